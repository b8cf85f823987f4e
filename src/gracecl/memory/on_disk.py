"""A memory whose images lie in a file that is mapped, so that it may be larger than main memory.

Writing changes the process's own copies of pages, never the file. A run's checkpoint is therefore a few slots: those written since
the last one go into a journal beside the file, the checkpoint names the journal, and when the checkpoint is in its place the slots
are written into the file, too. At every moment the file and the journal that the last complete checkpoint names make up the memory
at its step, whatever killed the process or cut the power; a checksum of each slot in the checkpoint shows it. Whoever asks for the
state outside `checkpointing` gets all images, as of a memory in RAM.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.files import check_place, check_readable, make_folder, replacing
from gracecl.inputs import Batched, Inputs, as_bytes, leaves, mapped, plain, tree_of, write_rows
from gracecl.machine import check_room, free_space
from gracecl.memory.reservoir import BOOKKEEPING, Memory
from gracecl.rows import Numbers, Rows

PIECE = 4096
"""slots handled at once where all are gone through"""


class MappedRows(NamedTuple):
    """The slots of a mapped tensor."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, numbers: Numbers) -> Tensor:
        return self.tensor.index_select(0, torch.from_numpy(numbers))


class DiskMemory(Memory):
    """Slots in a mapped file: `store="disk"`."""

    def __init__(self, capacity: int, inputs: Inputs, device: torch.device | str = "cpu", file: Path | None = None) -> None:
        """`file` is where the images lie; a temporary one, which ends with the process, if left out."""
        if file is None:
            file = Path(tempfile.mkdtemp(prefix="gracecl-memory-")) / "memory"
            weakref.finalize(self, shutil.rmtree, file.parent, ignore_errors=True)
        self.file = file
        self._changed = np.zeros(capacity, np.bool_)
        """slots written since the file was"""
        self._checks = np.zeros(capacity, np.int64)
        self._generation, self._journal = 0, False
        super().__init__(capacity, inputs, device)

    def room(self) -> Batched:
        check_room(self.capacity * BOOKKEEPING, f"the labels of a memory of {self.capacity} images", "use a smaller --memory")
        make_folder(self.file.parent)
        needed, room = self.capacity * self.inputs.bytes, free_space(self.file.parent)
        check_room(needed, f"a memory of {self.capacity} images on disk", "use a smaller --memory", room)
        check_place(self.file)
        self._handle = os.open(self.file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
        os.ftruncate(self._handle, needed)
        self._map = _private(self._handle, needed) if needed else None
        self._begins: list[int] = []
        self._slots: Batched = mapped(self._leaf, self.inputs.blank(1))
        return mapped(lambda leaf: Rows(MappedRows(leaf), device=self.device), self._slots)  # type: ignore[arg-type, return-value]

    def _leaf(self, one: Tensor) -> Tensor:
        """All slots of one part of an example, behind those of the parts before it."""
        begin = sum(self.capacity * leaf[0].nbytes for _, leaf in list(leaves(self.inputs.blank(1)))[: len(self._begins)])
        self._begins.append(begin)
        shape = (self.capacity, *one.shape[1:])
        if self._map is None:
            return torch.zeros(shape, dtype=one.dtype)
        length = self.capacity * one[0].nbytes
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=begin).view(one.dtype).view(shape)

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            os.close(handle)

    def __getitem__(self, slots: Ints) -> Batched:
        """Return the images in these slots."""
        return self._slots.index_select(0, torch.from_numpy(slots)).to(self.device)

    def write(self, slots: Ints, where: Tensor, rows: Batched) -> None:
        write_rows(self._slots, torch.from_numpy(slots), rows.to("cpu"))
        self._changed[slots] = True

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Within it the state names a journal; when it ends without an error, a checkpoint with that state is in its place."""
        slots = np.flatnonzero(self._changed)
        self._generation += 1
        self._checks[slots] = _checks(self._slots[torch.from_numpy(slots)])
        content = {f"x{place}": leaf for place, leaf in leaves(self._slots[torch.from_numpy(slots)])}
        try:
            with replacing(self._journal_file) as beside:
                save_file({"slots": torch.from_numpy(slots), **content}, beside)
        except OSError as error:
            raise UserError(
                f"cannot write {self._journal_file} ({error}); free some space, what was saved before is intact"
            ) from None
        self._journal = True
        try:
            yield
        finally:
            self._journal = False
        self._apply(slots, content)
        for other in self.file.parent.glob(f"{self.file.name}-*.journal"):
            if other != self._journal_file:
                other.unlink(missing_ok=True)

    @property
    def _journal_file(self) -> Path:
        return self.file.with_name(f"{self.file.name}-{self._generation}.journal")

    def _apply(self, slots: Ints, content: dict[str, Tensor]) -> None:
        """Write slots into the file; from then on the process's own copies of them are not needed."""
        for (place, leaf), begin in zip(leaves(self._slots), self._begins, strict=True):
            size = leaf[0].nbytes if self.capacity else 0
            rows = _bytes(content[f"x{place}"])
            for slot, row in zip(slots.tolist(), rows, strict=True):
                os.lseek(self._handle, begin + slot * size, os.SEEK_SET)
                os.write(self._handle, row.data)
        os.fsync(self._handle)
        self._changed[slots] = False
        if self._map is not None and not self._changed.any() and hasattr(mmap, "MADV_DONTNEED"):
            for first, last in self._pages(slots):
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _pages(self, slots: Ints) -> Iterator[tuple[int, int]]:
        """Return the whole pages that hold these slots, as ranges of bytes that do not touch; others stay where they are."""
        for (_, leaf), begin in zip(leaves(self._slots), self._begins, strict=True):
            size = leaf[0].nbytes if len(slots) else 0
            first = (begin + slots * size) // mmap.PAGESIZE
            last = -(-(begin + (slots + 1) * size) // mmap.PAGESIZE)
            apart = np.flatnonzero(first[1:] > last[:-1]) + 1
            for one, end in zip([0, *apart] if len(slots) else [], [*(apart - 1), len(slots) - 1], strict=False):
                yield int(first[one]) * mmap.PAGESIZE, int(last[end]) * mmap.PAGESIZE

    def saved_images(self) -> Any:
        if not self._journal:
            return plain(self._slots[: self.filled])
        return {"on_disk": self.filled * self.inputs.bytes, "generation": self._generation, "checks": self._checks[: self.filled]}

    def load_images(self, saved: Any) -> None:
        if not (isinstance(saved, dict) and "generation" in saved):
            self._slots[: self.filled] = tree_of(saved)
            self._changed[: self.filled] = True
            return
        self._generation, self._checks[: self.filled] = saved["generation"], saved["checks"]
        try:
            check_readable(self._journal_file)
            content = load_file(self._journal_file)
        except (SafetensorError, OSError) as error:
            raise self._other(str(error)) from None
        self._apply(content.pop("slots").numpy(), content)
        for start in range(0, self.filled, PIECE):
            held = slice(start, min(start + PIECE, self.filled))
            wrong = np.flatnonzero(_checks(self._slots[held]) != self._checks[held])
            if len(wrong):
                raise self._other(f"slot {start + wrong[0]} does not match its checksum")

    def _other(self, why: str) -> UserError:
        return UserError(
            f"{self.file} and its journal are not the memory that the checkpoint was written with ({why}); put both back from a "
            "copy, or delete the checkpoint to start this run anew"
        )


def _private(handle: int, size: int) -> mmap.mmap:
    """Map a file so that changes stay in this process; without room reserved for them, where the system can."""
    if hasattr(mmap, "MAP_NORESERVE"):
        return mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE | mmap.MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(handle, size, access=mmap.ACCESS_COPY)


def _bytes(leaf: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = as_bytes(leaf).numpy()
    return array


def _checks(examples: Batched) -> Ints:
    """A checksum of each example, over all its parts."""
    found = np.zeros(len(examples), np.int64)
    for _, leaf in leaves(examples):
        found[:] = [zlib.crc32(row, int(before)) for row, before in zip(_bytes(leaf), found, strict=True)]
    return found
