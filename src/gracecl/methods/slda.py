"""Deep SLDA. Hayes, Kanan, Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, CVPR workshops 2020.

    for each image (x, y) from the stream, one at a time:
        z <- features of x, from a net that stays as it is
        d <- z - μ_y;  S <- S + n_y / (n_y + 1) · d dᵀ
        μ_y <- μ_y + d / (n_y + 1);  n_y <- n_y + 1
    whenever predictions are wanted:
        Σ <- S / n;  Λ <- [ (1 - ε) Σ + ε I ]⁻¹, with the shrinkage ε
        score of class k <- μ_kᵀ Λ z - ½ μ_kᵀ Λ μ_k

μ_k are the means of the classes and Σ is the covariance within classes that they share, exactly those of all images so far, in
whatever order they came. See methods/closed.py, of which this is a preset.

The result is scikit-learn's LinearDiscriminantAnalysis(solver='lsqr') on the same features. Its priors are the classes' shares of
the images, which is priors='empirical' here (a term log n_k / n in the scores; the paper has none); its shrinkage=ε goes towards
the mean variance tr Σ / D times I, which is shrink_to='variance' here (the paper's goes towards I).

Differences from the paper and its program: the paper weighs d dᵀ by t / (t + 1), with t the images so far of any class, which adds
too much where classes are young, and its program lets a new class begin at the origin, so that its first image counts as far off
its mean (reference=True does both); the paper begins with a first batch of classes that also trains the net and gives a covariance
by another estimator (OAS), here everything is streamed; sums are in double precision; the inverse is not
formed. shrinkage='oas' needs no choice: it is OAS with n - K degrees of freedom, which begins near class means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import ClosedForm, Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtMost


@methods.register("slda")
@dataclass(eq=False, repr=False)
class SLDA(Preset):
    """Deep SLDA: class means and a shared covariance of a pretrained net's features, image by image; no training, no memory."""

    shrinkage: Annotated[float, Above(0), AtMost(1)] | Literal["oas"] = 1e-4
    """ε, the share of the covariance that is replaced by a multiple of the identity"""
    shrink_to: Literal["identity", "variance"] = "identity"
    """the multiple: 1, or the mean variance of the features, which does not depend on their scale"""
    priors: Literal["uniform", "empirical"] = "uniform"
    """take all classes as equally likely, or as likely as they were in the stream"""
    reference: bool = False
    """weigh deviations as the paper does and let classes begin at the origin as its program does, which is no covariance"""

    def closed(self) -> Closed:
        exact_or_not = AsPublished if self.reference else Closed
        return exact_or_not(solver="lda", shrink=self.shrinkage, shrink_to=self.shrink_to, priors=self.priors, features="each")


@dataclass(eq=False, repr=False)
class AsPublished(Closed):
    """SLDA's published recursion, which depends on the order of the stream."""

    def add(self, features: Tensor, labels: Ints) -> None:
        """Σ <- ( t Σ + t / (t + 1) d dᵀ ) / (t + 1) for each image, d from the mean before it, 0 for a new class."""
        h, sums, y = self.mapped(features), self.sums, torch.from_numpy(labels).to(features.device)
        earlier = (y[:, None] == y).tril(diagonal=-1).double()  # [B, B]: images of the same class before each one
        before = sums.counts[y]
        mean = (before[:, None] * sums.means[:, y] + earlier @ h) / (before + earlier.sum(dim=1)).clamp(min=1)[:, None]
        deviation = h - mean
        number = sums.images + torch.arange(len(y), device=y.device)
        weighed = deviation * (number / (number + 1))[:, None]
        scatter = sums.scatter + weighed.transpose(1, 2) @ deviation
        sums.add(h, labels)
        sums.scatter = scatter

    def merge(self, other: ClosedForm, numbers: Tensor | None = None) -> None:
        raise UserError("slda(reference=True) depends on the order of its images, so two of them cannot be merged; leave it out")
