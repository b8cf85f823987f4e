"""What methods that replay images have in common, whatever they do with them: how many, how often, and how they predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from gracecl.core import Ints, Plan, Planning, Progress, StreamBatch, Taps
from gracecl.functional.losses import classes_among
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.nets.class_means import class_means, nearest_mean
from gracecl.nets.closed_rule import CLOSED_RULES, closed_rule
from gracecl.nets.tapped import TappedNet
from gracecl.registry.spec import AtLeast, Within


@dataclass(eq=False, repr=False)
class Replay(Method):
    """A method that draws images from memory at each step."""

    n_recall: Annotated[int, AtLeast(0)] = 64
    """images drawn from memory at each step"""
    mem_iters: Annotated[int, Within(1, 1000)] = field(default=1, kw_only=True)
    """optimizer steps on each batch of the stream, each with images drawn anew; the batch is stored once"""
    inference: Literal["linear", "ncm", "lda", "ridge"] = field(default="linear", kw_only=True)
    """predict by the head, or by the memory's features: the nearest class mean, discriminant analysis or ridge regression"""
    recall_per_class: Annotated[int, AtLeast(1)] | None = field(default=None, kw_only=True)
    """draw at most so many images for each class met so far, which counts while these are few; None draws n_recall at once"""

    def recalled(self, new: StreamBatch) -> int:
        """Return how many images to draw from memory in this step."""
        limit = self.recall_per_class
        return self.n_recall if limit is None else min(self.n_recall, limit * len(new.progress.seen))

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        for _ in range(self.mem_iters):
            yield self.plan(new, memories, planning)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        """Return one update: which images make it up."""
        raise NotImplementedError(f"{type(self).__name__} must say which images make up an update")

    @property
    def rule(self) -> str:
        return f"{self.inference}_last"

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        if self.inference == "ncm":
            images, labels = self.past(memories)
            self.means = class_means(net, images, labels, progress.seen)
            held = classes_among(torch.from_numpy(labels), net.classes).to(self.means.device)
            self.predictable = held if len(labels) else torch.ones_like(held)
        elif self.inference in CLOSED_RULES:
            self.by_sums = closed_rule(net, *self.past(memories), self.inference)

    def past(self, memories: Memories) -> tuple[Tensor, Ints]:
        """Return the images that class means are taken of, and their labels."""
        memory = memories.replay
        return memory.examples[:2]

    def rules(self, out: Taps) -> dict[str, Tensor]:
        """By the memory's features, a class that it holds no image of is never predicted."""
        if self.inference in CLOSED_RULES:
            return super().rules(out) | {self.inference: self.by_sums(out.features.double())}
        if self.inference != "ncm":
            return super().rules(out)
        nearest = nearest_mean(out.features, self.means).masked_fill(~self.predictable, -torch.inf)
        return super().rules(out) | {"ncm": nearest}
