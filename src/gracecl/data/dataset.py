"""`Data`: what the rest of the library knows of a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gracecl.inputs import FULL, Batched, Images, Inputs, leaves, loaded

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
    train_x: Batched
    """`[N, …]`, of images uint8 `[N, channels, height, width]`; a `TensorTree` where an example has several parts"""
    train_y: Labels
    """int64 [N], 0 … classes - 1"""
    test_x: Batched
    test_y: Labels
    inputs: Inputs
    """what one example looks like, and how a net sees it"""
    class_names: tuple[str, ...]
    tasks: int
    """the usual number of tasks of its split stream"""
    labels: tuple[Hashable, ...] | None = field(default=None, kw_only=True)
    """the labels of the classes as they were given, where they are no class numbers"""
    origin: str | None = field(default=None, kw_only=True)
    """of features: a digest of the net, its weights, the images and how the net saw them"""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example, (channels, height, width) of an image."""
        return self.inputs.shape

    @property
    def mean(self) -> tuple[float, ...]:
        """per channel, of pixels scaled to [0, 1]"""
        return self.inputs.images.statistics[0]

    @property
    def std(self) -> tuple[float, ...]:
        return self.inputs.images.statistics[1]

    def __repr__(self) -> str:
        images = isinstance(self.inputs, Images)
        what = f"images of {' × '.join(map(str, self.shape))}" if images else f"examples of {self.inputs}"
        return f"Data({self.name}: {self.classes} classes, {len(self.train_y)} training and {len(self.test_y)} test {what})"

    @cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 over shapes, types, labels and values.

        It is equal when two sets hold the same examples in the same order, and features are of the same origin.
        """
        digest = hashlib.sha256((self.origin or "").encode())
        for x, y in ((self.train_x, self.train_y), (self.test_x, self.test_y)):
            for number, (place, leaf) in enumerate(leaves(x)):
                kind = "" if leaf.dtype == torch.uint8 and not place else f"{place}{leaf.dtype}"  # bytes were alone once
                digest.update(f"{kind}{tuple(leaf.shape)!r}".encode())
                if number == 0:
                    digest.update(np.ascontiguousarray(y, dtype="<i8").tobytes())
                for chunk in chunks(leaf):
                    digest.update(np.ascontiguousarray(chunk).data)
        return digest.hexdigest()


def chunks(images: Any) -> Iterator[npt.NDArray[Any]]:
    """The images of an array, a tensor or `Rows`, a few thousand at a time."""
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK]
        yield part if isinstance(part, np.ndarray) else loaded(part).numpy()


def with_own_statistics(inputs: Inputs, x: Batched) -> Inputs:
    """The inputs with mean and standard deviation of these images; others have none."""
    if not isinstance(inputs, Images):
        return inputs
    return Images(inputs.shape, *channel_statistics(x), inputs.dtype)


def channel_statistics(images: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, pixels scaled to [0, 1].

    Counted in integers, so the result depends neither on the order of the images nor on the size of the chunks. A
    constant channel gets the standard deviation 1, because pixels are divided by it.
    """
    channels = images.shape[1]
    if images.dtype not in (np.uint8, torch.uint8):
        return _statistics_of_numbers(images)
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


def _statistics_of_numbers(images: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Those of 16 bits or of floating point, summed in double precision."""
    full = FULL[images.dtype if isinstance(images.dtype, torch.dtype) else torch.from_numpy(images[:0]).dtype]
    sums, count = np.zeros((2, images.shape[1])), 0
    for chunk in chunks(images):
        scaled = chunk.astype(np.float64) / full
        sums += scaled.sum((0, 2, 3)), (scaled**2).sum((0, 2, 3))
        count += scaled.size // images.shape[1]
    mean = sums[0] / count
    std = np.sqrt(np.maximum(sums[1] / count - mean**2, 0))
    std[std == 0] = 1
    return tuple(mean.tolist()), tuple(std.tolist())
