"""GACL. Zhuang et al., GACL: Exemplar-Free Generalized Analytic Continual Learning, NeurIPS 2024.

    as ACIL (methods/acil.py), where classes may come back in any batch:
        columns of classes not met before start at 0 and take R Hᵀ Y_new
        columns of the others take R Hᵀ (Y_old - H V), in which R Hᵀ Y_old is the gain of labels that come back

With sums there is nothing to do for this: a class is a zero column until its first image. See methods/closed.py, of which this is
a preset.

Differences from the paper and its program: sums instead of the recursion (the same V); M is 2,000 (the paper's is 5,000); λ is the
paper's 100 (its program adds every batch three times, which makes it 33).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("gacl")
@dataclass(eq=False, repr=False)
class GACL(Preset):
    """GACL: ACIL for streams in which classes come back; no training, no memory."""

    size: Annotated[int, AtLeast(1)] = 2000
    """M, the width of the random layer; the paper's is 5000"""
    ridge: Annotated[float, Above(0)] = 100.0
    """λ"""

    def closed(self) -> Closed:
        return Closed(map="relu", spread="fan_in", size=self.size, solver="ridge", shrink=self.ridge, intercept=False)
