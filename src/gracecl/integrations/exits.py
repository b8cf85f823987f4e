"""What a training loop of another library needs of a net with several heads: one output, the others kept at hand; and a past."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gracecl import rng
from gracecl.core import Taps
from gracecl.errors import UserError
from gracecl.nets.tapped import TappedNet


class LastExit(nn.Module):
    """A tapped net that gives its last head's logits, as any classifier does, and remembers the taps of the latest call."""

    def __init__(self, net: TappedNet) -> None:
        super().__init__()
        self.net = net
        self.taps: Taps | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.taps = self.net(x)
        return self.taps.logits[-1]

    def __getstate__(self) -> dict[str, Any]:
        """Without the taps: they belong to a step, and their graph cannot be copied."""
        return self.__dict__ | {"taps": None}


def find_exit(model: nn.Module) -> LastExit:
    """The one tapped net inside a model."""
    found = [module for module in model.modules() if isinstance(module, LastExit)]
    if len(found) != 1:
        raise UserError(
            f"feedback needs a model with one LastExit(gracecl.tap(...)) in it, and {type(model).__name__} has {len(found)} of them"
        )
    return found[0]


class Past:
    """A uniform sample of the inputs and labels it was shown, of any shape and type, on the host."""

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1:
            raise UserError(f"the sample of the past needs room for at least one input, not {size}")
        self.size, self.seed, self.offered = size, seed, 0
        self.x: Tensor | None = None
        self.y = torch.full((size,), -1)

    def show(self, x: Tensor, y: Tensor) -> None:
        """Each input shown so far is kept with the same probability."""
        if self.x is None:
            self.x = torch.zeros((self.size, *x.shape[1:]), dtype=x.dtype)
        order = np.arange(self.offered, self.offered + len(y))
        chosen = rng.generator(self.seed, "past", self.offered).integers(0, order + 1) if len(y) else order
        chosen = np.where(order < self.size, order, chosen)
        self.offered += len(y)
        last = {slot: row for row, slot in enumerate(chosen.tolist()) if slot < self.size}  # the later one stays
        if last:  # ever more rarely, so that most steps do not wait for the device
            slots, rows = list(last), list(last.values())
            self.x[slots], self.y[slots] = x.detach()[rows].cpu(), y.detach()[rows].cpu().long()

    def sample(self) -> tuple[Tensor, Tensor] | None:
        """What is kept, or nothing if nothing was shown."""
        if self.x is None or self.offered == 0:
            return None
        held = min(self.offered, self.size)
        return self.x[:held], self.y[:held]

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x, "y": self.y, "offered": self.offered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["y"]) != self.size:
            raise UserError(
                f"the saved sample of the past has {len(state['y'])} places; give past={len(state['y'])} to go on from it"
            )
        self.x, self.y, self.offered = state["x"], state["y"], state["offered"]
