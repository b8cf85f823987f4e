"""Any arrays as a data set, checked once so that nothing later has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gracecl.data.dataset import Data, Images, Labels, channel_statistics
from gracecl.errors import UserError

MOST_CLASSES = 1_000_000
"""every number up to the largest label is a class, with a column in each head"""


def from_arrays(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    tasks: int = 1,
) -> Data:
    """A data set from numpy arrays or torch tensors.

    Images are numpy `[N, H, W, channels]`, tensors `[N, channels, H, W]`, or grey `[N, H, W]` of either kind; uint8, or
    floating point in [0, 1], which becomes `round(255 · x)` with halves to even. uint8 memory is shared where its
    layout allows. Labels are whole numbers from 0; every number up to the largest one is a class, with or without
    images. `mean` and `std` are computed from the training pixels when not given.
    """
    train, test = _images(train_x, "train_x"), _images(test_x, "test_x")
    if train.shape[1:] != test.shape[1:]:
        raise UserError(f"train_x holds images of shape {train.shape[1:]} and test_x of {test.shape[1:]}; they must agree")
    train_labels, test_labels = _labels(train_y, "train_y", len(train)), _labels(test_y, "test_y", len(test))
    count = int(max(train_labels.max(), test_labels.max())) + 1
    names = tuple(str(number) for number in range(count)) if class_names is None else tuple(class_names)
    if len(names) < count:
        raise UserError(f"class_names has {len(names)} names, but the labels go up to {count - 1}; give at least {count}")
    own_mean, own_std = channel_statistics(train) if mean is None or std is None else ((), ())
    return Data(
        name=name,
        train_x=torch.from_numpy(train),
        train_y=train_labels,
        test_x=torch.from_numpy(test),
        test_y=test_labels,
        mean=own_mean if mean is None else _per_channel(mean, "mean", train.shape[1]),
        std=own_std if std is None else _per_channel(std, "std", train.shape[1]),
        class_names=names,
        tasks=tasks,
    )


def _images(given: Any, what: str) -> Images:
    """[N, channels, H, W] uint8, writable so that torch can share it."""
    channels_first = isinstance(given, torch.Tensor)
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim != 4:
        raise UserError(f"{what} must have 3 or 4 dimensions (images, height, width and channels), not {array.ndim}")
    elif channels_first:
        _refuse_swapped(what, channels=array.shape[1], other=array.shape[3], advice="tensors are [N, channels, H, W]")
    else:
        _refuse_swapped(what, channels=array.shape[3], other=array.shape[1], advice="numpy arrays are [N, H, W, channels]")
        array = array.transpose(0, 3, 1, 2)
    if array.size == 0:
        raise UserError(f"{what} holds no images (shape {tuple(np.shape(given))})")
    array = np.ascontiguousarray(_as_bytes(array, what))
    return array if array.flags.writeable else array.copy()


def _refuse_swapped(what: str, channels: int, other: int, advice: str) -> None:
    """Channels in the wrong place would train, badly, without a word."""
    if channels > 4 and other in (1, 3, 4):
        raise UserError(f"{what} seems to have its {other} channels in the wrong place: {advice}")


def _as_bytes(array: npt.NDArray[Any], what: str) -> Images:
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{what} is {array.dtype}; images must be uint8, or floating point in [0, 1]")
    if not (array.min() >= 0 and array.max() <= 1):
        raise UserError(f"{what} is {array.dtype} with values outside [0, 1] or NaN; scale it, or convert it to uint8")
    scaled: Images = np.rint(array * 255).astype(np.uint8)
    return scaled


def _labels(given: Any, what: str, count: int) -> Labels:
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.ndim != 1 or len(array) != count:
        raise UserError(f"{what} must be one label for each of the {count} images, not an array of shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        reason = "has NaN" if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any() else f"is {array.dtype}"
        raise UserError(f"{what} {reason}; labels must be whole numbers from 0")
    if array.min() < 0:
        raise UserError(f"{what} has the negative label {array.min()}; labels must be whole numbers from 0")
    if array.max() >= MOST_CLASSES:
        raise UserError(
            f"{what} has the label {array.max()}; labels are the numbers of classes, of which there are at most {MOST_CLASSES:,}"
        )
    return array.astype(np.int64)


def _per_channel(values: Sequence[float], what: str, channels: int) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if len(numbers) != channels or not np.isfinite(numbers).all() or (what == "std" and min(numbers) <= 0):
        positive = "positive " if what == "std" else ""
        raise UserError(f"{what} must be {channels} {positive}numbers, one for each channel, not {numbers}")
    return numbers
