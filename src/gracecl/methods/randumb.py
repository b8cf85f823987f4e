"""RanDumb. Prabhu et al., RanDumb: Random Representations Outperform Online Continually Learned Representations, NeurIPS 2024.

    h <- √(2/M) cos(√(2γ) x W + b) of the normalised pixels x themselves, W and b drawn once
    score of class k <- μ_kᵀ Λ h - ½ μ_kᵀ Λ μ_k, Λ the inverse of the covariance within classes, shrunk by OAS

It is meant for pixels: give it `--net "identity()"`. See methods/closed.py, of which this is a preset.

Differences from the paper and its program: one covariance is shrunk (the program shrinks each class's and averages them); priors
are uniform (the program's are the classes' shares); γ is 1 / (D · variance) of the first batch (the program: of all training
images); no mirrored images; M is 2,000 (the paper's are up to 25,000).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("randumb")
@dataclass(eq=False, repr=False)
class RanDumb(Preset):
    """RanDumb: discriminant analysis on random Fourier features of the pixels (--net "identity()"); no training, no memory."""

    size: Annotated[int, AtLeast(1)] = 2000
    """M, the number of Fourier features"""
    gamma: Annotated[float, Above(0)] | Literal["first"] = "first"
    """γ of the kernel exp(-γ |x - x'|²); first is 1 / (D · variance) of the first batch"""
    priors: Literal["uniform", "empirical"] = "uniform"
    """take all classes as equally likely, or as likely as they were in the stream"""

    def closed(self) -> Closed:
        return Closed(map="rff", size=self.size, gamma=self.gamma, solver="lda", priors=self.priors)
