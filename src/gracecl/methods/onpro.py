"""OnPro. Wei, Ye, Huang, Zhang, Shan, Online Prototype Learning for Online Continual Learning, ICCV 2023.

    for each batch x, labels y, of the first task:
        u <- n_recall images drawn from memory, none in the first batch
        step on CE(A(x), y) + L_new(x) + OPE(x) + OPE(u)
    for each batch x of a later task:
        u <- n_recall images drawn from memory, at most 7 per class met, none of them twice
        w <- APF(u), each image mixed of one of class a and λ_mix of one of class b; u itself in the first batch of a task
        step on mean_w [ (1 - λ_mix) CE(A(w), a) + λ_mix CE(A(w), b) ] + L_mem(w) + L_new(x) + OPE(x) + OPE(u)
    after each step: proto <- (p + p') / 2 of u, zero for classes that are not in u;  memory <- reservoir(memory, x)
    predict by the head

    OPE(x):  p_c, p'_c <- means over class c of the unit projections of x and of A(x)
        each of the p and p', at unit length, against all the others: mean of -log softmax(similarity / τ_p) at its class's other
    APF(u), m images, ρ = base_rate, p = mix_probability:
        ρ m of u, each with a partner among them: with probability p for all, and then p for each, λ_mix ~ U(0, 0.6), else 0
        the rest of pairs of classes {a, b} in proto, each pair a share softmax(1 / |proto_a - proto_b|) of them in whole numbers:
            an image of a with one of b, both drawn from memory: with probability p for the pair, λ_mix ~ Beta(0.4, 0.4), else 0

A, L_new and L_mem are those of `rotation_contrast`, as in OCM; there is no teacher. In L_mem an image has the class (1 - λ_mix) a +
λ_mix b, so one that is mixed of two classes stands alone with its own views. x, A(x) are two of the turned views of x; w and u have
forwards of their own. GRACE's α acts on the row `ce/…`; with several tapped layers, proto is the deepest layer's.

Differences from the paper and its program: A is the run's augmentation (`--augment simclr` is the program's); an image that APF
takes more than once as the first of a pair is seen through the same augmentation each time; where proto has fewer than two classes,
or none of them is in memory, all of w is mixed within u; equal prototypes have the distance 1e-8; labels of mixes are in double
precision (in the program's single precision two may coincide); the reservoir is exact; precision is the run's (the program uses
fp16); the projection's width goes with the net's; unseen classes are ruled out at inference. That p counts twice within u is the
program's, by the library it mixes with. On a stream without task marks every step is one of a later task, once memory holds an
image, which is our extension.

On a GPU each step waits for the device, as the host decides which classes are mixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, Ints, LossTable, Plan, Planning, Selection, StreamBatch, Taps
from gracecl.functional.losses import (
    INFO_NCE_EPSILON,
    classes_among,
    cross_entropy,
    mean_per_class,
    mixed_cross_entropy,
    prototype_contrast,
    unit,
)
from gracecl.images.augment import Blend, Floats
from gracecl.memory import Memories, Memory
from gracecl.methods.base import Traits
from gracecl.methods.rotation_contrast import RotationContrast, turned_plan
from gracecl.methods.state import per_class
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, Within

SMALLEST_DISTANCE = 1e-8


@dataclass(frozen=True)
class Mixes:
    """Images of the memory mixed of two each."""

    first: Ints
    second: Ints
    """slots"""
    share: Floats
    """λ_mix, of the second"""

    def __add__(self, more: Mixes) -> Mixes:
        return Mixes(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(more).values(), strict=True)))


@methods.register("onpro")
@dataclass(eq=False, repr=False)
class OnPro(RotationContrast):
    """OnPro: InfoNCE over rotations, contrast of class prototypes, and replay mixed of classes whose prototypes are close."""

    base_rate: Annotated[float, Within(0, 1)] = 0.9
    """ρ, the part of the replayed images that are mixed among themselves; the rest is of pairs of classes"""
    mix_probability: Annotated[float, Within(0, 1)] = 0.2
    """p, whether images are mixed"""
    base_share: Annotated[float, Within(0, 1)] = 0.6
    """the largest λ_mix of images that are mixed among themselves"""
    concentration: Annotated[float, Above(0)] = 0.4
    """of the Beta distribution that gives λ_mix of pairs of classes"""
    prototype_temperature: Annotated[float, Above(0)] = 0.5
    """τ_p"""

    traits = Traits(boundaries="used", instead="as in later tasks, from the start", images="turns images by 90 degrees")
    state = (per_class("proto"),)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.proto = net.projector.weight.new_zeros(net.classes, net.projector.weight.shape[-1])

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream, first_task = Selection(np.arange(len(new))), new.progress.task == 0
        slots = memories.replay.draw(self.n_recall if first_task else self.recalled(new), planning.rng)
        seen = {"seen": Selection(slots=slots, views=((), planning.augment))} if len(slots) else {}
        if first_task or not seen:
            return turned_plan({"new": stream}, {"supervised": stream, **seen}, planning.augment)
        plain = Mixes(slots, slots, np.zeros(len(slots)))
        mixes = plain if new.progress.first_of_task else self.prototype_feedback(slots, new, memories.replay, planning.rng)
        first, second = (memories.replay.labels[slots] for slots in (mixes.first, mixes.second))
        found = [("other", second), ("share", mixes.share), ("mixed_label", mixed_labels(first, second, mixes.share))]
        replay = Selection(slots=mixes.first, found={name: torch.from_numpy(value).to(new.x.device) for name, value in found})
        blend = Blend(memories.replay[mixes.second], mixes.share)
        plan = turned_plan({"new": stream, "replay": replay}, {"supervised": replay, **seen}, planning.augment)
        for block in ("replay", "supervised"):  # images are mixed before they are turned or augmented
            views = plan[block].views or (planning.augment,)
            plan.blocks[block] = replace(replay, views=tuple((blend, *view) for view in views))
        return plan

    def prototype_feedback(self, slots: Ints, new: StreamBatch, memory: Memory, rng: np.random.Generator) -> Mixes:
        """Draw the mixes of APF. Slots are needed on the host, so this waits for the device once."""
        proto: Floats = self.proto.double().cpu().numpy()
        classes = np.array([label for label in new.progress.seen if proto[label].any()], np.int64)
        in_pairs = len(slots) - int(self.base_rate * len(slots))
        if in_pairs == 0 or len(classes) < 2 or not any(memory.count(label=label) for label in classes.tolist()):
            return self.base_mixes(slots, len(slots), rng)
        counts = pair_counts(pair_probabilities(proto[classes]), in_pairs, rng)
        return self.base_mixes(slots, len(slots) - in_pairs, rng) + self.pair_mixes(classes, counts, memory, rng)

    def base_mixes(self, slots: Ints, n: int, rng: np.random.Generator) -> Mixes:
        """Mix n of the slots among themselves."""
        first = slots[rng.permutation(len(slots))[:n]]
        second = first[rng.permutation(n)]
        mixed = (rng.random() < self.mix_probability) & (rng.random(n) < self.mix_probability)
        return Mixes(first, second, np.where(mixed, rng.uniform(0, self.base_share, n), 0.0))

    def pair_mixes(self, classes: Ints, counts: Ints, memory: Memory, rng: np.random.Generator) -> Mixes:
        """Mix every pair of classes as often as its count; a class that left the memory is replaced by another of
        them.
        """
        held = np.array([memory.count(label=label) > 0 for label in classes.tolist()])
        pair = np.repeat(np.arange(len(counts)), counts)
        first, second = (
            one_of_each(classes[np.where(held[side], side, rng.choice(np.flatnonzero(held), len(side)))][pair], memory, rng)
            for side in np.triu_indices(len(classes), 1)
        )
        mixed = rng.random(len(counts)) < self.mix_probability
        share = rng.beta(self.concentration, self.concentration, len(pair))
        return Mixes(first, second, np.where(mixed[pair], share, 0.0))

    def labels_of(self, block: str, batch: Batch) -> Tensor:
        return batch.blocks[block].found["mixed_label"] if block == "replay" else super().labels_of(block, batch)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        rows = batch.rows("supervised")
        logits, y = out.logits[:, rows], batch.y[rows]
        if "replay" in batch.blocks:
            mixed = batch.blocks["replay"].found
            table = {"ce/replay": mixed_cross_entropy(logits, y, mixed["other"], 1 - mixed["share"])}
        else:
            table = {"ce/new": cross_entropy(logits, y)}
        table |= self.contrasts(out, batch)
        for block in ("new", "seen"):
            if block in batch.blocks:
                present = classes_among(batch.y[batch.blocks[block].view(0)], batch.classes)
                table[f"ope/{block}"] = prototype_contrast(*self.prototypes(out, batch, block), present, self.prototype_temperature)
        return table

    def prototypes(self, out: Taps, batch: Batch, block: str) -> tuple[Tensor, Tensor]:
        """Return `[L, C, E]` twice: mean unit projections of each class, of a block's raw images and of the
        augmented ones.
        """
        where = batch.blocks[block]
        projected = self.projected(out, batch)[:, where.rows] if block == "new" else out[where.rows].embedding
        z = unit(projected, INFO_NCE_EPSILON).view(len(projected), where.views, where.images, -1)
        y = batch.y[where.view(0)]
        raw, augmented = (mean_per_class(z[:, view], y, batch.classes) for view in (0, where.views // 2))
        return raw, augmented

    def after_step(self, out: Taps, batch: Batch) -> None:
        if "seen" in batch.blocks:
            raw, augmented = self.prototypes(out, batch, "seen")
            self.proto = (raw[-1] + augmented[-1]) / 2


def mixed_labels(first: Ints, second: Ints, share: Floats) -> Floats:
    """Return a class number for each mix: its images' where they agree, or where nothing is mixed in."""
    labels: Floats = share * (second - first) + first
    return labels


