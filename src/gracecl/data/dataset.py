"""`Data`: what the rest of the library knows of a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gracecl.inputs import Images

ImageArray: TypeAlias = npt.NDArray[np.uint8]
Labels: TypeAlias = npt.NDArray[np.int64]

CHUNK = 4096
"""Images handled at once where a whole set would need a second copy in memory."""


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A labelled training and test set, on the host, pixels as uint8.

    Large sets are memory-mapped: index rows rather than copying the whole tensor.
    """

    name: str
    train_x: torch.Tensor
    """uint8 [N, channels, height, width]"""
    train_y: Labels
    """int64 [N], 0 … classes - 1"""
    test_x: torch.Tensor
    test_y: Labels
    mean: tuple[float, ...]
    """per channel, of pixels scaled to [0, 1]"""
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    tasks: int
    """the usual number of tasks of its split stream"""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def inputs(self) -> Images:
        """What one image looks like, and how a net sees it."""
        return Images(self.shape, self.mean, self.std)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        channels, height, width = self.train_x.shape[1:]
        return channels, height, width

    def __repr__(self) -> str:
        size = " × ".join(map(str, self.shape))
        return (
            f"Data({self.name}: {self.classes} classes, {len(self.train_y)} training and {len(self.test_y)} test images of {size})"
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over shapes, labels and pixels: equal when two sets hold the same images in the same order."""
        digest = hashlib.sha256()
        for x, y in ((self.train_x, self.train_y), (self.test_x, self.test_y)):
            digest.update(repr(tuple(x.shape)).encode())
            digest.update(np.ascontiguousarray(y, dtype="<i8").tobytes())
            for chunk in chunks(x.numpy()):
                digest.update(np.ascontiguousarray(chunk).data)
        return digest.hexdigest()


def chunks(images: ImageArray) -> Iterator[ImageArray]:
    """The images, a few thousand at a time."""
    for start in range(0, len(images), CHUNK):
        yield images[start : start + CHUNK]


def channel_statistics(images: ImageArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, pixels scaled to [0, 1].

    Counted in integers, so the result depends neither on the order of the images nor on the size of the chunks. A
    constant channel gets the standard deviation 1, because pixels are divided by it.
    """
    channels = images.shape[1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for chunk in chunks(images):
        for channel in range(channels):
            counts[channel] += np.bincount(chunk[:, channel].ravel(), minlength=256)
    values = np.arange(256)
    pixels = counts.sum(1)
    mean = counts @ values / pixels
    variance = counts @ values**2 / pixels - mean**2
    std = np.sqrt(np.maximum(variance, 0))
    std[std == 0] = 255
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())
