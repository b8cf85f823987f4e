"""The vocabulary: what the net returns (`Taps`), what a step sees (`StreamBatch`, `Planning`, `Selection`, `Batch`), what a loss is
(`LossTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from gracecl import rng

Ints = npt.NDArray[np.int64]

LossTable = dict[str, Tensor]
"""`{role/part: [L]}`: the terms of the objective, for each tapped layer. Those whose role is `log` are observations without a
gradient; those whose role is `aside` have one, which the method's own `backward` takes."""

NO_TASK = -1
NO_SOURCES: Ints = np.empty(0, np.int64)
"""of images that nobody has numbered: the engine counts them"""


def is_loss(row: str) -> bool:
    """Terms named `log/…` and `aside/…` are recorded; all others are also summed into the objective."""
    return not row.startswith(("log/", "aside/"))


def is_penalty(row: str) -> bool:
    """Terms named `penalty/…` depend on the weights alone, not on the step's images."""
    return row.startswith("penalty/")


def total(table: LossTable) -> Tensor:
    """The objective: every loss row summed over its layers."""
    rows = [value for row, value in table.items() if is_loss(row)]
    return torch.stack(rows).sum() if len(rows) > 1 else rows[0].sum()


@dataclass(eq=False)
class Taps:
    """What a net returns for B images: the layer is the first axis.

    `features [L, B, D]`, `logits [L, B, C]`, and `embedding [L, B, E]` for contrastive terms, computed when first asked for: a
    method that has no such term does not pay for the projectors.

    A dataclass, and known to PyTorch as a container, so that DistributedDataParallel finds the tensors in it.
    """

    features: Tensor
    logits: Tensor
    _project: Callable[[Tensor], Tensor]
    _parts: dict[tuple[int, int], Taps] = field(default_factory=dict, init=False)

    @cached_property
    def embedding(self) -> Tensor:
        return self._project(self.features)

    @property
    def layers(self) -> int:
        return self.logits.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Taps:
        """The same taps for some of the images; if they had a forward of their own, gradients go back through that one alone."""
        if isinstance(rows, slice) and (part := self._parts.get((rows.start, rows.stop))) is not None:
            return part
        return Taps(self.features[:, rows], self.logits[:, rows], self._project)

    @staticmethod
    def mean(one: Taps, other: Taps) -> Taps:
        """What two views of the same images show on average."""
        return Taps((one.features + other.features) / 2, (one.logits + other.logits) / 2, one._project)

    @staticmethod
    def join(parts: list[Taps]) -> Taps:
        """Several forwards, one after the other along the image axis."""
        if len(parts) == 1:
            return parts[0]
        features = torch.cat([part.features for part in parts], dim=1)
        joined = Taps(features, torch.cat([part.logits for part in parts], dim=1), parts[0]._project)
        start = 0
        for part in parts:
            stop = start + part.logits.shape[1]
            joined._parts[start, stop] = part
            start = stop
        return joined


def _rebuilt(tensors: Iterable[Tensor], project: Any) -> Taps:
    features, logits = tensors
    return Taps(features, logits, project)


register_pytree_node(Taps, lambda taps: ([taps.features, taps.logits], taps._project), _rebuilt)


@dataclass(frozen=True)
class Progress:
    """Which classes and tasks the learner has met, all in first-seen order. `task` is NO_TASK on a stream without marks."""

    step: int = 0
    task: int = NO_TASK
    first_of_task: bool = False
    seen: tuple[int, ...] = ()
    current: tuple[int, ...] = ()
    """classes met in the current task"""
    marked: bool = True
    """whether the task is the stream's word; False where it was guessed from labels"""

    @property
    def old(self) -> tuple[int, ...]:
        """classes met before the current task and not in it"""
        return tuple(label for label in self.seen if label not in self.current)

    def tick(self, every: int) -> bool:
        """Whether this step completes another `every` of them where no marks say when tasks end; 0 is never."""
        return every > 0 and (self.task == NO_TASK or not self.marked) and (self.step + 1) % every == 0


@dataclass(frozen=True, repr=False)
class StreamBatch:
    """One batch of the stream: raw images on the device, everything else on the host."""

    x: Tensor
    """uint8 [b, channels, height, width]"""
    labels: Ints
    sources: Ints = field(default_factory=lambda: NO_SOURCES)
    """a number that identifies each image within the stream; left out, the engine counts"""
    task: int = NO_TASK
    fresh: bool = True
    """False in later epochs over a task: such images were offered to the memory already"""
    last_of_task: bool = False
    """the task ends after it; where nobody can know that in advance, it ends when a batch of another task comes"""
    marked: bool = True
    """False where the task was guessed from labels"""
    progress: Progress = Progress()
    """where the learner stands when it meets the batch; the engine fills it in"""

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        size, classes = " × ".join(map(str, self.x.shape[1:])), np.unique(self.labels).tolist()
        task = "" if self.task == NO_TASK else f", task {self.task}"
        return f"StreamBatch({len(self)} images of {size}, classes {classes}{task})"

    def select(self, positions: Ints) -> StreamBatch:
        """Some of the images, as a batch of their own."""
        picked = torch.from_numpy(positions).to(self.x.device)
        return replace(self, x=self.x[picked], labels=self.labels[positions], sources=self.sources[positions])


