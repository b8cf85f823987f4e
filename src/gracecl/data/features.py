"""Files of features: what a net made of a data set's images, computed once and then a data set like any other.

A file is in the safetensors format: labels as int64, features `[images, width]` in half or single precision, and in its header what
they are made of (`Origin`), the width of each tap and a digest of every block of rows. It is written block by block under the name
`FILE.part`, and each block's digest into `FILE.blocks`: whoever is killed goes on behind the last block whose digest is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from gracecl.data.dataset import Data
from gracecl.data.domains import Domains
from gracecl.data.pixels import BLOCK
from gracecl.data.unread import Unread
from gracecl.errors import UserError
from gracecl.files import (
    DIGEST_BYTES,
    Digest,
    check_header,
    check_place,
    lock,
    open_own,
    open_to_read,
    parse_json,
    sync_folder,
    without_nul,
)
from gracecl.inputs import Inputs
from gracecl.machine import check_room
from gracecl.terminal import print_err

FORMAT = "gracecl-features-1"
"""the entry of the header that holds all that is no tensor, as JSON"""
NumberFormat = Literal["half", "single"]
KINDS: dict[str, tuple[str, str]] = {"half": ("F16", "<f2"), "single": ("F32", "<f4")}
"""what safetensors and numpy call the two precisions"""
UNKNOWN = "-" * 2 * DIGEST_BYTES
"""in the place of a digest that is not known yet, and as long"""
ALIGNED = 64
MOST_HEADER = 100_000_000
"""bytes, beyond which safetensors refuses a file"""

_compared: set[tuple[Path, int, int, int]] = set()
"""files that this process found to match their digests"""


@dataclass(frozen=True)
class Origin:
    """What features are made of. Equal origins mean equal features."""

    net: str
    """its expression or name, without what depends on how it learns"""
    weights: str
    """digest of its parameters and buffers"""
    data: str
    """digest of the images as the net got them, and of their labels"""
    shape: tuple[int, ...]
    """of an image: channels, height, width"""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    backend: str
    """what computed them, such as "onnxruntime 1.20.1" """
    precision: NumberFormat

    @property
    def digest(self) -> str:
        return str(Digest().add(json.dumps(asdict(self), sort_keys=True).encode()))

    def request(self, images: str) -> dict[str, Any]:
        """What is asked for, before the images are read; `images` is the key of their files. Equal requests make equal files."""
        known = {name: value for name, value in asdict(self).items() if name != "data"}
        return json.loads(json.dumps(known | {"images": images}))  # type: ignore[no-any-return]


class Damaged(UserError):
    """A file of features that is not what was written."""


# Reading.


def from_features(path: str | Path) -> Data:
    """The data set in a file of features; it is mapped into memory, and its digests are checked once per process."""
    return FeatureFile.open(without_nul(path).expanduser().resolve()).data()


@dataclass(frozen=True)
class FeatureFile:
    """An open file of features: its header, and where each array lies."""

    path: Path
    about: dict[str, Any]
    places: dict[str, tuple[str, list[int], int]]
    """of each array: its type, its shape, and its first byte in the file"""

    @classmethod
    def open(cls, path: Path) -> FeatureFile:
        """Read the header and compare everything with its digests."""
        try:
            with open_to_read(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                header = file.read(length) if length <= min(size - 8, MOST_HEADER) else b""
        except FileNotFoundError:
            raise UserError(f"there is no file {path}; 'gracecl features' makes one") from None
        except IsADirectoryError:
            raise UserError(f"{path} is a folder, not a file of features; name the file that 'gracecl features' wrote") from None
        try:
            tensors = parse_json(header)
            written = tensors.pop("__metadata__")
            check_header(written, FORMAT, path, "make the features again")
            text = written[FORMAT]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is not a file of features; 'gracecl features NET DATA --out FILE' makes one") from None
        digest, _, packed = text.partition(":")
        if str(Digest().add(packed.encode())) != digest:
            raise damaged(path, "its header was changed")
        about = parse_json(packed)
        begin = 8 + length
        places = {name: (value["dtype"], value["shape"], begin + value["data_offsets"][0]) for name, value in tensors.items()}
        end = begin + max(value["data_offsets"][1] for value in tensors.values())
        if size != end:
            raise damaged(path, f"it has {size:,} bytes instead of {end:,}")
        found = cls(path, about, places)
        found.compare()
        return found

    def compare(self) -> None:
        """Refuse a file whose values differ from its digests; once per process as long as nobody writes to it."""
        state = self.path.stat()
        identity = (self.path, state.st_ino, state.st_size, state.st_mtime_ns)
        if identity in _compared:
            return
        if str(self._digest_of_labels) != self.about["labels_digest"]:
            raise damaged(self.path, "its labels were changed")
        rows = (self.array(f"{part}_x") for part in ("train", "test"))
        size = self.about["block"]
        blocks = (array[start : start + size] for array in rows for start in range(0, len(array), size))
        for number, (block, digest) in enumerate(zip(blocks, self.about["digests"], strict=True)):
            if str(Digest().add(np.ascontiguousarray(block).data)) != digest:
                raise damaged(self.path, f"block {number} does not match its digest")
        _compared.add(identity)

    @property
    def _digest_of_labels(self) -> Digest:
        digest = Digest()
        for name in self.places:
            if not name.endswith("_x"):
                digest.add(np.ascontiguousarray(self.array(name)).data)
        return digest

    def array(self, name: str) -> Any:
        kind, shape, offset = self.places[name]
        types = {"I64": "<i8"} | dict(KINDS.values())
        return np.memmap(self.path, types[kind], mode="c", offset=offset, shape=tuple(shape))

    @cached_property
    def origin(self) -> Origin:
        values: dict[str, Any] = self.about["origin"]
        return Origin(**values | {name: tuple(values[name]) for name in ("shape", "mean", "std")})

    @property
    def widths(self) -> tuple[int, ...]:
        """of the vectors of each tap, which stand side by side"""
        return tuple(self.about["widths"])

    def check(self, request: dict[str, Any]) -> FeatureFile:
        """Refuse a file that was made for another request; return this one."""
        own = self.about["request"]
        other = next((name for name, value in request.items() if own.get(name) != value), None)
        if other is not None:
            raise UserError(
                f"{self.path} holds other features: its {other} is {own.get(other)!r} and not {request[other]!r}; "
                "choose another file, or delete this one"
            )
        return self

    def data(self) -> Data:
        train_x, test_x = (torch.from_numpy(self.array(f"{part}_x")) for part in ("train", "test"))
        labels = self.about["labels"]
        common: dict[str, Any] = {
            "name": self.about["name"],
            "train_x": train_x,
            "train_y": np.array(self.array("train_y")),
            "test_x": test_x,
            "test_y": np.array(self.array("test_y")),
            "inputs": Inputs(train_x.shape[1:], train_x.dtype),
            "class_names": tuple(self.about["class_names"]),
            "tasks": self.about["tasks"],
            "labels": None if labels is None else tuple(labels),
            "origin": self.origin.digest,
        }
        if "train_domain" not in self.places:
            return Data(**common)
        common |= {part: np.array(self.array(part)) for part in ("train_domain", "test_domain")}
        return Domains(**common, domain_names=tuple(self.about["domain_names"]))


def damaged(path: Path, why: str) -> Damaged:
    return Damaged(f"{path} is damaged or was changed: {why}; delete it and compute the features again")


# Writing.


class FeatureWriter:
    """A file of features that is being computed. `begin` says where to go on, `add` takes block after block, `finish` names it."""

    def __init__(self, path: Path, images: Unread, origin: Origin, widths: Sequence[int]) -> None:
        """`origin.data` is not known before the last block; what is written there until then is ignored."""
        if origin.precision not in get_args(NumberFormat):
            raise UserError(f"precision must be one of {', '.join(get_args(NumberFormat))}, not {origin.precision!r}")
        self.path, self.images, self.origin, self.width = path, images, origin, sum(widths)
        self.part, self.log = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.blocks")
        self.kind = KINDS[origin.precision]
        self.labels = {"train_y": images.train_y, "test_y": images.test_y}
        self.labels |= {name: value for name, value in images.domains.items() if name != "domain_names"}
        plain = images.labels is None or all(isinstance(label, str | int) for label in images.labels)
        self.about: dict[str, Any] = {
            "request": origin.request(images.key),
            "name": images.name,
            "class_names": list(images.class_names),
            "labels": list(images.labels) if images.labels is not None and plain else None,
            "domain_names": list(images.domains.get("domain_names", ())),
            "tasks": images.tasks,
            "widths": list(widths),
            "block": BLOCK,
        }
        self.digests: list[str] = []
        """of the blocks that are there"""
        self.seen: list[str] = []
        """of the images that they are made of"""

    @property
    def done(self) -> int:
        """images"""
        return sum(size for size, _ in zip(self.sizes, self.digests, strict=False))

    @property
    def total(self) -> int:
        return len(self.images.train_y) + len(self.images.test_y)

    @property
    def sizes(self) -> list[int]:
        """of all blocks, those of the training images first"""
        parts = (len(self.images.train_y), len(self.images.test_y))
        return [min(BLOCK, count - start) for count in parts for start in range(0, count, BLOCK)]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process writes this file."""
        check_place(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_own(self.log) as handle:
            try:
                lock(handle.fileno(), wait=False)
            except BlockingIOError:
                print_err(f"another process computes {self.path.name}; waiting for it")
                lock(handle.fileno(), wait=True)
            yield

    def forget(self) -> None:
        """Remove the note of a file that somebody else has finished."""
        if not self.part.exists():
            self.log.unlink(missing_ok=True)

    def begin(self) -> int:
        """Take what a killed process left, as far as its digests are right; return the number of blocks that are there."""
        self.digests, self.seen = [], []
        there = self.part.stat().st_size if self.part.exists() else 0
        room = shutil.disk_usage(self.path.parent).free + there
        needed = self.begin_of_features + self.total * self.row
        check_room(needed, f"the features of {self.total:,} images", "choose another disk, or half precision", room)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        begun_by = json.dumps(self.about["request"])
        if lines[:1] == [begun_by] and self.part.is_file():
            with self.part.open("rb") as file:
                file.seek(self.begin_of_features)
                for size, line in zip(self.sizes, lines[1:], strict=False):
                    digest, _, seen = line.partition(" ")
                    if len(line) != 2 * len(UNKNOWN) + 1 or str(Digest().add(file.read(size * self.row))) != digest:
                        break
                    self.digests.append(digest)
                    self.seen.append(seen)
        kept = [begun_by, *map(" ".join, zip(self.digests, self.seen, strict=True))]
        with self._explained():
            os.truncate(self.log, 0)
            with open_own(self.log) as log:
                log.write("".join(f"{line}\n" for line in kept).encode())
            with open_own(self.part, empty=not self.digests) as part:
                os.ftruncate(part.fileno(), self.begin_of_features + self.done * self.row)
        return len(self.digests)

    def add(self, rows: npt.NDArray[Any], seen: str) -> None:
        """Append the features of the next block; `seen` is a digest of its images."""
        if not np.isfinite(rows).all():
            raise UserError("the net gave features that are NaN or infinite; check its weights and the normalisation")
        data = np.ascontiguousarray(rows, self.kind[1]).data
        with self._explained():
            with open_own(self.part) as part:
                part.write(data)
            with open_own(self.log) as log:
                log.write(f"{Digest().add(data)} {seen}\n".encode())
        self.digests.append(str(Digest().add(data)))
        self.seen.append(seen)

    def finish(self) -> FeatureFile:
        """Write the header and the labels, and give the file its name; return it."""
        with self._explained(), self.part.open("rb+") as file:
            file.write(self._head())
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.part, self.path)
        self.log.unlink()
        sync_folder(self.path.parent)
        return FeatureFile.open(self.path)

    @cached_property
    def row(self) -> int:
        """bytes of the features of an image"""
        return self.width * np.dtype(self.kind[1]).itemsize

    @cached_property
    def begin_of_features(self) -> int:
        """Where the first row lies, behind a header whose length is known before its digests are."""
        return len(self._head())

    def _head(self) -> bytes:
        """Header and labels; the same number of bytes whether the digests are known or not."""
        labels = b"".join(np.ascontiguousarray(value, "<i8").tobytes() for value in self.labels.values())
        known = len(self.digests) == len(self.sizes)
        data = Digest().add(labels)
        for digest in self.seen:
            data.add(digest.encode())
        about = self.about | {
            "origin": asdict(self.origin) | {"data": str(data) if known else UNKNOWN},
            "labels_digest": str(Digest().add(labels)),
            "digests": self.digests if known else [UNKNOWN] * len(self.sizes),
        }
        packed = json.dumps(about)
        arrays = [(name, "I64", [len(value)], 8 * len(value)) for name, value in self.labels.items()]
        for name, count in (("train_x", len(self.images.train_y)), ("test_x", len(self.images.test_y))):
            arrays.append((name, self.kind[0], [count, self.width], count * self.row))
        header: dict[str, Any] = {"__metadata__": {"format": "pt", FORMAT: f"{Digest().add(packed.encode())}:{packed}"}}
        offset = 0
        for name, kind, shape, size in arrays:
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        return len(text).to_bytes(8, "little") + text + labels

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {self.part} ({error.strerror or error}); the features of {self.done:,} of {self.total:,} images are "
                "kept there: make room, and give the same command again"
            ) from None


def digest_of_images(images: npt.NDArray[Any]) -> str:
    return str(Digest().add(np.ascontiguousarray(images).data))
