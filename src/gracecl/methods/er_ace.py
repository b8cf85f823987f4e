"""ER-ACE, asymmetric cross-entropy. Caccia et al., New Insights on Reducing Abrupt Representation Change, ICLR 2022.

    for each batch B_n from the stream:
        B_M <- n_recall images drawn from memory, none of them twice
        P <- the classes of B_n
        step on CE(B_n, softmax over P) + CE(B_M, softmax over all classes)
        memory <- reservoir(memory, B_n)

Each batch has its own forward, hence its own BatchNorm statistics. New images pull at the classes they bring and leave the others
alone: no gradient of the first term reaches the head of a class outside P, and a batch of one class has no first term at all.

Differences from the paper and its program: the head is linear and n_recall 64, as in later work with this method (head='cosine' is
the program's, which gives experience replay a linear one: that comparison contains a change of head); the softmax of the new images
spans P as the paper says (the program adds all numbers from the largest class seen so far on, which supposes that classes arrive in
the order of their numbers; keep_unseen=True adds the classes not yet met, whatever their numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import classes_among, cross_entropy
from gracecl.memory import Memories
from gracecl.methods.replay import Replay
from gracecl.nets.heads import CosineHead
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods

COSINE_SCALE, COSINE_EPSILON = 10.0, 1e-5


@methods.register("er_ace")
@dataclass(eq=False, repr=False)
class ERACE(Replay):
    """ER-ACE: experience replay in which new images compete among the classes they bring, replayed ones among all."""

    keep_unseen: bool = False
    """let the softmax of the new images span the classes not met so far as well"""
    head: Literal["linear", "cosine"] = "linear"
    """linear, or 10 times the cosine between features and class weights, without bias"""
    reduction: Literal["sum_of_means", "concat"] = "sum_of_means"
    """the sum of two means, or one mean over new and replayed images"""
    joint_forward: bool = False
    """one forward for new and replayed images, hence one BatchNorm batch, instead of one for each"""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        if self.head == "cosine":
            net.classifier = CosineHead(net.classifier, COSINE_SCALE, COSINE_EPSILON)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream, slots = np.arange(len(new)), memories.replay.draw(self.recalled(new), planning.rng)
        blocks = {"new": Selection(stream)} | ({"replay": Selection(slots=slots)} if len(slots) else {})
        return Plan(blocks, forwards=None if self.joint_forward else apart(blocks))

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = {}
        for block, where in batch.blocks.items():
            y = batch.y[where.rows]
            allowed = self.allowed(y, batch) if block == "new" else None
            share = len(y) / len(batch) if self.reduction == "concat" else 1.0
            table[f"ce/{block}"] = share * cross_entropy(out.logits[:, where.rows], y, allowed)
        return table

    def allowed(self, y: Tensor, batch: Batch) -> Tensor:
        """Return `[C]`: the classes among which the new images are told apart."""
        present = classes_among(y, batch.classes)
        return present | ~batch.seen if self.keep_unseen else present