@dataclass(frozen=True)
class Planning:
    """What a plan may use besides the new images and the memories."""

    rng: np.random.Generator
    repeat: int = 0
    """which of the batch's updates is planned"""
    learning_rate: float | None = None
    """of the update, where the optimizer is gradient descent without adaptive scaling"""
    preview: Callable[[], Tensor] | None = None
    """gives the new images as the update would train on them, augmented and normalised, one view after the other"""


@dataclass(frozen=True)
class Selection:
    """The images of a block: positions in the stream's batch, then slots of a memory."""

    stream: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    slots: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    store: str = "replay"
    """which memory the slots belong to"""
    before: tuple[Any, ...] = ()
    """transformations of its images that come before those of each view"""
    shown: tuple[int, ...] | None = None
    """which of the method's views of the block the update shows; None is all"""
    found: dict[str, Any] = field(default_factory=dict)
    """what planning found out about the block and the step needs again: `batch.blocks[name].found`"""

    def __len__(self) -> int:
        return len(self.stream) + len(self.slots)

    def views(self, of_method: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The views that the update shows, of those that the method gives the block."""
        return [(*self.before, *view) for number, view in enumerate(of_method) if self.shown is None or number in self.shown]


MEMORY_SOURCE = 1 << 40
"""added to a memory slot where it stands beside stream sources, so that the two never collide"""
MADE_SOURCE = -1
"""stands where an image was made of others and came from nowhere"""


@dataclass(frozen=True)
class Block:
    """Where a block's rows are in the batch: view after view, each with the same images in the same order."""

    start: int
    images: int
    views: int
    from_stream: int
    """how many of the images came with the stream batch; they stand first"""
    raw_views: tuple[int, ...]
    """views that show the image as it is or mirrored, without anything random"""
    found: dict[str, Any] = field(default_factory=dict)
    """what planning and `prepare` found out about the block"""
    memory: Any = None
    """the memory that its other images come from"""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.images * self.views)

    def view(self, number: int) -> slice:
        first = self.start + number * self.images
        return slice(first, first + self.images)


class Batch:
    """What one step trains on: augmented pixels on the device, and where each row came from."""

    def __init__(
        self,
        x: Tensor,
        labels: Ints,
        sources: Ints,
        blocks: dict[str, Block],
        progress: Progress,
        classes: int,
        seed: int,
        repeat: int = 0,
        learning_rate: float | None = None,
    ) -> None:
        self.x, self.labels, self.sources, self.blocks = x, labels, sources, blocks
        self.progress, self.classes, self.repeat, self._seed = progress, classes, repeat, seed
        self.learning_rate = learning_rate
        """of the step, where the optimizer is gradient descent without adaptive scaling"""
        self.y = torch.from_numpy(labels).to(x.device, non_blocking=True)
        self.targets: dict[str, Tensor] = {}
        """what the hook `targets` gave: what teachers say of the images"""
        self.supervised: slice | Tensor = slice(0, len(labels))
        """rows that enter cross-entropy"""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, block: str) -> slice:
        return self.blocks[block].rows

    def slots(self, block: str) -> Ints:
        """The memory slots of a block's images, one view of them, where all came from a memory."""
        return self.sources[self.blocks[block].view(0)] - MEMORY_SOURCE

    def stored(self, block: str, name: str) -> Tensor:
        """What the memory holds under a name beside each image of a block that came from it."""
        values: Tensor = self.blocks[block].memory.attributes[name]
        return values.index_select(0, torch.from_numpy(self.slots(block)).to(values.device))

    def append(self, block: str, x: Tensor, labels: Ints) -> None:
        """A further block of images, for `prepare`: made of the step's own, with labels that may lie beyond the classes.

        `supervised` leaves them out, as nobody but the method that made them knows what they are.
        """
        self.blocks[block] = Block(len(self), len(labels), 1, 0, ())
        self.x = torch.cat([self.x, x])
        self.labels = np.concatenate([self.labels, labels])
        self.sources = np.concatenate([self.sources, np.full(len(labels), MADE_SOURCE)])
        self.y = torch.from_numpy(self.labels).to(self.x.device, non_blocking=True)

    @cached_property
    def stream_rows(self) -> Tensor:
        """The stream batch's own images where they first stand: their raw views, or all views if every one is random.

        All rows, if none came with the stream.
        """
        block = next((block for block in self.blocks.values() if block.from_stream), None)
        if block is None:
            return torch.arange(len(self), device=self.x.device)
        views = block.raw_views or range(block.views)
        rows = [block.view(number).start + np.arange(block.from_stream) for number in views]
        return torch.from_numpy(np.concatenate(rows)).to(self.x.device)

    @cached_property
    def from_memory(self) -> Tensor:
        """[B] True for images that came from a memory"""
        return torch.from_numpy(self.sources >= MEMORY_SOURCE).to(self.x.device)

    @cached_property
    def seen(self) -> Tensor:
        """[C] True for classes met so far"""
        return self._mask(self.progress.seen)

    @cached_property
    def current(self) -> Tensor:
        """[C] True for classes met in the current task"""
        return self._mask(self.progress.current)

    @cached_property
    def old(self) -> Tensor:
        """[C] True for classes met before the current task and not in it"""
        return self.seen & ~self.current

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator of this step's own, the same whenever it is asked for."""
        return rng.generator(self._seed, purpose, self.progress.step, self.repeat)

    def _mask(self, ids: tuple[int, ...]) -> Tensor:
        mask = torch.zeros(self.classes, dtype=torch.bool)
        mask[list(ids)] = True
        return mask.to(self.x.device, non_blocking=True)
