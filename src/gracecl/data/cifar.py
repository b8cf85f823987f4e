"""What CIFAR-10 and CIFAR-100 share: pickled batches of 3,072 bytes per image."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gracecl.data.dataset import ImageArray, Labels
from gracecl.data.pickles import read_pickle
from gracecl.data.pixels import ArrayPixels
from gracecl.data.source import Contents, Source, differences, missing_files
from gracecl.errors import UserError


class Cifar(Source):
    """The python version of a CIFAR archive, as its authors publish it."""

    size = 32
    mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
    std = (63.0 / 255, 62.1 / 255, 66.7 / 255)
    train_files: ClassVar[tuple[str, ...]]
    test_file: ClassVar[str]
    meta_file: ClassVar[str]
    label_key: ClassVar[str]
    names_key: ClassVar[str]
    digest: ClassVar[str | None] = None
    """order-free digest of a complete copy, where one is known for certain"""

    def files(self, folder: Path) -> list[Path]:
        paths = [folder / file for file in (*self.train_files, self.test_file, self.meta_file)]
        if missing := missing_files(paths):
            raise UserError(f"{missing[0]} is missing: move {folder} away and run 'gracecl data get {self.name}'")
        return paths

    def read(self, folder: Path) -> Contents:
        *train_paths, test_path, meta_path = self.files(folder)
        batches = [self._batch(path) for path in train_paths]
        test_x, test_y = self._batch(test_path)
        return Contents(
            train=ArrayPixels(np.concatenate([x for x, _ in batches])),
            train_y=np.concatenate([y for _, y in batches]),
            test=ArrayPixels(test_x),
            test_y=test_y,
            class_names=self._class_names(meta_path),
        )

    def problems(self, folder: Path) -> list[str]:
        train_counts, test_counts = ([images // self.classes] * self.classes for images in (50_000, 10_000))
        return differences(self.read(folder), train_counts, test_counts, self.digest)

    def _batch(self, path: Path) -> tuple[ImageArray, Labels]:
        content = read_pickle(path)
        rows, labels = content.get("data"), content.get(self.label_key)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
            raise UserError(f"{path} has no 'data' of 3,072 bytes per image: get an official copy")
        return rows.reshape(-1, 3, 32, 32), self._labels(path, labels, len(rows))

    def _labels(self, path: Path, given: Any, count: int) -> Labels:
        numbers = given.tolist() if isinstance(given, np.ndarray) else given
        if not isinstance(numbers, list) or len(numbers) != count or not all(type(label) is int for label in numbers):
            raise UserError(f"{path} has no '{self.label_key}', one whole number per image: get an official copy")
        if any(not 0 <= label < self.classes for label in numbers):
            raise UserError(f"{path} has labels outside 0 … {self.classes - 1}: get an official copy")
        return np.array(numbers, dtype=np.int64)

    def _class_names(self, path: Path) -> tuple[str, ...]:
        names = read_pickle(path).get(self.names_key)
        if not isinstance(names, list) or len(names) != self.classes or not all(isinstance(name, bytes | str) for name in names):
            raise UserError(f"{path} has no '{self.names_key}' with {self.classes} names: get an official copy")
        return tuple(name.decode("latin1") if isinstance(name, bytes) else name for name in names)
