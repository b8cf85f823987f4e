"""Deep SLDA. Hayes, Kanan, Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, CVPR workshops 2020.

    for each image (x, y) from the stream, one at a time:
        z <- features of x, from a net that stays as it is
        d <- z - μ_y;  S <- S + n_y / (n_y + 1) · d dᵀ
        μ_y <- μ_y + d / (n_y + 1);  n_y <- n_y + 1
    whenever predictions are wanted:
        Σ <- S / n;  Λ <- [ (1 - ε) Σ + ε I ]⁻¹, with the shrinkage ε
        score of class k <- μ_kᵀ Λ z - ½ μ_kᵀ Λ μ_k

μ_k are the means of the classes and Σ is the covariance within classes that they share, exactly those of all images so far, in
whatever order they came. A batch is added in one product with the deviations that its images would have one after the other.
See methods/closed_form.py for what it does not do.

The result is scikit-learn's LinearDiscriminantAnalysis(solver='lsqr') on the same features. Its priors are the classes' shares of
the images, which is priors='empirical' here (a term log n_k / n in the scores; the paper has none); its shrinkage=ε goes towards
the mean variance tr Σ / D times I, which is shrink_to='variance' here (the paper's goes towards I).

Differences from the paper and its program: the paper weighs d dᵀ by t / (t + 1), with t the images so far of any class, which adds
too much where classes are young, and its program lets a new class begin at the origin, so that its first image counts as far off
its mean (reference=True does both); the paper begins with a first batch of classes that also trains the net and gives a covariance
by another estimator (OAS), here everything is streamed; sums are in double precision; the inverse is not formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Progress, Taps
from gracecl.memory import Memories
from gracecl.methods.closed_form import ClosedForm
from gracecl.methods.state import per_class
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtMost


@methods.register("slda")
@dataclass(eq=False, repr=False)
class SLDA(ClosedForm):
    """Deep SLDA: class means and a shared covariance of a pretrained net's features, image by image; no training, no memory."""

    shrinkage: Annotated[float, Above(0), AtMost(1)] = 1e-4
    """ε, the share of the covariance that is replaced by a multiple of the identity"""
    shrink_to: Literal["identity", "variance"] = "identity"
    """the multiple: 1, or the mean variance of the features, which does not depend on their scale"""
    priors: Literal["uniform", "empirical"] = "uniform"
    """take all classes as equally likely, or as likely as they were in the stream"""
    reference: bool = False
    """weigh deviations as the paper does and let classes begin at the origin as its program does, which is no covariance"""

    state = (per_class("counts"), per_class("means", axis=1), "scatter")
    family: ClassVar[str] = "lda"

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        zeros = torch.zeros(net.layers, net.classes, net.width, dtype=torch.float64, device=net.classifier.weight.device)
        self.means = zeros
        self.counts = zeros.new_zeros(net.classes)
        self.scatter = zeros.new_zeros(net.layers, net.width, net.width)

    def add(self, features: Tensor, labels: Tensor) -> None:
        earlier = (labels[:, None] == labels).tril(diagonal=-1).double()  # [B, B]: images of the same class before each one
        before = self.counts[labels]
        number = before + earlier.sum(dim=1)
        mean = (before[:, None] * self.means[:, labels] + earlier @ features) / number.clamp(min=1)[:, None]
        deviation = features - mean
        weigh_by = self.counts.sum() + torch.arange(len(labels), device=labels.device) if self.reference else number
        self.scatter = self.scatter + (deviation * (weigh_by / (weigh_by + 1))[:, None]).transpose(1, 2) @ deviation
        member = F.one_hot(labels, len(self.counts)).T.double()
        counts = self.counts + member.sum(dim=1)
        self.means = (self.counts[:, None] * self.means + member @ features) / counts.clamp(min=1)[:, None]
        self.counts = counts

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        images, means = self.counts.sum(), self.means.transpose(1, 2)
        covariance = self.scatter / images
        identity = torch.eye(net.width, dtype=covariance.dtype, device=covariance.device)
        if self.shrink_to == "variance":
            variance = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)
            identity = torch.where(variance > 0, variance, 1)[:, None, None] * identity  # the first images may not vary at all
        self.weight = torch.linalg.solve((1 - self.shrinkage) * covariance + self.shrinkage * identity, means)
        self.bias = -(means * self.weight).sum(dim=1, keepdim=True) / 2
        if self.priors == "empirical":
            self.bias = self.bias + (self.counts / images).log()

    def rules(self, out: Taps) -> dict[str, Tensor]:
        return {self.family: out.features.double() @ self.weight + self.bias}
