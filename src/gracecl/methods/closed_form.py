"""What methods have in common that train nothing: they keep sums over features of the stream's images and solve for a classifier.

The net stays as it was built, whether its trunk is frozen or not: there are no gradients, no steps and no replay memory, so
optimizer, augmentation and memory of a run have no effect. What such a method knows of images is what the net knew before, so give
it a net with pretrained weights, as in `--net "efficientnet_lite0(freeze=True)"`; on a net without, it works on random features.
Every image is seen once, as it is and in evaluation mode; later epochs over a task add nothing. Sums are in double precision.

Wrappers are refused, GRACE among them: there is no loss to weigh and no step to change.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Planning, Selection, StreamBatch
from gracecl.memory import Memories
from gracecl.methods.base import Method, Trains


@dataclass(eq=False, repr=False)
class ClosedForm(Method):
    """A method that keeps sums over features, in the tensors that `sums` names."""

    trains: ClassVar[Trains] = "never"
    sums: ClassVar[tuple[str, ...]]
    """attributes that a checkpoint must hold"""
    family: ClassVar[str]
    """of its scores among the rules"""

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> dict[str, Selection]:
        return {}

    def store(self, memories: Memories, new: StreamBatch, rng: np.random.Generator, attributes: dict[str, Tensor]) -> None:
        """No image is kept."""

    def observe(self, memories: Memories, new: StreamBatch, rng: np.random.Generator) -> None:
        labels = torch.from_numpy(new.labels).to(new.x.device)
        for rows, taps in self.net.sweep(new.x):
            self.add(taps.features.double(), labels[rows])

    @abstractmethod
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Adds images with features `[L, B, D]` to the sums."""

    @property
    def rule(self) -> str:
        return f"{self.family}_last"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.sums:
            setattr(self, name, state[name].to(self.net.classifier.weight.device))
