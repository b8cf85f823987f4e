"""Online EWC. Schwarz et al., Progress & Compress, ICML 2018.

    at a task's end: F <- γ F + F of the task, as in EWC;  θ* <- θ
    penalty:         λ/2 Σ_p F_p (θ_p - θ*_p)²

Differences from the paper: as for EWC, a sample of the task's images is kept beside the memory until the task ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracecl.errors import UserError
from gracecl.methods.ewc import EWC
from gracecl.registry import methods


@methods.register("ewc_on")
@dataclass(eq=False, repr=False)
class EWCOnline(EWC):
    """Online EWC: one running Fisher information and one anchor for all tasks; added to a learner."""

    decay: float = 1.0
    """γ, what is left of earlier importances at each task's end"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0:
            raise UserError(f"ewc_on: decay cannot be negative, as {self.decay} is; 1 keeps all importances, 0 none")

    def remember(self, fisher: Tensor) -> None:
        self.importance = self.decay * self.importance + fisher
        self.anchor = self.flat.snapshot()
