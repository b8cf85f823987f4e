"""Memory Aware Synapses. Aljundi et al., Memory Aware Synapses: Learning What (not) to Forget, ECCV 2018.

    at a task's end: Ω_p <- Ω_p + mean over images of |∂ ‖z(x)‖² / ∂θ_p|, image by image, z the logits;  θ* <- θ
    penalty:         λ Σ_p Ω_p (θ_p - θ*_p)²

No label is read.

Differences from the paper: z is restricted to the classes met so far, since one head serves all tasks; a sample of the task's
images is kept beside the memory until it ends (`n_fisher`; a run reports it). With several tapped layers ‖z‖² is summed over the
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gracecl.core import Progress
from gracecl.inputs import loaded
from gracecl.memory import Memories
from gracecl.methods.quadratic import MeasuredAtTaskEnd
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast, Within


@methods.register("mas")
@dataclass(eq=False, repr=False)
class MAS(MeasuredAtTaskEnd):
    """Memory aware synapses: weights matter by how strongly the logits depend on them; added to a learner."""

    strength: Annotated[float, AtLeast(0)] = 1.0
    """λ, the strength of the pull"""
    keep: Annotated[float, Within(0, 1)] | None = None
    """share of the old importances in the mean of old and new ones; None adds the new ones, as in the paper"""

    def consolidate(self, memories: Memories, progress: Progress) -> None:
        images = memories[self.name]
        if len(images):
            seen = torch.zeros(self.net.classes, dtype=torch.bool)
            seen[list(progress.seen)] = True
            x = loaded(images.examples.images)
            self.remember(self.sensitivity(x, seen.to(x.device)))
            images.clear()

    def sensitivity(self, x: Tensor, classes: Tensor) -> Tensor:
        """Return `[P]`: the mean over images of |∂ ‖z‖² / ∂θ|, z over the classes marked True."""
        return self.average(x, lambda logits: (logits * classes).square().sum(), torch.abs)

    def remember(self, sensitivity: Tensor) -> None:
        if self.keep is None:
            self.importance = self.importance + sensitivity
        else:
            self.importance = self.keep * self.importance + (1 - self.keep) * sensitivity
        self.anchor = self.flat.snapshot()
