"""Classifier-Projection Regularisation. Cha et al., CPR: Classifier-Projection Regularization for Continual Learning, ICLR 2021.

    loss <- loss + β KL(p || uniform) = loss + β (ln K - H(p)), with p the softmax over K classes

The entropy is maximised, which widens the minima of every task, the first included.

Differences from the paper: one shared head instead of one per task, so the softmax spans the classes met so far (spanning all of
them pushes mass to classes nobody has seen: `classes='all'`); the constant ln K is kept, so the row is a divergence and never
negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gracecl.core import Batch, LossTable, Taps
from gracecl.functional.losses import entropy
from gracecl.methods.base import Addition, Traits
from gracecl.registry import methods


@methods.register("cpr")
@dataclass(eq=False, repr=False)
class CPR(Addition):
    """Classifier-projection regularisation: keeps predictions wide by their entropy; added to a learner."""

    beta: float = 0.1
    """β, the strength; online {0.05, 0.1, 0.3, 0.5} are worth trying, the authors' for CIFAR-100 offline are 0.5 to 0.9"""
    on: Literal["stream", "all"] = "stream"
    """images that it acts on: the stream's own, or replayed ones too"""
    classes: Literal["seen", "all"] = "seen"
    """outputs that the softmax spans"""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(met_only=self.classes == "seen")

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        if self.beta == 0:
            return {}
        logits = out.logits[:, batch.stream_rows if self.on == "stream" else batch.supervised]
        seen = self.classes == "seen"
        widest = math.log(len(batch.progress.seen) if seen else batch.classes)
        return {"cpr": self.beta * (widest - entropy(logits, batch.seen if seen else None))}
