"""Any map-style torch `Dataset`, torchvision's and Hugging Face's included, as a data set: read once, item by item."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from gracecl.data.arrays import numbered
from gracecl.data.dataset import Data, chunks, with_own_statistics
from gracecl.data.progress import progress
from gracecl.errors import UserError
from gracecl.inputs import Batched, Images, Inputs, Parts, inputs_of, mapped

IN_MEMORY = 1 << 30
"""bytes up to which inputs are held in memory; larger ones lie in a file that is mapped"""
WORTH_A_BAR = 5000
"""items from which on progress is shown"""
AT_ONCE = 256
"""items asked for together, of datasets that can give several"""
CHANNELS = (1, 3, 4)
"""numbers of channels by which images are known"""
PICTURE_MODES = {"1": "L", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
"""modes of Pillow whose values are no grey values or colours, and what they become"""
LABEL_NAMES = ("label", "labels", "fine_label", "target", "y", "cls")


def from_torch(
    dataset: Any,
    test_dataset: Any,
    *,
    label: str | None = None,
    class_names: Sequence[str] | None = None,
    name: str | None = None,
    tasks: int = 1,
    in_memory: int = IN_MEMORY,
    folder: str | Path | None = None,
) -> Data:
    """A data set from two map-style datasets: anything with `len(dataset)` and `dataset[i]`.

    An item is a pair `(input, label)` or a dict, of which `label` names the label's entry (found by itself if it is called label,
    labels, fine_label, target, y or cls); the other entries are the input, except further columns of class labels. Pictures of
    Pillow become bytes; bytes `[height, width]` and `[height, width, channels]` are images as well, and so are floats
    `[channels, height, width]` in [0, 1]; other tensors and arrays stay what they are. Items are read once and kept, so random
    augmentation belongs in `augment`. Inputs of more than `in_memory` bytes go into a file in `folder` (a temporary one, if left
    out) that is mapped, so that they need not fit into memory. `class_names` are those that the dataset knows, if left out.
    """
    sets = [Items(given, what, label) for given, what in ((dataset, "the dataset"), (test_dataset, "the test dataset"))]
    inputs = sets[0].inputs()
    place = folder if folder is not None or sets[0].length * inputs.bytes <= in_memory else _temporary()
    (train, train_y), (test, test_y) = (items.read(inputs, in_memory, place) for items in sets)
    inputs = as_images(inputs, train, test)
    labels, names, given = numbered(
        [(train_y, "the labels", len(train)), (test_y, "the test labels", len(test))],
        sets[0].class_names if class_names is None else class_names,
    )
    title = name or type(dataset).__name__
    return Data(title, train, labels[0], test, labels[1], with_own_statistics(inputs, train), names, tasks, labels=given)


def as_images(inputs: Inputs, *sets: Batched) -> Inputs:
    """Floats of three dimensions and few channels are images if all values are in [0, 1]; other inputs are themselves."""
    if isinstance(inputs, Images | Parts) or not inputs.dtype.is_floating_point:
        return inputs
    few = len(inputs.shape) == 3 and inputs.shape[0] in CHANNELS
    if few and all(bool((part >= 0).all() and (part <= 1).all()) for x in sets for part in chunks(x)):
        return Images(inputs.shape, dtype=inputs.dtype)
    return inputs


def _temporary() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="gracecl-")
    _FOLDERS.append(kept)
    return Path(kept.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""removed when the program ends"""


class Reader:
    """How the items of somebody else's dataset fall into input and label."""

    def __init__(self, dataset: Any, what: str, label: str | None) -> None:
        self.dataset, self.what, self.label = dataset, what, label
        self.known_names = _known_names(dataset)

    def label_of(self, item: Any) -> str | None:
        """The entry of a dict that is the label; None of a pair."""
        if not isinstance(item, Mapping):
            return None
        found = self.label if self.label is not None else next((name for name in LABEL_NAMES if name in item), None)
        if found is None or found not in item:
            missing = f" and none called {found!r}" if found is not None else ""
            raise UserError(
                f"{self.what} has items with the entries {', '.join(map(repr, item))}{missing}; say which is the label with label="
            )
        return found

    def split(self, given: Any, what: str) -> tuple[Any, Any]:
        """Input and label of an item: arrays and tensors, and a Python value."""
        if isinstance(given, Mapping):
            label = self.label_of(given)
            beside = {label, *self.known_names}
            x = {name: value for name, value in given.items() if name not in beside and not str(name).startswith("__")}
            if not x:
                raise UserError(f"{what} has no entry beside the label {label!r}; give the dataset a column with the input")
            return self.arrays(x if len(x) > 1 else next(iter(x.values())), what), _value(given[label])
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise UserError(f"{what} is a {type(given).__name__} and no pair (input, label) or dict")
        return self.arrays(given[0], what), _value(given[1])

    def arrays(self, x: Any, what: str) -> Any:
        """An input of arrays and tensors; bytes in two dimensions are a grey image, unless they are one part of several."""
        if isinstance(x, Mapping):
            return {name: _array(value, f"{what}[{name!r}]") for name, value in x.items()}
        if isinstance(x, tuple):
            return tuple(_array(value, f"{what}[{place}]") for place, value in enumerate(x))
        array = _array(x, what)
        return array[None] if array.ndim == 2 and _are_bytes(array) else array


