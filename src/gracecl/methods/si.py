"""Synaptic Intelligence. Zenke, Poole, Ganguli, Continual Learning Through Synaptic Intelligence, ICML 2017.

    at each step:    ω_p <- ω_p - g_p (θ_p after - θ_p before), with g the gradient without the penalty
    at a task's end: Ω_p <- max(0, Ω_p + ω_p / ((θ_p - θ*_p)² + ξ));  θ* <- θ;  ω <- 0
    penalty:         c Σ_p Ω_p (θ_p - θ*_p)²

Differences from the paper: g is the gradient of all of the learner's data terms, replay and distillation included, since the path
follows their sum. The first displacement is measured from the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from gracecl.core import Batch, Progress, Taps
from gracecl.memory import Memories
from gracecl.methods.quadratic import QuadraticPenalty
from gracecl.methods.state import per_weight
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("si")
@dataclass(eq=False, repr=False)
class SI(QuadraticPenalty):
    """Synaptic intelligence: weights matter by how much their path lowered the loss; added to a learner."""

    strength: Annotated[float, AtLeast(0)] = 0.1
    """c, the strength of the pull"""
    damping: Annotated[float, Above(0)] = 0.1
    """ξ, which bounds the importance of weights that hardly moved"""
    rectify: Literal["sum", "increment"] = "sum"
    """what is kept from becoming negative: the importance itself, as in the authors' program, or each task's share of it"""

    state = (per_weight("path"),)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.path = torch.zeros_like(self.anchor)

    def after_backward(self, batch: Batch) -> None:
        batch.targets |= {"si/gradient": self.flat.gradient(), "si/before": self.flat.snapshot()}

    def after_step(self, out: Taps, batch: Batch) -> None:
        moved = self.flat.snapshot() - batch.targets["si/before"]
        # Where half precision skipped the step, nothing moved and the gradient may be infinite.
        self.path -= torch.where(moved == 0, moved, batch.targets["si/gradient"] * moved)

    def consolidate(self, memories: Memories, progress: Progress) -> None:
        weights = self.flat.snapshot()
        share = self.counted(self.path) / ((weights - self.anchor).square() + self.damping)
        self.importance = (
            self.importance + share.clamp(min=0) if self.rectify == "increment" else (self.importance + share).clamp(min=0)
        )
        self.anchor = weights
        self.path = torch.zeros_like(self.path)
