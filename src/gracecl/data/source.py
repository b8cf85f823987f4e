"""`Source`: what a file must say to add a named data set with files of its own.

A set without files on disk is simpler still: register a function `(root, size) -> Data`, for instance one that ends in
`from_arrays`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from gracecl.data.dataset import Labels
from gracecl.data.pixels import FilePixels, Pixels

LabelledFiles = Sequence[tuple[Path, str]]
"""(image, label)"""


@dataclass(frozen=True)
class Archive:
    """A file to download: unpacked beside the others when it is a tar or zip, kept as it is otherwise."""

    url: str
    sha256: str | None

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[1]

    @property
    def packed(self) -> bool:
        return self.file.endswith((".tar.gz", ".tgz", ".tar", ".zip"))


@dataclass(frozen=True)
class Contents:
    """Contents of a data set's files; `Pixels` are decoded when first needed."""

    train: Pixels
    train_y: Labels
    test: Pixels
    test_y: Labels
    class_names: tuple[str, ...]


class Source(ABC):
    """A named data set: its folder, how it is read, and what a complete copy holds."""

    name: ClassVar[str]
    folder: ClassVar[str]
    """its folder below the data root"""
    classes: ClassVar[int]
    """of a complete copy"""
    size: ClassVar[int]
    """the resolution it is stored at unless another is asked for"""
    tasks: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    archives: ClassVar[tuple[Archive, ...]]

    @abstractmethod
    def files(self, folder: Path) -> list[Path]:
        """List every file that `read` depends on; a missing one is a `UserError`. Their sizes and dates key the
        cache.
        """

    @abstractmethod
    def read(self, folder: Path) -> Contents:
        """Read the contents; a damaged file is a `UserError`."""

    @abstractmethod
    def problems(self, folder: Path) -> list[str]:
        """List what a complete copy has and this one lacks, one sentence each, without decoding images."""


def contents_of_files(
    train: LabelledFiles, test: LabelledFiles, labels: Sequence[str], names: Mapping[str, str], side: int, margin: float = 1.0
) -> Contents:
    """Return contents of colour images in files of their own; class k is `labels[k]`, called `names` of it where that has one."""
    number = {label: index for index, label in enumerate(labels)}
    pixels = [FilePixels([path for path, _ in part], 3, (side, side), margin) for part in (train, test)]
    numbers = [np.array([number[label] for _, label in part], dtype=np.int64) for part in (train, test)]
    return Contents(pixels[0], numbers[0], pixels[1], numbers[1], tuple(names.get(label, label) for label in labels))


def missing_files(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if not path.is_file()]


def count_problems(part: str, labels: Labels, expected: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return a sentence if some classes have more or fewer images than a complete copy."""
    counts = np.bincount(labels, minlength=len(expected))
    wrong = [k for k in range(len(expected)) if counts[k] != expected[k]]
    if not wrong:
        return []
    examples = [f"{names[k]} has {counts[k]} of {expected[k]}" for k in wrong]
    return [f"{len(wrong)} of {len(expected)} classes have the wrong number of {part} images: {some(examples)}"]


def differences(contents: Contents, train_counts: Sequence[int], test_counts: Sequence[int], digest: str | None) -> list[str]:
    """List how the contents differ from a complete copy: images per class, then, if these agree, their pixels."""
    names = contents.class_names
    found = count_problems("training", contents.train_y, train_counts, names)
    found += count_problems("test", contents.test_y, test_counts, names)
    if not found and digest is not None and order_free_digest(contents) != digest:
        found.append("the pixels or labels differ from those of the official data set")
    return found


def order_free_digest(contents: Contents) -> str:
    """Return a SHA-256 over all images and labels that does not depend on their order, in which copies differ."""
    digest = hashlib.sha256()
    for pixels, labels in ((contents.train, contents.train_y), (contents.test, contents.test_y)):
        images = (image for block in pixels.blocks(pixels.native) for image in block)
        rows = (image.tobytes() + int(label).to_bytes(2, "big") for image, label in zip(images, labels, strict=True))
        digest.update(b"".join(sorted(hashlib.sha256(row).digest() for row in rows)))
    return digest.hexdigest()


def some(things: Sequence[str], shown: int = 5) -> str:
    """Return the first few, and how many more there are."""
    more = f", … and {len(things) - shown} more" if len(things) > shown else ""
    return ", ".join(things[:shown]) + more