class Items(Reader):
    """A dataset of somebody else's, with items by number."""

    def __init__(self, dataset: Any, what: str, label: str | None) -> None:
        if isinstance(dataset, Mapping):
            raise UserError(f"{what} is a {type(dataset).__name__}; give one of its parts, such as dataset['train']")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, str):
            raise UserError(
                f"{what} is a {type(dataset).__name__}; from_torch takes map-style datasets, with len(dataset) and dataset[i], and "
                "Learner.fit takes loaders and iterables"
            )
        super().__init__(dataset, what, label)
        self.length = len(dataset)
        if not self.length:
            raise UserError(f"{what} is empty; give one with at least one item")

    @property
    def class_names(self) -> list[str] | None:
        """The names that torchvision's and Hugging Face's datasets know of their classes."""
        return self.known_names.get(None) or self.known_names.get(self.label_of(self.dataset[0]))

    def given(self, begin: int, end: int) -> Iterator[Any]:
        """The dataset's items in order, several at a time where it has `__getitems__`, which torch's loaders use as well."""
        several = getattr(self.dataset, "__getitems__", None)
        for start in range(begin, end, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, end))
            yield from several(list(numbers)) if several else (self.dataset[number] for number in numbers)

    def between(self, begin: int, end: int, inputs: Inputs) -> Iterator[tuple[Batched, Any]]:
        """Input, as a batch of one, and label of these items."""
        for number, given in enumerate(self.given(begin, end), start=begin):
            what = f"item {number} of {self.what}"
            x, y = self.split(given, what)
            yield inputs.read(one(x), what), y

    def inputs(self) -> Inputs:
        """What the first item shows."""
        what = f"item 0 of {self.what}"
        return inputs_of(one(self.split(self.dataset[0], what)[0]), what)

    def read(self, inputs: Inputs, in_memory: int, folder: str | Path | None) -> tuple[Batched, list[Any]]:
        """All items, read one after the other."""
        mapped_file = self.length * inputs.bytes > in_memory
        room = _mapped(inputs, self.length, Path(folder or _temporary()), self.what) if mapped_file else inputs.blank(self.length)
        labels = []
        with progress(f"reading {self.what}", self.length, "items", show=self.length >= WORTH_A_BAR) as advance:
            for number, (x, y) in enumerate(self.between(0, self.length, inputs)):
                room[number : number + 1] = x
                labels.append(y)
                advance(1)
        return room, labels


def one(x: Any) -> Any:
    """A batch of one input."""
    if isinstance(x, dict):
        return {name: one(part) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(map(one, x))
    return x[None] if isinstance(x, Tensor | np.ndarray) and x.ndim else torch.as_tensor(x)[None]


def _array(value: Any, what: str) -> Any:
    """An entry as a tensor or an array; images as `[channels, height, width]`."""
    if hasattr(value, "getbands"):
        value = _picture(value)
    try:
        array = value if isinstance(value, Tensor) else np.asarray(value)
    except ValueError:
        raise UserError(f"{what} is a {type(value).__name__} of uneven parts; pad them to one length in the dataset") from None
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise UserError(
            f"{what} is a {type(value).__name__} and no numbers; make numbers of it in the dataset's transform, or remove the "
            "column"
        )
    last = array.ndim == 3 and _are_bytes(array) and array.shape[2] in CHANNELS and array.shape[0] not in CHANNELS
    return array.swapaxes(1, 2).swapaxes(0, 1) if last else array


def _picture(picture: Any) -> Any:
    """A picture of Pillow as `[channels, height, width]`: palettes and print colours as RGB, black and white as grey."""
    if mode := PICTURE_MODES.get(picture.mode):
        picture = (picture.convert("RGBA") if "transparency" in picture.info else picture).convert(mode)
    array = np.asarray(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _are_bytes(array: Any) -> bool:
    return array.dtype in (np.uint8, np.uint16, torch.uint8, torch.uint16)


def _known_names(dataset: Any) -> dict[str | None, list[str]]:
    """The class names that a dataset declares, of torchvision's under None, of Hugging Face's under the column of the label.

    torch's `Subset` and `ConcatDataset` have those of what they are made of, if all parts agree.
    """
    if isinstance(dataset, Subset):
        return _known_names(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        first, *others = map(_known_names, dataset.datasets)
        return first if all(other == first for other in others) else {}
    known: dict[str | None, list[str]] = {}
    names, features = (getattr(dataset, attribute, None) for attribute in ("classes", "features"))
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        known[None] = list(names)
    if isinstance(features, Mapping):
        known |= {column: list(feature.names) for column, feature in features.items() if getattr(feature, "names", None)}
    return known


def _value(label: Any) -> Any:
    return label.item() if isinstance(label, Tensor | np.generic) else label


def _mapped(inputs: Inputs, count: int, folder: Path, what: str) -> Batched:
    """Room in mapped files, one for each tensor of an example."""
    folder.mkdir(parents=True, exist_ok=True)
    number = itertools.count()

    def opened(leaf: Tensor) -> Tensor:
        path = folder / f"{what.replace(' ', '-')}-{next(number)}.npy"
        return torch.from_numpy(np.lib.format.open_memmap(path, "w+", leaf.numpy().dtype, (count, *leaf.shape[1:])))

    return mapped(opened, inputs.blank(1))
