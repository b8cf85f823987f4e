"""OCM. Guo, Liu, Zhao, Online Continual Learning through Mutual Information Maximization, ICML 2022.

    for each batch x, labels y, of the first task:
        step on CE(A(x), y) + L_new(x)
        memory <- reservoir(memory, x)
    at the end of each task: teacher <- copy of the net; old <- classes met so far
    for each batch x of a later task:
        (u, v) <- n_recall images drawn from memory, at most 7 per class met, none of them twice
        Z, Z* <- unit projections of R(u) by the net and by the teacher
        q <- logits of A(u);  q* <- the teacher's logits of another A(u)
        step on CE(q, v) + L_mem(u) + L_new(x) + L_pre + MSE(q, q* over the old classes),
            L_pre = mean_i mean_{j of i's pseudo class} -log softmax_j(Z_i · Z*_j / τ)
        memory <- reservoir(memory, x)
    predict by the head

A, R, L_new and L_mem are those of `rotation_contrast`: InfoNCE that bounds the mutual information of features and classes from
below. The turned views of x and u share a forward, A(x) or A(u) has one of its own. Once there is a teacher, new images reach the
head through memory alone; a step that finds the memory empty is one of the first task. GRACE's α acts on the row `ce/…`.

Differences from the paper and its program: A is the run's augmentation (`--augment simclr` is the program's); the teacher is in
evaluation mode (the program leaves it in training mode, where BatchNorm takes the statistics of the images it is shown;
teacher_mode='train' gives that); the reservoir is exact (the program may write two images of a batch to one slot); precision is the
run's (the program uses fp16); BatchNorm takes the statistics of a whole forward (on Tiny-ImageNet the program splits it among
several devices); the projection's width goes with the net's; unseen classes are ruled out at inference. The paper has one InfoNCE
where the program's differ for new and replayed images, and the program's are these. `every` is this library's own, for streams
without task marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.functional.losses import INFO_NCE_EPSILON, cross_entropy, info_nce, info_nce_terms, logit_distance, products, unit
from gracecl.images import augment
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.rotation_contrast import RotationContrast, pseudo_labels, raw_turned, turned_plan
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast


@methods.register("ocm")
@dataclass(eq=False, repr=False)
class OCM(RotationContrast):
    """OCM: InfoNCE over rotations of new and replayed images; projections and logits stay near the previous task's net."""

    teacher_mode: Literal["eval", "train"] = "eval"
    """whether the teacher uses BatchNorm's running statistics or, as the authors' program, those of the images it is shown"""
    every: Annotated[int, AtLeast(0)] = 500
    """steps after which the teacher is renewed on a stream without task marks, which is our extension; 0 is never"""

    traits = Traits(boundaries="used", interval="every", images="turns images by 90 degrees")
    state = ("teacher",)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.teacher = Teacher(net, training=self.teacher_mode == "train")

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew(progress.seen)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream = Selection(np.arange(len(new)))
        replay = Selection(slots=memories.replay.draw(self.recalled(new) if self.teacher else 0, planning.rng))
        if len(replay) == 0:
            return turned_plan({"new": stream}, {"supervised": stream}, planning.augment)
        return turned_plan({"new": stream, "replay": replay}, {"supervised": replay}, planning.augment)

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        if "replay" in batch.blocks:
            block, view = batch.blocks["replay"], batch.augment
            draws = batch.rng("the teacher's view").random((block.images, augment.draws(view)))
            another = augment.apply(view, batch.x[block.view(0)], draws, self.net.inputs)
            batch.targets["ocm/projected"] = self.teacher(batch.x[raw_turned(block)]).embedding
            batch.targets["ocm/logits"] = self.teacher(another).logits

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        supervised, replayed = batch.rows("supervised"), "replay" in batch.blocks
        logits = out.logits[:, supervised]
        table = {f"ce/{'replay' if replayed else 'new'}": cross_entropy(logits, batch.y[supervised]), **self.contrasts(out, batch)}
        if replayed:
            table["kd/projected"] = self.projections_kept(out, batch)
            table["kd/logits"] = logit_distance(logits, batch.targets["ocm/logits"], self.teacher.classes)
        return table

    def projections_kept(self, out: Taps, batch: Batch) -> Tensor:
        """Return L_pre, InfoNCE of the net's projections with the teacher's."""
        z = self.projected(out, batch)[:, raw_turned(batch.blocks["replay"])]
        similarity = products(unit(z, INFO_NCE_EPSILON), unit(batch.targets["ocm/projected"], INFO_NCE_EPSILON))
        return info_nce(info_nce_terms(similarity, self.temperature), pseudo_labels(self.labels_of("replay", batch), batch.classes))
