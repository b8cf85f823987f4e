"""What a net was at some moment: frozen copies, for teachers and averaged weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from gracecl.core import Taps
from gracecl.nets.tapped import TappedNet


def frozen_copy(net: TappedNet) -> TappedNet:
    """The net as it is now, in its layout, in evaluation mode, without gradients: using it moves neither weights nor statistics."""
    twin = copy.deepcopy(net)
    return twin.requires_grad_(False).eval()


class Teacher:
    """A frozen copy of a learner's net that its method renews when it likes; there is none before the first time."""

    def __init__(self, net: TappedNet) -> None:
        self.net = net
        self.copy: TappedNet | None = None

    def __bool__(self) -> bool:
        return self.copy is not None

    def renew(self) -> None:
        """The net as it is now becomes the teacher."""
        self.copy = frozen_copy(self.net)

    def __call__(self, x: Tensor) -> Taps:
        """What the teacher says of normalised images."""
        if self.copy is None:
            raise RuntimeError("the teacher was asked before renew() made one")
        with torch.no_grad():
            taps: Taps = self.copy(x)
        self.net.count(forward=len(x))
        return taps

    def state_dict(self) -> dict[str, Any]:
        return {"copy": None if self.copy is None else self.copy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copy = None
        if state["copy"] is not None:
            self.copy = frozen_copy(self.net)
            self.copy.load_state_dict(state["copy"])
