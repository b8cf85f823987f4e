"""A clock: a task begins every n steps, whatever the stream shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.core import Progress, StreamBatch
from gracecl.detectors.base import Detector
from gracecl.registry import detectors
from gracecl.registry.spec import AtLeast


@detectors.register("every")
@dataclass(eq=False, repr=False)
class Every(Detector):
    """A clock: a task begins every n steps, in place of the intervals that parts of a method have."""

    n: Annotated[int, AtLeast(1)] = 500
    """steps of a task"""

    guesses = False

    def begins(self, batch: StreamBatch, progress: Progress) -> bool:
        return progress.step % self.n == 0

    def is_idle(self, steps: int) -> bool:
        return self.n >= steps
