"""Images on their way to a uint8 tensor: decoded, cropped and resized with Pillow, block by block."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from PIL import Image, UnidentifiedImageError

from gracecl.data.dataset import ImageArray, Labels
from gracecl.errors import UserError
from gracecl.files import open_to_read
from gracecl.rows import Rows

Extent: TypeAlias = tuple[int, int]
"""(height, width)"""

BLOCK = 512
"""Images decoded at once: enough to keep the threads busy, little enough to hold at 224 px."""

GREY_MODES = ("1", "L", "LA")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""of image files, by what is in them and not by their names; others, such as EPS, would start other programs"""
MOST_PIXELS = 100_000_000
"""of one image, as its header says"""


class Pixels(Protocol):
    """The images of one split, not yet decoded."""

    def __len__(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def native(self) -> Extent:
        """The extent at which no image needs resizing (or only the odd one)."""

    def blocks(self, extent: Extent, begin: int = 0) -> Iterator[ImageArray]:
        """uint8 [n, channels, height, width], in order, from image `begin` on. May be called again."""

    def chosen(self, rows: Labels) -> Pixels:
        """Some of the images, by their places."""


@dataclass(frozen=True)
class ArrayPixels:
    """Images that are arrays already, or read as such: [N, channels, height, width]."""

    array: ImageArray | Rows

    def __len__(self) -> int:
        return len(self.array)

    @property
    def channels(self) -> int:
        return int(self.array.shape[1])

    @property
    def native(self) -> Extent:
        return self.array.shape[2], self.array.shape[3]

    def blocks(self, extent: Extent, begin: int = 0) -> Iterator[ImageArray]:
        with _threads() as pool:
            for start in range(begin, len(self.array), BLOCK):
                rows = self.array[start : start + BLOCK]
                block: ImageArray = rows.numpy() if isinstance(rows, Rows) else rows
                yield block if extent == self.native else np.stack(list(pool.map(lambda image: resized(image, extent), block)))

    def chosen(self, rows: Labels) -> ArrayPixels:
        return ArrayPixels(self.array[rows])


@dataclass(frozen=True)
class InArchive:
    """An image file inside a tar archive, read at its place."""

    archive: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.name} in {self.archive}"

    def content(self) -> io.BytesIO:
        with open_to_read(self.archive) as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))


ImageFile: TypeAlias = Path | InArchive


@dataclass(frozen=True)
class FilePixels:
    """Images in files of any format and size that Pillow reads."""

    paths: Sequence[ImageFile]
    channels: int
    native: Extent
    margin: float = 1.0
    """the shorter side is scaled to this many times the extent before the centre is cut out (CUB: 256 / 224)"""

    def __len__(self) -> int:
        return len(self.paths)

    def blocks(self, extent: Extent, begin: int = 0) -> Iterator[ImageArray]:
        def decode(path: ImageFile) -> ImageArray:
            return _channels_first(centre(opened(path, self.channels), extent, self.margin))

        with _threads() as pool:
            for start in range(begin, len(self.paths), BLOCK):
                yield np.stack(list(pool.map(decode, self.paths[start : start + BLOCK])))

    def chosen(self, rows: Labels) -> FilePixels:
        return replace(self, paths=[self.paths[row] for row in rows])


def _threads() -> ThreadPoolExecutor:
    """Threads for Pillow, which decodes and resizes without the GIL."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def resized(image: ImageArray, extent: Extent) -> ImageArray:
    """[channels, height, width] at another extent: bicubic, antialiased, each channel for itself."""
    height, width = extent
    planes = [Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC) for plane in image]
    return np.stack([np.asarray(plane) for plane in planes])


def opened(path: ImageFile, channels: int) -> Image.Image:
    """The image in `path`, grey or RGB; a file that cannot be decoded is named."""
    try:
        with _looked_at(path) as image:
            whole: Image.Image = image.convert("RGBA") if "transparency" in image.info else image
            return whole.convert("L" if channels == 1 else "RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged(path, error) from error


def header(path: ImageFile) -> tuple[Extent, bool]:
    """Extent of the image in `path` and whether it is grey, without decoding it."""
    try:
        with _looked_at(path) as image:
            return (image.height, image.width), image.mode in GREY_MODES
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged(path, error) from error


@contextmanager
def _looked_at(path: ImageFile) -> Iterator[Image.Image]:
    """The image in `path`, open and not decoded, if it is one that can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is a limit of our own
        image = Image.open(path.content() if isinstance(path, InArchive) else path, formats=FORMATS)
    with image:
        if image.width * image.height > MOST_PIXELS:
            raise UserError(
                f"the image {path} has {image.width} × {image.height} pixels, more than {MOST_PIXELS:,}: make it smaller"
            )
        _refuse_deep(image, path)
        yield image


def damaged(path: ImageFile, error: Exception) -> UserError:
    return UserError(f"cannot read the image {path} ({error}): replace the file or remove it")


def centre(image: Image.Image, extent: Extent, margin: float = 1.0) -> Image.Image:
    """Scaled (bicubic) until it covers `margin` times the extent, then the middle cut out; untouched if it fits."""
    height, width = extent
    tall, wide = round(height * margin), round(width * margin)
    if tall * image.width >= wide * image.height:
        covering = tall * image.width // image.height, tall
    else:
        covering = wide, wide * image.height // image.width
    if covering != image.size:
        image = image.resize(covering, Image.Resampling.BICUBIC)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def _refuse_deep(image: Image.Image, path: ImageFile) -> None:
    """Pillow clips 16-bit and floating-point grey to white; better no image than that one."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"the image {path} has more than 8 bits per channel: convert it to 8 bits first")


def _channels_first(image: Image.Image) -> ImageArray:
    array: Any = np.asarray(image)
    return np.ascontiguousarray(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
