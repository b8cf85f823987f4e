"""Online EWC. Schwarz et al., Progress & Compress, ICML 2018.

    at a task's end: F <- γ F + F of the task, as in EWC;  θ* <- θ
    penalty:         λ/2 Σ_p F_p (θ_p - θ*_p)²

Differences from the paper: as for EWC, a sample of the task's images is kept beside the memory until the task ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from gracecl.methods.ewc import EWC
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast


@methods.register("ewc_on")
@dataclass(eq=False, repr=False)
class EWCOnline(EWC):
    """Online EWC: one running Fisher information and one anchor for all tasks; added to a learner."""

    decay: Annotated[float, AtLeast(0)] = 1.0
    """γ, what is left of earlier importances at each task's end"""

    def remember(self, fisher: Tensor) -> None:
        self.importance = self.decay * self.importance + fisher
        self.anchor = self.flat.snapshot()
