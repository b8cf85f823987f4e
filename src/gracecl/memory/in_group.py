"""A memory whose images are spread over the processes of a group: slot s of N processes lies in process s % N.

Labels, tasks, lists of slots and what methods store beside images are the same in every process, so all draw the same slots, and
the law of the reservoir is that of one process. To read images, all processes name the same slots. Each puts in those that it holds
and zeros for the others, and the bytes are added, which is exact for inputs of any type.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from gracecl import processes
from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.inputs import Batched, as_bytes, leaves, loaded, mapped, tree_of
from gracecl.machine import check_room
from gracecl.memory.reservoir import BOOKKEEPING, Memory
from gracecl.rows import Numbers, Rows

AT_ONCE = 1 << 26
"""bytes, at most, that are sent at once"""
READS = 1 << 32
"""added to a checksum of slots, so that it differs from the one of labels that `Engine.meet` compares"""
TOGETHER = (
    "with store='sharded' the processes of a group make the same calls: learn and save, and predict, evaluate and export where "
    "predictions need the memory"
)


class GroupRows:
    """Slots of which this process holds its own, as bytes."""

    def __init__(self, capacity: int, blank: Tensor) -> None:
        """`blank` is one example, as a batch."""
        self.shape, self.dtype = (capacity, *blank.shape[1:]), blank.dtype
        self.rank, self.count = processes.rank(), processes.count()
        held = len(range(self.rank, capacity, self.count))
        self.own = torch.zeros((held, blank.nbytes), dtype=torch.uint8, device=blank.device)

    def write(self, slots: Ints, values: Tensor) -> None:
        """Put those of the examples into slots that this process holds."""
        rows, places = self._own(slots)
        of_rows = as_bytes(values).index_select(0, rows.to(values.device))
        self.own.index_copy_(0, places.to(self.own.device), of_rows.to(self.own.device))

    def read(self, numbers: Numbers) -> Tensor:
        """The examples of these numbers, which all processes must name; many of them on the host."""
        where = self.own.device if len(numbers) <= self._at_once else "cpu"
        found = torch.empty((len(numbers), self.own.shape[1]), dtype=torch.uint8, device=where)
        for start, piece in zip(range(0, len(numbers), self._at_once), self.pieces(numbers), strict=True):
            found[start : start + len(piece)] = piece
        return found.view(self.dtype).view(len(numbers), *self.shape[1:])

    def pieces(self, numbers: Numbers) -> Iterator[Tensor]:
        """Yield what `read` returns piece by piece, as bytes."""
        for start in range(0, len(numbers), self._at_once):
            asked = numbers[start : start + self._at_once]
            awaited = f"this process waits for the others to read the same images of the memory; {TOGETHER}"
            if not processes.all_have(READS + zlib.crc32(asked.tobytes()), self.own.device, awaited):
                raise UserError(f"one process reads images of the memory that the others do not; {TOGETHER}")
            rows, places = (index.to(self.own.device) for index in self._own(asked))
            piece = self.own.new_zeros(len(asked), self.own.shape[1])
            piece.index_copy_(0, rows, self.own.index_select(0, places))
            distributed.all_reduce(piece)
            yield piece

    @property
    def _at_once(self) -> int:
        return max(1, AT_ONCE // self.own.shape[1])

    def _own(self, slots: Ints) -> tuple[Tensor, Tensor]:
        """Return which of the slots this process holds, and where."""
        rows = np.flatnonzero(slots % self.count == self.rank)
        return torch.from_numpy(rows), torch.from_numpy(slots[rows] // self.count)


class ShardedMemory(Memory):
    """Slots of which each process of a group holds a part: `store="sharded"`."""

    spread = True

    def room(self) -> Batched:
        here = len(range(processes.rank(), self.capacity, processes.count())) * self.inputs.bytes
        what = f"this process's part of a memory of {self.capacity} images"
        check_room(here + self.capacity * BOOKKEEPING, what, "use a smaller --memory")
        blank = self.inputs.blank(1, self.device)
        return mapped(lambda leaf: Rows(GroupRows(self.capacity, leaf), device=self.device), blank)  # type: ignore[arg-type, return-value]

    def __getitem__(self, slots: Ints) -> Batched:
        """Return the images in these slots, which all processes must name."""
        return loaded(self.images[slots])

    def write(self, slots: Ints, where: Tensor, rows: Batched) -> None:
        for (_, leaf), (_, values) in zip(leaves(self.images), leaves(rows), strict=True):
            leaf.source.write(slots, values)  # type: ignore[attr-defined]

    def load_images(self, saved: Any) -> None:
        slots = np.arange(self.filled)
        self.write(slots, torch.from_numpy(slots), loaded(tree_of(saved)))

    def send_images(self) -> None:
        for _, leaf in leaves(self.images[: self.filled]):
            for _ in leaf.source.pieces(leaf.chosen):  # type: ignore[attr-defined]
                pass
