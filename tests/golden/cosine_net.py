"""The net of two golden files, f = W x + b and a cosine head with a learned scale, as a net of this library, in double."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.nets.heads import CosineHead
from gracecl.nets.tapped import Backbone, TappedNet

VALUES = {"rtol": 1e-9, "atol": 1e-9}
GRADIENTS = {"rtol": 1e-8, "atol": 1e-8}


class Body(Backbone):
    """f = W x + b; keeps what it last gave."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.layers, self.width = 1, width
        self.linear = nn.Linear(inputs, width)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.linear(x.flatten(1))
        self.kept.append(features.detach())
        return features.unsqueeze(0)


def engine_with(method: Method, inputs: int, width: int, classes: int, optimizer: str) -> Engine:
    """An engine whose net has the file's sizes; images are vectors that the net takes as they are."""
    net = TappedNet(Body(inputs, width), classes)
    engine = Engine(method, net, Memories(0, Images((1, 1, inputs))), optimizer=optimizer, augmentation="none")
    net.double()
    return engine


def set_weights(net: TappedNet, fields: Mapping[str, Any], body: str, rows: Any, scale: Any = None) -> None:
    """The body named by a prefix, and the head's first rows."""
    backbone, head = net.backbone, net.classifier
    assert isinstance(backbone, Body)
    assert isinstance(head, CosineHead)
    with torch.no_grad():
        backbone.linear.weight.copy_(torch.from_numpy(fields[f"{body}_W"]))
        backbone.linear.bias.copy_(torch.from_numpy(fields[f"{body}_b"]))
        head.weight[0, :, : len(rows)] = torch.from_numpy(np.asarray(rows)).T
        if scale is not None:
            head.scale.copy_(torch.as_tensor(scale).reshape(1, 1, 1))


def rows_of(values: Tensor) -> np.ndarray:
    """The head's weights, or their gradients, as the file has them: class by feature."""
    return values.detach()[0].T.numpy()
