"""AIR. Fang et al., AIR: Analytic Imbalance Rectifier for Continual Learning, 2024.

    as ACIL (methods/acil.py), with a Gram matrix G_k for each class:
        w_k <- 1 / n_k, scaled
        V <- ( Σ_k w_k G_k + λ I )⁻¹ C diag(w)

so that each class has the same total weight however many images it brought. See methods/closed.py, of which this is a preset.

Differences from the paper and its program: weights are scaled to Σ w_k n_k = n, so that λ means what it means in ACIL; the default
shares one covariance between classes, G_k ~ n_k (S_w / n + μ_k μ_kᵀ), which takes M² numbers instead of K M² (weights='exact' is
the paper's); M is 2,000; sums instead of the recursion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("air")
@dataclass(eq=False, repr=False)
class AIR(Preset):
    """AIR: ACIL in which all classes weigh the same, for long tails; no training, no memory."""

    size: Annotated[int, AtLeast(1)] = 2000
    """M, the width of the random layer; the paper's is 8192"""
    ridge: Annotated[float, Above(0)] = 0.1
    """λ"""
    weights: Literal["balanced", "exact"] = "balanced"
    """with one covariance for all classes, or with a Gram matrix of each"""

    def closed(self) -> Closed:
        return Closed(
            map="relu",
            spread="fan_in",
            size=self.size,
            solver="ridge",
            shrink=self.ridge,
            intercept=False,
            weights=self.weights,
        )
