"""γ as the mean of its posterior, from the model that the paper sketches. Section by section in docs/bayes.md.

    H = H* + c / γ + noise,  ln γ ~ N(μ0, τ²);  γ_l <- β E[γ | H_l], with H - H* taken relative to the other layers

Differences from the paper: its evidence bound lacks the term ln s, without which the posterior collapses to a point; here it is
kept and maximised exactly. c = -1 agrees with the paper's rule (strength grows with entropy), c = +1 with its prose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from torch import Tensor

from gracecl.controllers.base import Controller, Signals
from gracecl.controllers.posterior import Strength
from gracecl.registry import controllers
from gracecl.registry.spec import Above


@controllers.register("bayes")
@dataclass(eq=False, repr=False)
class Bayes(Controller):
    """The Bayesian strength: γ = β E[γ] under the exact variational posterior of each layer."""

    c: float = -1.0
    """-1: strength grows with entropy, as in Algorithm 1; +1: it falls, as in the prose"""
    sigma: Annotated[float, Above(0)] = 1.0
    """noise of the entropies, which are taken relative to each other"""
    tau: Annotated[float, Above(0)] = 1.0
    """width of the prior of ln γ"""
    mu0: float | Literal["unit"] = "unit"
    """centre of the prior of ln γ; unit puts it where E[γ] = 1 for a layer of average entropy"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model  # noqa: B018 (refuses bad options now, not at the first step)

    @cached_property
    def model(self) -> Strength:
        return Strength(self.c, self.sigma, self.tau, self.mu0)

    def strengths(self, signals: Signals) -> Tensor:
        h = signals.entropy.detach()
        return (self.beta * self.model.posterior(self.relative(h)).mean).to(h.dtype)
