"""Labels of any kind and the numbers of their classes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.inputs import as_array

UNKNOWN = -1
"""number of a label that is not among the classes"""


class ClassLabels:
    """The labels of a learner's classes: class n is that of `labels[n]`. Without a declaration, labels are added as they come."""

    def __init__(self, declared: int | Sequence[Hashable] | None = None) -> None:
        """`declared` is the number of classes, whose labels are then 0, 1, …, or the list of their labels."""
        self.open = declared is None
        self.counted = declared if isinstance(declared, int | np.integer) and not isinstance(declared, bool) else None
        if self.counted is not None and not 1 <= self.counted < 1 << 31:
            raise UserError(f"classes is the number of classes, at least 1, or a list of labels, not {declared!r}")
        if isinstance(declared, str | bytes | bool) or not isinstance(declared, int | np.integer | Iterable | None):
            raise UserError(f"classes is the number of classes, at least 1, or a list of labels, not {declared!r}")
        self.labels: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        if self.counted is None and declared is not None:
            labels = listed(declared, "classes")
            self.add(labels)
            if len(self.labels) < max(len(labels), 1):
                raise UserError("classes has no label, or one of them twice; name each class once, or leave classes= out")

    def __len__(self) -> int:
        return len(self.labels) if self.counted is None else int(self.counted)

    @property
    def declared(self) -> int | list[Hashable] | None:
        """What was declared."""
        return self.counted if self.counted is not None else None if self.open else self.labels

    def add(self, labels: Iterable[Hashable]) -> None:
        """Give the labels that are new the next numbers, in their order."""
        for label in labels:
            if key(label) not in self._numbers:
                self._numbers[key(label)] = len(self.labels)
                self.labels.append(label)

    def known(self, labels: Iterable[Hashable]) -> bool:
        """Whether all of them are labels of classes."""
        return self.counted is None and all(key(label) in self._numbers for label in labels)

    def checked(self, y: Any) -> Sequence[Hashable] | Ints:
        """The labels in the form that `learned` takes; refuses what cannot be one."""
        if self.counted is not None:
            return self._counted_numbers(y, self.counted)
        labels = listed(y, "labels")
        if not self.open:
            self.numbers(labels)
        return labels

    def numbers(self, y: Any) -> Ints:
        """The class number of each label. One that is new is UNKNOWN where labels are added as they come; else it is refused."""
        if self.counted is not None:
            return self._counted_numbers(y, self.counted)
        labels = listed(y, "labels")
        found = np.array([self._numbers.get(key(label), UNKNOWN) for label in labels], np.int64)
        if not self.open and (found == UNKNOWN).any():
            label = labels[int(np.argmin(found))]
            raise UserError(f"label {label!r} is not one of the {len(self)} declared classes; declare it with classes=")
        return found

    def learned(self, labels: Sequence[Hashable] | Ints) -> Ints:
        """The class number of each of some labels that were checked; those that are new are added."""
        if isinstance(labels, np.ndarray):
            return labels
        if self.open:
            self.add(labels)
        return np.array([self._numbers[key(label)] for label in labels], np.int64)

    def named(self, numbers: Ints) -> npt.NDArray[Any]:
        """The labels of class numbers: integers if all classes have such labels, else objects."""
        return numbers if self.counted is not None else self.array[numbers]

    def saved(self) -> list[Hashable]:
        """The labels as a file can hold them, and give them back as they are."""
        for label in self.labels:
            if not exact_in_a_file(label):
                raise UserError(
                    f"the label {label!r} is a {type(label).__name__}, which a file does not give back as it was; use texts, whole "
                    "numbers, truth values or tuples of these"
                )
        return self.labels

    @property
    def array(self) -> npt.NDArray[Any]:
        """All labels by their number."""
        return np.arange(self.counted) if self.counted is not None else as_labels(self.labels)

    def _counted_numbers(self, y: Any, classes: int) -> Ints:
        numbers = whole_numbers(y, "labels")
        wrong = numbers[(numbers < 0) | (numbers >= classes)]
        if len(wrong):
            raise UserError(f"label {wrong[0]} is not one of the declared classes 0 to {classes - 1}; declare more with classes=")
        return numbers.astype(np.int64)


def as_labels(labels: Sequence[Any]) -> npt.NDArray[Any]:
    """An array of labels: int64 where all are whole numbers of that size, else objects."""
    if all(type(label) is int and -(1 << 63) <= label < 1 << 63 for label in labels):
        return np.array(labels, np.int64)
    array = np.empty(len(labels), object)
    array[:] = labels
    return array


def listed(y: Any, what: str) -> list[Hashable]:
    """The labels as Python values: those of numpy and torch as whole numbers, texts and truth values."""
    if isinstance(y, Tensor | np.ndarray) or hasattr(y, "__array__"):
        array = as_array(y, what)
        if array.ndim != 1:
            raise UserError(f"{what} must be one label for each example, not an array of shape {list(array.shape)}")
        values: list[Hashable] = array.tolist()
    elif isinstance(y, str | bytes) or not isinstance(y, Iterable):
        raise UserError(f"{what} must be a list with one label for each example, not {y!r}")
    else:
        values = [one.item() if isinstance(one, np.generic) or (isinstance(one, Tensor) and one.ndim == 0) else one for one in y]
    for label in values:
        if label is None or isinstance(label, float):
            missing = "is missing (None)" if label is None else f"is the number {label!r}"
            raise UserError(f"one of the {what} {missing}; give whole numbers, texts or other exact values")
        try:
            hash(label)
        except TypeError:
            raise UserError(
                f"one of the {what} is a {type(label).__name__}, which cannot be hashed; use a text or a tuple"
            ) from None
    return values


def exact_in_a_file(label: Any) -> bool:
    """Whether JSON, with tuples, gives the label back."""
    return all(map(exact_in_a_file, label)) if type(label) is tuple else type(label) in (str, int, bool)


def key(label: Hashable) -> Hashable:
    """What tells labels apart: True and 1 are two labels, though Python takes them for equal."""
    return (bool, label) if isinstance(label, bool) else label


def whole_numbers(values: Any, what: str) -> npt.NDArray[Any]:
    """Whole numbers of whichever type: one that is too large for ours is still the number that it is."""
    numbers = np.array(as_array(values, what))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise UserError(f"{what} must be a list of whole numbers, not {numbers.dtype} of shape {list(numbers.shape)}")
    return numbers
