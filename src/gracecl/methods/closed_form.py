"""What methods have in common that train nothing: they keep sums over features of the stream's images and solve for a classifier.

The net stays as it was built, whether its trunk is frozen or not: there are no gradients, no steps and no replay memory, so
optimizer, augmentation and memory of a run have no effect. What such a method knows of images is what the net knew before, so give
it a net with pretrained weights, as in `--net "efficientnet_lite0(freeze=True)"`; on a net without, it works on random features.
Every image is seen once, as it is and in evaluation mode; later epochs over a task add nothing. Sums are in double precision.

Wrappers are refused, GRACE among them: there is no loss to weigh and no step to change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gracecl.core import Plan, Planning, StreamBatch
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits


@dataclass(eq=False, repr=False)
class ClosedForm(Method):
    """A method that keeps sums over features, in the tensors that `state` names."""

    traits = Traits(trains="never", met_only=True)
    family: ClassVar[str]
    """of its scores among the rules"""

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        return iter(())

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        """Adds the images to the sums; none is kept."""
        labels = torch.from_numpy(new.labels).to(new.x.device)
        for rows, taps in self.net.sweep(new.x):
            self.add(taps.features.double(), labels[rows])

    @abstractmethod
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Adds images with features `[L, B, D]` to the sums."""

    @property
    def rule(self) -> str:
        return f"{self.family}_last"