def pair_probabilities(proto: Floats) -> Floats:
    """Return softmax(1 / distance) over the pairs of prototypes, in the order (0, 1), (0, 2), …, (1, 2), …"""
    one, other = np.triu_indices(len(proto), 1)
    closeness = 1 / np.maximum(np.linalg.norm(proto[one] - proto[other], axis=1), SMALLEST_DISTANCE)
    weight = np.exp(closeness - closeness.max())
    probabilities: Floats = weight / weight.sum()
    return probabilities


def pair_counts(probabilities: Floats, n: int, rng: np.random.Generator) -> Ints:
    """Return how many of n each pair gets: its share, rounded; random pairs make up for what is missing or too many."""
    counts = np.rint(probabilities * n).astype(np.int64)
    missing = n - int(counts.sum())
    can_change = np.arange(len(counts)) if missing > 0 else np.flatnonzero(counts)
    counts[rng.permutation(can_change)[: abs(missing)]] += np.sign(missing)
    return counts


def one_of_each(labels: Ints, memory: Memory, rng: np.random.Generator) -> Ints:
    """Draw a slot of each label; repeats are possible."""
    classes, which = np.unique(labels, return_inverse=True)
    held = [memory.slots_of(label) for label in classes.tolist()]
    size = np.array([len(slots) for slots in held])
    place: Ints = (np.cumsum(size) - size)[which] + rng.integers(0, size[which])
    return np.concatenate(held)[place]
