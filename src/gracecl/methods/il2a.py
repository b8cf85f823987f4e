"""IL2A, dual augmentation. Zhu, Cheng, Zhang, Liu, Class-Incremental Learning via Dual Augmentation, NeurIPS 2021.

    for each batch x of a task, `new` the classes of the task:
        u <- n_recall images drawn from memory, none in the first task
        class augmentation, mix_times times:
            π <- a random permutation; for every i with y_i ≠ y_π(i): append l x_i + (1 - l) x_π(i) as an image of an extra class,
            that of the pair {y_i, y_π(i)};  l ~ Beta(20, 20), or 0.5 where that is outside [0.4, 0.6]
        X <- x ∪ u ∪ mixes
        L <- CE(logits of X / T), over the classes met and the extra classes of pairs of `new`
        after the first task, f* the features of the net as the last task left it:
            semantic augmentation: draw n_prototypes old classes c; a_k <- w_k·μ_c + b_k + γ/2 (w_k - w_c)ᵀ Σ_c (w_k - w_c)
            L <- L + kd_weight ‖f(X) - f*(X)‖_F + semantic_weight · mean_c CE(a / T, c)
        step on L;  memory <- reservoir(memory, x)
    at the end of a task: μ_c, Σ_c <- mean and covariance of the features of each of its classes;  f* <- f;  drop the extra classes

At T = 1 the semantic term is a bound on the expected cross-entropy of infinitely many features from N(μ_c, γ Σ_c). It moves the
head alone.

Differences from the paper and its program, which see a task many times and keep no images: there is a memory, as in the literature
that compares it on online streams, and its images join the first two terms (n_recall=0 is without); μ and Σ are those of the
memory's images as they are, or of a class without any, the mean of the features it had in training and 0 (the program uses all of
the task's images, augmented; n_statistics keeps some of them until the task ends); Σ_c is that of class c (in the program it is
another's from the third task on, by accident: reference=True); `new` are the classes met so far, and the first mixed_classes of
them are mixed; outputs of all classes are there from the beginning, and the optimizer's weight decay acts on those not met (the
program's head grows); the outputs of extra classes start afresh in each task, while the optimizer's moments of them stay (the
program makes a new optimizer for each task); one forward gives logits and features (the program makes two, so its BatchNorm
statistics move twice). As the distillation grows with the square root of the number of images, kd_weight is worth tuning (1, 3,
10).

No softmax here spans a class before it is met. Under grace(...) say classes='seen', or the entropy of all outputs is lowered
through those of unmet classes, which nothing else holds.

On a GPU the host waits for the device where a task ends, as it keeps the list of covariances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, Ints, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.functional.losses import cross_entropy, cross_entropy_of_each, frobenius_distance, full_precision
from gracecl.images.augment import central_shares, mix, pair_number, unlike_pairs
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.methods.state import per_class
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.nets.teacher import Teacher
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast, Within


@methods.register("il2a")
@dataclass(eq=False, repr=False)
class IL2A(Replay):
    """IL2A: mixes of two new classes are extra classes, and old classes are kept as Gaussians of features that train the head."""

    mix_times: Annotated[int, Within(0, 100)] = 4
    """how often each new image is offered to be mixed with another"""
    concentration: Annotated[float, Above(0)] = 20.0
    """shares of mixes are drawn from Beta(concentration, concentration)"""
    mixed_classes: Annotated[int, AtLeast(0)] = 20
    """classes of a task that are mixed with each other, the first met; each pair of them has an output"""
    temperature: Annotated[float, Above(0)] = 0.1
    """T, which logits are divided by"""
    semantic_weight: Annotated[float, AtLeast(0)] = 10.0
    """of the cross-entropy on old classes' Gaussians"""
    spread: Annotated[float, AtLeast(0)] = 2.5
    """γ, the factor of their covariances"""
    n_prototypes: Annotated[int, Within(1, 100_000)] = 64
    """old classes drawn at each step, the same possibly more than once"""
    kd_weight: Annotated[float, AtLeast(0)] = 10.0
    """of the distance from the features that the last task's net has"""
    n_statistics: Annotated[int, AtLeast(0)] = 0
    """images of the current task that are kept beside the memory to find its Gaussians; 0 takes the memory's own"""
    reference: bool = False
    """give a class the covariance that the authors' program looks up for it, which from the third task on is another's"""

    traits = Traits(boundaries="required", met_only=True, makes_inputs=True)
    state = (
        "teacher",
        "old",
        *(per_class(name, axis=1) for name in ("means", "factors", "sums")),
        *(per_class(name) for name in ("covariance_of", "counts")),
    )

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.mixable = min(self.mixed_classes, net.classes or self.mixed_classes)
        pairs = StackedLinear(net.layers, net.width, self.mixable * (self.mixable - 1) // 2)
        self.pairs = net.add_extra("pairs", pairs.to(net.classifier.weight.dtype))
        self.fresh_pairs = [value.detach().clone() for value in self.pairs.parameters()]
        self.teacher = Teacher(net)
        zeros = net.classifier.weight.new_zeros
        self.old: list[int] = []
        """classes that have statistics"""
        self.means = zeros(net.layers, net.classes, net.width)
        self.factors = zeros(net.layers, net.classes, 0, net.width)
        """a matrix R for each class with Σ = RᵀR, which has at most as many rows as images were seen"""
        self.covariance_of = torch.arange(net.classes, device=net.classifier.weight.device)
        """the class whose covariance each class is given: its own, unless `reference` says otherwise"""
        self.sums, self.counts = zeros(net.layers, net.classes, net.width), zeros(net.classes)
        """of the features of the current task's images as they were trained on"""
        if self.n_statistics:
            memories.scratch(self.name, self.n_statistics)

    def begin_task(self, progress: Progress) -> None:
        with torch.no_grad():
            for value, fresh in zip(self.pairs.parameters(), self.fresh_pairs, strict=True):
                value.copy_(fresh)
        self.sums, self.counts = torch.zeros_like(self.sums), torch.zeros_like(self.counts)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream = np.arange(len(new))
        slots = memories.replay.draw(self.recalled(new) if self.teacher else 0, planning.rng)
        return Plan({"new": Selection(stream)} | ({"replay": Selection(slots=slots)} if len(slots) else {}))

    def prepare(self, batch: Batch) -> None:
        self.augment_classes(batch)
        if self.teacher:
            self.ask_teacher(batch)

    def augment_classes(self, batch: Batch) -> None:
        """Append mixes of new images as images of extra classes, numbered after the classes."""
        rng, rows, place = batch.rng("class augmentation"), batch.rows("new"), self.places(batch)
        first, second = unlike_pairs(batch.labels[rows], self.mix_times, rng)
        a, b = place[batch.labels[rows][first]], place[batch.labels[rows][second]]
        mixed = np.maximum(a, b) < self.mixable
        share = central_shares(int(np.count_nonzero(mixed)), self.concentration, rng)
        if len(share):
            labels = batch.classes + pair_number(a[mixed], b[mixed], self.mixable)
            batch.append("mixed", mix(batch.x[rows], first[mixed], second[mixed], share), labels)

    def places(self, batch: Batch) -> Ints:
        """Return `[C]`: a class's place among those of the task that are mixed, in the order in which they were
        met; others lie beyond.
        """
        place = np.full(batch.classes, self.mixable)
        first = list(batch.progress.current[: self.mixable])
        place[first] = np.arange(len(first))
        return place

    def pairs_met(self, batch: Batch) -> Tensor:
        """True for the pairs of classes of the task that were met."""
        a, b = np.triu_indices(min(len(batch.progress.current), self.mixable), 1)
        met = torch.zeros(self.pairs.weight.shape[-1], dtype=torch.bool)
        met[torch.from_numpy(pair_number(a, b, self.mixable))] = True
        return met.to(batch.x.device)

    def ask_teacher(self, batch: Batch) -> None:
        """Take the teacher's features of the images, the old classes that are drawn, and how often each of them was."""
        drawn = batch.rng("prototypes").integers(0, len(self.old), self.n_prototypes)
        which, times = np.unique(drawn, return_counts=True)
        device = batch.x.device
        batch.targets |= {
            "il2a/features": self.teacher(batch.x).features,
            "il2a/classes": torch.from_numpy(np.array(self.old)[which]).to(device),
            "il2a/shares": torch.from_numpy(times / self.n_prototypes).to(device),
        }

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        logits = full_precision(torch.cat([out.logits, self.pairs(out.features)], dim=-1)) / self.temperature
        table = {"ce/all": cross_entropy(logits, batch.y, torch.cat([batch.seen, self.pairs_met(batch)]))}
        if "il2a/features" in batch.targets:
            classes, shares = batch.targets["il2a/classes"], batch.targets["il2a/shares"]
            of_each = cross_entropy_of_each(self.semantic_logits(classes) / self.temperature, classes, batch.seen)
            table["ce/semantic"] = self.semantic_weight * (of_each * shares.to(of_each)).sum(dim=1)
            then, now = full_precision(batch.targets["il2a/features"]), full_precision(out.features)
            table["kd/features"] = self.kd_weight * frobenius_distance(now, then)
        return table

    def semantic_logits(self, classes: Tensor) -> Tensor:
        """Return `[L, n, C]`: of the classes' means, each with γ/2 times the variance of its distance from the
        class's own logit.
        """
        head = self.net.classifier
        along = full_precision(self.factors[:, self.covariance_of[classes]] @ head.weight[:, None])
        own = along.gather(3, classes.view(1, -1, 1, 1).expand(len(along), -1, along.shape[2], 1))
        return full_precision(head(self.means[:, classes])) + self.spread / 2 * (along - own).square().sum(dim=2)

    def after_step(self, out: Taps, batch: Batch) -> None:
        rows = batch.rows("new")
        member = F.one_hot(batch.y[rows], batch.classes).T.to(self.sums.dtype)
        self.sums = self.sums + member @ out.features[:, rows].to(self.sums.dtype)
        self.counts = self.counts + member.sum(dim=1)

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        super().after_batch(memories, new)
        if self.n_statistics:
            memories[self.name].add(new.rng("observe"), new.x, new.labels, new.progress.task)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        store = memories[self.name] if self.n_statistics else memories.replay
        if self.reference:
            self.put_first(progress.current)
        for label in progress.current:
            slots = np.sort(store.slots_of(label))
            if len(slots):
                features = torch.cat([taps.features for _, taps in self.net.sweep(store[slots])], dim=1)
                self.remember(label, features.mean(dim=1), factor(features))
            else:
                self.remember(label, self.sums[:, label] / self.counts[label], self.factors[:, label, :0])
        if self.n_statistics:
            store.clear()
        self.teacher.renew()

    def put_first(self, newest: tuple[int, ...]) -> None:
        """Store covariances as the program does: the newest task's first, and the c-th class met takes the c-th of
        them.
        """
        met = [*self.old, *(label for label in newest if label not in self.old)]
        stored = [*newest, *(label for label in self.covariance_of[self.old].tolist() if label not in newest)]
        self.covariance_of[met] = self.covariance_of.new_tensor(stored)

    def remember(self, label: int, mean: Tensor, root: Tensor) -> None:
        """Keep a class's mean and the factor `root [L, r, D]` of its covariance, by the class's number."""
        missing = root.shape[1] - self.factors.shape[2]
        self.factors = F.pad(self.factors, (0, 0, 0, max(0, missing)))
        self.factors[:, label] = F.pad(root, (0, 0, 0, max(0, -missing)))
        self.means[:, label] = mean
        if not self.reference:
            self.covariance_of[label] = label
        self.old += [] if label in self.old else [label]


def factor(features: Tensor) -> Tensor:
    """Return `[L, r, D]`: R with RᵀR the unbiased covariance of features `[L, n, D]`; r is at most D, and 0 for a
    single image.
    """
    n, width = features.shape[1:]
    centred: Tensor = (features - features.mean(dim=1, keepdim=True)) / max(1, n - 1) ** 0.5
    if n < 2:
        return centred[:, :0]
    root: Tensor = torch.linalg.qr(centred, mode="r").R if n > width else centred
    return root
