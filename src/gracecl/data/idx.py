"""The idx format of MNIST and the sets that follow it: a short header, then bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, ClassVar, cast

import numpy as np

from gracecl.data.dataset import ImageArray
from gracecl.data.pixels import ArrayPixels
from gracecl.data.source import Contents, Source, differences
from gracecl.errors import UserError

UNSIGNED_BYTE = 8
CHUNK = 1 << 20


class IdxSource(Source):
    """Four idx files: images and labels for training (`train-`) and testing (`t10k-`)."""

    classes = 10
    size = 28
    tasks = 5
    class_names: ClassVar[tuple[str, ...]]
    train_counts: ClassVar[tuple[int, ...]]
    test_counts: ClassVar[tuple[int, ...]]
    digest: ClassVar[str]

    def files(self, folder: Path) -> list[Path]:
        names = (f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        return [self._file(folder, name) for name in names]

    def read(self, folder: Path) -> Contents:
        train_x, train_y, test_x, test_y = (read_idx(path) for path in self.files(folder))
        for part, x, y in (("train", train_x, train_y), ("t10k", test_x, test_y)):
            if x.ndim != 3 or y.shape != x.shape[:1] or y.max(initial=0) >= self.classes:
                raise UserError(
                    f"the {part} files in {folder} do not fit together: images {x.shape}, labels {y.shape}; "
                    f"remove them and run 'gracecl data get {self.name}'"
                )
        return Contents(
            train=ArrayPixels(train_x[:, None]),
            train_y=train_y.astype(np.int64),
            test=ArrayPixels(test_x[:, None]),
            test_y=test_y.astype(np.int64),
            class_names=self.class_names,
        )

    def problems(self, folder: Path) -> list[str]:
        return differences(self.read(folder), self.train_counts, self.test_counts, self.digest)

    def _file(self, folder: Path, name: str) -> Path:
        found = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
        if found is None:
            raise UserError(f"{folder} has neither {name} nor {name}.gz: run 'gracecl data get {self.name} --data {folder.parent}'")
        return found


def read_idx(path: Path) -> ImageArray:
    """Read the array of unsigned bytes in an idx file; refuse one that ends early or runs on."""
    try:
        with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            zero, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zero != 0 or kind != UNSIGNED_BYTE:
                raise ValueError("it does not begin like an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            content = _exactly(file, math.prod(shape))
    except (ValueError, struct.error, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged ({error}): remove it and get it again") from error
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _exactly(file: IO[bytes], count: int) -> bytearray:
    """Read piece by piece: a header may promise more than there is."""
    content = bytearray()
    while len(content) < count and (piece := file.read(min(CHUNK, count - len(content)))):
        content += piece
    if len(content) < count:
        raise ValueError(f"it ends after {len(content):,} of {count:,} bytes")
    if file.read(1):
        raise ValueError(f"it goes on after the {count:,} bytes that its header announces")
    return content
