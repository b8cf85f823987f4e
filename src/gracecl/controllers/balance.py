"""Entropy gradients in proportion to those of cross-entropy. Our own controller, to compare the paper's with.

    γ_l <- share · α_l · |∂CE_l / ∂logits| / |∂H_l / ∂logits|, at most limit

so that the entropy term's gradient at each head's logits is a fixed share of that of the weighted cross-entropy, whatever the
layer's entropy is. β has no part in it, but β = 0 turns it off. The paper's β gives shares between 0.1 % and 5 %, by how well the
images are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracecl.controllers.base import Controller, Signals
from gracecl.registry import controllers


@controllers.register("balance")
@dataclass(eq=False, repr=False)
class Balance(Controller):
    """Keeps the entropy gradient of each layer at a fixed share of its cross-entropy gradient."""

    share: float = 0.01
    """norm of the entropy term's gradient over that of the cross-entropy's"""
    limit: float = 1.0
    """largest γ, for layers whose entropy has hardly a gradient"""

    def strengths(self, signals: Signals) -> Tensor:
        return (self.share * self.weights(signals.accuracy).to(signals.pull) / signals.pull.clamp(min=1e-12)).clamp(max=self.limit)
