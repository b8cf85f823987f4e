"""FeCAM. Goswami et al., FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free CL, NeurIPS 2023.

    t(z) <- z^β, Tukey's power, for features that are not negative
    for each class: S_k <- covariance of t(z), shrunk twice: S + α₁ V₁ I + α₂ V₂ (1 1ᵀ - I)
        V₁ the mean variance, V₂ the mean of the other entries;  R_k <- correlation matrix of it
    x <- unit( t(z) );  m_k <- unit( t(mean of z) )
    class <- argmin (x - m_k)ᵀ R_k⁻¹ (x - m_k)

Counts, means of z and of t(z), and a scatter of t(z) for each class are sums: the order of the stream does not matter. They take
K D² numbers (100 classes of 512 features: 0.2 GB). For a transformer, whose features may be negative: fecam(beta=1.0, unit=True,
rounds=1, off_diagonal=0.0). See methods/closed_form.py for what it does not do.

Differences from the paper and its program: no training of the net on the first task, and the rule is used from the first task on; a
covariance of few images is mixed with that within all classes, (n_k S_k + κ S_w / n) / (n_k + κ) with κ = 2, where the program has
S_k alone, which one image does not give (few=0 leaves S_k alone from two images on); covariance='common' is the covariance within
classes (the program's is the total one of each task's augmented images); double precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Ints, Progress, Taps
from gracecl.functional import closed_forms as forms
from gracecl.memory import Memories
from gracecl.methods.closed_form import ClosedForm
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast, AtMost, Within


@methods.register("fecam")
@dataclass(eq=False, repr=False)
class FeCAM(ClosedForm):
    """FeCAM: Mahalanobis distances with a covariance for each class of a pretrained net's features; no training, no memory."""

    beta: Annotated[float, Above(0), AtMost(1)] = 0.5
    """β of Tukey's power; 1 leaves features as they are"""
    unit: bool = False
    """take features of unit length, and class means of those as they are"""
    on_diagonal: Annotated[float, AtLeast(0)] = 1.0
    """α₁"""
    off_diagonal: Annotated[float, AtLeast(0)] = 1.0
    """α₂"""
    rounds: Annotated[int, Within(0, 10)] = 2
    """how often a covariance is shrunk"""
    covariance: Literal["class", "common", "diagonal", "none"] = "class"
    """of each class, of all together, of each class without its correlations; none is the distance from the mean"""
    correlate: bool = True
    """turn covariances into correlations"""
    few: Annotated[float, AtLeast(0)] = 2.0
    """κ, the images that the covariance within all classes counts for"""

    state: ClassVar[tuple[str, ...]] = ("plain",)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.begin(net.layers, net.width, each_class=self.covariance in ("class", "diagonal"))
        self.plain = self.new_sums(net.layers, net.width)

    @property
    def rule(self) -> str:
        return "fecam_last"

    def taken(self, features: Tensor) -> Tensor:
        return F.normalize(features.double(), dim=-1) if self.unit else features.double()

    def powered(self, z: Tensor) -> Tensor:
        return z if self.beta == 1 else z.clamp(min=0) ** self.beta

    def add(self, features: Tensor, labels: Ints) -> None:
        z = self.taken(features)
        self.plain.add(z, labels)
        self.sums.add(self.powered(z), labels)

    def merge(self, other: ClosedForm, numbers: Tensor | None = None) -> None:
        super().merge(other, numbers)
        if isinstance(other, FeCAM):
            self.plain.merge(other.plain, numbers)

    def covariances(self) -> Iterator[Tensor]:
        """`[L, D, D]` of each class met, before it is shrunk; one at a time, as all take as much room as the sums."""
        shared = self.sums.within / self.sums.images
        if self.sums.scatter.ndim == 3:
            yield shared
            return
        for label in self.sums.met:
            count = self.sums.counts[label]
            own = self.sums.scatter[:, label] / (count - 1).clamp(min=1)
            mixed = (count * own + self.few * shared) / (count + self.few)
            yield torch.where(count > 1, mixed, shared)

    def distances(self) -> Iterator[Tensor]:
        """`[L, D, D]` of each: the matrix whose inverse measures distances."""
        for matrix in self.covariances():
            for _ in range(self.rounds):
                matrix = forms.raised(matrix, self.on_diagonal, self.off_diagonal)
            if self.covariance == "diagonal":
                variances = matrix.diagonal(dim1=-2, dim2=-1)
                yield torch.diag_embed(F.normalize(variances, dim=-1))
            else:
                yield forms.correlation(matrix) if self.correlate else matrix

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        met, means = self.sums.met, self.powered(self.plain.means[:, self.sums.met])
        self.means = means if self.unit else F.normalize(means, dim=-1)
        identity = torch.eye(net.width, dtype=means.dtype, device=means.device).expand(net.layers, -1, -1)
        matrices = iter([identity]) if self.covariance == "none" else self.distances()
        own = len(met) if self.sums.scatter.ndim == 4 else 1
        self.whitening = means.new_empty(net.layers, own, net.width, net.width)
        for number, matrix in enumerate(matrices):
            self.whitening[:, number] = torch.linalg.solve_triangular(forms.factored(matrix), identity, upper=False)
        self.columns = met

    def rules(self, out: Taps) -> dict[str, Tensor]:
        x = F.normalize(self.powered(self.taken(out.features)), dim=-1)
        apart = x[:, None] - self.means[:, :, None]  # [L, K, B, D]
        scores = -(apart @ self.whitening.transpose(2, 3)).square().sum(dim=-1).transpose(1, 2)
        every = scores.new_full((*scores.shape[:2], len(self.sums.counts)), -torch.inf)
        return {"fecam": every.index_copy(2, self.columns, scores)}
