"""Dark Experience Replay. Buzzega et al., Dark Experience for General Continual Learning: a Strong, Simple Baseline, NeurIPS 2020.

    for each batch (x, y) from the stream:
        o <- logits of x
        (u, o') <- n_recall images drawn from memory with the logits stored beside them, none of them twice
        step on CE(o, y) + α · mean (logits of u - o')²
        memory <- reservoir(memory, (x, y, o))

The two forwards are separate, each with its own BatchNorm statistics. o belongs to the augmented image in training mode before the
step, while memory keeps the image as it came; both terms span all outputs, those of classes not yet met included.

Differences from the paper: with several tapped layers the logits of each are stored and matched; n_recall and α are those of the
online setting (the paper's offline runs replay as many images as are new, with α of 0.1 to 0.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import cross_entropy, logit_distance
from gracecl.memory import Memories
from gracecl.methods.replay import Replay
from gracecl.methods.state import per_class
from gracecl.registry import methods


@methods.register("der")
@dataclass(eq=False, repr=False)
class DER(Replay):
    """Dark experience replay: stored images are replayed against the logits they had when they were new."""

    alpha: float = 0.2
    """α, the weight of the distance to the stored logits; with 0 they are not replayed at all"""
    joint_forward: bool = False
    """one forward for new and replayed images, hence one BatchNorm batch, instead of one for each draw"""
    seen_only: bool = False
    """both terms over the classes met so far instead of all outputs"""

    kept = (per_class("logits", axis=1),)

    @property
    def dark(self) -> str:
        """The block whose logits are matched."""
        return "dark"

    @property
    def replayed(self) -> list[str]:
        """The blocks drawn from memory."""
        return [self.dark] if self.alpha else []

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        draws = {block: Selection(slots=memories.replay.draw(self.recalled(new), planning.rng)) for block in self.replayed}
        blocks = {"new": Selection(np.arange(len(new)))} | {block: rows for block, rows in draws.items() if len(rows)}
        return Plan(blocks, forwards=None if self.joint_forward else apart(blocks))

    def prepare(self, batch: Batch) -> None:
        if "dark" in batch.blocks:  # the last block, and one whose labels nobody reads
            batch.supervised = slice(0, batch.rows("dark").start)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        new, classes = batch.rows("new"), batch.seen if self.seen_only else None
        table = {"ce/new": cross_entropy(out.logits[:, new], batch.y[new], classes)}
        if self.alpha and self.dark in batch.blocks:
            logits = out.logits[:, batch.rows(self.dark)]
            table["kd/logits"] = self.alpha * logit_distance(logits, batch.stored(self.dark, "logits"), classes)
        return table

    def after_step(self, out: Taps, batch: Batch) -> None:
        batch.keep(logits=out.logits)
