"""ER-AML, asymmetric metric learning. Caccia et al., New Insights on Reducing Abrupt Representation Change, ICLR 2022.

    for each batch B_n from the stream:
        if memory is empty: step on CE(B_n), not augmented; store B_n and go on
        B_M <- n_recall images drawn from memory, none of them twice
        P <- the classes of B_n;  pool <- memory ∪ B_n
        for each image k of B_n: one positive <- another image of k's class, one negative <- an image of another class of P,
            each uniform over the pool; k is dropped where either is missing
        h <- unit features of the anchors k;  V <- unit features of all positives and negatives, in a forward of their own
        L_1 <- mean_k mean_{j of k's class} -(τ / 0.07) log softmax_j(h_k · V / τ), the softmax over all of V
        step on γ L_1 + CE(B_M), the softmax over all classes
        memory <- reservoir(memory, B_n)

The head learns from replayed images alone: L_1 acts on features. Those are the rows `sc` and `ce/replay`; GRACE's α acts on the
second, and its entropy is that of the replayed images.

Differences from the paper and its program: n_recall is 64 (the program's 10 belongs to a smaller net); an image that is drawn more
than once among the pairs of a step is seen through the same augmentation each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, Ints, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import contrast, cross_entropy, unit
from gracecl.memory import Memories, Memory
from gracecl.methods.replay import Replay
from gracecl.nets.heads import CosineHead
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above

COSINE_SCALE, EPSILON = 10.0, 1e-5
BASE_TEMPERATURE = 0.07
TRIPLET_WEIGHT, TRIPLET_MARGIN = 2.0, 0.2
RAW = ((),)
"""one view: the image as it is"""


@methods.register("er_aml")
@dataclass(eq=False, repr=False)
class ERAML(Replay):
    """ER-AML: replayed images train the head, new ones are contrasted with images of the classes they bring."""

    temperature: Annotated[float, Above(0)] = 0.1
    """τ, of the contrast"""
    gamma: float = 1.0
    """γ, the weight of the contrast"""
    metric: Literal["supcon", "triplet"] = "supcon"
    """the contrast above, or twice a triplet loss of margin 0.2 on each anchor's own pair, which is then not augmented"""
    head: Literal["linear", "cosine"] = "cosine"
    """linear, or 10 times the cosine between features and class weights, without bias"""
    joint_forward: bool = False
    """one forward for all images of a step, hence one BatchNorm batch, instead of one each for anchors, pairs and replay"""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        if self.head == "cosine":
            net.classifier = CosineHead(net.classifier, COSINE_SCALE, EPSILON)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        memory = memories.replay
        if len(memory) == 0:
            return Plan({"first": Selection(np.arange(len(new)), views=RAW)})
        slots = memory.draw(self.recalled(new), planning.rng)
        anchors, partners = draw_pairs(new.labels, memory, planning.rng)
        from_stream = partners >= memory.capacity
        # A block holds its stream images before its memory images; this is where each anchor's partners went.
        place = torch.from_numpy(np.argsort(np.argsort(~from_stream, kind="stable")))
        blocks = {
            "anchors": Selection(anchors),
            "pairs": Selection(
                partners[from_stream] - memory.capacity,
                partners[~from_stream],
                views=RAW if self.metric == "triplet" else None,
                found={"place": place},
            ),
            "replay": Selection(slots=slots),
        }
        blocks = {name: rows for name, rows in blocks.items() if len(rows)}
        return Plan(blocks, forwards=None if self.joint_forward else apart(blocks))

    def prepare(self, batch: Batch) -> None:
        if "replay" in batch.blocks:
            batch.supervised = batch.rows("replay")  # the only rows that enter cross-entropy

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = {}
        if "anchors" in batch.blocks:
            anchors, pairs = batch.rows("anchors"), batch.rows("pairs")
            h, partners = unit(out.features[:, anchors], EPSILON), unit(out.features[:, pairs], EPSILON)
            if self.metric == "supcon":
                distance = contrast(h, batch.y[anchors], partners, batch.y[pairs], self.temperature)
                table["sc"] = self.gamma * self.temperature / BASE_TEMPERATURE * distance
            else:
                table["sc"] = self.gamma * TRIPLET_WEIGHT * self.triplet(h, partners, batch.blocks["pairs"].found["place"])
        for block in ("first", "replay"):
            if block in batch.blocks:
                rows = batch.rows(block)
                table[f"ce/{block}"] = cross_entropy(out.logits[:, rows], batch.y[rows])
        return table

    def triplet(self, anchors: Tensor, partners: Tensor, place: Tensor) -> Tensor:
        """Return the triplet loss: the mean over anchors of how far the negative misses the margin."""
        positive, negative = partners[:, place.to(partners.device)].chunk(2, dim=1)
        excess = F.pairwise_distance(anchors, positive) - F.pairwise_distance(anchors, negative) + TRIPLET_MARGIN
        return excess.clamp(min=0).mean(dim=1)


def draw_pairs(labels: Ints, memory: Memory, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return the images of a batch that can be anchors, and their partners: a positive for each, then a negative
    for each.

    Partners are slots of the memory or, from its capacity on, rows of the batch. The pool stands class by class, so that "of this
    class" is a stretch of it and "of another" the rest; classes count in the order they occur in, not by their numbers.
    """
    _, first, of_class = np.unique(labels, return_index=True, return_inverse=True)
    of_class = np.argsort(np.argsort(first))[of_class]
    held = [memory.slots_of(label) for label in labels[np.sort(first)].tolist()]
    rows = [np.flatnonzero(of_class == number) for number in range(len(held))]
    pool = np.concatenate([part for slots, own in zip(held, rows, strict=True) for part in (slots, memory.capacity + own)])
    size = np.array([len(slots) + len(own) for slots, own in zip(held, rows, strict=True)])
    start = np.cumsum(size) - size
    itself = np.empty_like(labels)
    itself[pool[pool >= memory.capacity] - memory.capacity] = np.flatnonzero(pool >= memory.capacity)
    positives, negatives = (size - 1)[of_class], (len(pool) - size)[of_class]
    anchors = np.flatnonzero((positives > 0) & (negatives > 0))
    start, size, itself = start[of_class][anchors], size[of_class][anchors], itself[anchors]
    positive = start + rng.integers(0, positives[anchors])
    positive += positive >= itself
    negative = rng.integers(0, negatives[anchors])
    negative += np.where(negative >= start, size, 0)
    return anchors, pool[np.concatenate([positive, negative])]
