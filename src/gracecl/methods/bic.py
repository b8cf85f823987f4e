"""BiC, bias correction. Wu et al., Large Scale Incremental Learning, CVPR 2019.

    for each batch B_n from the stream:
        the first images of each new class go to a validation store, as many of each class; the rest is B
        B_M <- n_recall images drawn from memory;  z <- logits of B ∪ B_M
        step on (1 - λ) CE(z over the classes met, y)
              + λ CE(softmax(z* / T), softmax(z / T)), both over the old classes, with λ = old classes / classes met
        memory <- reservoir(memory, B)
    at the end of each task but the first, with the net as it is:
        (a, b) <- argmin over the validation store of CE(a z + b for the task's new classes and z for the others, y) + 0.05 b²
    teacher z* <- frozen copy of the net, its last task's new classes corrected by that task's (a, b)
    predict with the last task's new classes corrected; within a task, before (a, b) exist, with plain logits

In the first task there is neither teacher nor correction. A class that comes back in a later task is old there: the teacher knows
it, and it is not corrected. Only the newest correction is applied: earlier ones live on through the teacher. The validation store
is a tenth of the memory's slots and is never trained on. With several taps each has its own a and b, fitted on its own logits. In
`ema(bic())` the averaged net is corrected by what was fitted on the trained one.

Differences from the paper and its program: one pass over the stream and a reservoir instead of exemplars chosen by herding, so the
held-out images are those that come first, and a batch that is held out entirely makes no step; how many classes a task brings is
not known at its start, so λ and the share of each class in the validation store follow the classes met so far; (a, b) are the
exact minimum, found by Newton's method within 5 of a = 1 and b = 0 (the program: 200 epochs of gradient descent, its net in
training mode, so that BatchNorm sees single validation batches); without images of both new and old classes in the store they stay
1 and 0; weight decay does not change from task to task. In later epochs over a task, held-out images are known by their pixels.

On a GPU the host waits for the device where a task ends, for the values that it records.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.functional.losses import classes_among, cross_entropy, distillation
from gracecl.memory import Memories
from gracecl.memory.held_out import HeldOut
from gracecl.methods.base import TaskValues, Traits
from gracecl.methods.replay import Replay
from gracecl.nets.correction import Correction, fit_correction
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast, Below

log = logging.getLogger(__name__)


@methods.register("bic")
@dataclass(eq=False, repr=False)
class BiC(Replay):
    """BiC: replay with distillation, and two numbers fitted on held-out images that bring the newest classes' logits to level."""

    temperature: Annotated[float, Above(0)] = 2.0
    """T, which both softmaxes of the distillation are softened by"""
    held_out: Annotated[float, AtLeast(0), Below(1)] = 0.1
    """share of the memory's slots that hold validation images"""
    shift_penalty: Annotated[float, AtLeast(0)] = 0.05
    """what b² is multiplied by in the fit"""

    traits = Traits(boundaries="required", met_only=True)
    state = ("teacher", "old", "correction", "of_teacher")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.validation = HeldOut(memories.reserve("validation", round(self.held_out * memories.replay.capacity)))
        self.device = net.classifier.weight.device
        self.teacher = Teacher(net)
        self.old: tuple[int, ...] = ()
        """the classes that the teacher knows"""
        self.correction = self.of_teacher = Correction.none(net.layers, net.classes, self.device)

    def begin_task(self, progress: Progress) -> None:
        self.correction = Correction.none(self.net.layers, self.net.classes, self.device)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        aside = self.validation.rows(new)
        new.found["bic/aside"] = new.sources[aside]
        stream = np.delete(np.arange(len(new)), aside)
        if len(stream) == 0:
            return Plan({})
        return Plan({"all": Selection(stream, memories.replay.draw(self.recalled(new), planning.rng))})

    def prepare(self, batch: Batch) -> None:
        if self.teacher:
            batch.targets["bic"] = self.of_teacher(self.teacher(batch.x).logits)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        on_labels = cross_entropy(out.logits, batch.y, batch.seen)
        if "bic" not in batch.targets:
            return {"ce/all": on_labels}
        on_teacher = distillation(
            out.logits, batch.targets["bic"], self.temperature, self.marked(self.old), measure="cross_entropy"
        )
        past = len(self.old) / len(batch.progress.seen)
        return {"ce/all": (1 - past) * on_labels, "kd/old": past * on_teacher}

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        rng, held = new.rng("store"), np.isin(new.sources, new.found.get("bic/aside", ()))
        if held.any():
            self.validation.add(new.select(np.flatnonzero(held)), rng)
            new = new.select(np.flatnonzero(~held))
        memories.replay.add(rng, new.x, new.labels, new.progress.task, **new.kept)

    def end_task(self, memories: Memories, progress: Progress) -> TaskValues:
        self.correction = self.fitted(progress)
        self.teacher.renew()
        self.of_teacher, self.old = self.correction, progress.seen
        return {"bias_scale": self.correction.scale.tolist(), "bias_shift": self.correction.shift.tolist()}

    def fitted(self, progress: Progress) -> Correction:
        """Fit the correction of the classes that came with this task, by the net as it is; none in the first task."""
        memory, classes = self.validation.memory, len(progress.seen)
        if self.held_out and self.validation.share(classes) == 0:
            log.warning(
                "bic: %d validation slots are too few for %d classes, so classes that come late have none; "
                "use a larger memory or a larger held_out",
                memory.capacity,
                classes,
            )
        slots = self.validation.balanced(classes)
        labels = memory.labels[slots]
        known = np.isin(labels, self.old)
        if known.all() or not known.any():
            return Correction.none(self.net.layers, self.net.classes, self.device)
        logits = torch.cat([taps.logits for _, taps in self.net.sweep(memory[slots])], dim=1)
        new = self.marked(tuple(set(progress.seen) - set(self.old)))
        y = torch.from_numpy(labels).to(self.device)
        return fit_correction(logits, y, new, self.marked(progress.seen), self.shift_penalty)

    def marked(self, classes: tuple[int, ...]) -> Tensor:
        """Return `[C]`: True for these classes."""
        return classes_among(torch.tensor(classes, dtype=torch.int64), self.net.classes).to(self.device, non_blocking=True)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        return super().rules(out) | {"linear": self.correction(out.logits)}
