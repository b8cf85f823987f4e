"""Predictions from each image and its mirror image, around any method. A method of our own.

    whatever is scored (test images, and those of the memory that class means are made of):
        features, outputs <- mean of those of x and of its mirror image

Training does not change; a prediction costs twice as many images. For data whose mirror images would be photographs too: not for
digits or letters.

Differences from a paper: none, there is none.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from gracecl.errors import UserError
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods


@methods.register("mirrored")
@dataclass(eq=False, repr=False)
class Mirrored(Wrapper):
    """Predictions averaged over each image and its mirror image, around any method."""

    inner: Method = "er()"  # type: ignore[assignment]
    """the method that learns"""

    traits = Traits(images="looks at images and their mirror images")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inside.traits.trains == "evaluation":
            raise UserError(
                f"{self.name} looks through the learner's own net, and {self.inner!r} predicts by another; use it alone"
            )

    def eval_net(self, net: TappedNet) -> TappedNet:
        net = copy.copy(net)  # the same weights
        net.mirrored = True
        return net
