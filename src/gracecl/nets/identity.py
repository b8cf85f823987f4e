"""No net at all, for data that are features already: what a learner is given is what its heads and closed forms see."""

from __future__ import annotations

import math

from torch import Tensor

from gracecl.errors import UserError
from gracecl.nets.tapped import Backbone
from gracecl.registry import nets


@nets.register("identity")
def identity(shape: tuple[int, ...], taps: int, at_most: bool) -> Backbone:
    """No layers: the inputs, as one vector each, are the features; for features that another net made, or plain pixels."""
    if taps > 1 and not at_most:
        raise UserError(f"identity() has no layers to tap, and --taps {taps} asks for {taps}; leave --taps out")
    return Identity(math.prod(shape))


class Identity(Backbone):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.width = 1, width

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).unsqueeze(0)
