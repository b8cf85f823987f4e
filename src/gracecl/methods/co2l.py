"""Co2L, contrastive continual learning. Cha, Lee, Shin, ICCV 2021.

    for each batch B_n from the stream:
        X <- B_n ∪ n_recall images drawn from memory, in two views each;  z <- unit vectors of g(f(X)), g a projector of two layers
        L <- (τ / τ_0) · Σ SC_i(z) / |X|, over the images i of the current task's classes; SC_i is SupCon's term of anchor i at τ
        from the second task on, with z* those of the teacher:
            q_i <- softmax over j ≠ i of z*_i·z*_j / κ*;  p_i <- the same of z, at κ;  L <- L + λ · mean_i CE(q_i, p_i)
        step on L;  memory <- reservoir(memory, B_n)
    at a task's end: teacher <- frozen copy of f and g
    predict by a linear classifier on the features f of the memory's images, fitted whenever predictions are wanted

Images of old classes are no anchors, but anchors are compared with them; what divides the sum counts them too, so the contrast gets
weaker as their share grows. τ_0 (`base_temperature`) is in the authors' program and not in the paper; at 0.07 it makes the contrast
seven times as strong against the distillation.

There is no softmax over classes. The contrast's row is `ce/contrast`, so that GRACE's α acts on it, and the heads that GRACE reads
entropies and accuracies from are trained by train_head=True on features that they do not move: grace(co2l(train_head=True)).

Differences from the paper and its program: the stream's batch and a uniform draw of a reservoir replace batches of 512 out of the
task's images and exemplars by class; one pass (with the stream's option `epochs`: as many) at a constant rate, without warm-up or
cosine; the classifier is scikit-learn's logistic regression with balanced classes on the memory's images as they are (the program:
SGD over augmented, class-balanced images of the memory and the whole current task, which a stream does not give back); the teacher
is in evaluation mode (the program leaves it in training mode by accident: teacher_mode='train'); views are the run's augmentation
(`--augment full` is the program's, apart from the random order of the colour jitter's parts and, at 64 pixels, the blur and windows
from a tenth of the image on). `every` is this library's own, for streams without task marks, where all classes met are current.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.functional.losses import asymmetric_contrast, cross_entropy, full_precision, relation_distillation
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.nets.probe import LinearProbe
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast

HIDDEN = "projector_hidden"


@methods.register("co2l")
@dataclass(eq=False, repr=False)
class Co2L(Replay):
    """Co2L: contrast with current classes as anchors, distilled relations between images; predictions by a linear probe."""

    temperature: Annotated[float, Above(0)] = 0.5
    """τ, of the contrast"""
    base_temperature: Annotated[float, Above(0)] = 0.07
    """τ_0, which the contrast is divided by after it was multiplied by τ; equal to the temperature it has no effect"""
    distillation: Annotated[float, AtLeast(0)] = 1.0
    """λ, the weight of the distilled relations"""
    relation_temperature: Annotated[float, Above(0)] = 0.2
    """κ, of the net's relations"""
    teacher_temperature: Annotated[float, Above(0)] = 0.01
    """κ*, of the teacher's relations"""
    teacher_mode: Literal["eval", "train"] = "eval"
    """whether the teacher's BatchNorm uses its running statistics or those of the step's images"""
    inference: Literal["probe", "ncm", "linear", "lda", "ridge"] = "probe"  # type: ignore[assignment]
    """predict by the linear classifier that is fitted to the memory's features, by their nearest class mean, or by the head"""
    probe_c: Annotated[float, Above(0)] = 1.0
    """scikit-learn's C, the inverse strength of that classifier's regularisation"""
    train_head: bool = False
    """train the linear heads beside it, on features that they do not move: for GRACE, and for inference='linear'"""
    every: Annotated[int, AtLeast(0)] = 500
    """steps after which the teacher is renewed on a stream without task marks, which is our extension; 0 is never"""

    state = ("teacher",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inference == "linear" and not self.train_head:
            raise UserError("co2l: inference='linear' needs heads that were trained; add train_head=True")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(boundaries="used", interval="every", met_only=self.inference != "linear")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        net.add_extra(HIDDEN, StackedLinear(net.layers, net.width, net.width))
        self.teacher = Teacher(net, training=self.teacher_mode == "train")

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew()

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        slots, twice = memories.replay.draw(self.n_recall, planning.rng), (planning.augment, planning.augment)
        return Plan({"all": Selection(np.arange(len(new)), slots, views=twice)})

    def prepare(self, batch: Batch) -> None:
        if self.teacher.copy is not None:
            batch.targets["co2l"] = projected(self.teacher.copy, self.teacher(batch.x).features)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        z = projected(self.net, out.features)
        contrast = asymmetric_contrast(z, batch.y, batch.current[batch.y], self.temperature)
        table = {"ce/contrast": self.temperature / self.base_temperature * contrast}
        if "co2l" in batch.targets:
            relations = relation_distillation(z, batch.targets["co2l"], self.relation_temperature, self.teacher_temperature)
            table["kd/relations"] = self.distillation * relations
        if self.train_head:
            table["ce/head"] = cross_entropy(self.net.classifier(out.features.detach()), batch.y)
        return table

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        super().before_eval(net, memories, progress)
        if self.inference == "probe":
            memory = memories.replay
            held = slice(0, len(memory))
            self.probe = LinearProbe(net, memory.images[held], memory.labels[held], progress.seen, self.probe_c)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        families = super().rules(out)
        if not self.train_head:
            del families["linear"]
        return families | ({"probe": self.probe(out.features)} if self.inference == "probe" else {})


def projected(net: TappedNet, features: Tensor) -> Tensor:
    """Return `[L, B, E]`: the unit vectors that are compared, by a net's projector."""
    return F.normalize(full_precision(net.projector(torch.relu(net.extras[HIDDEN](features)))), dim=-1)
