"""LODE, loss decoupling. Liang, Li, Loss Decoupling for Task-Agnostic Continual Learning, NeurIPS 2023.

Cross-entropy on new images is exactly a sum of two parts, with z the logits, `old` the outputs of earlier tasks' classes and `rest`
all others, of current and of future classes:

    inter = log Σ_all e^z - log Σ_rest e^z      new against old
    intra = log Σ_rest e^z - z_y                among the new
    for each batch of task t (t = 0, 1, …), with the replay method's loss  CE(new) + replay terms:
        if t = 0 or memory is empty: step on it as it is
        else: step on (ρ / t) · inter(new) + C · intra(new) + replay terms

It is written around a replay method, DER++ by default as in the paper, of which it replaces the row `ce/new`: the mean
cross-entropy of the block `new` over all outputs. `lode(er(reduction='sum_of_means'))` is another. GRACE goes around it,
`grace(lode())`, as its α would be lost on a row that is replaced afterwards.

Differences from the paper: none known around DER++. The authors' program for ER halves the whole loss, which is not done here. A
class that comes back in a later task counts as new there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Progress, Taps
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy, full_precision
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.registry import methods


@methods.register("lode")
@dataclass(eq=False, repr=False)
class LODE(Wrapper):
    """Loss decoupling: new images push old classes down with a small, shrinking weight; around DER++ or another replay method."""

    inner: Method = "derpp()"  # type: ignore[assignment]
    """the replay method whose cross-entropy on new images is decoupled; the paper's is derpp()"""
    rho: float = 0.1
    """ρ, the weight of new against old, before it is divided by the task's number"""
    intra_weight: float = 1.0
    """C, the weight of the part among the new"""
    share: Literal["tasks", "classes"] = "tasks"
    """how ρ shrinks: 1 / number of earlier tasks, or classes of this task / earlier classes met, for tasks of unequal size"""
    seen_only: bool = False
    """both parts over the classes met so far instead of all outputs"""

    traits = Traits(boundaries="required", met_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = [part.name for part in self.inside.parts]
        weighted = [part.name for part in self.inside.parts if part.name == "grace" or getattr(part, "stream_weight", 1) != 1]
        if weighted:
            outer = weighted[-1]
            raise UserError(f"{self!r} would replace the cross-entropy that {outer} has weighted; write {outer}(lode(...)) instead")
        if "lode" in inside:
            raise UserError(f"{self!r} would replace the cross-entropy that {self.inner!r} has decoupled; use {self.inner!r} alone")

    def adjust(self, table: LossTable, out: Taps, batch: Batch) -> LossTable:
        if "ce/new" not in table or "new" not in batch.blocks:
            raise UserError(
                f"{self!r}: {self.inner!r} has no loss row 'ce/new' of a block of its own (its rows: {', '.join(table)}); "
                "use a method with a block of new images, such as derpp() or er(reduction='sum_of_means')"
            )
        if batch.progress.task > 0 and len(batch.blocks["new"].memory) > 0:
            new = batch.rows("new")
            old = batch.seen & ~batch.current
            inter, intra = decoupled(out.logits[:, new], batch.y[new], old, batch.seen if self.seen_only else None)
            decided = self.inter_weight(batch.progress) * inter + self.intra_weight * intra
            return table | {"ce/new": decided, "log/inter": inter, "log/intra": intra}
        return table

    def inter_weight(self, progress: Progress) -> float:
        if self.share == "tasks":
            return self.rho / progress.task
        return self.rho * len(progress.current) / max(1, len(progress.seen) - len(progress.current))


def decoupled(logits: Tensor, y: Tensor, old: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split each layer's mean cross-entropy into new against old and among the new; `old [C]` marks the old classes."""
    logits = full_precision(logits)
    if classes is not None:
        logits = logits.masked_fill(~classes, -torch.inf)
    rest = logits.masked_fill(old, -torch.inf)
    inter = torch.logsumexp(logits, dim=-1) - torch.logsumexp(rest, dim=-1)
    return inter.mean(dim=1), cross_entropy(rest, y)
