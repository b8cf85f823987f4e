"""Nearest class mean. SimpleCIL: Zhou et al., Revisiting Class-Incremental Learning with Pre-Trained Models, IJCV 2024.

    for each image (x, y) from the stream: add its features z to the sum of its class
    class <- argmax cos(z, μ_k)

See methods/closed.py, of which this is a preset.

Differences from the paper and its program: a class that comes back keeps the images from before (the program overwrites its mean).
score='euclidean' and norm='unit' are the variants of others: FeCAM's program takes the distance to means of unit features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gracecl.methods.closed import Closed
from gracecl.methods.closed_form import Preset
from gracecl.registry import methods


@methods.register("ncm")
@dataclass(eq=False, repr=False)
class NCM(Preset):
    """Nearest class mean of a pretrained net's features (SimpleCIL); no training, no memory."""

    score: Literal["cosine", "euclidean"] = "cosine"
    """how near is measured"""
    norm: Literal["none", "unit"] = "none"
    """means of features as they are, or of unit length"""

    def closed(self) -> Closed:
        return Closed(solver="ncm", score=self.score, norm=self.norm, features="each")
