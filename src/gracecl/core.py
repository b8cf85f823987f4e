"""The vocabulary: what the net returns (`Taps`), what a step sees (`StreamBatch`, `Planning`, `Plan`, `Batch`), what a loss is
(`LossTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from gracecl import rng
from gracecl.errors import UserError
from gracecl.inputs import Batched, leaves

Ints = npt.NDArray[np.int64]

LossTable = dict[str, Tensor]
"""`{role/part: [L]}`: the terms of the objective, for each tapped layer. Those whose role is `log` are observations without a
gradient."""
View = tuple[Any, ...]
"""operations that make what an update sees of an image; () is the image as it is (`images/augment.py`)"""

NO_TASK = -1
NO_SOURCES: Ints = np.empty(0, np.int64)
"""of images that nobody has numbered: the engine counts them"""


def is_loss(term: str) -> bool:
    """Return whether a term is part of the objective; those named `log/…` are only recorded."""
    return not term.startswith("log/")


def is_penalty(term: str) -> bool:
    """Return whether a term (`penalty/…`) depends on the weights alone, not on the step's images."""
    return term.startswith("penalty/")


def total(table: LossTable) -> Tensor:
    """Return the objective: the sum of all loss terms over their layers."""
    losses = [value for term, value in table.items() if is_loss(term)]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0].sum()


@dataclass(eq=False)
class Taps:
    """Output of a net for B images: the layer is the first axis.

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
        """Return the taps of some images; if these had their own forward, gradients go back through that one alone."""
        if isinstance(rows, slice) and (part := self._parts.get((rows.start, rows.stop))) is not None:
            return part
        return Taps(self.features[:, rows], self.logits[:, rows], self._project)

    @staticmethod
    def mean(one: Taps, other: Taps) -> Taps:
        """Average the taps of two views of the same images."""
        return Taps((one.features + other.features) / 2, (one.logits + other.logits) / 2, one._project)

    @staticmethod
    def join(parts: list[Taps]) -> Taps:
        """Concatenate several forwards along the image axis."""
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
    """Classes and tasks that the learner has met, in first-seen order. `task` is NO_TASK on a stream without marks."""

    step: int = 0
    task: int = NO_TASK
    first_of_task: bool = False
    seen: tuple[int, ...] = ()
    current: tuple[int, ...] = ()
    """classes met in the current task"""
    marked: bool = True
    """whether the task is the stream's word; False where it was guessed from labels"""
    evaluating: bool = True
    """False while rules are prepared for predictions between evaluations, for a method whose `traits.approximates`"""

    @property
    def old(self) -> tuple[int, ...]:
        """classes met before the current task and not in it"""
        return tuple(label for label in self.seen if label not in self.current)

    def tick(self, every: int) -> bool:
        """True every `every` steps of a stream without task marks (never if 0)."""
        return every > 0 and (self.task == NO_TASK or not self.marked) and (self.step + 1) % every == 0


@dataclass(frozen=True, repr=False)
class StreamBatch:
    """One batch of the stream: raw images on the device, everything else on the host."""

    x: Batched
    """raw, as they came: a tensor with the batch first, or a `TensorTree` of such"""
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
    rng: Callable[[str], np.random.Generator] = rng.generator
    """gives the generator of a purpose at this step; the engine fills it in"""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """what to store beside each image, in the batch's order: `Batch.keep` fills it in"""
    found: dict[str, Any] = field(default_factory=dict)
    """what planning found out about the batch and `after_batch` needs again"""

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[Any]:
        """Images and labels, as in `for x, y in stream`."""
        return iter((self.x, self.labels))

    def __repr__(self) -> str:
        size = "; ".join(" × ".join(map(str, leaf.shape[1:])) for _, leaf in leaves(self.x))
        classes = np.unique(self.labels).tolist()
        task = "" if self.task == NO_TASK else f", task {self.task}"
        return f"StreamBatch({len(self)} images of {size}, classes {classes}{task})"

    def select(self, positions: Ints) -> StreamBatch:
        """Return some of the images as a batch of their own."""
        picked = torch.from_numpy(positions).to(self.x.device)
        kept = {name: value[picked.to(value.device)] for name, value in self.kept.items()}
        return replace(self, x=self.x[picked], labels=self.labels[positions], sources=self.sources[positions], kept=kept)


@dataclass(frozen=True)
class Planning:
    """What plans may use besides the new images and the memories."""

    rng: np.random.Generator
    """each plan's own: the engine sends it to its place before it asks for the next plan"""
    augment: View = ()
    """the run's augmentation, as one view"""
    learning_rate: float | None = None
    """of the update, where the optimizer is gradient descent without adaptive scaling"""
    preview: Callable[[tuple[View, ...]], Tensor] | None = None
    """gives views of the new images as the update would train on them, augmented and normalised, one view after the other"""


@dataclass(frozen=True)
class Selection:
    """The images of a block: positions in the stream's batch, then slots of a memory."""

    stream: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    slots: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    store: str = "replay"
    """which memory the slots belong to"""
    views: tuple[View, ...] | None = None
    """what the update sees of each image; None is one view, the plan's augmentation"""
    found: dict[str, Any] = field(default_factory=dict)
    """what planning found out about the block and the step needs again: `batch.blocks[name].found`"""

    def __len__(self) -> int:
        return len(self.stream) + len(self.slots)


