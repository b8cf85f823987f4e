"""One task that never ends: the baseline of all other detectors."""

from __future__ import annotations

from dataclasses import dataclass

from gracecl.detectors.base import Detector
from gracecl.registry import detectors


@detectors.register("never")
@dataclass(eq=False, repr=False)
class Never(Detector):
    """One task that never ends: what methods do at the end of tasks they never do."""

    guesses = False

    def is_idle(self, steps: int) -> bool:
        return True
