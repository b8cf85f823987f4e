"""What all quadratic regularisers share: a penalty that holds weights near an anchor, each as hard as it is important.

    penalty = factor · Σ_p Ω_p (θ_p - θ*_p)²

over all trainable weights. A regulariser says how Ω is estimated; it consolidates (renews Ω and θ*) at the end of a task. Each
weight's part of the sum counts for the first tapped layer that depends on it (`nets/flat.py`), so the penalty is a row like any
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Progress, StreamBatch, Taps
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Addition, Traits
from gracecl.methods.state import per_weight
from gracecl.nets.flat import FlatParameters
from gracecl.nets.scoring import gradients_of_each, trainable
from gracecl.nets.tapped import TappedNet
from gracecl.registry.spec import AtLeast

FLOATS_AT_ONCE = 1 << 25
"""gradients of single images that are held at a time"""


@dataclass(eq=False, repr=False)
class QuadraticPenalty(Addition):
    """A pull of important weights towards where they were when the last task ended."""

    strength: Annotated[float, AtLeast(0)] = 1.0
    """λ, the strength of the pull"""
    exclude_head: bool = False
    """leave the classification heads free"""
    every: Annotated[int, AtLeast(0)] = 500
    """steps between two consolidations on a stream without task marks, which is our extension; 0 is never"""

    traits = Traits(boundaries="used", interval="every")
    state: ClassVar[tuple[str, ...]] = (per_weight("anchor", as_weights=True), per_weight("importance"), "consolidated")
    half: ClassVar[bool] = False
    """whether the paper writes the penalty as λ/2 instead of λ times the sum"""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.flat = FlatParameters(net, memories.replay.inputs)
        self.anchor = self.flat.snapshot()
        self.importance = torch.zeros_like(self.anchor)
        self.consolidated = False

    def consolidate(self, memories: Memories, progress: Progress) -> None:
        """Renew `importance` and `anchor`."""
        raise NotImplementedError(f"{type(self).__name__} must say how it finds what is important")

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.consolidate(memories, progress)
        self.consolidated = True

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        """No row before the first consolidation, so that the first task is that of the learner alone, to the bit."""
        if not self.consolidated or self.strength == 0:
            return {}
        return {f"penalty/{self.name}": (self.strength / 2 if self.half else self.strength) * self.distance()}

    def distance(self) -> Tensor:
        """Return `[L]`: Σ_p Ω_p (θ_p - θ*_p)² over the weights of each layer."""
        return self.flat.by_layer(self.importance * (self.flat.vector() - self.anchor).square())

    def counted(self, values: Tensor) -> Tensor:
        """Importances, 0 for weights that are left free."""
        return values.masked_fill(self.flat.is_head, 0.0) if self.exclude_head else values


@dataclass(eq=False, repr=False)
class MeasuredAtTaskEnd(QuadraticPenalty):
    """A penalty whose importances are found by looking at a sample of the task's images once more when the task ends."""

    n_fisher: Annotated[int, AtLeast(1)] = 1000
    """images of the current task that are kept for this, beside the memory"""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        memories.scratch(self.name, self.n_fisher)

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        memories[self.name].add(new.rng("observe"), new.x, new.labels, new.progress.task)

    def normalised(self, images: Tensor) -> Tensor:
        """Stored inputs as the net sees them; images that are normalised already stay."""
        inputs = self.net.inputs
        return images if isinstance(inputs, Images) and images.dtype != inputs.dtype else inputs.normalise(images)

    def average(self, x: Tensor, score: Callable[..., Tensor], of_each: Callable[[Tensor], Tensor], *given: Tensor) -> Tensor:
        """Return `[P]`: the mean over images of `of_each` of the gradient of `score(logits, *given)`, a few images
        at a time.
        """
        weights = trainable(self.net)
        sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        at_once = max(1, FLOATS_AT_ONCE // sum(value.numel() for value in weights.values()))
        for start in range(0, len(x), at_once):
            some = slice(start, start + at_once)
            found = gradients_of_each(
                self.net, weights, score, self.normalised(x[some])[:, None], *(value[some] for value in given)
            )
            for name, value in found.items():
                sums[name] += of_each(value).sum(dim=0)
        name_of = {id(parameter): name for name, parameter in self.net.named_parameters()}
        return self.counted(self.flat.gather(lambda parameter: sums[name_of[id(parameter)]]) / len(x))
