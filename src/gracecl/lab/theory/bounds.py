"""The two theorems of the GRACE paper as arithmetic on any objective: PAC-Bayes per task, forgetting per pair of tasks.

Theorem 1, for task t with n samples, prior p chosen before the task and any posterior q, with probability 1 - δ:

    E_q[R] ≤ E_q[R̂] + sqrt( (KL(q‖p) + ln(2 sqrt(n)/δ)) / (2 (n - 1)) );    E_q[R + λΔ] is at most that plus λ E_q[Δ̂ + Δ]

Theorem 2, for s < t, with L_s the largest gradient of task s's objective along the way and μ_k the convexity of task k's:

    L_s(θ_t) - L_s(θ_s) ≤ L_s Σ_k ‖θ_k - θ_{k-1}‖ ≤ L_s Σ_k ( ‖∇R̂_k(θ_{k-1})‖ + 2 λ C_Δ sqrt(Δ̂_k(θ_{k-1})) ) / μ_k

The largest gradient and the smallest curvature are those of sampled points, so the one may be too small and the other too large:
what comes out are estimates of the bounds, not certificates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Point = Mapping[str, Tensor]
"""θ: named tensors"""
Convexity = Literal["curvature", "secant"]
"""which estimate of μ_k: the smallest directional curvature on the segment, or its mean, from the gradients at both ends"""

STATIONARY = 0.01
"""θ_k passes for a stationary point of J_k where its gradient is at most this share of the gradient at θ_{k-1}"""


# --- θ ----------------------------------------------------------------------------------------------------------------------


def between(start: Point, end: Point, at: float | Tensor) -> dict[str, Tensor]:
    """Return the point at a fraction of the way from one to another."""
    return {name: value + at * (end[name] - value) for name, value in start.items()}


def difference(start: Point, end: Point) -> dict[str, Tensor]:
    return {name: end[name] - value for name, value in start.items()}


def inner(one: Point, two: Point) -> float:
    return math.fsum(float((value.double() * two[name].double()).sum()) for name, value in one.items())


def norm(vector: Point) -> float:
    return math.sqrt(inner(vector, vector))


def fractions(points: int) -> list[float]:
    """Return `number` evenly spaced fractions from 0 to 1."""
    return [index / (points - 1) for index in range(points)]


# --- the objective ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """An objective's values at a point."""

    risk: float
    entropies: tuple[float, ...]
    deviation: float
    """Δ = Σ_l (H_l - H*)²"""
    total: float
    """R + λΔ"""


@dataclass(frozen=True)
class Slopes:
    """An objective's first derivatives at a point."""

    total: dict[str, Tensor]
    """∇(R + λΔ)"""
    risk: float
    """‖∇R‖"""
    entropies: tuple[float, ...]
    """‖∇H_l‖"""


@dataclass(frozen=True)
class Objective:
    """R(θ) + λ Σ_l (H_l(θ) - H*)² on some images.

    Each part gives what some of the images contribute to [R, H_1, …, H_L], so that they need not be in memory all at once.
    """

    parts: Sequence[Callable[[Point], Tensor]]
    weight: float = 0.0
    """λ"""
    target: float = 0.0
    """H*"""

    def values(self, theta: Point) -> Values:
        terms = self._terms(theta)
        deviation = float(((terms[1:] - self.target) ** 2).sum())
        return Values(float(terms[0]), tuple(terms[1:].tolist()), deviation, float(terms[0]) + self.weight * deviation)

    def gradient(self, theta: Point) -> dict[str, Tensor]:
        """∇(R + λΔ)."""
        factors = self._factors(self._terms(theta)) if self.weight else None
        leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for part in self.parts:
            terms = part(leaves)
            _add(total, leaves, terms[0] if factors is None else (factors.to(terms) * terms).sum())
        return total

    def slopes(self, theta: Point) -> Slopes:
        """Return the gradients of R and of each H_l, and of their sum."""
        factors = self._factors(self._terms(theta))
        leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
        rows = [{name: torch.zeros_like(value) for name, value in theta.items()} for _ in factors]
        for part in self.parts:
            terms = part(leaves)
            for row, term in zip(rows, terms, strict=True):
                _add(row, leaves, term)
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for factor, row in zip(factors.tolist(), rows, strict=True):
            for name, gradient in row.items():
                total[name] += factor * gradient
        return Slopes(total, norm(rows[0]), tuple(norm(row) for row in rows[1:]))

    def curvature(self, start: Point, end: Point, at: float) -> float:
        """Return u'∇²(R + λΔ)u at a fraction of the way from `start` to `end`, u its unit vector.

        With ψ = [R, H_1, …] as a function of the way x and w the weight of each in the objective, it is w·ψ'' + 2 λ Σ_l (H_l')².
        One backward pass through a backward pass gives both: g = d(w·ψ)/dx, then ∂g/∂x = w·ψ'' and ∂g/∂w = ψ'.
        """
        factors = self._factors(self._terms(between(start, end, at)))
        first, second = torch.zeros_like(factors), 0.0
        for part in self.parts:
            some = next(iter(start.values()))
            x = torch.tensor(at, dtype=some.dtype, device=some.device, requires_grad=True)
            weights = factors.to(some).requires_grad_()
            (slope,) = torch.autograd.grad((weights * part(between(start, end, x))).sum(), x, create_graph=True)
            of_weights, of_x = torch.autograd.grad(slope, (weights, x), allow_unused=True)
            first = first + of_weights.double().cpu()
            second += 0.0 if of_x is None else float(of_x)
        total = second + 2 * self.weight * float((first[1:] ** 2).sum())
        return total / norm(difference(start, end)) ** 2

    def _terms(self, theta: Point) -> Tensor:
        with torch.no_grad():
            return torch.stack([part(theta).double().cpu() for part in self.parts]).sum(dim=0)

    def _factors(self, terms: Tensor) -> Tensor:
        """Return the derivatives of the objective by R and by each H_l."""
        return torch.cat([torch.ones_like(terms[:1]), 2 * self.weight * (terms[1:] - self.target)])


