"""A multilayer perceptron, each hidden layer a possible tap: for tests, benchmarks and data that are not images."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from gracecl.errors import UserError
from gracecl.nets.tapped import Backbone, BatchNorm, stack_layers
from gracecl.registry import nets
from gracecl.registry.spec import AtLeast, Within


@nets.register("mlp")
def mlp(
    shape: tuple[int, ...],
    taps: int,
    at_most: bool,
    width: Annotated[int, AtLeast(1)] = 100,
    depth: Annotated[int, Within(1, 1000)] = 2,
    norm: bool = False,
) -> Backbone:
    """Fully connected layers with ReLU, `depth` of them, `width` wide, with BatchNorm or without; any of the last can be tapped."""
    if taps > depth and not at_most:
        raise UserError(f"mlp(depth={depth}) has {depth} layers to tap, not {taps}; use a larger depth or --taps {depth}")
    return MLP(math.prod(shape), width, depth, min(taps, depth), norm)


class MLP(Backbone):
    def __init__(self, inputs: int, width: int, depth: int, taps: int, norm: bool) -> None:
        super().__init__()
        self.layers, self.width = taps, width
        self.hidden = nn.ModuleList(nn.Linear(inputs if i == 0 else width, width) for i in range(depth))
        self.norms = nn.ModuleList(BatchNorm(width) if norm else nn.Identity() for _ in range(depth))
        self.last_relu = True

    def drop_last_relu(self) -> None:
        self.last_relu = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        outputs = []
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = layer(x)
            if isinstance(norm, BatchNorm):
                x = norm(x[:, :, None, None]).flatten(1)
            before, x = x, torch.relu(x)
            outputs.append(x if self.last_relu else before)
        return stack_layers(outputs[-self.layers :])