@dataclass(frozen=True)
class Plan:
    """One update: its images by block, and how they pass the net. A plan without blocks is no update."""

    blocks: dict[str, Selection]
    forwards: list[list[str]] | None = None
    """blocks that share a forward pass, hence a BatchNorm batch; None is one pass for all"""
    rate: float = 1.0
    """the part of the optimizer's learning rate that the update uses"""
    augment: View | None = None
    """stands in place of the run's augmentation"""
    shared_out: str | None = None
    """who left the update only a part of a step's views or images, for the error where losses need more of them"""

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __getitem__(self, block: str) -> Selection:
        return self.blocks[block]


def apart(blocks: Iterable[str]) -> list[list[str]]:
    """Return `Plan.forwards` that gives each block its own forward pass."""
    return [[block] for block in blocks]


MEMORY_SOURCE = 1 << 40
"""added to a memory slot where it stands beside stream sources, so that the two never collide"""
MADE_SOURCE = -1
"""stands where an image was made of others and came from nowhere"""


@dataclass(frozen=True)
class Block:
    """The rows of a block in the batch: view after view, each with the same images in the same order."""

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
    stream: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """positions in the stream's batch of the images that came with it"""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.images * self.views)

    def view(self, number: int) -> slice:
        first = self.start + number * self.images
        return slice(first, first + self.images)


class Batch:
    """One update's training batch: augmented inputs on the device, and where each row came from."""

    def __init__(
        self,
        x: Batched,
        labels: Ints,
        sources: Ints,
        blocks: dict[str, Block],
        progress: Progress,
        classes: int,
        seed: int,
        repeat: int = 0,
        learning_rate: float | None = None,
        plan: Plan | None = None,
        new: StreamBatch | None = None,
        augment: View = (),
    ) -> None:
        self.x, self.labels, self.sources, self.blocks = x, labels, sources, blocks
        self.progress, self.classes, self.repeat, self._seed = progress, classes, repeat, seed
        self.learning_rate = learning_rate
        """of the step, where the optimizer is gradient descent without adaptive scaling"""
        self.plan = Plan({}) if plan is None else plan
        self._new = new
        self.augment = augment
        """what a block without views of its own is seen through"""
        self.y = torch.from_numpy(labels).to(x.device, non_blocking=True)
        self.targets: dict[str, Tensor] = {}
        """what hooks found out in this update, by name: what teachers say of the images, above all"""
        self.supervised: slice | Tensor = slice(0, len(labels))
        """rows that enter cross-entropy"""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, block: str) -> slice:
        return self.blocks[block].rows

    def slots(self, block: str) -> Ints:
        """Return the memory slots of a block's images (one view), where all came from a memory."""
        return self.sources[self.blocks[block].view(0)] - MEMORY_SOURCE

    def stored(self, block: str, name: str) -> Tensor:
        """Return what `keep` stored under a name beside each image of a block that came from memory: `[n]` or `[L,
        n, …]`.
        """
        attributes = self.blocks[block].memory.attributes
        if name not in attributes:
            raise UserError(f"nothing was stored under '{name}' beside the images; call batch.keep({name}=...) in after_step")
        values: Tensor = attributes[name]
        of_images = values.index_select(0, torch.from_numpy(self.slots(block)).to(values.device))
        return of_images.transpose(0, 1) if of_images.ndim > 1 else of_images

    def keep(self, **values: Tensor) -> None:
        """Store values beside the stream's images. Give those of all rows, `[B]` or `[L, B, …]`; the first view's are kept."""
        block = next((block for block in self.blocks.values() if block.from_stream), None)
        if block is None or self._new is None:
            return
        rows, kept = slice(block.start, block.start + block.from_stream), self._new.kept
        for name, value in values.items():
            own = value.detach()[rows] if value.ndim == 1 else value.detach()[:, rows].transpose(0, 1)
            own = own.float() if own.dtype in (torch.float16, torch.bfloat16) else own
            if len(own) < len(self._new):  # a part of the batch; other updates bring the rest
                whole = kept[name] if name in kept else own.new_zeros(len(self._new), *own.shape[1:])
                own = whole.index_copy(0, torch.from_numpy(block.stream).to(own.device), own)
            kept[name] = own

    def take_out(self, block: str) -> tuple[Tensor, Tensor]:
        """Remove the last block, for `prepare`: its images and labels, which the step then does not train on."""
        rows = self.blocks.pop(block).rows
        taken = self.x[rows], self.y[rows]
        self.x, self.y = self.x[: rows.start], self.y[: rows.start]
        self.labels, self.sources = self.labels[: rows.start], self.sources[: rows.start]
        self.supervised = slice(0, rows.start)
        return taken

    def append(self, block: str, x: Tensor, labels: Ints) -> None:
        """Append a block of images, for `prepare`: made of the step's own, with labels that may lie beyond the classes.

        `supervised` leaves them out, as nobody but the method that made them knows what they are.
        """
        self.blocks[block] = Block(len(self), len(labels), 1, 0, ())
        self.x = torch.cat([self.x, x])
        self.labels = np.concatenate([self.labels, labels])
        self.sources = np.concatenate([self.sources, np.full(len(labels), MADE_SOURCE)])
        self.y = torch.from_numpy(self.labels).to(self.x.device, non_blocking=True)

    @cached_property
    def stream_rows(self) -> Tensor:
        """Rows of the stream batch's own images: their raw views, or all views if every one is random.

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
        """Return this step's generator for a purpose, the same whenever it is asked for."""
        return rng.generator(self._seed, purpose, self.progress.step, self.repeat)

    def _mask(self, ids: tuple[int, ...]) -> Tensor:
        mask = torch.zeros(self.classes, dtype=torch.bool)
        mask[list(ids)] = True
        return mask.to(self.x.device, non_blocking=True)
