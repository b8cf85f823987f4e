"""RanPAC. McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023.

    W <- normal numbers, drawn once, from D features to M projections
    for each image (x, y) from the stream:
        h <- relu(f W), f the features of x, from a net that stays as it is
        G <- G + h hᵀ;  C <- C + h eᵀ_y, so that column k is the sum of the h of class k, its prototype
    whenever predictions are wanted:
        V <- (G + λ I)⁻¹ C;  scores <- relu(f W) V

G and C are sums, so the order of the stream does not matter, and V is ridge regression to one-hot labels on all images so far:
scikit-learn's Ridge(alpha=λ, fit_intercept=False). See methods/closed.py, of which this is a preset.

Differences from the paper and its program: no parameter-efficient training of the net on the first task; M is 2,000 (the paper's
10,000 takes 0.8 GB for each tapped layer and a minute for each evaluation); λ is chosen by evidence from all sums, for each tapped
layer (the program: by the error on the last fifth of the newest task, whose images it has at once; ridge='held_out' takes every
fifth image of the stream for that, at twice the memory, and depends on the order); the program's scores have one factor for all
classes, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("ranpac")
@dataclass(eq=False, repr=False)
class RanPAC(Preset):
    """RanPAC: ridge regression on random projections of a pretrained net's features, in closed form; no training, no memory."""

    projections: Annotated[int, AtLeast(1)] = 2000
    """M, the number of random features; the paper's is 10000"""
    ridge: Annotated[float, Above(0)] | Literal["held_out"] | None = None
    """λ; None chooses it by evidence at each evaluation, held_out by the error on every fifth image"""
    refresh: Annotated[int, AtLeast(0)] | Literal["auto"] = "auto"
    """new images after which predictions between evaluations take a new solution; auto is a tenth of all, or of M if less"""

    def closed(self) -> Closed:
        return Closed(
            map="relu",
            size=self.projections,
            solver="ridge",
            shrink="evidence" if self.ridge is None else self.ridge,
            intercept=False,
            features="each",
            refresh=self.refresh,
        )
