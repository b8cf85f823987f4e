"""Weights that follow where the net forgets. Our own controller, to compare the paper's with.

    d_l <- mean cross-entropy of head l on images from memory - that on new images, of the step
    D_l <- (1 - rate) D_l + rate d_l;  α <- L softmax(D / temperature), so that their mean is 1;  γ <- 0

A layer that does worse on the past than on the present, more than the other layers do, weighs more from the next step on.
`grace(mose(), strength='forgetting', alpha_on='ce_past')` lets it act on the block of past images alone. Steps without images of
either kind change nothing. β has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gracecl.controllers.base import Controller, Signals
from gracecl.registry import controllers
from gracecl.registry.spec import Above, Within


@controllers.register("forgetting")
@dataclass(eq=False, repr=False)
class Forgetting(Controller):
    """Weighs layers by how much worse they do on images of the past than on new ones; no entropy term."""

    rate: Annotated[float, Within(0, 1)] = 0.02
    """share of the running difference that a step renews"""
    temperature: Annotated[float, Above(0)] = 0.5
    """differences, in nats, are divided by it; the smaller, the more the layers' weights differ"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._difference = torch.zeros(())

    def __call__(self, signals: Signals) -> tuple[Tensor, Tensor]:
        accuracy = signals.accuracy
        if not self.adaptive:
            return torch.ones_like(accuracy), self.strengths(signals)
        difference = self._difference.to(accuracy).expand_as(accuracy)
        return len(accuracy) * torch.softmax(difference / self.temperature, dim=0), self.strengths(signals)

    def strengths(self, signals: Signals) -> Tensor:
        return torch.zeros_like(signals.accuracy)

    def after_step(self, signals: Signals) -> None:
        latest = signals.forgetting
        before = self._difference.to(latest).expand_as(latest)
        self._difference = torch.where(latest.isfinite(), before.lerp(latest, self.rate), before)

    def state_dict(self) -> dict[str, Any]:
        return {"difference": self._difference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._difference = state["difference"]
