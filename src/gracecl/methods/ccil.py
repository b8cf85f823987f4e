"""CCIL, compositional class-incremental learning. Mittal et al., Essentials for Class Incremental Learning, CVPR workshops 2021.

    the head is σ · cos(f, w), with σ learned and features f that may be negative: taps read their layer before its last ReLU
    for each batch x of task t, u <- n_recall images from memory, each of a class drawn uniformly among those held, new ones too:
        step on
            CE(x, softmax over the task's classes met so far)
            + CE(u, softmax over all classes met)
            + λ · (classes met / classes of the task)^power · [KD(x) + KD(u)], if t > 0,
                KD = T² / |old| · KL( softmax(teacher / T) ‖ softmax(net / T) ), both over the |old| classes of earlier tasks
            with a forward each for x and u, and a tenth of the learning rate if t > 0
        memory <- reservoir(memory, x)
    at the end of a task: teacher <- frozen copy of the net
    before that, at the end of the first one, if self_distillation > 0:
        so many times over memory, in batches u: step on CE(u) + self_weight · KD(u) to a frozen copy, over the task's classes

New images tell new classes apart, those from memory tell everything apart; without current images in memory the method would know
no border between new and old.

Differences from the paper and its program: one pass in small batches, no schedule; a reservoir that fills as the stream comes, and
that is drawn from evenly, in place of a balanced set of exemplars that is chosen before a task is trained; new classes count from
when they are met; self-distillation is off, and on memory instead of a second training on the whole task; which task is the first
is told by its number (the program takes any task with more new than old classes for a first one); strength is λ times the program's
further weight; its other regularisers of the first task (AutoAugment, mixup, label smoothing) are left out. σ, rows and teacher are
each tapped layer's own; a row stays as it began until its class is met. A net that does not know where its taps' last ReLU is
(`gracecl.tap`, timm, transformers) keeps it. A class that comes back in a later task counts as new there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import cross_entropy, distillation
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.nets.heads import HeldRows, use_cosine_head
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast, Within


@methods.register("ccil")
@dataclass(eq=False, repr=False)
class CCIL(Replay):
    """CCIL: new images compete among new classes, evenly drawn replayed ones among all; distillation on both, low rate later."""

    strength: Annotated[float, AtLeast(0)] = 5.0
    """λ, of the distillation before it grows with the classes met; the program's for ImageNet is 600"""
    power: Annotated[float, Within(-10, 10)] = 0.66
    """how it grows with classes met / classes of the task"""
    temperature: Annotated[float, Above(0)] = 2.0
    """T, which teacher and net are softened by"""
    later_rate: Annotated[float, Above(0)] = 0.1
    """the part of the learning rate that tasks after the first use"""
    self_distillation: Annotated[int, Within(0, 10_000)] = 0
    """passes over memory at the end of the first task, with a copy of the net as teacher"""
    self_weight: Annotated[float, AtLeast(0)] = 10.0
    """of the distillation in these"""
    scale: float = 1.0
    """σ at the start"""
    last_relu: bool = False
    """keep the ReLU that features end in"""

    traits = Traits(boundaries="required", met_only=True)
    state = ("teacher",)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        head = use_cosine_head(net, self.scale, self.last_relu)
        self.held, self.teacher = HeldRows(head), Teacher(net)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream, slots = np.arange(len(new)), memories.replay.draw_by_class(self.recalled(new), planning.rng)
        blocks = {"new": Selection(stream)} | ({"replay": Selection(slots=slots)} if len(slots) else {})
        return Plan(blocks, forwards=apart(blocks), rate=self.later_rate if new.progress.task > 0 else 1.0)

    def prepare(self, batch: Batch) -> None:
        self.held.remember()
        if self.teacher:
            batch.targets["ccil"] = self.teacher(batch.x).logits

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = {}
        for block, where in batch.blocks.items():
            logits, y = out.logits[:, where.rows], batch.y[where.rows]
            table[f"ce/{block}"] = cross_entropy(logits, y, batch.seen if block == "replay" else batch.current)
            if "ccil" in batch.targets and (weight := self.weight(block, batch.progress)):
                taught = batch.current if block == "again" else batch.old
                divergence = distillation(
                    logits, batch.targets["ccil"][:, where.rows], self.temperature, taught, over_classes="mean"
                )
                table[f"kd/{block}"] = weight * self.temperature**2 * divergence
        return table

    def weight(self, block: str, progress: Progress) -> float:
        """Return the weight of the distillation on a block, 0 where there is nothing to distil."""
        if block == "again":
            return self.self_weight
        return self.strength * (len(progress.seen) / len(progress.current)) ** self.power if progress.old else 0.0

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.held.put_back(moving=batch.seen)

    def closing(self, progress: Progress, memories: Memories, planning: Planning) -> Iterator[Plan]:
        """Yield updates of self-distillation, at the end of the first task."""
        held, size = len(memories.replay), self.n_recall
        if progress.task > 0 or 0 in (held, size, self.self_distillation):
            return
        self.teacher.renew()
        for _ in range(self.self_distillation):
            for slots in np.split(planning.rng.permutation(held), range(size, held, size)):
                yield Plan({"again": Selection(slots=slots)})

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew()
