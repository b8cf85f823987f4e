"""Any arrays as a data set, checked once so that nothing later has to."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gracecl.data.dataset import Data, ImageArray, Labels, channel_statistics
from gracecl.errors import Misfit, UserError
from gracecl.inputs import Images, Inputs, TensorTree, as_array, inputs_of

Channels = Literal["first", "last"]

MOST_CLASSES = 1_000_000
"""every number up to the largest label is a class, with a column in each head"""


MANY_TIMES = 20
"""classes without images, against those with, that are worth a word"""


def from_arrays(
    train_x: Any,
    train_y: Any = None,
    test_x: Any = None,
    test_y: Any = None,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    tasks: int = 1,
    channels: Channels | None = None,
    images: bool | None = None,
    inputs: Inputs | None = None,
) -> Data:
    """A data set from numpy arrays or torch tensors; all four are needed.

    Arrays of 3 or 4 dimensions are images: numpy `[N, H, W, channels]`, tensors `[N, channels, H, W]` (`channels` says "first" or
    "last" where they lie otherwise), or grey `[N, H, W]` of either kind; uint8, uint16, or floating point in [0, 1], which becomes
    `round(255 · x)` with halves to even. uint8 memory is shared where its layout allows. `mean` and `std` are computed from the
    training pixels when not given.

    Everything else is taken as it comes: vectors `[N, D]`, ids, and dicts or tuples of arrays, nested or not, each with the
    examples first. `images=False` says so of arrays of 3 or 4 dimensions, such as sequences `[N, T, D]`. Double precision becomes
    single; nothing is scaled or standardised. `inputs` says it all: `Inputs((T, D))`, or `Images(shape, mean, std, torch.float32)`
    for images in floating point, channels first.

    Labels are whole numbers from 0, of which every one up to the largest is a class, with or without examples; or they are of any
    other hashable kind, such as texts: then classes are numbered in the order of `class_names`, or else sorted.
    """
    if channels not in (None, *get_args(Channels)):
        raise UserError(f"channels says where they lie, 'first' or 'last', not {channels!r}")
    if not isinstance(name, str):
        raise UserError(f"name is what the data set is called, not a {type(name).__name__}")
    if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1:
        raise UserError(f"tasks is a whole number of at least 1, not {tasks!r}")
    if inputs is not None and not isinstance(inputs, Inputs):
        raise UserError(f"inputs is an Inputs such as Inputs((64,)), not a {type(inputs).__name__}")
    if inputs is None and (are_images(train_x) if images is None else images):
        train, test, taken = _image_sets(train_x, test_x, channels, mean, std)
    else:
        if mean is not None or std is not None or channels is not None:
            raise UserError("mean, std and channels are those of images, which these inputs are not; leave them out")
        taken = inputs_of(train_x, "train_x") if inputs is None else inputs
        train, test = taken.read(train_x, "train_x"), taken.read(test_x, "test_x")
    labels, names, given = numbered([(train_y, "train_y", len(train)), (test_y, "test_y", len(test))], class_names)
    return Data(name, train, labels[0], test, labels[1], taken, names, tasks, labels=given)


def are_images(x: Any) -> bool:
    """Whether an array is taken for images: 4 dimensions, or 3 of bytes, 16 bits or floating point."""
    if isinstance(x, Mapping | tuple | TensorTree):
        return False
    array = as_array(x, "train_x")
    return array.ndim == 4 or (array.ndim == 3 and (array.dtype.kind == "f" or array.dtype in (np.uint8, np.uint16)))


def _image_sets(
    train_x: Any, test_x: Any, channels: Channels | None, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Tensor, Tensor, Inputs]:
    """Training and test images as tensors, and what they are."""
    train, test = _images(train_x, "train_x", channels), _images(test_x, "test_x", channels)
    if train.shape[1:] != test.shape[1:]:
        raise UserError(f"train_x holds images of shape {train.shape[1:]} and test_x of {test.shape[1:]}; they must agree")
    if train.dtype != test.dtype:
        raise UserError(f"train_x is {train.dtype} and test_x {test.dtype}; they must agree")
    own_mean, own_std = channel_statistics(train) if mean is None or std is None else ((), ())
    taken = Images(
        train.shape[1:],
        own_mean if mean is None else _per_channel(mean, "mean", train.shape[1]),
        own_std if std is None else _per_channel(std, "std", train.shape[1]),
        torch.from_numpy(train[:0]).dtype,
    )
    return torch.from_numpy(train), torch.from_numpy(test), taken


def numbered(
    given: list[tuple[Any, str, int]], class_names: Sequence[str] | None
) -> tuple[list[Labels], tuple[str, ...], tuple[Hashable, ...] | None]:
    """The labels of several sets as class numbers, the names of the classes, and the labels of those that are no numbers.

    Each set comes with its name and length.
    """
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, Sequence | np.ndarray)):
        raise UserError(f"class_names is a list of names, one for each class, not a {type(class_names).__name__}")
    arrays = [_one_each(y, what, count) for y, what, count in given]
    if all(np.issubdtype(array.dtype, np.integer) for array in arrays):
        labels = [_numbers(array, what) for array, (_, what, _) in zip(arrays, given, strict=True)]
        return labels, _names_of_numbers(labels, class_names), None
    values = [_hashable(array, what) for array, (_, what, _) in zip(arrays, given, strict=True)]
    met = list(dict.fromkeys(value for of_set in values for value in of_set))
    if class_names is None:
        with suppress(TypeError):  # of several kinds, which have no order: that in which they come
            met.sort()
        classes, names = met, tuple(map(str, met))
    else:
        classes, names = list(class_names), tuple(map(str, class_names))
        if unknown := [value for value in met if value not in classes]:
            raise UserError(f"the label {unknown[0]!r} is not one of the {len(classes)} class_names; give the names of all classes")
    number = {value: place for place, value in enumerate(classes)}
    return [np.array([number[value] for value in of_set], np.int64) for of_set in values], names, tuple(classes)


def _names_of_numbers(labels: list[Labels], class_names: Sequence[str] | None) -> tuple[str, ...]:
    count, shown = 1 + max(int(of_set.max()) for of_set in labels), len(np.unique(labels[0]))
    if class_names is None and count > MANY_TIMES * shown:
        warnings.warn(
            f"the labels go up to {count - 1:,}, and {shown:,} of these {count:,} classes have training images; every class takes "
            "part in the losses and costs accuracy, so number them from 0: np.unique(labels, return_inverse=True)[1]",
            Misfit,
            stacklevel=4,
        )
    names = tuple(map(str, range(count) if class_names is None else class_names))
    if len(names) < count:
        raise UserError(f"class_names has {len(names)} names, but the labels go up to {count - 1}; give at least {count}")
    return names


def _images(given: Any, what: str, channels: Channels | None) -> npt.NDArray[Any]:
    """[N, channels, H, W] uint8 or uint16, writable so that torch can share it."""
    array = as_array(given, what)
    place = channels or ("first" if isinstance(given, Tensor) else "last")
    if array.ndim not in (3, 4):
        raise UserError(f"{what} must have 3 or 4 dimensions (images, height, width and channels), not {array.ndim}")
    if array.ndim == 4 and channels is None:
        _refuse_swapped(what, array.shape[1:], place)
    if array.ndim == 3:
        array = array[:, None]
    elif place == "last":
        array = array.transpose(0, 3, 1, 2)
    if array.size == 0:
        raise UserError(f"{what} holds no images (shape {tuple(np.shape(given))})")
    array = np.ascontiguousarray(_as_pixels(array, what))
    return array if array.flags.writeable else array.copy()


def _refuse_swapped(what: str, shape: tuple[int, ...], place: str) -> None:
    """Channels in the wrong place would train, badly, without a word. Images that are square as they lie are taken for right."""
    sides, channels, other = (shape[1:], shape[0], shape[2]) if place == "first" else (shape[:2], shape[2], shape[0])
    if channels > 4 and other in (1, 3, 4) and sides[0] != sides[1]:
        usual = "tensors are [N, channels, H, W]" if place == "first" else "numpy arrays are [N, H, W, channels]"
        raise UserError(
            f"{what} seems to have its {other} channels in the wrong place: {usual}; "
            "say channels='first' or channels='last' if it is meant so"
        )


def _as_pixels(array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    if array.dtype in (np.uint8, np.uint16):
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(
            f"{what} is {array.dtype}; images must be uint8 or uint16, or floating point in [0, 1]; if it holds no images, say "
            "images=False"
        )
    if not (array.min() >= 0 and array.max() <= 1):
        raise UserError(
            f"{what} is {array.dtype} with values outside [0, 1] or NaN; scale it, or convert it to uint8; "
            "if it holds no images, say images=False"
        )
    scaled: ImageArray = np.rint(array * 255).astype(np.uint8)
    return scaled


def _one_each(given: Any, what: str, count: int) -> npt.NDArray[Any]:
    if isinstance(given, list | tuple) and any(isinstance(value, tuple | frozenset) for value in given):
        array = np.empty(len(given), object)  # numpy would take tuples for rows
        array[:] = given
    else:
        array = as_array(given, what)
    if array.ndim != 1 or len(array) != count:
        raise UserError(f"{what} must be one label for each of the {count} examples, not an array of shape {array.shape}")
    return array


def _numbers(array: npt.NDArray[Any], what: str) -> Labels:
    if array.min() < 0:
        raise UserError(f"{what} has the negative label {array.min()}; labels must be whole numbers from 0")
    if array.max() >= MOST_CLASSES:
        raise UserError(
            f"{what} has the label {array.max()}; labels are the numbers of classes, of which there are at most {MOST_CLASSES:,}"
        )
    return array.astype(np.int64)


def _hashable(array: npt.NDArray[Any], what: str) -> list[Any]:
    """Labels that are no numbers, as Python's own values."""
    if array.dtype.kind in "fc":
        reason = "has NaN" if np.isnan(array).any() else f"is {array.dtype}"
        raise UserError(f"{what} {reason}; labels must be whole numbers from 0, texts or other hashable values")
    values: list[Any] = array.tolist()
    try:
        dict.fromkeys(values)
    except TypeError:
        wrong = next(value for value in values if getattr(value, "__hash__", None) is None)
        raise UserError(f"{what} has the label {wrong!r}, a {type(wrong).__name__}, which cannot be hashed") from None
    if any(value is None or value != value for value in values):
        raise UserError(f"{what} has missing labels (None or NaN); give every example one, or leave it out")
    return values


def _per_channel(values: Sequence[float], what: str, channels: int) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        raise UserError(f"{what} must be {channels} numbers, one for each channel, not {values!r}") from None
    if len(numbers) != channels or not np.isfinite(numbers).all() or (what == "std" and min(numbers) <= 0):
        positive = "positive " if what == "std" else ""
        raise UserError(f"{what} must be {channels} {positive}numbers, one for each channel, not {numbers}")
    return numbers
