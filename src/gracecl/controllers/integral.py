"""A proportional–integral controller for each layer's entropy. Our own, to compare the paper's with.

    e_l <- H_l / ln C - target;  I_l <- I_l + e_l;  γ_l <- β (proportional · e_l + integral · I_l), within ±limit β

Adding γ H pushes the entropy down where γ is positive, so a layer above the target is calmed and one below it is stirred, more and
more as long as it stays away. The sum stops growing where γ is at its limit, so that it does not take as long to come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gracecl.controllers.base import Controller, Signals
from gracecl.registry import controllers
from gracecl.registry.spec import Within


@controllers.register("pi")
@dataclass(eq=False, repr=False)
class ProportionalIntegral(Controller):
    """Drives each layer's entropy to a target by a proportional and an integral term."""

    target: Annotated[float, Within(0, 1)] = 0.25
    """wanted entropy of every layer, as a share of ln C, the entropy of a head that knows nothing"""
    proportional: float = 10.0
    """strength per share of ln C that a layer is off, in units of β"""
    integral: float = 0.1
    """strength that is added per step and share of ln C that a layer is off, in units of β"""
    limit: float = 100.0
    """largest strength either way, in units of β"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sum = torch.zeros(())

    def strengths(self, signals: Signals) -> Tensor:
        return self.beta * self._unlimited(self._error(signals)).clamp(-self.limit, self.limit)

    def after_step(self, signals: Signals) -> None:
        error = self._error(signals).nan_to_num(nan=0.0)  # half precision may overflow; such a step is skipped
        gamma = self._unlimited(error)
        winds_up = (gamma.abs() >= self.limit) & (gamma * self.integral * error > 0)
        self._sum = self._sum.to(error) + error.masked_fill(winds_up, 0.0)

    def _unlimited(self, error: Tensor) -> Tensor:
        """γ in units of β, before it is kept within ±limit."""
        return self.proportional * error + self.integral * self._sum.to(error)

    def _error(self, signals: Signals) -> Tensor:
        widest = torch.as_tensor(signals.widest, device=signals.entropy.device).clamp(min=1e-12)
        return signals.entropy.detach() / widest - self.target

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum = state["sum"]
