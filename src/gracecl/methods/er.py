"""Experience Replay. Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019.

    for each batch B_n from the stream:
        mem_iters times:
            B_M <- n_recall images drawn from memory, none of them twice
            step on CE(B_n ∪ B_M)
        memory <- reservoir(memory, B_n)

Differences from the paper: the softmax spans all classes (the paper's is restricted to the task's own); every image is seen
through the run's augmentation (the paper has none, `--augment none` gives that); 64 images are drawn, as in later work (the paper
draws as many as are new, 10).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import cross_entropy
from gracecl.memory import Memories
from gracecl.methods.replay import Replay
from gracecl.registry import methods


@methods.register("er")
@dataclass(eq=False, repr=False)
class ER(Replay):
    """Experience replay: train on the new images together with some drawn from a reservoir memory."""

    reduction: Literal["concat", "sum_of_means"] = "concat"
    """one forward and one mean over new and replayed images, or two forwards and the sum of two means"""

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream, recalled = np.arange(len(new)), self.recall(new, memories, planning)
        if self.reduction == "concat":
            return Plan({"all": replace(recalled, stream=stream)})
        blocks = {"new": Selection(stream)} | ({"replay": recalled} if len(recalled) else {})
        return Plan(blocks, forwards=apart(blocks))

    def recall(self, new: StreamBatch, memories: Memories, planning: Planning) -> Selection:
        """Return the slots to replay: here drawn uniformly."""
        return Selection(slots=memories.replay.draw(self.recalled(new), planning.rng))

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {
            f"ce/{block}": cross_entropy(out.logits[:, where.rows], batch.y[where.rows]) for block, where in batch.blocks.items()
        }
