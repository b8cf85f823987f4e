"""What a training loop of another library needs of a net with several heads: one output, the others kept at hand; and a past."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gracecl import rng
from gracecl.core import NO_TASK, Taps
from gracecl.errors import UserError
from gracecl.inputs import Inputs
from gracecl.memory.reservoir import Memory
from gracecl.nets.tapped import TappedNet


class LastExit(nn.Module):
    """Wrap a tapped net as a plain classifier: return the last head's logits and keep the taps of the latest call."""

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
    """Return the one tapped net inside a model."""
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
        self.size, self.seed = size, seed
        self.memory: Memory | None = None

    def show(self, x: Tensor, y: Tensor) -> None:
        """Offer a batch; each input shown so far is kept with the same probability."""
        if self.memory is None:
            self.memory = Memory(self.size, Inputs(x.shape[1:], x.dtype))
        slots, rows = self.memory.choose(rng.generator(self.seed, "past", self.memory.offered), len(y))
        if len(slots):  # ever more rarely, so that most steps do not wait for the device
            self.memory.put(slots, x.detach(), rows, y.detach().cpu().long().numpy(), NO_TASK, {})

    def sample(self) -> tuple[Tensor, Tensor] | None:
        """Return the inputs and labels kept, or None if nothing was shown."""
        if self.memory is None or not len(self.memory):
            return None
        return self.memory.examples.images, torch.from_numpy(self.memory.examples.labels)

    @property
    def offered(self) -> int:
        """Inputs shown so far."""
        return 0 if self.memory is None else self.memory.offered

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers alone, which every loop's checkpoints can hold."""
        sample = self.sample()
        return {"size": self.size, "offered": self.offered, "x": sample and sample[0], "y": sample and sample[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        size = state["size"] if "size" in state else len(state["y"])  # 0.1.0 saved empty places too
        if size != self.size:
            raise UserError(f"the saved sample of the past has {size} places; give past={size} to go on from it")
        self.memory = None
        if state["offered"]:
            self.memory = Memory(self.size, Inputs(state["x"].shape[1:], state["x"].dtype))
            rows = np.arange(min(state["offered"], size))
            self.memory.put(rows, state["x"], rows, state["y"].numpy(), NO_TASK, {})
            self.memory.offered = state["offered"]
