"""Classifiers that follow from sums over features: nearest means, discriminant analysis, ridge regression, class covariances.

U [M, K] are the means of the classes met, n_k their counts, S_w the scatter within classes (`functional/sums.py`). One factor
serves all linear rules: with A = S_w + λ I = L Lᵀ, P = A⁻¹ U and T = Uᵀ P,

    discriminant analysis, covariance A:   hᵀ P - ½ diag T
    ridge regression to one-hot labels:    V = (G + λ I)⁻¹ C = P (D⁻¹ + T)⁻¹, D = diag(w_k n_k), w_k = 1 unless classes are weighed
    with an intercept:                     U - m for U, m the mean of all images; bias = w_k n_k / n - mᵀ V

so ridge is a K × K mixture of the scores of discriminant analysis, and the evidence of λ needs no more than the same factor:

    log |G + λ I| = log |A| + log |D⁻¹ + T| + log |D|
    Q(λ) = yy - tr Cᵀ (G + λ I)⁻¹ C = tr (D⁻¹ + T)⁻¹ - Σ n_k² / n (the last term with an intercept alone)
    J(λ) = (n - 1) log Q + log |G + λ I| - M log λ (n for n - 1 without an intercept)

J is -2 log of the marginal likelihood per output of y ~ N(H v, s² I), v ~ N(0, s²/λ I) with s² profiled; its minimiser needs no
images held out and no option to tune.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.errors import Misfit
from gracecl.functional.sums import Sums

if TYPE_CHECKING:
    from gracecl.nets.growth import Growth

Weights = Literal["none", "sqrt", "balanced"]
POWERS = range(-6, 3)
"""of ten: λ as a multiple of the mean eigenvalue of G that is not 0"""
FIRST_POWER = -2
"""where the search begins: always there, so that λ is a function of the sums alone"""
HELD_OUT_RIDGES = [10.0**power for power in range(-8, 9)]


class Linear:
    """Scores `h weight + bias`, with `weight [L, M, C]` and `bias [L, 1, C]`; a class that was not met has -∞."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def of_nothing(cls, layers: int, size: int, classes: int, device: torch.device | None = None) -> Linear:
        """Before any class was met."""
        weight = torch.zeros(layers, size, classes, dtype=torch.float64, device=device)
        return cls(weight, weight.new_full((layers, 1, classes), -torch.inf))

    def __call__(self, h: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, h, self.weight)

    @property
    def known(self) -> Tensor:
        """`[C]`: True for the classes that it can predict."""
        return self.bias.isfinite().all(dim=0).squeeze(0)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value.to(self.bias.device, copy=True))  # aligned as new ones are: products depend on it

    def grown(self, growth: Growth) -> Linear:
        """The same with room for new classes, which it does not know."""
        known = growth.padded(self.bias.isfinite().double(), 2) > 0
        return Linear(growth.padded(self.weight, 2), growth.padded(self.bias, 2).masked_fill(~known, -torch.inf))


def of_all_classes(sums: Sums, weight: Tensor, bias: Tensor) -> Linear:
    """A classifier of the classes met, `weight [L, M, K]` and `bias [L, 1, K]`, with columns for all of them."""
    layers, size, _ = weight.shape
    full = Linear.of_nothing(layers, size, len(sums.counts), weight.device)
    full.weight[..., sums.met], full.bias[..., sums.met] = weight, bias
    return full


# The factor.


@dataclass(frozen=True)
class Solution:
    """P = A⁻¹ U `[L, M, K]`, T = Uᵀ P `[L, K, K]` and log |A| `[L]`."""

    directions: Tensor
    overlaps: Tensor
    log_det: Tensor


def solve(matrix: Tensor, means: Tensor) -> Solution:
    """Factor A `[L, M, M]` once and solve it for U `[L, M, K]`."""
    factor = factored(matrix)
    directions = torch.cholesky_solve(means, factor)
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    return Solution(directions, means.transpose(1, 2) @ directions, log_det)