def _add(total: dict[str, Tensor], leaves: Mapping[str, Tensor], value: Tensor) -> None:
    found = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, allow_unused=True)
    for name, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            total[name] += gradient


# --- theorem 1 ----------------------------------------------------------------------------------------------------------------


def gaussian_kl(start: Point, end: Point, prior: Mapping[str, float], posterior: Mapping[str, float]) -> float:
    """KL( N(end, posterior) ‖ N(start, prior) ), each tensor with a variance of its own.

    A tensor of k entries adds ‖end - start‖²/(2v) + (k/2)(w/v - 1 - ln(w/v)), v its prior and w its posterior variance.
    """
    terms = []
    for name, moved in difference(start, end).items():
        v, ratio = prior[name], posterior[name] / prior[name]
        terms += [float((moved.double() ** 2).sum()) / (2 * v), moved.numel() / 2 * (ratio - 1 - math.log(ratio))]
    return math.fsum(terms)


def printed_kl(start: Point, end: Point, prior: Mapping[str, float], posterior: Mapping[str, float]) -> float:
    """The paper's upper bound on it, (κ/2) ‖end - start‖² + C: the whole displacement at the precision of the sharpest tensor."""
    kappa = 1 / min(prior[name] for name in start)
    return kappa / 2 * norm(difference(start, end)) ** 2 + gaussian_kl(start, start, prior, posterior)


def complexity(kl: float, samples: int, delta: float) -> float:
    """sqrt( (KL + ln(2 sqrt(n)/δ)) / (2 (n - 1)) )."""
    if samples < 2 or not 0 < delta < 1:
        raise ValueError(f"theorem 1 needs at least 2 samples and 0 < δ < 1, not {samples} and {delta}")
    return math.sqrt((kl + math.log(2 * math.sqrt(samples) / delta)) / (2 * (samples - 1)))


def choice_cost(rung: int, families: int = 1) -> float:
    """Return what choosing the variance by the data adds to KL: ln(π² j²/6) for rung j ≥ 1 of a ladder,
    ln(families) for the ladder.

    Rung j gets the share 6/(π² j²) of δ; the shares sum to 1, so the bound holds for all rungs at once.
    """
    return math.log(math.pi**2 * rung**2 / 6) + math.log(families)


@dataclass(frozen=True)
class PacBayes:
    """Theorem 1 for one task: p = N(θ_{t-1}, V), q = N(θ_t, V), averages over draws from q."""

    task: int
    """counted from 1"""
    samples: int
    """n_t"""
    family: str
    """isotropic: the same variance everywhere; relative: each tensor's variance is in proportion to its mean square"""
    rung: int
    variance: float
    kl: float
    kl_printed: float
    cost: float
    """of choosing family and rung"""
    training_error: float
    """E_q[R̂], 0-1"""
    spread: float
    """standard error of that over the draws"""
    test_error: float
    """E_q[R]"""
    net_error: float
    """R at θ_t itself"""
    training_deviation: float
    """E_q[Δ̂]"""
    test_deviation: float
    """E_q[Δ]"""
    weight: float
    """λ"""

    def bound(self, delta: float) -> float:
        """On E_q[R]."""
        return self.training_error + complexity(self.kl + self.cost, self.samples, delta)

    def bound_printed_kl(self, delta: float) -> float:
        """The same with the paper's upper bound on KL."""
        return self.training_error + complexity(self.kl_printed + self.cost, self.samples, delta)

    def bound_objective(self, delta: float) -> float:
        """On E_q[R + λΔ], as printed: λΔ̂ and the population's λΔ stand on the right too."""
        return self.bound(delta) + self.weight * (self.training_deviation + self.test_deviation)

    @property
    def objective(self) -> float:
        """E_q[R + λΔ]."""
        return self.test_error + self.weight * self.test_deviation


