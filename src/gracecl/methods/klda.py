"""KLDA. Momeni et al., Continual Learning Using a Kernel-Based Method Over Foundation Models, AAAI 2025.

    W <- N(0, 2γ), b <- U(0, 2π), drawn once
    h <- √(2/M) cos(z W + b), so that hᵀh' ~ exp(-γ |z - z'|²)
    score of class k <- μ_kᵀ Λ h - ½ μ_kᵀ Λ μ_k, Λ the inverse of the covariance within classes that they share

members=5 is KLDA-E: the mean softmax of five draws. See methods/closed.py, of which this is a preset.

Differences from the paper and its program: the covariance within classes is exact in any order (the program takes deviations from
the mean after each batch), divided by n (so its softmaxes are sharper by that factor) and shrunk by OAS (the program inverts it as
it is); γ is 1 / (D · variance) of the first batch unless it is given (the paper sets one for each net by hand); M is 2,000 (5,000).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("klda")
@dataclass(eq=False, repr=False)
class KLDA(Preset):
    """KLDA: discriminant analysis on random Fourier features of a pretrained net's features; no training, no memory."""

    size: Annotated[int, AtLeast(1)] = 2000
    """M, the number of Fourier features; the paper's is 5000"""
    gamma: Annotated[float, Above(0)] | Literal["first"] = "first"
    """γ of the kernel exp(-γ |z - z'|²); first is 1 / (D · variance) of the first batch"""
    members: Annotated[int, AtLeast(1)] = 1
    """draws of the map, whose softmaxes are averaged"""

    def closed(self) -> Closed:
        return Closed(map="rff", size=self.size, gamma=self.gamma, members=self.members, solver="lda")
