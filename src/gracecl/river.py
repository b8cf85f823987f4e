"""A learner as a classifier of river (https://riverml.xyz): dicts of features in, labels of any kind out, one at a time::

model = preprocessing.StandardScaler() | gracecl.river.Classifier("er")
evaluate.progressive_val_score(datasets.ImageSegments(), model, metrics.Accuracy())
"""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracecl.data.labels import ClassLabels, listed
from gracecl.errors import UserError
from gracecl.estimators import OPEN_NET, LearnerEstimator
from gracecl.learner import Learner
from gracecl.methods.base import Method
from gracecl.nets.module import optional_package
from gracecl.registry import options
from gracecl.registry.options import LearnerOptions
from gracecl.streams import Stream

__all__ = ["Classifier", "stream_items"]

base: Any = optional_package("river.base", "river", "gracecl.river")
ARRAY = "x"
"""name of the one feature of an item that is an array"""


class Classifier(LearnerEstimator, base.MiniBatchClassifier):  # type: ignore[misc]
    """A continual learner behind river's interface.

    The columns are the numeric features of the first item, sorted by name, unless `features` declares them. In later items, other
    features are ignored and missing ones are 0. An item may instead have a single feature that is an array, such as an image
    (`stream_items`). Features are taken as they are: scale them first.

    Labels are of any kind that can be hashed, and new ones may come at any time. Items are learned in steps of `batch`: the first
    `batch - 1` items of a step wait for its last one, whether they come by `learn_one` or `learn_many`.
    """

    @options.takes(LearnerOptions, open_ended=OPEN_NET)
    def __init__(
        self,
        method: str | Method = "er",
        *,
        features: tuple[Hashable, ...] | None = None,
        classes: int | tuple[Hashable, ...] | None = None,
        batch: int = 1,
        **more: Any,
    ) -> None:
        """Store the options, those of `Learner` and two more.

        Args:
            method: an expression such as "er(n_recall=32)", or a method
            features: names of the features to use, in the order of the columns; None is those of the first item
            classes: number of classes, whose labels are then 0, 1, …, or all labels; None adds labels as they come
            batch: items that a step learns from
        """
        self._store(method, more, features=features, classes=classes, batch=batch)
        self.learner: Learner | None = None
        self.columns: tuple[Hashable, ...] | None = features
        """names of the features in use"""
        self.waiting: list[tuple[npt.NDArray[Any], Hashable]] = []
        """items of a step that is not complete yet"""
        self._met = ClassLabels()
        """labels that were learned or wait"""

    @property
    def _multiclass(self) -> bool:
        return True

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {"method": "er", "net": "mlp(width=8, depth=1)", "memory": 50, "device": "cpu"}

    def learn_one(self, x: Mapping[Hashable, Any], y: Hashable) -> None:
        """Learn an item, or let it wait until there are `batch` of them."""
        [label] = listed([y], "labels")
        self._take(self._row(x, learning=True), label)

    def learn_many(self, X: Any, y: Any) -> None:
        """Learn the rows of a data frame, as `learn_one` would learn one after the other."""
        for row, label in zip(self._rows(X, learning=True), listed(y, "labels"), strict=True):
            self._take(row, label)

    def _take(self, row: npt.NDArray[Any], label: Hashable) -> None:
        if self.learner is None:
            self.learner = self._new_learner(of_images=row.ndim == 3, classes=self.classes)
        self.learner.labels.checked([label])  # one that was not declared is refused now, not when its step is complete
        self._met.add([label])
        self.waiting.append((row, label))
        if len(self.waiting) == self.batch:
            rows, labels = zip(*self.waiting, strict=True)
            self.waiting = []
            self.learner.learn(np.stack(rows), labels)

    def predict_one(self, x: Mapping[Hashable, Any], **unused: Any) -> Hashable | None:
        """The label of an item; None before anything was learned."""
        [label] = self._labels([self._row(x)]) if self._met.labels else [None]
        return label

    def predict_many(self, X: Any) -> Any:
        """The label of each row of a data frame, as a series."""
        pandas = optional_package("pandas", "pandas", "predict_many")
        labels = self._labels(self._rows(X)) if self._met.labels and len(X) else [None] * len(X)
        return pandas.Series(labels, index=X.index, dtype="object")

    def predict_proba_one(self, x: Mapping[Hashable, Any], **unused: Any) -> dict[Hashable, float]:
        """The probability of each label met; empty before anything was learned."""
        if not self._met.labels:
            return {}
        return dict(zip(self._met.labels, self._chances([self._row(x)])[0].tolist(), strict=True))

    def predict_proba_many(self, X: Any) -> Any:
        """A column for each label met, a row for each row of a data frame."""
        pandas = optional_package("pandas", "pandas", "predict_proba_many")
        chances = self._chances(self._rows(X)) if self._met.labels and len(X) else None
        return pandas.DataFrame(chances, columns=self._met.labels, index=X.index)

    def _labels(self, rows: Sequence[npt.NDArray[Any]]) -> list[Hashable]:
        """The label of each row; that met first while the first step is not complete."""
        assert self.learner is not None
        labels: list[Hashable] = self.learner.predict(np.stack(rows), default=self._met.labels[0]).tolist()
        return labels

    def _chances(self, rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """`[rows, labels met]`: 0 for labels that wait, all equal while the first step is not complete."""
        assert self.learner is not None
        if self.learner.nothing_learned:
            return np.full((len(rows), len(self._met)), 1 / len(self._met))
        found = self.learner.predict_proba(np.stack(rows)).astype(np.float64)
        columns = self.learner.labels.numbers(self._met.labels)
        chances = np.where(columns >= 0, found[:, columns], 0.0)
        normalised: npt.NDArray[np.float64] = chances / chances.sum(axis=1, keepdims=True)
        return normalised

    def _row(self, x: Mapping[Hashable, Any], learning: bool = False) -> npt.NDArray[Any]:
        """An item as the learner takes it, in memory of its own."""
        if len(x) == 1:
            [value] = x.values()
            if hasattr(value, "__array__") and np.ndim(value):
                return np.array(value)
        if learning and self.columns is None:
            self.columns = tuple(sorted((name for name, value in x.items() if isinstance(value, NUMBERS)), key=str))
        return np.array([_number(name, x.get(name, 0)) for name in self.columns or ()], np.float32)

    def _rows(self, X: Any, learning: bool = False) -> list[npt.NDArray[Any]]:
        return [self._row(item, learning) for item in X.to_dict(orient="records")]


NUMBERS = (numbers.Real, np.bool_)


def _number(name: Hashable, value: Any) -> float:
    if not isinstance(value, NUMBERS):
        raise UserError(f"feature {name!r} was a number and is {value!r} now; encode it, or name the numeric ones by features=")
    return float(value)


def stream_items(stream: Stream) -> Iterator[tuple[dict[str, npt.NDArray[Any]], int]]:
    """The examples of a stream in their order, each as `({"x": array}, class number)`."""
    for batch in map(stream.batch, range(len(stream))):
        for x, label in zip(batch.x.numpy(), batch.labels.tolist(), strict=True):
            yield {ARRAY: x}, label