# --- theorem 2 ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """What theorem 2 needs of the way from θ_{k-1} to θ_k, under task k's own empirical objective J_k."""

    length: float
    """d_k = ‖θ_k - θ_{k-1}‖"""
    curvature: float
    """smallest u'∇²J_k u over the points; NaN for a way of no length"""
    secant: float
    """⟨∇J_k(θ_k) - ∇J_k(θ_{k-1}), θ_k - θ_{k-1}⟩ / d_k²; NaN for a way of no length"""
    risk_gradient: float
    """‖∇R̂_k(θ_{k-1})‖"""
    gradient_before: float
    """‖∇J_k(θ_{k-1})‖"""
    gradient_after: float
    """‖∇J_k(θ_k)‖, which the printed proof takes for 0"""
    deviation: float
    """Δ̂_k(θ_{k-1})"""
    entropy_gradients: tuple[float, ...]
    """c_l: largest ‖∇H_l‖ over the points"""

    def convexity(self, kind: Convexity) -> float:
        return self.curvature if kind == "curvature" else self.secant

    @property
    def stationary(self) -> bool:
        return self.gradient_after <= STATIONARY * self.gradient_before


def measure_segment(objective: Objective, before: Point, after: Point, points: int = 11) -> Segment:
    """Measure one task's segment at `points` places."""
    moved = difference(before, after)
    length = norm(moved)
    first, last = objective.slopes(before), objective.slopes(after)
    inside = [objective.slopes(between(before, after, at)).entropies for at in fractions(points)[1:-1]] if objective.weight else []
    if length == 0:
        curvature = secant = math.nan
    else:
        curvature = min(objective.curvature(before, after, at) for at in fractions(points))
        secant = (inner(last.total, moved) - inner(first.total, moved)) / length**2
    return Segment(
        length=length,
        curvature=curvature,
        secant=secant,
        risk_gradient=first.risk,
        gradient_before=norm(first.total),
        gradient_after=norm(last.total),
        deviation=objective.values(before).deviation,
        entropy_gradients=tuple(map(max, zip(first.entropies, *inside, last.entropies, strict=True))),
    )


def largest_gradient(objective: Objective, start: Point, end: Point, points: int = 11) -> float:
    """Return the objective's largest gradient norm at places of a segment: a lower estimate of the supremum."""
    return max(norm(objective.gradient(between(start, end, at))) for at in fractions(points))


@dataclass(frozen=True)
class ForgettingBound:
    """Theorem 2 for one pair of tasks: the forgetting and its upper bounds, tighter ones first.

    A level that rests on μ_k > 0 is None where that fails.
    """

    old: int
    """s, counted from 1"""
    new: int
    """t"""
    measured: float
    """F = L_s(θ_t) - L_s(θ_s)"""
    steepness: float
    """L_s: largest gradient of task s's objective on the segments s+1 … t"""
    chord_steepness: float
    """the same on the straight line from θ_s to θ_t, which the printed proof integrates along"""
    distance: float
    """‖θ_t - θ_s‖"""
    segments: tuple[Segment, ...]
    """of the tasks s+1 … t"""
    weight: float
    """λ"""

    @property
    def by_distance(self) -> float:
        """L_s ‖θ_t - θ_s‖."""
        return self.steepness * self.distance

    @property
    def by_path(self) -> float:
        """L_s Σ d_k."""
        return self.steepness * math.fsum(segment.length for segment in self.segments)

    def corrected(self, kind: Convexity = "curvature") -> float | None:
        """L_s Σ (‖∇J_k(θ_{k-1})‖ + ‖∇J_k(θ_k)‖)/μ_k: the printed argument without taking θ_k for a stationary point."""
        return self._over_convexity([part.gradient_before + part.gradient_after for part in self.segments], kind)

    def printed(self, kind: Convexity = "curvature") -> float | None:
        """L_s Σ (‖∇R̂_k(θ_{k-1})‖ + 2 λ C_Δ sqrt(Δ̂_k(θ_{k-1})))/μ_k. A bound only where `stationary`."""
        return self._over_convexity([part.risk_gradient + self._entropy_cost(part) for part in self.segments], kind)

    def second_form(self, kind: Convexity = "curvature") -> float | None:
        """L_s Σ (‖∇J_k(θ_{k-1})‖ + 4 λ C_Δ sqrt(Δ̂_k(θ_{k-1})))/μ_k, which the paper calls equivalent. Never below the first."""
        return self._over_convexity([part.gradient_before + 2 * self._entropy_cost(part) for part in self.segments], kind)

    @property
    def stationary(self) -> bool:
        """Whether every θ_k on the way is a stationary point of its task's objective, as the printed proof takes for granted."""
        return all(segment.stationary for segment in self.segments)

    @property
    def entropy_lipschitz(self) -> float:
        """C_Δ = sqrt(Σ_l c_l²), c_l over all segments."""
        return math.sqrt(math.fsum(max(c) ** 2 for c in zip(*(part.entropy_gradients for part in self.segments), strict=True)))

    def _entropy_cost(self, segment: Segment) -> float:
        return 2 * self.weight * self.entropy_lipschitz * math.sqrt(segment.deviation)

    def _over_convexity(self, numerators: Sequence[float], kind: Convexity) -> float | None:
        mus = [segment.convexity(kind) for segment in self.segments]
        if not all(mu > 0 for mu in mus):
            return None
        return self.steepness * math.fsum(top / mu for top, mu in zip(numerators, mus, strict=True))
