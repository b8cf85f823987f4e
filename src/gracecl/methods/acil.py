"""ACIL. Zhuang et al., ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection, NeurIPS 2022.

    W <- uniform in ±1/√D, drawn once;  R <- I / λ;  V <- 0
    for each batch: H <- relu(X W)
        R <- R - R Hᵀ (I + H R Hᵀ)⁻¹ H R
        V <- V + R Hᵀ (Y - H V)

Whatever the batches, R = (G + λ I)⁻¹ and V = R C: ridge regression, which is solved here from the sums. See methods/closed.py, of
which this is a preset.

Differences from the paper and its program: sums instead of the recursion (the same V); M is 2,000 (its 8,192 takes 0.5 GB); no
training of the net on the first classes; a class that was not met is never predicted (the program gives it the score 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("acil")
@dataclass(eq=False, repr=False)
class ACIL(Preset):
    """ACIL: recursive ridge regression on a random ReLU layer above a pretrained net; no training, no memory."""

    size: Annotated[int, AtLeast(1)] = 2000
    """M, the width of the random layer; the paper's is 8192"""
    ridge: Annotated[float, Above(0)] = 0.1
    """λ"""

    def closed(self) -> Closed:
        return Closed(map="relu", spread="fan_in", size=self.size, solver="ridge", shrink=self.ridge, intercept=False)
