"""Any map-style torch `Dataset`, torchvision's and Hugging Face's included, as a data set: read once, item by item."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracecl.data.arrays import numbered
from gracecl.data.dataset import Data, with_own_statistics
from gracecl.data.progress import progress
from gracecl.errors import UserError
from gracecl.inputs import Batched, Images, Inputs, Parts, inputs_of, mapped

IN_MEMORY = 1 << 30
"""bytes up to which inputs are held in memory; larger ones lie in a file that is mapped"""
WORTH_A_BAR = 5000
"""items from which on progress is shown"""
LABEL_NAMES = ("label", "labels", "fine_label", "target", "y")


def from_torch(
    dataset: Any,
    test_dataset: Any,
    *,
    label: str | None = None,
    name: str | None = None,
    tasks: int = 1,
    in_memory: int = IN_MEMORY,
    folder: str | Path | None = None,
) -> Data:
    """A data set from two map-style datasets: anything with `len(dataset)` and `dataset[i]`.

    An item is a pair `(input, label)` or a dict, of which `label` names the label's entry (found by itself if it is called label,
    labels, fine_label, target or y); the other entries are the input. Pictures of Pillow become bytes, tensors and arrays stay what
    they are, and floats `[channels, height, width]` in [0, 1] are images. Each item is read once. Inputs of more than `in_memory`
    bytes go into a file in `folder` (a temporary one, if left out) that is mapped, so that they need not fit into memory.
    """
    sets = [_Items(given, what, label) for given, what in ((dataset, "the dataset"), (test_dataset, "the test dataset"))]
    inputs = sets[0].inputs()
    place = folder if folder is not None or sets[0].length * inputs.bytes <= in_memory else _temporary()
    (train, train_y), (test, test_y) = (items.read(inputs, in_memory, place) for items in sets)
    if _within_one(inputs, train, test):
        inputs = Images(inputs.shape, dtype=inputs.dtype)
    labels, names, given = numbered(
        [(train_y, "the labels", len(train)), (test_y, "the test labels", len(test))], sets[0].class_names
    )
    title = name or type(dataset).__name__
    return Data(title, train, labels[0], test, labels[1], with_own_statistics(inputs, train), names, tasks, labels=given)


def _within_one(inputs: Inputs, *sets: Batched) -> bool:
    """Whether floats are images: three dimensions, few channels, and all values in [0, 1]."""
    if isinstance(inputs, Images | Parts) or not inputs.dtype.is_floating_point:
        return False
    few = len(inputs.shape) == 3 and inputs.shape[0] in (1, 3, 4)
    return few and all(bool((x >= 0).all() and (x <= 1).all()) for x in sets)


def _temporary() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="gracecl-")
    _FOLDERS.append(kept)
    return Path(kept.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""removed when the program ends"""


class _Items:
    """A dataset of somebody else's, and how its items fall into input and label."""

    def __init__(self, dataset: Any, what: str, label: str | None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, Mapping | str):
            raise UserError(
                f"{what} is a {type(dataset).__name__}; from_torch takes map-style datasets, with len(dataset) and dataset[i], and "
                "Learner.fit takes loaders and iterables"
            )
        self.dataset, self.what, self.label, self.length = dataset, what, label, len(dataset)
        if not self.length:
            raise UserError(f"{what} is empty; give one with at least one item")

    @property
    def class_names(self) -> list[str] | None:
        """The names that torchvision's and Hugging Face's datasets know of their classes."""
        names = getattr(self.dataset, "classes", None)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
        feature = (getattr(self.dataset, "features", None) or {}).get(self.label_of(self.dataset[0]) or "")
        return list(getattr(feature, "names", None) or ()) or None

    def label_of(self, item: Any) -> str | None:
        """The entry of a dict that is the label; None of a pair."""
        if not isinstance(item, Mapping):
            return None
        found = self.label if self.label is not None else next((name for name in LABEL_NAMES if name in item), None)
        if found is None or found not in item:
            raise UserError(
                f"{self.what} has items with the entries {', '.join(map(repr, item))}; say which is the label with label="
            )
        return found

    def item(self, number: int) -> tuple[Any, Any]:
        """Input and label of an item: arrays and tensors, and a Python value."""
        given = self.dataset[number]
        if isinstance(given, Mapping):
            label = self.label_of(given)
            entries = {name: _array(value) for name, value in given.items() if name != label}
            x = entries if len(entries) > 1 else next(iter(entries.values()), None)
            return x, _value(given[label])
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise UserError(f"item {number} of {self.what} is a {type(given).__name__} and no pair (input, label) or dict")
        x, y = given
        if isinstance(x, Mapping):
            x = {name: _array(value) for name, value in x.items()}
        else:
            x = tuple(map(_array, x)) if isinstance(x, tuple) else _array(x)
        return x, _value(y)

    def inputs(self) -> Inputs:
        """What the first item shows."""
        return inputs_of(_one(self.item(0)[0]), f"item 0 of {self.what}")

    def read(self, inputs: Inputs, in_memory: int, folder: str | Path | None) -> tuple[Batched, list[Any]]:
        """All items, read one after the other."""
        mapped_file = self.length * inputs.bytes > in_memory
        room = _mapped(inputs, self.length, Path(folder or _temporary()), self.what) if mapped_file else inputs.blank(self.length)
        labels = []
        with progress(f"reading {self.what}", self.length, "items", show=self.length >= WORTH_A_BAR) as advance:
            for number in range(self.length):
                x, y = self.item(number)
                room[number : number + 1] = inputs.read(_one(x), f"item {number} of {self.what}")
                labels.append(y)
                advance(1)
        return room, labels


def _one(x: Any) -> Any:
    """A batch of one input."""
    if isinstance(x, dict):
        return {name: _one(part) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(map(_one, x))
    return x[None] if isinstance(x, Tensor | np.ndarray) and x.ndim else torch.as_tensor(x)[None]


def _array(value: Any) -> Any:
    """An entry as a tensor or an array; a picture as `[channels, height, width]`."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if hasattr(value, "getbands"):
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"an entry of the dataset is {type(value).__name__} and no numbers; make numbers of it in the dataset's transform, or "
            "remove the column"
        )
    return array


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
