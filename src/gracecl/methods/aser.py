"""ASER, adversarial Shapley value experience replay. Shim et al., Online Class-Incremental Continual Learning with ASER, AAAI 2021.

    SV(e, i) <- what candidate i is worth to evaluation point e for a nearest-neighbour classifier in feature space
    for each batch B_n from the stream:
        B_M <- n_recall slots drawn uniformly, while memory is being filled; afterwards
            C, E <- two disjoint draws of memory, each up to n_c images per class
            B_M <- the n_recall of C with the largest mean_{e in E} SV(e, i) - mean_{e in B_n} SV(e, i)
        step on CE(B_n ∪ B_M)
        append B_n while there is room; for the rest
            u <- uniform(0, 1 / classes)
            E <- up to n_c images per class of memory ∪ the new images whose class holds less than u of memory
            C <- n_c · classes other slots, and the new images after them
            the |C| - |B_n| of C with the largest Σ_{e in E} SV(e, i) stay or get a slot

Features are those of the deepest tapped layer, as they are, of raw images in evaluation mode; each image passes the net once per
retrieval and once per update. n_c grows where few classes were met, so that there is something to choose from.

Differences from the paper: of its two programs, which differ, this follows the second, in PyTorch: retrieval is uniform until
memory is full, replay begins in the first task, and a class with few stored images counts in the evaluation set instead of being
forced into memory. It does not follow that program's forwards whose gradients are thrown away and which move BatchNorm's statistics
three times a step. Values are exact also where there are fewer candidates than neighbours. 64 images are replayed and n_c follows
from that (the program: 10, with n_c of 2 for CIFAR-100 and 9 for CIFAR-10).

On a GPU each step waits for the device, as the host keeps the list of slots that are drawn and replaced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch

from gracecl.core import Ints, Planning, Selection, StreamBatch
from gracecl.memory import Memories
from gracecl.memory.knn_shapley import adversarial_values, balanced_draws, exchanges, shapley_values
from gracecl.methods.er import ER
from gracecl.nets.scoring import features_of
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast, Within

FEWEST_PER_CLASS = 2


@methods.register("aser")
@dataclass(eq=False, repr=False)
class ASER(ER):
    """ASER: keep and replay stored images by what they are worth to memory and to the new images' neighbourhood."""

    neighbours: Annotated[int, AtLeast(1)] = 3
    """K, the neighbours that vote"""
    per_class: Annotated[float, Within(1, 1_000_000)] | None = None
    """n_c, images per class in a candidate or evaluation set, rounded down; None is 2, or more where that gives too few to choose
    from: enough for twice n_recall candidates. In the update None leaves a quarter of a class's share of memory to be replaced"""
    retrieval: Literal["asvm", "asv", "neg_sv", "random"] = "asvm"
    """value of a candidate: mean help to memory minus mean help to the new images (`asvm`), largest help to one minus smallest to
    one (`asv`), the new images' part alone (`neg_sv`); or uniform retrieval"""
    update: Literal["shapley", "reservoir"] = "shapley"
    """how a full memory decides what to keep"""
    known_classes: bool = True
    """count all classes of the net in the update, as the paper's program does; False counts those met so far"""

    def recall(self, new: StreamBatch, memories: Memories, planning: Planning) -> Selection:
        """Return the most valuable candidates. Slots are needed on the host, so this waits for the device once."""
        memory = memories.replay
        if self.retrieval == "random" or memory.offered <= memory.capacity or len(memory) == 0:
            return super().recall(new, memories, planning)
        n_c = int(self.sample_size(len(new.progress.seen)))
        candidates, helped = balanced_draws(memory.examples.labels, n_c, planning.rng, times=2)
        wanted = self.recalled(new)
        if len(candidates) <= wanted:
            return Selection(slots=candidates)
        features = features_of(self.net, torch.cat([memory[candidates], memory[helped], new.x]))
        labels = torch.from_numpy(np.concatenate([memory.labels[candidates], memory.labels[helped], new.labels])).to(new.x.device)
        n = len(candidates)
        values = shapley_values(features[n:], labels[n:], features[:n], labels[:n], self.neighbours)
        scores = adversarial_values(values[: len(helped)], values[len(helped) :], self.retrieval)
        chosen: Ints = scores.topk(wanted).indices.cpu().numpy()
        return Selection(slots=candidates[chosen])

    def sample_size(self, classes: int, capacity: int | None = None) -> float:
        """Return n_c for a number of classes; with `capacity`, at most what leaves a quarter of that many slots
        undrawn.
        """
        if self.per_class is not None:
            return self.per_class
        n_c = max(FEWEST_PER_CLASS, math.ceil(2 * self.n_recall / classes))
        return n_c if capacity is None else min(n_c, max(1, 3 * capacity // (4 * classes)))

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        if self.update == "reservoir":
            super().after_batch(memories, new)
            return
        memory, rng = memories.replay, new.rng("store")
        memory.offered += len(new)
        rows = np.arange(len(new))
        free = memory.capacity - len(memory)
        memory.put(len(memory) + rows[:free], new.x, rows[:free], new.labels, new.progress.task, new.kept)
        if memory.capacity == 0 or len(rows) <= free:
            return
        rest, classes = rows[free:], self.net.classes if self.known_classes else len(new.progress.seen)
        n_c = self.sample_size(classes, memory.capacity)
        [judges] = balanced_draws(memory.labels, int(n_c), rng)
        others = np.setdiff1d(np.arange(memory.capacity), judges, assume_unique=True)
        candidates = rng.permutation(others)[: int(n_c * classes)]
        minority = is_minority(new.labels[rest], memory.labels, rng.uniform(0, 1 / classes))
        incoming, leaving = self.exchange(memories, new, rest, judges, minority, candidates)
        memory.put(candidates[leaving], new.x, rest[incoming], new.labels, new.progress.task, new.kept)

    def exchange(
        self, memories: Memories, new: StreamBatch, rest: Ints, judges: Ints, minority: Ints, candidates: Ints
    ) -> tuple[Ints, Ints]:
        """Return positions in `rest` that get a slot, and the positions of those slots among the candidates."""
        memory = memories.replay
        images = torch.cat([memory[judges], memory[candidates], new.select(rest).x])
        features = features_of(self.net, images)
        labels = torch.from_numpy(np.concatenate([memory.labels[judges], memory.labels[candidates], new.labels[rest]]))
        labels = labels.to(features.device)
        n, end = len(judges), len(judges) + len(candidates)
        judging = torch.from_numpy(np.concatenate([np.arange(n), end + minority])).to(features.device)
        values = shapley_values(features[judging], labels[judging], features[n:], labels[n:], self.neighbours).sum(dim=0)
        return exchanges(values, len(candidates))


def is_minority(labels: Ints, stored: Ints, share: float) -> Ints:
    """Return positions of the labels that hold less than this share of the stored ones."""
    return np.flatnonzero((stored[None, :] == labels[:, None]).sum(axis=1) / len(stored) < share)
