"""LUCIR. Hou et al., Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019.

    the head is η · cos(f, w), with η learned and features f that may be negative: taps read their layer before its last ReLU
    for each batch x of task t, B_M <- n_recall images drawn from memory, X = x ∪ B_M in one forward:
        if t > 0, for each class that x brings for the first time:
            w <- mean of the unit features of its images in x, made as long as the rows of old classes are on average
        step on
            CE(η · cos over the classes met, all of X)
            + λ · mean over X of [1 - cos(f, f of the net at the end of the last task)]              less forget, if t > 0
            + mean over images of old classes and their K nearest new classes k of
                max(0, margin - cos_y + cos_k)                                                         margin ranking, if t > 0
            with λ = λ_base · sqrt(old classes / new classes); of the head, the rows of new classes alone are moved
        memory <- reservoir(memory, x)
    at the end of a task: teacher <- frozen copy of the net

Old are the classes met before the current task, new those met in it. The margin is on cosines, so it does not depend on η.

Differences from the paper and its program: one pass in small batches, a reservoir in place of herding and no schedule; new classes
count from when they are met, so λ is larger in the first steps of a task; rows are imprinted from the first batch of a class, not
from all its images; λ has old over new classes under its root, as in the program (the paper prints the inverse); the fine-tuning on
a balanced set that the program has for ImageNet is left out. η, rows, teacher and all three terms are each tapped layer's own. A
net that does not know where its taps' last ReLU is (`gracecl.tap`, timm, transformers) keeps it. A class that comes back in a later
task counts as new there, keeps its row and may move it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.functional.losses import cosine_distance, cross_entropy, margin_ranking
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.nets.class_means import class_means
from gracecl.nets.heads import HeldRows, use_cosine_head
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast


@methods.register("lucir")
@dataclass(eq=False, repr=False)
class LUCIR(Replay):
    """LUCIR: a cosine head whose old rows are frozen, features that keep their direction, a margin between old and new classes."""

    less_forget: Annotated[float, AtLeast(0)] = 5.0
    """λ_base, of the distillation of features' directions"""
    margin: float = 0.5
    """by how much an old image's cosine with its class should exceed those with new classes"""
    margin_weight: Annotated[float, AtLeast(0)] = 1.0
    """of the margin's term"""
    nearest: Annotated[int, AtLeast(1)] = 2
    """K, new classes that each old image is kept away from; fewer while fewer were met"""
    scale: float = 1.0
    """η at the start; in one pass 1 may stay small, 10 is a common choice"""
    imprint: Literal["lazy", "off"] = "lazy"
    """set a new class's row to its mean direction when its first batch arrives, or leave it random"""
    last_relu: bool = False
    """keep the ReLU that features end in"""

    traits = Traits(boundaries="required", met_only=True)
    state = ("teacher", "met")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.head = use_cosine_head(net, self.scale, self.last_relu)
        self.held, self.teacher = HeldRows(self.head), Teacher(net)
        self.met: tuple[int, ...] = ()
        """classes met before this step"""

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        directions = self.first_directions(new) if self.imprint == "lazy" and new.progress.old else None
        slots = memories.replay.draw(self.recalled(new), planning.rng)
        return Plan({"all": Selection(np.arange(len(new)), slots, found={"directions": directions})})

    def first_directions(self, new: StreamBatch) -> Tensor | None:
        """`[L, C, D]`: the mean directions of the classes that this batch brings first, by its images as they are and in
        evaluation mode; 0 for all other classes."""
        arriving = np.flatnonzero(~np.isin(new.labels, self.met))
        if len(arriving) == 0:
            return None
        theirs = new.select(arriving)
        return class_means(self.net, theirs.x, theirs.labels, seen=())

    def prepare(self, batch: Batch) -> None:
        directions = batch.blocks["all"].found.get("directions")
        if directions is not None:
            self.head.imprint(directions, like=batch.old)
        self.met = batch.progress.seen
        self.held.remember()
        if self.teacher:
            batch.targets["lucir"] = self.teacher(batch.x).features

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = {"ce/all": cross_entropy(out.logits, batch.y, batch.seen)}
        if "lucir" in batch.targets:
            table["kd/features"] = self.strength(batch.progress) * cosine_distance(out.features, batch.targets["lucir"])
            cosines, nearest = self.head.cosine(out.features), min(self.nearest, len(batch.progress.current))
            ranking = margin_ranking(cosines, batch.y, batch.current, nearest, self.margin, images=batch.old[batch.y])
            table["margin/old"] = self.margin_weight * ranking
        return table

    def strength(self, progress: Progress) -> float:
        """Return λ."""
        return self.less_forget * math.sqrt(len(progress.old) / len(progress.current))

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.held.put_back(moving=batch.current)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew()
