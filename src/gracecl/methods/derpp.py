"""DER++. Buzzega et al., Dark Experience for General Continual Learning: a Strong, Simple Baseline, NeurIPS 2020.

    for each batch (x, y) from the stream:
        o <- logits of x
        (u, o') <- n_recall images drawn from memory with the logits stored beside them
        (w, v)  <- another, independent draw with its labels
        step on CE(o, y) + α · mean (logits of u - o')² + β · CE(logits of w, v)
        memory <- reservoir(memory, (x, y, o))

Three separate forwards; everything else is DER's.

Differences from the paper: those of DER; β is that of the online setting. The paper's equation has one distribution for both terms,
its program the two independent draws that stand here; `shared_replay` uses one draw for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from gracecl.core import Batch, LossTable, Taps
from gracecl.functional.losses import cross_entropy
from gracecl.methods.der import DER
from gracecl.registry import methods


@methods.register("derpp")
@dataclass(eq=False, repr=False)
class DERpp(DER):
    """DER++: dark experience replay, and a second draw from memory that is replayed with its labels."""

    beta: float = 1.0
    """β, the weight of the cross-entropy on replayed images; with 0 it is DER"""
    shared_replay: bool = False
    """one draw serves both replay terms, which halves the cost"""

    @property
    def dark(self) -> str:
        return "replay" if self.shared_replay and self.beta else "dark"

    @property
    def replayed(self) -> list[str]:
        # The images with labels come first, so that all rows that enter cross-entropy stand together.
        labelled = ["replay"] if self.beta else []
        return list(dict.fromkeys(labelled + super().replayed))

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = super().losses(out, batch)
        if "replay" in batch.blocks:
            replay, classes = batch.rows("replay"), batch.seen if self.seen_only else None
            table["ce/replay"] = self.beta * cross_entropy(out.logits[:, replay], batch.y[replay], classes)
        return table
