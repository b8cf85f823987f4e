"""New labels: a task begins where a batch brings a label that was not met before."""

from __future__ import annotations

from dataclasses import dataclass

from gracecl.core import Progress, StreamBatch
from gracecl.detectors.base import Detector
from gracecl.registry import detectors


@detectors.register("novelty")
@dataclass(eq=False, repr=False)
class Novelty(Detector):
    """New labels: a task begins with a batch that brings a label not met before."""

    def begins(self, batch: StreamBatch, progress: Progress) -> bool:
        return not set(batch.labels.tolist()) <= set(progress.seen)
