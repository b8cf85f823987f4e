"""F-OAL. Zhuang et al., F-OAL: Forward-only Online Analytic Learning with Fast Training and Low Memory Footprint, NeurIPS 2024.

    f <- LayerNorm( mean over the tapped blocks of their class tokens )
    h <- sigmoid(f W), W uniform in ±1/√D, drawn once
    V <- ridge regression to one-hot labels with λ = 1, as in ACIL

Give it all blocks of a transformer: `--net "vit(depth=12)" --taps 12`. See methods/closed.py, of which this is a preset.

Differences from the paper and its program: tapped tokens have passed the norm of their tap, and the last LayerNorm has no weights;
sums instead of the recursion (the same V); no image is left out (the program drops the last partial batch of each task); a class
that was not met is never predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("foal")
@dataclass(eq=False, repr=False)
class FOAL(Preset):
    """F-OAL: ridge regression on a random sigmoid layer above the mean of a pretrained net's layers; no training, no memory."""

    size: Annotated[int, AtLeast(1)] = 1000
    """M, the width of the random layer"""
    ridge: Annotated[float, Above(0)] = 1.0
    """λ"""

    def closed(self) -> Closed:
        return Closed(
            features="mean",
            norm="layer",
            map="sigmoid",
            spread="fan_in",
            size=self.size,
            solver="ridge",
            shrink=self.ridge,
            intercept=False,
        )
