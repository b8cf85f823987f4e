"""Learning without Forgetting. Li, Hoiem, ECCV 2016.

    at the end of each task: teacher <- frozen copy of the net; old <- classes met so far
    for each batch x from the stream, once there is a teacher:
        add λ · T² · KL( softmax(teacher(x) / T) ‖ softmax(net(x) / T) ), both over the old classes, to the learner's loss

No image is kept. `lwf()` alone is `sgd() + lwf()`; with one head for all classes it needs a learner whose cross-entropy leaves the
old ones alone: `sgd(classes='current') + lwf()`. In `er() + lwf()` the teacher also sees the replayed images.

Differences from the paper: one head instead of one per task; no phase in which only new outputs are trained, as an online stream is
seen once; the divergence stands for the paper's cross-entropy between the two (same gradient). `every` is this library's own, for
streams without task marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.core import Batch, LossTable, Progress, Taps
from gracecl.functional.losses import distillation
from gracecl.memory import Memories
from gracecl.methods.base import Addition, Traits
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("lwf")
@dataclass(eq=False, repr=False)
class LwF(Addition):
    """Learning without forgetting: on new images, outputs for old classes stay near what the net said before the task."""

    strength: Annotated[float, AtLeast(0)] = 1.0
    """λ, the weight of the distillation"""
    temperature: Annotated[float, Above(0)] = 2.0
    """T, which both softmaxes are softened by"""
    every: Annotated[int, AtLeast(0)] = 500
    """steps after which the teacher is renewed on a stream without task marks, which is our extension; 0 is never"""

    traits = Traits(boundaries="used", interval="every")
    state = ("teacher",)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.teacher = Teacher(net)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew(progress.seen)

    def prepare(self, batch: Batch) -> None:
        if self.teacher:
            batch.targets["lwf"] = self.teacher(batch.x).logits

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        if "lwf" not in batch.targets:
            return {}
        divergence = distillation(out.logits, batch.targets["lwf"], self.temperature, self.teacher.classes)
        return {"kd/lwf": self.strength * self.temperature**2 * divergence}
