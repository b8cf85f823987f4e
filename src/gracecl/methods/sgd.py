"""Fine-tuning, the lower bound: no memory, nothing against forgetting.

    for each batch B_n from the stream:
        step on CE(B_n)

Differences from the paper: there is none to differ from; the step is that of ER with an empty memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gracecl.core import Batch, LossTable, StreamBatch, Taps
from gracecl.functional.losses import cross_entropy
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits
from gracecl.registry import methods


@methods.register("sgd")
@dataclass(eq=False, repr=False)
class SGD(Method):
    """Fine-tuning on the stream, the lower bound."""

    classes: Literal["all", "seen", "current"] = "all"
    """what the softmax spans: all outputs, the classes met so far, or those met in the current task (which lwf() needs)"""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(met_only=self.classes != "all")

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {"ce/all": cross_entropy(out.logits, batch.y, self.spanned(batch))}

    def spanned(self, batch: Batch) -> Tensor | None:
        if self.classes == "all":
            return None
        return batch.seen if self.classes == "seen" else batch.current

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        """Keep nothing."""
