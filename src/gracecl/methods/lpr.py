"""LPR, layerwise proximal replay. Yoo, Liu, Wood, Pleiss, A Proximal Point Method for Online Continual Learning, ICML 2024.

    every K optimizer steps, for each affine layer:
        Z <- the layer's inputs on n images of the memory, in evaluation mode; p rows for each image, patches of a convolution
        P <- I + ω / p^β · ZᵀZ / n
    at each optimizer step of the inner method, for each of these layers:
        G <- P⁻¹ G, with G the gradient of all its losses, weight and bias as one matrix
        step

P⁻¹ shrinks the directions that would change what the layer says of the memory's images; it moves no loss. No task marks are needed.

P⁻¹ G is what plain gradient descent wants. Adam divides each weight's gradient by its usual size and so undoes part of it;
acts_on='update' multiplies the step that the optimizer made instead, with whatever weight decay is in it.

Differences from the paper and its program: BatchNorm's scale and shift keep their gradients (the program has a 2×2 matrix for each
channel), and so do depthwise convolutions and modules that a method adds to the net; all tapped heads and projectors are among the
layers; the images are those of evenly spaced slots of the memory, raw (the program takes all of it, in its transform); the first
matrices are made as soon as there is a memory; a layer that is called twice in a pass counts both times (the program keeps its last
input).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, Taps
from gracecl.errors import UserError
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.nets.affine import Affine, affine_layers, second_moments
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast


@methods.register("lpr")
@dataclass(eq=False, repr=False)
class LPR(Wrapper):
    """LPR: gradients that leave each layer's outputs on the memory's images mostly as they are, around any replay method."""

    inner: Method = "er()"  # type: ignore[assignment]
    """the method whose gradients are changed"""
    strength: Annotated[float, AtLeast(0)] = 4.0
    """ω, how strongly outputs on the memory are held; 0 is the inner method"""
    position_power: float = 2.0
    """β: ω is divided by p^β, so at 2 early layers with many positions are nearly free"""
    refresh_every: Annotated[int, AtLeast(1)] = 30
    """K, optimizer steps between two looks at the memory"""
    n_images: Annotated[int, AtLeast(1)] = 500
    """n, images of the memory that are looked at, or all if there are fewer"""
    acts_on: Literal["gradient", "update"] = "gradient"
    """what P⁻¹ is multiplied with: the gradient, or what the optimizer makes of it"""

    traits = Traits(moves_weights=True)
    state = ("inverses", "age")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inside.traits.trains == "evaluation":
            raise UserError(f"lpr changes steps on the stream, of which {self.inner!r} makes none; use {self.inner!r} alone")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.memories, self.layers = memories, affine_layers(net)
        self.inverses: dict[str, Tensor] = {}
        self.age = 0
        """optimizer steps since the memory was looked at"""

    def prepare(self, batch: Batch) -> None:
        memory = self.memories.replay
        if self.strength and len(memory) and (not self.inverses or self.age >= self.refresh_every):
            n = min(self.n_images, len(memory))
            slots = np.arange(n) * len(memory) // n
            self.refresh(memory[slots])

    def refresh(self, images: Tensor) -> None:
        """Recompute P⁻¹ of every layer from its current inputs."""
        for name, (moments, positions) in second_moments(self.net, self.layers, images).items():
            identity = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
            proximal = identity + self.strength / positions**self.position_power * moments
            self.inverses[name] = torch.cholesky_inverse(torch.linalg.cholesky(proximal)).to(self.net.classifier.weight)
        self.age = 0

    def held(self) -> dict[str, tuple[Affine, Tensor]]:
        """Return the layers that this step trains and that have a matrix, with P⁻¹."""
        layers = {name: (self.layers[name], inverse) for name, inverse in self.inverses.items()}
        return {name: of for name, of in layers.items() if all(value.grad is not None for value in of[0].parameters)}

    def after_backward(self, batch: Batch) -> None:
        for name, (layer, inverse) in self.held().items():
            if self.acts_on == "update":
                batch.targets[f"lpr/{name}"] = layer.matrix(torch.Tensor.detach)
            else:
                layer.put(inverse @ layer.matrix(gradient), gradient)

    def after_step(self, out: Taps, batch: Batch) -> None:
        for name, (layer, inverse) in self.held().items():
            if (before := batch.targets.get(f"lpr/{name}")) is not None:
                layer.put(before + inverse @ (layer.matrix(torch.Tensor.detach) - before), torch.Tensor.detach)
        self.age += 1


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
