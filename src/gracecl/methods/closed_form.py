"""What methods have in common that train nothing: they keep sums over features of the stream's images and solve for a classifier.

The net stays as it was built, whether its trunk is frozen or not: there are no gradients, no steps and no replay memory, so
optimizer, augmentation and memory of a run have no effect. What such a method knows of images is what the net knew before, so give
it a net with pretrained weights, as in `--net "efficientnet_lite0(freeze=True)"`; on a net without, it works on random features.
Every image is seen once, as it is and in evaluation mode; later epochs over a task add nothing. Sums are in double precision, and
they are all that is kept: any order, any batching and any split over machines of the same images gives the same learner.

Wrappers are refused, GRACE among them: there is no loss to weigh and no step to change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gracecl.core import Ints, Plan, Planning, StreamBatch
from gracecl.functional.sums import Sums
from gracecl.machine import check_room
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits

BYTES_OF_A_DOUBLE = 8
AT_ONCE = 1024
"""images of a batch that are added to the sums in one product, however few go through the net together"""


@dataclass(eq=False, repr=False)
class ClosedForm(Method):
    """A method that keeps sums over features, `sums`."""

    traits = Traits(trains="never", met_only=True)
    state: ClassVar[tuple[str, ...]] = ("sums",)

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        return iter(())

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        """Add the images to the sums; none is kept."""
        features = torch.cat([taps.features for _, taps in self.net.sweep(new.x)], dim=1)
        for start in range(0, len(new.labels), AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            self.add(features[:, rows].double(), new.labels[rows])

    @abstractmethod
    def add(self, features: Tensor, labels: Ints) -> None:
        """Add images with features `[L, B, D]` to the sums."""

    def begin(self, layers: int, size: int, each_class: bool = False) -> None:
        """Begin with sums of no images."""
        self.sums = self.new_sums(layers, size, each_class)

    def new_sums(self, layers: int, size: int, each_class: bool = False) -> Sums:
        """Sums of no images, for `size` features of each layer."""
        classes = self.net.classes
        numbers = layers * size * (classes + size * (classes if each_class else 1))
        check_room(BYTES_OF_A_DOUBLE * numbers, f"sums over {size} projections", "use fewer projections")
        return Sums(layers, classes, size, self.net.classifier.weight.device, each_class)

    def merge(self, other: ClosedForm, numbers: Tensor | None = None) -> None:
        """Add what another learner with the same options and the same net has learned.

        `numbers [C']` are its classes as they are numbered here; None is the same.
        """
        self.sums.merge(other.sums, numbers)


@dataclass(eq=False, repr=False)
class Preset(Method):
    """A paper's method as options of another one, which is what learns."""

    @abstractmethod
    def closed(self) -> Method:
        """The method with the paper's options."""

    @cached_property
    def _meant(self) -> Method:
        return self.closed()

    @property
    def parts(self) -> tuple[Method, ...]:
        return self._meant.parts
