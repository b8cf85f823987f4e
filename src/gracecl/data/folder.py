"""Any folder of images, one sub-folder per class."""

from __future__ import annotations

import os
import warnings
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from gracecl.data.cache import decoded, files_key
from gracecl.data.dataset import Data, Labels, channel_statistics
from gracecl.data.locations import cache_folder, data_root
from gracecl.data.pixels import Extent, FilePixels, header
from gracecl.data.source import Contents, some
from gracecl.data.splits import held_out
from gracecl.errors import Caution, UserError
from gracecl.files import without_nul
from gracecl.inputs import Images

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
TEST_FOLDERS = ("test", "val")

Rows = list[tuple[Path, str]]
"""(image, name of its class)"""


def from_folder(
    path: str | Path,
    *,
    size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
    tasks: int = 1,
    root: str | Path | None = None,
    mmap_bytes: int | None = None,
) -> Data:
    """A data set from `path/train/<class>/…` and `path/test/<class>/…` (or `val`), or from `path/<class>/…`.

    Without a test folder, `test_fraction` of each class is held out, chosen by `seed` and file name. Classes are
    numbered in alphabetical order. Every image is scaled until it covers size × size (without `size`: the extent of the
    first image) and its centre is kept. If all images are grey they stay so, else all become RGB. `root` is where the
    decoded copy is kept (see `load`).
    """
    place = without_nul(path).expanduser().resolve()
    if not place.is_dir():
        raise UserError(f"there is no folder {place}")
    if not 0 < test_fraction < 1:
        raise UserError(f"test_fraction must be between 0 and 1, not {test_fraction}")
    train, test = rows_of(place, test_fraction, seed)
    extent = (size, size) if size else None
    key = files_key([image for image, _ in (*train, *test)], extent) + f"-{test_fraction}-{seed}"
    resolution = f"{size}px" if size else "native"
    entry = cache_folder(data_root(root)) / f"folder-{resolution}-{sha256(str(place).encode()).hexdigest()[:16]}"
    arrays = decoded(entry, key, lambda: _contents(train, test), extent, place.name, mmap_bytes)
    return Data(
        name=name or place.name,
        train_x=torch.from_numpy(arrays.train_x),
        train_y=arrays.train_y,
        test_x=torch.from_numpy(arrays.test_x),
        test_y=arrays.test_y,
        inputs=Images(arrays.train_x.shape[1:], *channel_statistics(arrays.train_x)),
        class_names=arrays.class_names,
        tasks=tasks,
    )


def rows_of(place: Path, test_fraction: float, seed: int) -> tuple[Rows, Rows]:
    """The training and the test images of a folder, with the names of their classes."""
    if (place / "train").is_dir():
        test_folder = next((place / name for name in TEST_FOLDERS if (place / name).is_dir()), None)
        if test_folder is None:
            raise UserError(f"{place} has a folder 'train', but neither 'test' nor 'val' beside it")
        train, test = _images(place / "train"), _images(test_folder)
        if strangers := sorted({label for _, label in test} - {label for _, label in train}):
            raise UserError(f"{test_folder} has classes without training images: {some(strangers)}")
        return train, test
    rows = _images(place)
    held = held_out([str(image.relative_to(place)) for image, _ in rows], _numbers(rows, rows), test_fraction, seed)
    train = [row for row, out in zip(rows, held, strict=True) if not out]
    test = [row for row, out in zip(rows, held, strict=True) if out]
    if not test:
        raise UserError(f"every class in {place} has one image only: there is nothing to hold out for testing")
    if untested := sorted({label for _, label in train} - {label for _, label in test}):
        warnings.warn(
            f"{len(untested)} classes in {place} have too few images for one to be held out, so they are never tested: "
            f"{some(untested)}; add images, or a folder 'test' beside 'train'",
            Caution,
            stacklevel=2,
        )
    return train, test


def _images(place: Path) -> Rows:
    """List every image below each class's folder, in alphabetical order."""
    rows: Rows = []
    for folder in sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")):
        images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.name.startswith("."))
        for image in images:
            _check_file(image)
        rows += [(image, folder.name) for image in images]
    if not rows:
        raise UserError(f"{place} has no images in sub-folders, one for each class")
    return rows


def _check_file(path: Path) -> None:
    """Refuse pipes and devices, which would block, and names that are no text, which the cache cannot hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name of the image {os.fsencode(path)!r} is not UTF-8; rename the file") from None
    if not path.is_file():
        raise UserError(f"{path} has the name of an image and is no file: replace or remove it")


def _contents(train: Rows, test: Rows) -> Contents:
    headers = [header(image) for image, _ in (*train, *test)]
    native: Extent = headers[0][0]
    channels = 1 if all(grey for _, grey in headers) else 3
    return Contents(
        train=FilePixels([image for image, _ in train], channels, native),
        train_y=_numbers(train, train),
        test=FilePixels([image for image, _ in test], channels, native),
        test_y=_numbers(test, train),
        class_names=tuple(_names(train)),
    )


def _names(train: Rows) -> list[str]:
    return sorted({label for _, label in train})


def _numbers(rows: Rows, train: Rows) -> Labels:
    number = {name: index for index, name in enumerate(_names(train))}
    return np.array([number[label] for _, label in rows], dtype=np.int64)
