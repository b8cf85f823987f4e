"""The paper's γ in every reading of it. Wu, Wang, Huang, Dynamic Feedback Engines, 2025.

    H_l <- mean entropy of softmax(head l);  z <- (H - mean H) / std H;  γ <- β exp(tanh(z))

The abstract, the introduction, the theorems and Algorithm 1 say four different things about which way and how hard each layer is
pushed; `entropy_mode` names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gracecl.controllers.base import Controller, Signals
from gracecl.registry import controllers

EntropyMode = Literal["alg1", "cpr", "target", "deviation", "cpr_literal", "uniform", "none"]


@controllers.register("paper")
@dataclass(eq=False, repr=False)
class Paper(Controller):
    """The paper's γ = β exp(tanh(z)), in all its readings."""

    entropy_mode: EntropyMode = "alg1"
    """what is added per layer. alg1: +β e^tanh(z) H, as Algorithm 1 prints. cpr: -β e^tanh(-z) H, as the introduction says.
    target: β (e^tanh(z) - 1) H, towards the mean, as the abstract says. deviation: β (H - mean H)², as the theorems say.
    cpr_literal: -β e^tanh(z) H. uniform: β H. none: nothing"""
    attached: bool = False
    """let gradients flow through γ"""

    def strengths(self, signals: Signals) -> Tensor:
        h = signals.entropy
        z = self.relative(h if self.attached else h.detach())
        match self.entropy_mode:
            case "alg1":
                return self.beta * torch.exp(torch.tanh(z))
            case "cpr":
                return -self.beta * torch.exp(torch.tanh(-z))
            case "cpr_literal":
                return -self.beta * torch.exp(torch.tanh(z))
            case "target":
                return self.beta * (torch.exp(torch.tanh(z)) - 1)
            case "none":
                return torch.zeros_like(z)
        return torch.full_like(z, self.beta)

    def term(self, signals: Signals, gamma: Tensor) -> Tensor:
        if self.entropy_mode == "deviation":
            return gamma * self._distance(signals) ** 2
        return super().term(signals, gamma)

    def slope(self, signals: Signals, gamma: Tensor) -> Tensor:
        return 2 * gamma * self._distance(signals) if self.entropy_mode == "deviation" else gamma

    def _distance(self, signals: Signals) -> Tensor:
        return signals.entropy - signals.entropy.detach().mean()
