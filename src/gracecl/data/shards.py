"""Shards: a data set in files of equally many examples, read by number, so that it need not fit into memory.

A folder holds `train-00000.safetensors`, …, `test-00000.safetensors`, …, `labels.safetensors` and, written last, `index.json`,
which has the digests of all of them. A shard has a tensor for each part of an example, the labels as they were given, and a
checksum of each row, which is compared whenever the row is read. Rows are read at their place in the file rather than mapped: the
process then holds what it asked for and no more, and a thread that reads ahead does not stop the others while it waits for the
disk.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gracecl.data.dataset import Data
from gracecl.errors import UserError
from gracecl.files import check_format, check_readable, file_digests, read_sealed, without_nul
from gracecl.inputs import Batched, Inputs, leaves, mapped, restored
from gracecl.rows import Numbers, Rows

FORMAT = 1
INDEX, PLAN, LABELS = "index.json", "plan.json", "labels.safetensors"
SPLITS = ("train", "test")
HELD_OPEN = 64
SMALL_TEST = 256 << 20
"""bytes up to which test examples are read into memory once"""


def from_shards(path: str | Path) -> Data:
    """The data set that `gracecl data pack` or `gracecl.pack` wrote into a folder.

    Training examples stay on the disk and are read when they are asked for; test examples too, if they are many.
    """
    folder = without_nul(path).expanduser().resolve()
    about = read_index(folder)
    data = data_in(folder, about)
    vars(data)["fingerprint"] = about["fingerprint"]  # that of this very data: `replace` makes one without it
    return data


def data_in(folder: Path, about: dict[str, Any]) -> Data:
    """The data set in a folder, as an index describes it."""
    inputs, labels = restored(about["inputs"]), _labels(folder)
    train, test = (_rows(folder, split, about, inputs) for split in SPLITS)
    if len(test) * inputs.bytes <= SMALL_TEST:
        test = mapped(lambda leaf: leaf.loaded(), test)  # type: ignore[attr-defined]
    given = about["labels"] and tuple(tuple(label) if isinstance(label, list) else label for label in about["labels"])
    names, tasks = tuple(about["class_names"]), about["tasks"]
    return Data(about["name"], train, labels["train"], test, labels["test"], inputs, names, tasks, labels=given)


def is_packed(path: str | Path) -> bool:
    """Whether a folder holds shards."""
    return (without_nul(path) / INDEX).is_file()


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index and compare the sizes of all files with it."""
    if not (folder / INDEX).is_file():
        unfinished = (folder / PLAN).is_file()
        why = "is not packed to its end; give the same 'gracecl data pack' again, which goes on" if unfinished else "has no shards"
        raise UserError(
            f"{folder} {why}" + ("" if unfinished else f" (no {INDEX}); make them with 'gracecl data pack SOURCE DEST'")
        )
    about = read_sealed(folder / INDEX)
    check_format(about.get("format"), FORMAT, folder / INDEX, "pack the data set again")
    for file, known in about["files"].items():
        size = (folder / file).stat().st_size if (folder / file).is_file() else 0
        if size != known["bytes"]:
            raise UserError(f"{folder / file} has {size} bytes of {known['bytes']}; {_REMEDY}")
    return about


_REMEDY = "copy it again, or delete index.json and it and give the same 'gracecl data pack' again"


def damaged_shards(path: str | Path) -> list[str]:
    """List the files that do not match their digests, one sentence each."""
    folder = without_nul(path).expanduser().resolve()
    found = []
    for file, known in read_index(folder)["files"].items():
        pairs = enumerate(zip_longest(file_digests(folder / file), known["digests"]))
        if wrong := [number for number, (now, then) in pairs if now != then]:
            found.append(f"{folder / file} does not match its digest in chunk {wrong[0]}; {_REMEDY}")
    return found


def shard_file(split: str, number: int) -> str:
    return f"{split}-{number:05d}.safetensors"


def checks_of(leaf: Tensor) -> Tensor:
    """Checksums of the rows of a tensor."""
    return torch.tensor([zlib.crc32(row) for row in as_bytes(leaf).numpy()], dtype=torch.int64)


def as_bytes(leaf: Tensor) -> Tensor:
    """`[N, bytes]` of a contiguous tensor, whose memory it shares."""
    return leaf.reshape(len(leaf), -1).view(torch.uint8)


def _labels(folder: Path) -> dict[str, Numbers]:
    try:
        check_readable(folder / LABELS)
        return {name: value.numpy() for name, value in load_file(folder / LABELS).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {folder / LABELS} ({error}); {_REMEDY}") from None


def _rows(folder: Path, split: str, about: dict[str, Any], inputs: Inputs) -> Batched:
    """All examples of a split, none of them read."""
    count, of_each = about[split]["rows"], about[split]["of_each"]
    versions = tuple(about["files"][shard_file(split, number)]["digests"][0] for number in range(-(-count // of_each)))
    places = (place for place, _ in leaves(inputs.blank(1)))
    return mapped(
        lambda leaf: Rows(ShardRows(folder, split, versions, next(places), (count, *leaf.shape[1:]), leaf.dtype, of_each)),  # type: ignore[arg-type, return-value]
        inputs.blank(1),
    )


class ShardRows(NamedTuple):
    """One part of all examples of a split, in shards."""

    folder: Path
    split: str
    versions: tuple[str, ...]
    """a digest of each file, so that a file made anew is not taken for the one that is open"""
    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_each: int
    """rows in each shard but the last"""

    def read(self, numbers: Numbers) -> Tensor:
        found = torch.empty((len(numbers), *self.shape[1:]), dtype=self.dtype)
        if len(numbers):
            rows = as_bytes(found).numpy()
            for row, number in zip(rows, numbers.tolist(), strict=True):
                shard, place = divmod(number, self.of_each)
                _opened(self.folder / shard_file(self.split, shard), self.versions[shard], self.place).read_into(row, place)
        return found


@lru_cache(maxsize=HELD_OPEN)
def _opened(path: Path, version: str, place: str) -> _OpenShard:
    return _OpenShard(path, place)


class _OpenShard:
    """One part of the examples in an open shard."""

    def __init__(self, path: Path, place: str) -> None:
        self.path, self._lock = path, threading.Lock()
        check_readable(path)
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        length = int.from_bytes(os.read(self._handle, 8), "little")
        header = json.loads(os.read(self._handle, length))
        self._begin, self._checks = (8 + length + header[f"{name}{place}"]["data_offsets"][0] for name in ("x", "check"))

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            os.close(handle)

    def read_into(self, row: Any, place: int) -> None:
        """Read a row into an array of bytes and compare its checksum."""
        self._read(row, self._begin + place * len(row))
        check = np.empty(1, "<i8")
        self._read(check.view(np.uint8), self._checks + 8 * place)
        if zlib.crc32(row) != check[0]:
            raise UserError(f"row {place} of {self.path} is damaged; {_REMEDY}")

    def _read(self, room: Any, offset: int) -> None:
        if hasattr(os, "preadv"):
            count = os.preadv(self._handle, [room], offset)
        else:
            with self._lock:
                os.lseek(self._handle, offset, os.SEEK_SET)
                content = os.read(self._handle, len(room))
            count, room[: len(content)] = len(content), np.frombuffer(content, np.uint8)
        if count < len(room):
            raise UserError(f"{self.path} ends too early; {_REMEDY}")
