"""MOSE, multi-level online sequential experts. Yan et al., Orchestrate Latent Expertise, CVPR 2024.

    for each batch x of b images of task t, B = n_recall:
        if memory is empty: store x and go on
        N <- x ∪ draw(images of task t; B if t = 1, else B/2 - b), x alone in the first step of a task
        K <- first min(B·|new|/|seen|, b) of x ∪ draw(images of other tasks; up to B in all, at most 7 per seen class), if t > 1
        N, K <- each image raw, mirrored, τ(raw), τ(mirrored)
        f_1..f_4 <- one forward over N ∪ K
        step on Σ_i [ contrast · SC(N ∪ K) + CE_i + RSD_i ],
            CE_i  = CE(N) if t = 1, else 2·CE(K) + CE(N, softmax over the task's classes met so far)
            RSD_i = ‖n(A f_4) - sg n(f_i)‖_F, the norm of the whole matrix, for the experts i that are not the student
        memory <- reservoir(memory, x)
    predict by the nearest class mean of the memory's features, averaged over the experts

On a stream without task marks the classes of each batch stand for those of task t (our extension): N is x with memory images of its
classes, K is x with memory images of the others, once there are any. Our options beside the paper's: fewer views of each image, and
the weight of the contrast; best() uses neither.

Differences from the paper and its program: the reservoir is exact (the program's is slightly biased within a batch); a single
current-task image in memory is replayed (the program drops it by an indexing slip); τ's window candidates are drawn per image,
ten each (the program draws ten times the batch and shares them out; the distribution is the same); images are stored as bytes;
precision is the run's (the program uses fp16); a class without memory images gets a direction by first-seen order; unseen classes
are ruled out at inference for every rule; the fusion layer that the program never uses does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.core import NO_TASK, Batch, Ints, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.functional.losses import classes_among, cross_entropy, frobenius_distance, full_precision, supervised_contrast
from gracecl.images.augment import Mirror
from gracecl.memory import Memories, Memory
from gracecl.methods.base import Method, Traits
from gracecl.nets.class_means import class_means, nearest_mean
from gracecl.nets.closed_rule import CLOSED_RULES, closed_rule
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast


@methods.register("mose")
@dataclass(eq=False, repr=False)
class MOSE(Method):
    """MOSE: an expert at each layer, contrast and cross-entropy on new and balanced blocks, reverse self-distillation."""

    n_recall: Annotated[int, AtLeast(0)] = 64
    """B, the size that the blocks are made up to"""
    per_class: Annotated[int, AtLeast(0)] = 7
    """past images in the balanced block, at most this many per seen class"""
    views: Literal[4, 2, 1] = 4
    """of each image: raw, mirrored, augmented, both; two are raw, and mirrored and augmented; one is augmented"""
    contrast: Annotated[float, AtLeast(0)] = 1.0
    """weight of the contrastive loss; 0 leaves it out"""
    temperature: Annotated[float, Above(0)] = 0.07
    """of the contrastive loss"""
    balanced_weight: float = 2.0
    """of the cross-entropy on the balanced block"""
    student: int = -1
    """the expert that the others teach, counted from 0; -1 is the last"""
    inference: Literal[
        "ncm_mean", "ncm_last", "linear_mean", "linear_votes", "linear_last", "lda_mean", "lda_last", "ridge_mean", "ridge_last"
    ] = "ncm_mean"
    """the headline rule; ncm and linear are always reported, lda and ridge on the memory's features where asked for"""

    traits = Traits(
        boundaries="used", instead="takes each batch's classes for the task's", all_taps=True, images="shows images mirrored"
    )

    @property
    def rule(self) -> str:
        return self.inference

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        if not -net.layers <= self.student < net.layers:
            raise UserError(f"mose: student {self.student} is not one of the {net.layers} experts")
        student = self.student % net.layers
        self.teachers = torch.tensor([layer for layer in range(net.layers) if layer != student], dtype=torch.int64)
        self.adapt = net.add_extra("adaptation", nn.Linear(net.width, net.width))

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        memory, progress, b = memories.replay, new.progress, len(new)
        if len(memory) == 0:
            return
        current = progress.current if progress.task != NO_TASK else tuple(dict.fromkeys(new.labels.tolist()))
        alone = len(current) == len(progress.seen) if progress.task == NO_TASK else progress.task == 0
        wanted = self.n_recall if alone else max(0, self.n_recall // 2 - b)
        four = (), (Mirror(),), planning.augment, (Mirror(), *planning.augment)
        views = {4: four, 2: (four[0], four[3]), 1: (four[2],)}[self.views]
        recalled = self.draw(memory, 0 if progress.first_of_task else wanted, planning.rng, progress, current)
        blocks = {"new": Selection(np.arange(b), recalled, views=views)}
        if not alone:
            n_new = min(self.n_recall * len(current) // len(progress.seen), b)
            n_past = min(self.n_recall - n_new, self.per_class * len(progress.seen))
            past = self.draw(memory, n_past, planning.rng, progress, current, past=True)
            blocks["balanced"] = Selection(np.arange(n_new), past, views=views)
        yield Plan({name: rows for name, rows in blocks.items() if len(rows)})

    def draw(
        self, memory: Memory, n: int, rng: np.random.Generator, progress: Progress, current: tuple[int, ...], past: bool = False
    ) -> Ints:
        """Draw slots of the current task or of the others; without task marks, of the batch's classes or of the
        others.
        """
        if progress.task == NO_TASK:
            return memory.draw(n, rng, except_labels=current) if past else memory.draw(n, rng, labels=current)
        return memory.draw(n, rng, except_task=progress.task) if past else memory.draw(n, rng, task=progress.task)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        new = batch.rows("new")
        table = {"sc": self.contrast * supervised_contrast(out.embedding, batch.y, self.temperature)} if self.contrast else {}
        table["ce/new"] = cross_entropy(out.logits[:, new], batch.y[new], classes=self.rivals(batch))
        if "balanced" in batch.blocks:
            balanced = batch.rows("balanced")
            table["ce/balanced"] = self.balanced_weight * cross_entropy(out.logits[:, balanced], batch.y[balanced])
        table["rsd"] = self.reverse_self_distillation(out.features)
        return table

    def rivals(self, batch: Batch) -> Tensor | None:
        """Return `[C]`: the classes that new images are told from; None is all outputs, as long as there is no past."""
        if batch.progress.task == NO_TASK:
            return classes_among(batch.y[batch.rows("new")], batch.classes) if "balanced" in batch.blocks else None
        return None if batch.progress.task == 0 else batch.current

    def reverse_self_distillation(self, features: Tensor) -> Tensor:
        """Return how far the adapted student is from each of the other experts, which get no gradient from it."""
        student = F.normalize(full_precision(self.adapt(features[self.student])), dim=-1)
        teachers = F.normalize(full_precision(features.detach()[self.teachers]), dim=-1)
        return teachers.new_zeros(len(features)).index_copy(
            0, self.teachers.to(features.device), frobenius_distance(student, teachers)
        )

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        memory = memories.replay
        self.means = class_means(net, memory.examples.images, memory.examples.labels, progress.seen)
        family = self.inference.split("_")[0]
        self.by_sums = {
            rule: closed_rule(net, memory.examples.images, memory.examples.labels, rule) for rule in CLOSED_RULES if rule == family
        }

    def rules(self, out: Taps) -> dict[str, Tensor]:
        fitted = {rule: solution(out.features.double()) for rule, solution in self.by_sums.items()}
        return {"linear": out.logits, "ncm": nearest_mean(out.features, self.means)} | fitted
