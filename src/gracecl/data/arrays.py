"""Any arrays as a data set, checked once so that nothing later has to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gracecl.data.dataset import Data, ImageArray, Labels, channel_statistics
from gracecl.errors import Misfit, UserError

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
) -> Data:
    """A data set from numpy arrays or torch tensors; all four are needed.

    ImageArray are numpy `[N, H, W, channels]`, tensors `[N, channels, H, W]` (`channels` says "first" or "last" where they lie
    otherwise), or grey `[N, H, W]` of either kind; uint8, or
    floating point in [0, 1], which becomes `round(255 · x)` with halves to even. uint8 memory is shared where its
    layout allows. Labels are whole numbers from 0; every number up to the largest one is a class, with or without
    images. `mean` and `std` are computed from the training pixels when not given.
    """
    if channels not in (None, *get_args(Channels)):
        raise UserError(f"channels says where they lie, 'first' or 'last', not {channels!r}")
    if not isinstance(name, str):
        raise UserError(f"name is what the data set is called, not a {type(name).__name__}")
    if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1:
        raise UserError(f"tasks is a whole number of at least 1, not {tasks!r}")
    train, test = _images(train_x, "train_x", channels), _images(test_x, "test_x", channels)
    if train.shape[1:] != test.shape[1:]:
        raise UserError(f"train_x holds images of shape {train.shape[1:]} and test_x of {test.shape[1:]}; they must agree")
    train_labels, test_labels = _labels(train_y, "train_y", len(train)), _labels(test_y, "test_y", len(test))
    count = int(max(train_labels.max(), test_labels.max())) + 1
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, Sequence | np.ndarray)):
        raise UserError(f"class_names is a list of names, one for each class, not a {type(class_names).__name__}")
    shown = len(np.unique(train_labels))
    if class_names is None and count > MANY_TIMES * shown:
        warnings.warn(
            f"the labels go up to {count - 1:,}, and {shown:,} of these {count:,} classes have training images; every class takes "
            "part in the losses and costs accuracy, so number them from 0: np.unique(labels, return_inverse=True)[1]",
            Misfit,
            stacklevel=2,
        )
    names = tuple(map(str, range(count) if class_names is None else class_names))
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


def as_array(given: Any, what: str) -> npt.NDArray[Any]:
    """The values as a numpy array, whose memory they may share."""
    if isinstance(given, Dataset | Data):
        raise UserError(
            f"{what} is a data set ({type(given).__name__}) and not an array; take its images and labels out of it, for example "
            "torch.stack([image for image, _ in dataset]) and [label for _, label in dataset]"
        )
    if not isinstance(given, Tensor | Sequence) and not hasattr(given, "__array__") and not hasattr(given, "__array_interface__"):
        # numpy would take it for one value, or ask for its items one by one, without end where no IndexError comes.
        raise UserError(f"{what} must be an array or a tensor, not {'missing' if given is None else 'a ' + type(given).__name__}")
    try:
        return _host_array(given) if isinstance(given, Tensor) else np.asarray(given)
    except (ValueError, TypeError, RuntimeError):
        raise UserError(
            f"{what} must be an array or a tensor, not a {type(given).__name__} of uneven parts, "
            "or of tensors that numpy cannot read"
        ) from None


def _host_array(tensor: Tensor) -> npt.NDArray[Any]:
    tensor = tensor.detach().cpu().to_dense()
    array: npt.NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16
    return array


def _images(given: Any, what: str, channels: Channels | None) -> ImageArray:
    """[N, channels, H, W] uint8, writable so that torch can share it."""
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
    array = np.ascontiguousarray(_as_bytes(array, what))
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


def _as_bytes(array: npt.NDArray[Any], what: str) -> ImageArray:
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{what} is {array.dtype}; images must be uint8, or floating point in [0, 1]")
    if not (array.min() >= 0 and array.max() <= 1):
        raise UserError(f"{what} is {array.dtype} with values outside [0, 1] or NaN; scale it, or convert it to uint8")
    scaled: ImageArray = np.rint(array * 255).astype(np.uint8)
    return scaled


def _labels(given: Any, what: str, count: int) -> Labels:
    array = as_array(given, what)
    if array.ndim != 1 or len(array) != count:
        raise UserError(f"{what} must be one label for each of the {count} images, not an array of shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        reason = "has NaN" if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any() else f"is {array.dtype}"
        named = array.dtype.kind in "USO" and reason != "has NaN"
        remedy = ", which np.unique(labels, return_inverse=True)[1] makes of names" if named else ""
        raise UserError(f"{what} {reason}; labels must be whole numbers from 0{remedy}")
    if array.min() < 0:
        raise UserError(f"{what} has the negative label {array.min()}; labels must be whole numbers from 0")
    if array.max() >= MOST_CLASSES:
        raise UserError(
            f"{what} has the label {array.max()}; labels are the numbers of classes, of which there are at most {MOST_CLASSES:,}"
        )
    return array.astype(np.int64)


def _per_channel(values: Sequence[float], what: str, channels: int) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        raise UserError(f"{what} must be {channels} numbers, one for each channel, not {values!r}") from None
    if len(numbers) != channels or not np.isfinite(numbers).all() or (what == "std" and min(numbers) <= 0):
        positive = "positive " if what == "std" else ""
        raise UserError(f"{what} must be {channels} {positive}numbers, one for each channel, not {numbers}")
    return numbers
