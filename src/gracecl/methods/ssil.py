"""SS-IL, separated softmax. Ahn et al., SS-IL: Separated Softmax for Incremental Learning, ICCV 2021.

    for each batch x from the stream, n images:
        u <- m images of earlier tasks drawn from memory;  z <- logits of x and u in one forward
        L_new <- Σ over x of CE(z over the task's own classes);  L_old <- Σ over u of CE(z over the classes of earlier tasks)
        L_tkd <- Σ over earlier tasks s of T² KL( softmax(z* / T) ‖ softmax(z / T) ), both over the classes of s, mean over x and u
        step on (L_new + L_old) / (n + m) + L_tkd
        memory <- reservoir(memory, x)
    at the end of each task: teacher z* <- frozen copy of the net
    predict by plain logits over all classes met

New images cannot push old logits down, nor old images new ones; each softmax is kept as the teacher had it, apart from the others.
Nothing in the losses compares new with old logits, so nothing makes the right task's block the highest. L_tkd is a sum, and its
share of the loss grows with the tasks. In the first task there is no teacher and one softmax.

Differences from the paper and its program: one pass over the stream, a reservoir memory, and 64 replayed images beside 10 new ones
(the program: 32 beside 128, ratio=4 gives that); images of the first task are replayed in it as well, with plain cross-entropy
(replay_in_first_task=False is the program's); the learning rate stays (the program divides it by the number of the task,
decay_rate=True); the task's own classes are those met so far; an image whose class came with an earlier task competes among the old
classes wherever it comes from (the program takes labels modulo the task's size, which supposes tasks of equal size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from gracecl.core import Batch, Ints, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.functional.losses import class_blocks, classes_among, cross_entropy, distillation
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.methods.state import per_class
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("ssil")
@dataclass(eq=False, repr=False)
class SSIL(Replay):
    """SS-IL: new images compete among new classes, replayed ones among old classes; distillation within each earlier task."""

    temperature: Annotated[float, Above(0)] = 2.0
    """T, which the softmaxes of the distillation are softened by"""
    strength: Annotated[float, AtLeast(0)] = 1.0
    """weight of the distillation"""
    mean_over_tasks: bool = False
    """divide the distillation by the number of earlier tasks, so that its share of the loss does not grow with them"""
    replay_in_first_task: bool = True
    """draw from memory in the first task too, where every image is of the task itself"""
    ratio: Annotated[float, Above(0)] | None = None
    """new images for each replayed one, the paper's is 4; None draws n_recall"""
    decay_rate: bool = False
    """divide the learning rate by the number of the task, counted from 1"""

    traits = Traits(boundaries="required", met_only=True)
    state = ("teacher", "tasks", "blocks", per_class("old"))

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.teacher = Teacher(net)
        self.know([])

    def know(self, tasks: list[tuple[int, ...]]) -> None:
        """Set the classes that came with each earlier task."""
        device = self.net.classifier.weight.device
        known = torch.tensor([label for classes in tasks for label in classes], dtype=torch.int64)
        self.tasks, self.blocks = tasks, class_blocks(tasks).to(device)
        self.old = classes_among(known, self.net.classes).to(device)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream, slots = np.arange(len(new)), self.recall(new, memories, planning)
        blocks = {"new": Selection(stream)} | ({"replay": Selection(slots=slots)} if len(slots) else {})
        return Plan(blocks, rate=1 / (new.progress.task + 1) if self.decay_rate else 1.0)

    def recall(self, new: StreamBatch, memories: Memories, planning: Planning) -> Ints:
        """Draw slots of images of earlier tasks; in the first task, of any."""
        wanted = self.recalled(new) if self.ratio is None else max(1, round(len(new) / self.ratio))
        if self.tasks:
            return memories.replay.draw(wanted, planning.rng, except_task=new.progress.task)
        return memories.replay.draw(wanted if self.replay_in_first_task else 0, planning.rng)

    def prepare(self, batch: Batch) -> None:
        if self.teacher:
            batch.targets["ssil"] = self.teacher(batch.x).logits

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        new = batch.seen & ~self.old
        rivals = torch.where(self.old[batch.y][:, None], self.old, new)  # [B, C]: the classes that each image competes among
        table = {}
        for block, where in batch.blocks.items():
            rows, share = where.rows, where.images / len(batch)
            table[f"ce/{block}"] = share * cross_entropy(out.logits[:, rows], batch.y[rows], rivals[rows])
        if "ssil" in batch.targets:
            divergence = distillation(out.logits, batch.targets["ssil"], self.temperature, blocks=self.blocks)
            weight = self.strength / (len(self.tasks) if self.mean_over_tasks else 1)
            table["kd/tasks"] = weight * self.temperature**2 * divergence
        return table

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew()
        known = {label for classes in self.tasks for label in classes}
        if new := tuple(label for label in progress.current if label not in known):
            self.know([*self.tasks, new])
