"""RAR, Repeated Augmented Rehearsal. Zhang et al., A Simple but Strong Baseline for Online Continual Learning, NeurIPS 2022.

    for each batch B_n from the stream:
        K times:
            B_M <- n_recall images drawn from memory
            B_n', B_M' <- RandAugment(P operations, magnitude Q) of each image, drawn anew
            step on CE(B_n') + CE(B_M'), one forward over both
        memory <- reservoir(memory, B_n), once

It is a way to train any method: `rar()` is around er, and rar(derpp()), rar(scr()) … repeat and augment those.

(Retrospective Adversarial Replay, which goes by the same letters, is `adversarial_replay`.)

Differences from the paper and its program: K, P and Q are fixed (the paper also adapts them to the memory's training accuracy); an
image passes P operations (the program's transform is inserted three times, so its P = 1 is `operations=3`); ranges in pixels are
scaled to the image (the program's shift of 47 pixels leaves nothing of an image of 32; `pixel_ranges="absolute"` gives that); 64
images are drawn (the program: 10); predictions are the head's (the program's scripts also ask for nearest class means).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.images.rand_augment import RandAugment
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.registry import methods
from gracecl.registry.spec import Within


@methods.register("rar")
@dataclass(eq=False, repr=False)
class RAR(Wrapper):
    """Repeated augmented rehearsal: several steps per batch of the stream, each with images drawn and strongly augmented anew."""

    inner: Method = "er(reduction='sum_of_means')"  # type: ignore[assignment]
    """the method whose steps are repeated"""
    iterations: Annotated[int, Within(1, 1000)] = 10
    """K, steps per batch of the stream; the paper compares 1, 2, 5, 10 and 20"""
    augmentation: Literal["randaugment", "run"] = "randaugment"
    """what replaces the run's augmentation: RandAugment, or nothing (EMA's base: rar(er(), iterations=3, augmentation='run'))"""
    operations: Annotated[int, Within(0, 100)] = 1
    """P, operations of RandAugment on each image"""
    magnitude: Annotated[float, Within(0, 30)] = 14
    """Q, their strength from 0 to 30"""
    pixel_ranges: Literal["scaled", "absolute"] = "scaled"
    """whether RandAugment's shifts and cut-outs go with the image's size or are pixels, as for images of 224"""
    memory_weight: float = 1.0
    """w_m, of the cross-entropy on images from memory; like w_s it needs an inner method that keeps the two means apart"""
    stream_weight: float = 1.0
    """w_s, of the cross-entropy on the stream's images"""
    joint: bool = True
    """one forward over all blocks, as the paper's program does; False leaves that to the inner method"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inside.traits.trains == "evaluation":
            raise UserError(f"rar repeats steps on the stream, of which {self.inner!r} makes none; use {self.inner!r} alone")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        strong = self.augmentation == "randaugment"
        return Traits(images="shows images through RandAugment, unless augmentation='run'" if strong else "")

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        planning = self.augmented(planning)
        for _ in range(self.iterations):
            for plan in self.inside.plans(new, memories, planning):
                yield self.shown(plan, planning)

    def closing(self, progress: Progress, memories: Memories, planning: Planning) -> Iterator[Plan]:
        planning = self.augmented(planning)
        for plan in self.inside.closing(progress, memories, planning):
            yield self.shown(plan, planning)

    def augmented(self, planning: Planning) -> Planning:
        """Return the planning with this method's augmentation."""
        if self.augmentation == "run":
            return planning
        return replace(planning, augment=(RandAugment(self.operations, self.magnitude, self.pixel_ranges == "scaled"),))

    def shown(self, plan: Plan, planning: Planning) -> Plan:
        """Return a plan with the augmentation of its planning, and in one forward if `joint` says so."""
        return replace(plan, augment=planning.augment, forwards=None if self.joint else plan.forwards)

    def adjust(self, table: LossTable, out: Taps, batch: Batch) -> LossTable:
        for row, weight in (("ce/new", self.stream_weight), ("ce/replay", self.memory_weight)):
            if weight != 1 and row in table:
                table = table | {row: weight * table[row]}
            elif weight != 1 and "ce/new" not in table:
                raise UserError(f"rar: {self.inner!r} has no row {row} to weigh (its rows: {', '.join(table)})")
        return table
