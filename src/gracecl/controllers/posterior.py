"""The strength γ of a layer's entropy term as a posterior mean: the model behind GRACE's rule, solved exactly.

    H_l = H* + c/γ_l + noise,  noise ~ N(0, σ²)      what is observed is d = H_l - H*
    ln γ_l ~ N(μ0, τ²)                               the prior
    ln γ_l ~ N(m, s²)                                q, whose evidence lower bound (ELBO) is maximised over m and s

Every expectation under q has a closed form: E[γ] = exp(m + s²/2), E[1/γ] = exp(-m + s²/2), E[1/γ²] = exp(-2m + 2s²), and so has

    ELBO(m, s) = -½ ln 2πσ² - (d² - 2 d c E[1/γ] + E[1/γ²]) / 2σ² - (ln τ/s + (s² + (m - μ0)²) / 2τ² - ½)

Differences from the paper: it counts ln s among the constants, so that its bound is largest at s = 0, which gives the most probable
ln γ and no posterior; here the term is kept. Its rule exp(tanh z) does not follow from the model: near the prior m falls with c d,
so the rule has the direction of c = -1 and the text ("inverse relationship") that of c = 1.

Where |d| τ ≤ √8 σ the ELBO is concave in (m, s) and the optimum the only one; beyond, no second one was found for |d| ≤ √3,
0.1 ≤ σ ≤ 1, 0.5 ≤ τ ≤ 3 and μ0 of 0, ±2, ±4 or 'unit'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from torch import Tensor

from gracecl.errors import UserError
from gracecl.registry import spec
from gracecl.registry.spec import Above

M_RANGE = (-8.0, 8.0)
S_RANGE = (0.02, 2.0)
"""where m and s are looked for; without limits a step could overflow"""
LOG_S_RANGE = (math.log(S_RANGE[0]), math.log(S_RANGE[1]))
STEP_LENGTHS = 4
"""how many are tried in each iteration: the whole step, a half, a quarter, an eighth"""
LONGEST_STEP = 2.0
ROUNDING = 1e-9
"""differences of the ELBO that may be rounding"""


@dataclass(frozen=True)
class Posterior:
    """q of each layer: ln γ ~ N(m, s²)."""

    m: Tensor
    s: Tensor

    @property
    def mean(self) -> Tensor:
        """E[γ]."""
        return torch.exp(self.m + self.s**2 / 2)


@dataclass(frozen=True)
class Strength:
    """The model of γ; `posterior(d)` solves it for the layers' deviations d."""

    c: float = -1.0
    """-1: a layer with more entropy gets a larger γ, as in the algorithm; 1: a smaller one, as the text says"""
    sigma: Annotated[float, Above(0)] = 1.0
    """σ, the noise of an entropy; 1 where d is standardised"""
    tau: Annotated[float, Above(0)] = 1.0
    """τ, how far ln γ tends to be from μ0 before an entropy is seen"""
    mu0: float | Literal["unit"] = "unit"
    """μ0, the centre of the prior; 'unit' stands for the one that makes E[γ] = 1 at d = 0"""

    def __post_init__(self) -> None:
        spec.check_fields(self, "strength")
        if self.c not in (-1, 1):
            raise UserError(f"strength: c must be -1 or 1, not {self.c!r}; its size is a matter of units, change mu0 instead")

    @cached_property
    def centre(self) -> float:
        """μ0 as a number."""
        if self.mu0 != "unit":
            return float(self.mu0)
        precision = self.sigma**-2  # with m = -s²/2, ∂ELBO/∂s = 0 gives s and then ∂ELBO/∂m = 0 gives μ0
        variance = bisect(lambda v: 1 - v / self.tau**2 - 2 * precision * v * math.exp(3 * v), S_RANGE[0] ** 2, S_RANGE[1] ** 2)
        return -variance / 2 - self.tau**2 * precision * math.exp(3 * variance)

    @cached_property
    def at_rest(self) -> tuple[float, float]:
        """Return m and s at d = 0, where both derivatives vanish if s² = τ² / (1 + 2 (m - μ0)), which leaves m to
        find.
        """

        def variance(m: float) -> float:
            return min(max(self.tau**2 / (1 + 2 * max(m - self.centre, 0.0)), S_RANGE[0] ** 2), S_RANGE[1] ** 2)

        m = bisect(lambda m: math.exp(2 * (variance(m) - m)) / self.sigma**2 - (m - self.centre) / self.tau**2, *M_RANGE)
        return m, math.sqrt(variance(m))

    def elbo(self, m: Tensor, s: Tensor, d: Tensor) -> Tensor:
        """Return the evidence lower bound, in closed form."""
        constant = 0.5 - math.log(self.tau) - math.log(2 * math.pi * self.sigma**2) / 2
        return self._fit(m, s**2, self._pull(d)) + torch.log(s) - d**2 / (2 * self.sigma**2) + constant

    def gradient(self, m: Tensor, s: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∂ELBO/∂m and ∂ELBO/∂s."""
        by_m, by_log_s, *_ = self._derivatives(m, s**2, self._pull(d))
        return by_m, by_log_s / s

    def monte_carlo_elbo(self, m: Tensor, s: Tensor, d: Tensor, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the evidence lower bound as a mean over draws ln γ = m + s ε of ln p(d, γ) - ln q(γ);
        differentiable in m and s.
        """
        noise = torch.randn(samples, *m.shape, generator=generator, dtype=m.dtype, device=m.device)
        log_gamma = m + s * noise
        likelihood = log_normal(d - self.c * torch.exp(-log_gamma), self.sigma)
        prior = log_normal(log_gamma - self.centre, self.tau)
        return (likelihood + prior - log_normal(log_gamma - m, s)).mean(dim=0)

    @property
    def iterations(self) -> int:
        """Enough of them from the optimum at d = 0; where τ ≤ σ the ELBO is concave for abs(d) ≤ √8, and half as many will do."""
        return 10 if self.tau <= self.sigma else 20

    @torch.no_grad()
    def posterior(self, d: Tensor, start: Posterior | None = None, iterations: int | None = None) -> Posterior:
        """Return the m and s of largest ELBO for each deviation, in double precision, without gradients.

        Damped Newton in (m, ln s) for all layers at once, from the optimum at d = 0 or from an earlier answer, which may need fewer
        `iterations`. Their number is fixed, so that nothing waits for the device.
        """
        pull = self._pull(d.double())
        if start is None:
            m, log_s = torch.full_like(pull, self.at_rest[0]), torch.full_like(pull, math.log(self.at_rest[1]))
        else:
            m, log_s = start.m.double().clamp(*M_RANGE), start.s.double().log().clamp(*LOG_S_RANGE)
        lengths = torch.arange(STEP_LENGTHS, dtype=pull.dtype, device=pull.device).neg().exp2().view(-1, *[1] * pull.dim())
        for _ in range(self.iterations if iterations is None else iterations):
            step_m, step_log_s = self._newton(m, log_s, pull)
            tried_m = (m + lengths * step_m).clamp(*M_RANGE)
            tried_log_s = (log_s + lengths * step_log_s).clamp(*LOG_S_RANGE)
            reached = self._fit(tried_m, torch.exp(2.0 * tried_log_s), pull) + tried_log_s
            reached[0] += ROUNDING  # at the optimum all lengths reach the same, and the whole step is the one that converges
            best = reached.argmax(dim=0, keepdim=True)
            m, log_s = tried_m.gather(0, best).squeeze(0), tried_log_s.gather(0, best).squeeze(0)
        return Posterior(m, torch.exp(log_s))

    @torch.no_grad()
    def map(self, d: Tensor) -> Tensor:
        """Return γ at the most probable ln γ, the optimum in the limit s → 0, by bisection over m."""
        pull = self._pull(d.double())
        m, half = torch.zeros_like(pull), M_RANGE[1]
        while half > 1e-13:
            half /= 2
            inverse = torch.exp(-m)
            slope = inverse * (inverse / self.sigma**2 - pull) - (m - self.centre) / self.tau**2
            m = m + half * torch.sign(slope)
        return torch.exp(m)

    def _pull(self, d: Tensor) -> Tensor:
        """Return the part of the ELBO that depends on d."""
        return d * (self.c / self.sigma**2)

    def _fit(self, m: Tensor, variance: Tensor, pull: Tensor) -> Tensor:
        """Return the ELBO without ln s and without constants."""
        inverse, inverse_square = inverse_moments(m, variance)
        prior = (variance + (m - self.centre) ** 2) / (2 * self.tau**2)
        return pull * inverse - inverse_square / (2 * self.sigma**2) - prior

    def _derivatives(self, m: Tensor, variance: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return derivatives of the ELBO: by m, by ln s, twice by m, by m and ln s, twice by ln s."""
        inverse, inverse_square = inverse_moments(m, variance)
        linear, square = pull * inverse, inverse_square / self.sigma**2
        curvature = linear - 2.0 * square - 1 / self.tau**2
        by_m = square - linear - (m - self.centre) / self.tau**2
        by_both = variance * (4.0 * square - linear)
        by_log_s_twice = variance * (2.0 * curvature + variance * (linear - 8.0 * square))
        return by_m, variance * curvature + 1.0, curvature, by_both, by_log_s_twice

    def _newton(self, m: Tensor, log_s: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Return an uphill step in (m, ln s): Newton's where the ELBO is concave, a shorter one elsewhere."""
        by_m, by_log_s, mm, both, ss = self._derivatives(m, torch.exp(2.0 * log_s), pull)
        stuck_m = (m + by_m).clamp(*M_RANGE) == m  # at the end of its range and pushed outwards, a coordinate rests
        stuck_s = (log_s + by_log_s).clamp(*LOG_S_RANGE) == log_s
        by_m, by_log_s = by_m.masked_fill(stuck_m, 0.0), by_log_s.masked_fill(stuck_s, 0.0)
        both = both.masked_fill(stuck_m | stuck_s, 0.0)
        upward = (mm + ss + torch.hypot(mm - ss, 2.0 * both)).clamp(min=0.0)  # twice the larger eigenvalue, if that is positive
        mm, ss = mm - upward, ss - upward
        determinant = mm * ss - both**2
        step_m, step_log_s = (both * by_log_s - ss * by_m) / determinant, (both * by_m - mm * by_log_s) / determinant
        excess = torch.hypot(step_m, step_log_s).clamp(min=LONGEST_STEP) / LONGEST_STEP
        return step_m / excess, step_log_s / excess


def inverse_moments(m: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[1/γ] and E[1/γ²] for ln γ ~ N(m, variance)."""
    return torch.exp(variance / 2.0 - m), torch.exp(2.0 * (variance - m))


def log_normal(deviation: Tensor, spread: Tensor | float) -> Tensor:
    """Return ln of the normal density at a distance from its centre."""
    spread = torch.as_tensor(spread, dtype=deviation.dtype, device=deviation.device)
    return -((deviation / spread) ** 2) / 2 - torch.log(spread) - math.log(2 * math.pi) / 2


def bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function crosses 0, or the nearer end where it does not."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
