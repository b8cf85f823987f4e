"""EWC++. Chaudhry, Dokania, Ajanthan, Torr, Riemannian Walk for Incremental Learning, ECCV 2018.

    at each step:    every K-th: F <- (1 - α) F + α A / K, A <- 0;  then A <- A + g², with g the gradient without the penalty
    at a task's end: θ* <- θ;  F̂ <- (F - min F) / (max F - min F)
    penalty:         λ Σ_p F̂_p (θ_p - θ*_p)², from the second task on

F and A are never reset: F forgets old tasks at the rate of the refreshes. Steps are counted from the start of the task. g is the
gradient of the batch's mean loss, as in the authors' program, so F is not a Fisher information but something smaller.

Differences from the paper: g is the gradient of all of the learner's data terms; F starts at 0 (the authors' program starts it at
the first batch's g²).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gracecl.core import Batch, Progress
from gracecl.memory import Memories
from gracecl.methods.quadratic import QuadraticPenalty
from gracecl.methods.state import per_weight
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast, Within

TINY = 1e-16
"""keeps F̂ at 0 where all entries of F are equal"""


@methods.register("ewc_pp")
@dataclass(eq=False, repr=False)
class EWCpp(QuadraticPenalty):
    """EWC++: elastic weight consolidation with a running estimate of importance; added to a learner."""

    strength: Annotated[float, AtLeast(0)] = 10.0
    """λ, the strength of the pull"""
    new_share: Annotated[float, Within(0, 1)] = 0.9
    """α, the weight of the newest estimate in the running one"""
    refresh: Annotated[int, AtLeast(1)] = 50
    """K, steps between two refreshes of the running estimate; a task of fewer steps leaves it as it was"""

    state = (per_weight("running"), per_weight("squares"), "steps")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.running, self.squares = torch.zeros_like(self.anchor), torch.zeros_like(self.anchor)
        self.steps = 0

    def after_backward(self, batch: Batch) -> None:
        self.steps += 1
        if self.steps % self.refresh == 0:
            self.running = (1 - self.new_share) * self.running + self.new_share * self.squares / self.refresh
            self.squares = torch.zeros_like(self.squares)
        # In half precision a gradient may overflow; such a step is skipped, and so is its square.
        self.squares += self.flat.gradient().square().nan_to_num(nan=0.0, posinf=0.0)

    def consolidate(self, memories: Memories, progress: Progress) -> None:
        self.anchor = self.flat.snapshot()
        self.importance = self.counted(self.rescaled())
        self.steps = 0

    def rescaled(self) -> Tensor:
        """F̂: the running estimate scaled to [0, 1], all weights together."""
        among = self.running[~self.flat.is_head] if self.exclude_head else self.running
        return (self.running - among.min()) / (among.max() - among.min() + TINY)
