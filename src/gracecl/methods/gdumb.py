"""GDumb, greedy sampler and dumb learner. Prabhu, Torr, Dokania, ECCV 2020.

    for each image (x, y) from the stream:
        if y is new, or has fewer than memory / classes images in memory:
            if memory is full: drop a random image of the largest class
            memory <- memory ∪ (x, y)
    whenever predictions are wanted:
        θ <- fresh weights
        for each epoch over the shuffled memory:
            rate: a tenth of lr, then lr, then a cosine from lr to lr_min over epochs 2-3, 4-7, 8-15, …
            for each mini-batch: with probability cutmix, paste a box of other images of the batch into each
                step on λ CE(y) + (1 - λ) CE(y of the pasted), softmax over the classes met
        predict with the last epoch's weights

It learns nothing between predictions, so each evaluation costs epochs × memory images forward and backward, which a run counts
apart from its steps (`fit_images` in its timing); with `--eval-every` that cost comes every time.

Differences from the paper and its program: the program takes the first images of each class instead of a stream, and reports the
best test accuracy over the epochs, which selects on test data; "fresh weights" are those that the net was built with, the same
for every fit; equally large classes are ordered by when they were first met; images are seen through the run's augmentation
(`--augment partial` is the program's crop and flip); precision is the run's (the program uses half). Under grace(...) the past
accuracies that α follows do not exist, as the learner's own net is never trained, so α stays 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, StreamBatch, Taps
from gracecl.engine.fit import Fit
from gracecl.functional import optim
from gracecl.functional.losses import cross_entropy, mixed_cross_entropy
from gracecl.memory import Memories
from gracecl.memory.class_balanced import add_balanced
from gracecl.methods.base import Method, Traits
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast, Within


@methods.register("gdumb")
@dataclass(eq=False, repr=False)
class GDumb(Method):
    """GDumb: keep a class-balanced memory, and train from scratch on it whenever predictions are wanted."""

    epochs: Annotated[int, Within(1, 10_000)] = 256
    """over the memory before each evaluation: what a prediction costs"""
    batch: Annotated[int, AtLeast(1)] = 16
    """images per mini-batch of that training"""
    lr: float = 0.05
    """highest learning rate"""
    lr_min: float = 0.0005
    """the rate that each cosine goes down to"""
    momentum: float = 0.9
    """of SGD"""
    weight_decay: float = 1e-6
    """of SGD"""
    max_norm: float = 10.0
    """gradients with a larger norm are scaled down to it"""
    cutmix: Annotated[float, Within(0, 1)] = 0.5
    """probability that a mini-batch is mixed; with few epochs, 0 is better"""
    cutmix_alpha: Annotated[float, Above(0)] = 1.0
    """λ is drawn from Beta(alpha, alpha)"""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        pastes = "pastes parts of images into others (cutmix), unless cutmix=0" if self.cutmix else ""
        return Traits(trains="evaluation", met_only=True, images=pastes)

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        return iter(())

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        add_balanced(memories.replay, new.rng("store"), new.x, new.labels, new.progress.task, **new.kept)

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> Fit | None:
        images = len(memories.replay)
        if images == 0:
            return None
        fresh = copy.deepcopy(self.net)
        sgd = f"sgd(lr={self.lr}, momentum={self.momentum}, weight_decay={self.weight_decay})"
        return Fit(
            fresh,
            optim.build(sgd, fresh.parameter_groups()),
            images=images,
            epochs=self.epochs,
            batch=self.batch,
            rate=lambda epoch: self.rate_in(epoch) / self.lr,
            max_norm=self.max_norm,
        )

    def rate_in(self, epoch: int) -> float:
        """Return the learning rate of an epoch: warm-up, then cosines that restart at epochs 2, 4, 8, …"""
        if epoch < 2:
            return self.lr * (0.1 if epoch == 0 else 1)
        cycle = 1 << (epoch.bit_length() - 1)
        return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * (epoch - cycle) / cycle)) / 2

    def prepare(self, batch: Batch) -> None:
        """Apply CutMix: one box and one permutation for the mini-batch."""
        rng = batch.rng("cutmix")
        if rng.random() >= self.cutmix:
            return
        share, order = rng.beta(self.cutmix_alpha, self.cutmix_alpha), rng.permutation(len(batch))
        height, width = batch.x.shape[-2:]
        (top, bottom), (left, right) = (cut(n, share, int(rng.integers(n))) for n in (height, width))
        batch.x, share = paste(batch.x, torch.from_numpy(order).to(batch.x.device), (top, bottom, left, right))
        [block] = batch.blocks.values()
        block.found["other"] = torch.from_numpy(batch.labels[order]).to(batch.x.device)
        block.found["share"] = torch.tensor(share, device=batch.x.device)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        [block] = batch.blocks.values()
        if "share" not in block.found:
            return {"ce/all": cross_entropy(out.logits, batch.y, batch.seen)}
        return {"ce/all": mixed_cross_entropy(out.logits, batch.y, block.found["other"], block.found["share"], batch.seen)}


def cut(length: int, share: float, centre: int) -> tuple[int, int]:
    """Return where the box of CutMix begins and ends along an axis, clipped to the image."""
    half = int(length * math.sqrt(1 - share)) // 2
    return max(centre - half, 0), min(centre + half, length)


def paste(x: Tensor, order: Tensor, box: tuple[int, int, int, int]) -> tuple[Tensor, float]:
    """Return images with a box (top, bottom, left, right) of the images that `order` names, and the share of each
    that is its own.
    """
    top, bottom, left, right = box
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = x[order][..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (x.shape[-2] * x.shape[-1])
