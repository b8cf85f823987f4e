"""MOSE, multi-level online sequential experts. Yan et al., Orchestrate Latent Expertise, CVPR 2024.

    for each batch x of b images of task t, B = n_recall:
        if memory is empty: store x and go on
        N <- x ∪ draw(images of task t; B if t = 1, else B/2 - b), x alone in the first step of a task
        K <- first min(B·|new|/|seen|, b) of x ∪ draw(images of other tasks; up to B in all, at most 7 per seen class), if t > 1
        N, K <- each image raw, mirrored, τ(raw), τ(mirrored)
        f_1..f_4 <- one forward over N ∪ K
        step on Σ_i [ SC(N ∪ K) + CE_i + RSD_i ],
            CE_i  = CE(N) if t = 1, else 2·CE(K) + CE(N, softmax over the task's classes met so far)
            RSD_i = ‖n(A f_4) - sg n(f_i)‖_F, the norm of the whole matrix, for the experts i that are not the student
        memory <- reservoir(memory, x)
    predict by the nearest class mean of the memory's features, averaged over the experts

Differences from the paper and its program: the reservoir is exact (the program's is slightly biased within a batch); a single
current-task image in memory is replayed (the program drops it by an indexing slip); τ's window candidates are drawn per image,
ten each (the program draws ten times the batch and shares them out; the distribution is the same); images are stored as bytes;
precision is the run's (the program uses fp16); a class without memory images gets a direction by first-seen order; unseen classes
are ruled out at inference for every rule; the fusion layer that the program never uses does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.augment import Mirror, View
from gracecl.core import Batch, Incoming, LossTable, Progress, Rows, Taps
from gracecl.errors import UserError
from gracecl.losses import cross_entropy, frobenius_distance, full_precision, supervised_contrast
from gracecl.memory import Memories
from gracecl.method import Boundaries, Method
from gracecl.nets.class_means import class_means, nearest_mean
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods


@methods.register("mose")
@dataclass(eq=False, repr=False)
class MOSE(Method):
    """MOSE: an expert at each layer, contrast and cross-entropy on new and balanced blocks, reverse self-distillation."""

    n_recall: int = 64
    """B, the size that the blocks are made up to"""
    per_class: int = 7
    """past images in the balanced block, at most this many per seen class"""
    temperature: float = 0.07
    """of the contrastive loss"""
    balanced_weight: float = 2.0
    """of the cross-entropy on the balanced block"""
    student: int = -1
    """the expert that the others teach, counted from 0; -1 is the last"""
    inference: Literal["ncm_mean", "ncm_last", "linear_mean", "linear_last"] = "ncm_mean"
    """the headline rule; all four are reported"""

    boundaries: ClassVar[Boundaries] = "required"
    wants_taps: ClassVar[bool] = True

    @property
    def rule(self) -> str:
        return self.inference

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        if not -net.layers <= self.student < net.layers:
            raise UserError(f"mose: student {self.student} is not one of the {net.layers} experts")
        student = self.student % net.layers
        self.teachers = torch.tensor([layer for layer in range(net.layers) if layer != student], dtype=torch.int64)
        self.adapt = net.extra("adaptation", nn.Linear(net.width, net.width))

    def plan(self, new: Incoming, memories: Memories, rng: np.random.Generator) -> dict[str, Rows]:
        memory, progress, b = memories.replay, new.progress, len(new)
        if len(memory) == 0:
            return {}
        first_task = progress.task == 0
        wanted = self.n_recall if first_task else max(0, self.n_recall // 2 - b)
        recalled = memory.draw(0 if progress.first_of_task else wanted, rng, task=progress.task)
        blocks = {"new": Rows(np.arange(b), recalled)}
        if not first_task:
            n_new = min(self.n_recall * len(progress.current) // len(progress.seen), b)
            n_past = min(self.n_recall - n_new, self.per_class * len(progress.seen))
            blocks["balanced"] = Rows(np.arange(n_new), memory.draw(n_past, rng, except_task=progress.task))
        return {name: rows for name, rows in blocks.items() if len(rows)}

    def views(self, block: str, augment: View) -> Sequence[View]:
        return (), (Mirror(),), augment, (Mirror(), *augment)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        new = batch.rows("new")
        table = {"sc": supervised_contrast(out.embedding, batch.y, self.temperature)}
        first_task = batch.progress.task == 0
        table["ce/new"] = cross_entropy(out.logits[:, new], batch.y[new], classes=None if first_task else batch.current)
        if "balanced" in batch.blocks:
            balanced = batch.rows("balanced")
            table["ce/balanced"] = self.balanced_weight * cross_entropy(out.logits[:, balanced], batch.y[balanced])
        table["rsd"] = self.reverse_self_distillation(out.features)
        return table

    def reverse_self_distillation(self, features: Tensor) -> Tensor:
        """How far the adapted student is from each of the other experts, which do not move for it."""
        student = F.normalize(full_precision(self.adapt(features[self.student])), dim=-1)
        teachers = F.normalize(full_precision(features.detach()[self.teachers]), dim=-1)
        return teachers.new_zeros(len(features)).index_copy(
            0, self.teachers.to(features.device), frobenius_distance(student, teachers)
        )

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        memory = memories.replay
        self.means = class_means(net, memory.images[: len(memory)], memory.labels[: len(memory)], progress.seen)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        return {"linear": out.logits, "ncm": nearest_mean(out.features, self.means)}
