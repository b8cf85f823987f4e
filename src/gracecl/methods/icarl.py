"""iCaRL. Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017.

    at the end of each task: teacher <- frozen copy of the net; old <- classes met so far
        m <- memory / classes met; each old class keeps its first m exemplars
        each class of the task gets m exemplars by herding: the k-th is the image that brings the mean of the first k nearest to the
        mean of all images of the class, in unit features of the teacher
    for each batch x from the stream:
        u <- n_recall exemplars, none of them twice
        g <- sigmoid of the logits of x ∪ u;  q <- sigmoid of the teacher's
        step on the mean over images of  Σ over new classes BCE(g_k, [y = k])  +  Σ over old classes BCE(g_k, q_k)
    predict the class whose mean of exemplars is nearest, with unit features and means

Both losses are the paper's binary cross-entropies, one sigmoid for each class; the common form with a softmax is
er(inference='ncm') + lwf(). New classes are those met that are not old: a replayed exemplar has the targets 0 there and the
teacher's elsewhere, whatever its label. Under grace(...), α acts on `ce/new`; entropies are those of a softmax of the same logits.

Online, the images of a task are gone when it ends. exemplars='herding' therefore keeps up to `candidates` of them, a uniform
sample, beyond the memory until then, which a run notes; exemplars are chosen among these, and before the end they give the means of
the task's classes. exemplars='reservoir' needs no more than the memory, a plain reservoir, of which images of earlier tasks are
replayed: the form in which online comparisons run iCaRL (Mai et al., Online continual learning in image classification: an
empirical survey, 2022). On a stream without task marks a task ends every `every` steps, which is our extension, and 'reservoir'
replays everything.

Differences from the paper: one pass over the stream with n_recall exemplars beside each batch (the paper: epochs over new images
and all exemplars); herding among candidates as above, in the features of the deepest tapped layer; a class that comes again is
herded anew from its exemplars and the new images; losses are summed over classes, as the paper writes and the survey does (the
authors' program and others take the mean); a class without any image cannot be predicted.

On a GPU herding waits for the device, as the host keeps the list of slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import NO_TASK, Batch, Ints, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.functional.losses import binary_cross_entropy, full_precision
from gracecl.memory import Memories
from gracecl.memory.herding import herd
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.nets.scoring import features_of
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast

CANDIDATES = "candidates"


@methods.register("icarl")
@dataclass(eq=False, repr=False)
class ICaRL(Replay):
    """iCaRL: sigmoid outputs distilled from the net before the task, herded exemplars, predictions by their nearest mean."""

    exemplars: Literal["herding", "reservoir"] = "herding"
    """choose exemplars by herding when a task ends, or keep a reservoir"""
    candidates: Annotated[int, AtLeast(1)] = 1000
    """images of the current task among which herding chooses, kept beyond the memory until the task ends"""
    every: Annotated[int, AtLeast(0)] = 500
    """steps after which a stream without task marks is treated as if a task ended, which is our extension; 0 is never"""
    inference: Literal["linear", "ncm", "lda", "ridge"] = field(default="ncm", kw_only=True)
    """predict by the nearest mean of exemplars, by the largest output (the paper's hybrid1), or by another rule on exemplars"""

    traits = Traits(boundaries="used", interval="every", met_only=True)
    state = ("teacher",)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.teacher = Teacher(net)
        if self.exemplars == "herding":
            memories.scratch(CANDIDATES, self.candidates)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        task = new.progress.task if self.exemplars == "reservoir" and new.progress.task != NO_TASK else None
        slots = memories.replay.draw(self.recalled(new), planning.rng, except_task=task)
        return Plan({"all": Selection(np.arange(len(new)), slots)})

    def prepare(self, batch: Batch) -> None:
        if self.teacher:
            batch.targets["icarl"] = full_precision(self.teacher(batch.x).logits).sigmoid()

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        labels = F.one_hot(batch.y, batch.classes)
        table = {"ce/new": binary_cross_entropy(out.logits, labels, batch.seen & ~self.teacher.classes)}
        if "icarl" in batch.targets:
            table["kd/old"] = binary_cross_entropy(out.logits, batch.targets["icarl"], self.teacher.classes)
        return table

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        store = memories[CANDIDATES] if self.exemplars == "herding" else memories.replay
        store.add(new.rng("store"), new.x, new.labels, new.progress.task)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.teacher.renew(progress.seen)
        if self.exemplars == "herding":
            self.choose_exemplars(memories, progress)

    def choose_exemplars(self, memories: Memories, progress: Progress) -> None:
        """Refill the memory: for each class its exemplars, in the order of herding, in neighbouring slots."""
        memory, candidates = memories.replay, memories[CANDIDATES]
        share = memory.capacity // len(progress.seen)
        images = torch.cat([store.examples.images for store in (memory, candidates)])
        labels = np.concatenate([store.examples.labels for store in (memory, candidates)])
        tasks = np.concatenate([store.examples.tasks for store in (memory, candidates)])
        features = features_of(self.net, images)
        kept = []
        for label in progress.seen:
            rows = np.flatnonzero(labels == label)
            if (rows >= len(memory)).any():  # candidates, which stand after what memory holds
                rows = rows[herd(features[torch.from_numpy(rows).to(features.device)], share).cpu().numpy()]
            kept.append(rows[:share])
        chosen = np.concatenate(kept)
        images, labels, tasks = images[torch.from_numpy(chosen).to(images.device)], labels[chosen], tasks[chosen]
        memory.clear()
        candidates.clear()
        for task in np.unique(tasks).tolist():
            rows = np.flatnonzero(tasks == task)
            memory.put(rows, images, rows, labels, task, {})

    def past(self, memories: Memories) -> tuple[Tensor, Ints]:
        """Return the exemplars, and within a task its candidates so far."""
        images, labels = super().past(memories)
        if self.exemplars == "reservoir":
            return images, labels
        candidates = memories[CANDIDATES]
        held = len(candidates)
        return torch.cat([images, candidates.images[:held]]), np.concatenate([labels, candidates.labels[:held]])
