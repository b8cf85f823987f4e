"""The small nets of the golden files, z = W2 relu(W1 x + b1) + b2 (some with a third layer), as nets of this library, in double."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.nets.flat import FlatParameters
from gracecl.nets.mlp import MLP
from gracecl.nets.tapped import Backbone, TappedNet

FOLDER = Path(__file__).parent


def load(method: str) -> Mapping[str, Any]:
    """Open a golden file; a field is read when it is asked for, so that `test_golden_fields.py` can tell which are."""
    return np.load(FOLDER / f"{method}.npz")


class SmallNet:
    """A net with the golden file's weights; flat vectors go both ways in the file's order: W1 row by row, b1, W2, b2, …"""

    def __init__(self, fields: Mapping[str, Any], prefix: str = "") -> None:
        layers = 3 if f"{prefix}W3" in fields else 2
        weights = [np.asarray(fields[f"{prefix}W{i}"]) for i in range(1, layers + 1)]
        self._make([(w.shape[1], w.shape[0]) for w in weights], np.asarray(weights[0]).dtype)
        flat = [np.concatenate([np.ravel(fields[f"{prefix}W{i}"]), fields[f"{prefix}b{i}"]]) for i in range(1, layers + 1)]
        self.set(np.concatenate(flat))

    @classmethod
    def of_sizes(cls, inputs: int, hidden: int, outputs: int, dtype: Any = np.float64) -> SmallNet:
        """A net of two layers whose weights are still to be set."""
        small = cls.__new__(cls)
        small._make([(inputs, hidden), (hidden, outputs)], np.dtype(dtype))
        return small

    def _make(self, sizes: list[tuple[int, int]], dtype: Any) -> None:
        hidden, outputs = sizes[-1]
        backbone = MLP(sizes[0][0], hidden, len(sizes) - 1, 1, norm=False)
        self.net = TappedNet(backbone, outputs, embedding=1).to(torch.from_numpy(np.zeros(1, dtype)).dtype)
        self.shape = (sizes[0][0], 1, 1)
        linear = backbone.hidden
        head = self.net.classifier
        # Heads are stored as [layer, in, out], the file has [out, in].
        self.parts = [part for layer in linear for part in ((layer.weight, False), (layer.bias, False))]
        self.parts += [(head.weight, True), (head.bias, False)]
        for parameter in self.net.projector.parameters():
            parameter.requires_grad_(False)

    def images(self, x: Any) -> Tensor:
        """Vectors as the images they are to the net."""
        return torch.as_tensor(x).reshape(len(x), *self.shape)

    def set(self, flat: Any) -> None:
        """Gives the weights the values of a flat vector."""
        with torch.no_grad():
            for (parameter, _), value in zip(self.parts, self.split(flat), strict=True):
                parameter.copy_(value)

    def split(self, flat: Any) -> list[Tensor]:
        """A flat vector as tensors in the shapes of the parameters."""
        parts, start = [], 0
        for parameter, turned in self.parts:
            piece = torch.as_tensor(np.array(flat[start : start + parameter.numel()]))
            start += parameter.numel()
            parts.append(
                piece.view(parameter.shape[-1], parameter.shape[-2]).T.reshape(parameter.shape)
                if turned
                else piece.view(parameter.shape)
            )
        assert start == len(flat)
        return parts

    def put_gradient(self, flat: Any) -> None:
        """As if a backward pass had found these gradients."""
        for (parameter, _), value in zip(self.parts, self.split(flat), strict=True):
            parameter.grad = value.clone()

    def join(self, value_of: Any) -> np.ndarray:
        """The flat vector of one tensor per parameter."""
        parts = []
        for parameter, turned in self.parts:
            value = value_of(parameter).detach()
            parts.append((value.squeeze(0).T if turned else value).reshape(-1))
        return torch.cat(parts).numpy()

    def weights(self) -> np.ndarray:
        return self.join(lambda parameter: parameter)

    def gradient(self) -> np.ndarray:
        return self.join(lambda parameter: parameter.grad)

    def in_file_order(self, flat: FlatParameters, vector: Tensor) -> np.ndarray:
        """A vector in the library's order, in the file's."""
        values = flat.scatter(vector)
        return self.join(lambda parameter: values[parameter])

    def in_our_order(self, flat: FlatParameters, vector: Any) -> Tensor:
        """A vector in the file's order, in the library's."""
        values = {id(parameter): value for (parameter, _), value in zip(self.parts, self.split(vector), strict=True)}
        return flat.gather(lambda parameter: values[id(parameter)])

    def attach(self, method: Method, memory: int = 0) -> Memories:
        """Attaches a method to the net; returns its memories."""
        memories = Memories(memory, Images(self.shape))
        method.attach(self.net, memories)
        return memories


class NoLayers(Backbone):
    """The inputs are the features."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers, self.width = 1, inputs

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).unsqueeze(0)


class LinearNet:
    """z = W x + b as a net of this library, in double."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.net = TappedNet(NoLayers(inputs), outputs, Images((1, 1, 1), (0.5,), (0.25,)), embedding=1).double()
        self.net.projector.requires_grad_(False)
        self.shape = (inputs, 1, 1)

    def images(self, x: Any) -> Tensor:
        return torch.as_tensor(x).reshape(len(x), *self.shape)

    def set(self, weight: np.ndarray, bias: np.ndarray) -> None:
        head = self.net.classifier
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(weight).T[None])
            head.bias.copy_(torch.from_numpy(bias)[None, None])

    def get(self) -> tuple[np.ndarray, np.ndarray]:
        head = self.net.classifier
        return head.weight.detach()[0].T.numpy(), head.bias.detach()[0, 0].numpy()

    def in_our_order(self, flat: FlatParameters, weight: np.ndarray, bias: np.ndarray) -> Tensor:
        """One number for each weight, as the library orders them."""
        head = self.net.classifier
        of = {id(head.weight): torch.from_numpy(weight).T[None], id(head.bias): torch.from_numpy(bias)[None, None]}
        return flat.gather(lambda parameter: of[id(parameter)])