def factored(matrix: Tensor) -> Tensor:
    """The Cholesky factor; of a matrix that rounding left indefinite, with as much more on its diagonal as it takes."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed.any() or not matrix.isfinite().all():  # what is no number comes out as none, and is told of where it is used
        return factor
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    more = torch.finfo(matrix.dtype).eps * matrix.shape[-1] * diagonal.amax(dim=1).clamp(min=torch.finfo(matrix.dtype).tiny)
    warnings.warn("the ridge is below what double precision can tell from 0; a larger one is used", Misfit, stacklevel=2)
    while failed.any():
        factor, failed = torch.linalg.cholesky_ex(plus_identity(matrix, more))
        more = 10 * more
    return factor


def plus_identity(matrix: Tensor, factor: Tensor) -> Tensor:
    """`[L, M, M]` plus `factor [L]` times the identity."""
    matrix = matrix.clone()
    matrix.diagonal(dim1=1, dim2=2).add_(factor[:, None])
    return matrix


def means_of_met(sums: Sums) -> Tensor:
    """U `[L, M, K]`"""
    return sums.means[:, sums.met].transpose(1, 2)


# Nearest means and discriminant analysis.


def nearest_means(sums: Sums, score: Literal["cosine", "euclidean"]) -> Linear:
    """Of features as they are: μᵀh - ½ μᵀμ. Of unit features, whose scores then are cosines: unit(μ)ᵀ h."""
    means = means_of_met(sums)
    if score == "cosine":
        return of_all_classes(sums, F.normalize(means, dim=1), means.new_zeros(len(means), 1, means.shape[2]))
    return of_all_classes(sums, means, -means.square().sum(dim=1, keepdim=True) / 2)


def oas(covariance: Tensor, freedom: Tensor | float) -> Tensor:
    """`[L]`: the share ρ of the covariance that OAS (Chen et al. 2010) replaces by its mean variance times I.

    `freedom` is the number of independent deviations: n - K within classes (scikit-learn takes n).
    """
    size = covariance.shape[-1]
    variance = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)
    energy = covariance.square().mean(dim=(1, 2))
    denominator = (freedom + 1) * (energy - variance.square() / size)
    share = (energy + variance.square()) / denominator
    return torch.where(denominator > 0, share, 1.0).clamp(max=1)


def shrunk(covariance: Tensor, share: Tensor, to: Literal["identity", "variance"] = "variance") -> Tensor:
    """(1 - ρ) Σ + ρ I, or ρ times the mean variance times I; where nothing varies at all the identity stands for it."""
    variance = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)
    multiple = torch.where(variance > 0, variance, 1.0) if to == "variance" else torch.ones_like(variance)
    return plus_identity((1 - share)[:, None, None] * covariance, share * multiple)


def discriminant(sums: Sums, covariance: Tensor, priors: Literal["uniform", "empirical"] = "uniform") -> Linear:
    """Linear discriminant analysis with a covariance `[L, M, M]` that all classes share."""
    solved = solve(covariance, means_of_met(sums))
    bias = -solved.overlaps.diagonal(dim1=1, dim2=2)[:, None] / 2
    if priors == "empirical":
        bias = bias + (sums.counts[sums.met] / sums.images).log()
    return of_all_classes(sums, solved.directions, bias)


# Ridge regression.


def class_weights(counts: Tensor, kind: Weights) -> Tensor:
    """`[K]`: what an image of each class counts, 1, n_k^-½ or 1/n_k, scaled so that Σ w_k n_k = n and λ keeps its meaning."""
    weights = counts ** {"none": 0.0, "sqrt": -0.5, "balanced": -1.0}[kind]
    return weights * counts.sum() / (weights * counts).sum()


class Ridge:
    """Ridge regression to one-hot labels for any λ.

    Weighed classes share a covariance unless the sums keep classes apart: then S_w is Σ w_k S_k, exactly.
    """

    def __init__(self, sums: Sums, intercept: bool, weights: Weights = "none") -> None:
        self.sums, self.intercept = sums, int(intercept)
        counts = sums.counts[sums.met]
        weigh = class_weights(counts, weights)
        self.mass = weigh * counts
        """the diagonal of D"""
        each_class = sums.scatter.ndim == 4
        self.within = (weigh[:, None, None] * sums.scatter[:, sums.met]).sum(dim=1) if each_class else sums.within
        means = means_of_met(sums)
        self.center = intercept * (means @ (self.mass / self.mass.sum()))[..., None]
        self.means = means - self.center
        self._solved: dict[tuple[float, ...], tuple[Solution, Tensor]] = {}

    @property
    def scale(self) -> Tensor:
        """`[L]`: the mean eigenvalue of G (about the mean of all images, with an intercept) among those that are not 0."""
        trace = self.within.diagonal(dim1=1, dim2=2).sum(dim=1) + (self.mass * self.means.square().sum(dim=1)).sum(dim=1)
        scale = trace / min(len(self.sums), self.means.shape[1])
        return torch.where(scale > 0, scale, 1.0)

    def solved(self, ridge: Tensor) -> tuple[Solution, Tensor]:
        """The solution of S_w + λ I for `ridge [L]`, and the factor of D⁻¹ + T; each λ is solved for once."""
        key = tuple(ridge.tolist())
        if key not in self._solved:
            solution = solve(plus_identity(self.within, ridge), self.means)
            self._solved[key] = solution, factored(solution.overlaps + torch.diag(1 / self.mass))
        return self._solved[key]

    def at(self, ridge: Tensor) -> Linear:
        """The classifier at `ridge [L]`."""
        solution, inner = self.solved(ridge)
        weight = torch.cholesky_solve(solution.directions.transpose(1, 2), inner).transpose(1, 2)
        bias = self.intercept * self.mass / self.mass.sum() - self.center.transpose(1, 2) @ weight
        return of_all_classes(self.sums, weight, bias)

    def evidence(self, ridge: Tensor) -> Tensor:
        """`[L]`: J(λ); the smaller, the likelier."""
        solution, inner = self.solved(ridge)
        n = self.mass.sum()
        log_det = solution.log_det + 2 * inner.diagonal(dim1=1, dim2=2).log().sum(dim=1) + self.mass.log().sum()
        return (n - self.intercept) * self.unexplained(inner).log() + log_det - self.means.shape[1] * ridge.log()

    def unexplained(self, inner: Tensor) -> Tensor:
        """`[L]`: Q(λ) from the factor of D⁻¹ + T."""
        n, trace = self.mass.sum(), torch.cholesky_inverse(inner).diagonal(dim1=1, dim2=2).sum(dim=1)
        left = trace - self.intercept * self.mass.square().sum() / n
        return left.clamp(min=torch.finfo(left.dtype).eps * float(n))  # one class alone, or a perfect fit, leaves nothing

    # From the eigenvalues d of G and b, the squared lengths of the rows of Qᵀ C.

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """d and b, `[L, M]` each."""
        gram = self.within + (self.mass * self.means) @ self.means.transpose(1, 2)
        values, basis = torch.linalg.eigh(gram)
        return values.clamp(min=0), (basis.transpose(1, 2) @ (self.mass * self.means)).square().sum(dim=2)

    def fit_and_freedom(self, ridges: Tensor) -> tuple[Tensor, Tensor]:
        """`[R, L]` each: the sum of squared residuals and the degrees of freedom at `ridges [R, L]`."""
        values, rows = self.spectrum()
        ridges, n = ridges[..., None], self.mass.sum()
        energy = n - self.intercept * self.mass.square().sum() / n
        residual = energy - (rows * (values + 2 * ridges) / (values + ridges).square()).sum(dim=2)
        return residual, self.intercept + (values / (values + ridges)).sum(dim=2)

    def generalised_cross_validation(self, ridges: Tensor) -> Tensor:
        """`[R, L]`: (RSS / n) / (1 - df / n)² at `ridges [R, L]`."""
        (residual, freedom), n = self.fit_and_freedom(ridges), self.mass.sum()
        return residual / n / (1 - freedom / n).square()


def by_evidence(ridge: Ridge) -> Tensor:
    """`[L]`: the likeliest λ, to half a power of ten.

    Downhill from the same place each time, over powers of ten and then a half: four to six factors, and a function of the sums.
    """
    return by_descent(ridge.evidence, ridge.scale)


def by_descent(loss: Callable[[Tensor], Tensor], scale: Tensor) -> Tensor:
    """`[L]`: scale · 10^j with j downhill from FIRST_POWER, at whole and then at half numbers, each layer by itself."""
    power = torch.full_like(scale, FIRST_POWER)
    least = loss(scale * 10**power)

    def lower(step: float | Tensor) -> Tensor:
        """Take a step where that leads lower; return where it did."""
        nonlocal power, least
        there = (power + step).clamp(POWERS[0], POWERS[-1])
        found = loss(scale * 10**there)
        better = found < least
        power, least = torch.where(better, there, power), torch.where(better, found, least)
        return better

    while lower(1.0).any():
        pass
    while (power <= FIRST_POWER).any() and lower(-1.0).any():
        pass
    # The half on the side of the lower neighbour, both of which are known unless layers went different ways.
    above, below = (loss(scale * 10 ** (power + step).clamp(POWERS[0], POWERS[-1])) for step in (1, -1))
    upwards = ((above < below) & (power < POWERS[-1])) | (power <= POWERS[0])
    lower(torch.where(upwards, 0.5, -0.5))
    return scale * 10**power


def by_cross_validation(ridge: Ridge) -> Tensor:
    """`[L]`: the λ with the least generalised cross-validation, to half a power of ten."""
    halves = torch.arange(2 * POWERS[0], 2 * POWERS[-1] + 1, device=ridge.scale.device) / 2
    tried = 10 ** halves.double()[:, None] * ridge.scale
    return tried.gather(0, ridge.generalised_cross_validation(tried).argmin(dim=0, keepdim=True)).squeeze(0)


def held_out_errors(learned: Sums, held_out: Sums, ridges: Tensor) -> tuple[Tensor, Tensor]:
    """The squared error on images held out, tr Vᵀ G' V - 2 tr Vᵀ C' + n', of ridge regression on the others, `[R, L]`.

    `ridges [R]` are tried, for each layer not below what double precision can tell from 0; returns those, `[R, L]`, and the errors.
    """
    # In the basis of eigenvectors, each ridge costs a division instead of a solution.
    values, basis = torch.linalg.eigh(learned.gram)
    have, wanted = (basis.transpose(1, 2) @ sums.class_sums for sums in (learned, held_out))
    gram = basis.transpose(1, 2) @ held_out.gram @ basis
    tried = torch.maximum(ridges[:, None], values[:, -1] * values.shape[1] * torch.finfo(values.dtype).eps)
    errors = []
    for ridge in tried:
        solution = have / (values.clamp(min=0) + ridge[:, None])[..., None]
        errors.append((solution * (gram @ solution - 2 * wanted)).sum(dim=(1, 2)) + held_out.images)
    return tried, torch.stack(errors)


def by_images_held_out(learned: Sums, held_out: Sums) -> Tensor:
    """`[L]`: that of 10⁻⁸, …, 10⁸ with the least error; 1 while none is held out."""
    if len(held_out) == 0:
        return learned.means.new_ones(len(learned.means))
    tried, errors = held_out_errors(learned, held_out, learned.means.new_tensor(HELD_OUT_RIDGES))
    return tried.gather(0, errors.argmin(dim=0, keepdim=True)).squeeze(0)


# Class covariances.


def raised(covariance: Tensor, on_diagonal: float, off_diagonal: float) -> Tensor:
    """FeCAM's shrinkage of `[…, M, M]`: S + α₁ V₁ I + α₂ V₂ (1 1ᵀ - I), V₁ the mean variance, V₂ the mean of the other entries.

    Entries that are 0 do not count for V₂.
    """
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    others = covariance * (1 - identity)
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    mean = others.sum(dim=(-2, -1)) / others.ne(0).sum(dim=(-2, -1)).clamp(min=1)
    return covariance + on_diagonal * variance[..., None, None] * identity + off_diagonal * mean[..., None, None] * (1 - identity)


def correlation(covariance: Tensor) -> Tensor:
    """S_ij / √(S_ii S_jj); what does not vary at all has the variance 1 there."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    covariance = covariance + torch.diag_embed((variance == 0).double())
    spread = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return covariance / (spread[..., :, None] * spread[..., None, :])
