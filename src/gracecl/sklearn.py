"""A learner as a scikit-learn classifier: `OnlineClassifier` in pipelines, searches and cross-validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from gracecl import rng
from gracecl.estimators import OPEN_NET, LearnerEstimator
from gracecl.inputs import Images, Inputs
from gracecl.methods.base import Method
from gracecl.registry import options
from gracecl.registry.options import LearnerOptions

__all__ = ["OnlineClassifier"]


class OnlineClassifier(ClassifierMixin, LearnerEstimator, BaseEstimator):  # type: ignore[misc]
    """A continual learner behind scikit-learn's interface.

    `fit` forgets what was learned and makes `epochs` shuffled passes in steps of `batch` rows. `partial_fit` goes on learning, one
    step for every `batch` rows in the order they come. The first call of `partial_fit` may declare all `classes`; without them,
    labels that are new are added whenever they come. Rows are taken as they are: scale them first.

    >>> model = make_pipeline(StandardScaler(), OnlineClassifier("er")).fit(X, y)
    >>> model.predict(X)

    Attributes:
        classes_: the labels, sorted
        n_features_in_: columns of X
        feature_names_in_: names of the columns, where X has any
        learner_: the `Learner` that does it all
        order_: the labels in the order of the learner's class numbers
    """

    @options.takes(LearnerOptions, open_ended=OPEN_NET)
    def __init__(
        self,
        method: str | Method = "er",
        *,
        shape: tuple[int, ...] | None = None,
        batch: int = 10,
        epochs: int = 10,
        **more: Any,
    ) -> None:
        """Store the options, those of `Learner` and three more.

        Args:
            method: an expression such as "er(n_recall=32)", or a method
            shape: that of one example, which is a row: (3, 32, 32) for images; None for vectors
            batch: rows that a step learns from
            epochs: passes over the rows in `fit`
        """
        self._store(method, more, shape=shape, batch=batch, epochs=epochs)

    def fit(self, X: Any, y: Any) -> OnlineClassifier:
        """Learn the rows of X from the start, in shuffled passes; return the classifier."""
        X, y = self._validated(X, y, first=True)
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise ValueError(f"epochs is the number of passes over the rows, at least 1, not {self.epochs!r}")
        self._begin(X, np.unique(y))
        if self.learner_.method.chain.traits.boundaries == "required":
            raise ValueError(
                f"{self.learner_.method!r} needs to be told where tasks end, which shuffled rows cannot; use a method such as er"
            )
        for epoch in range(self.epochs):
            self._learn(X, y, rng.generator(self.seed, "epoch of a classifier", epoch).permutation(len(y)))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Sequence[Any] | npt.NDArray[Any] | None = None) -> OnlineClassifier:
        """Go on learning from the rows of X, in their order; return the classifier.

        `classes` declares all labels that will ever come, in the first call. Others are then refused.
        """
        first = not hasattr(self, "learner_")
        X, y = self._validated(X, y, first)
        if first:
            self._begin(X, None if classes is None else np.unique(classes))
        elif classes is not None and not (self.learner_.labels.counted and np.array_equal(np.unique(classes), self.classes_)):
            raise ValueError(f"classes={classes!r} is not what the first call of partial_fit declared; leave it out in later calls")
        self._learn(X, y, np.arange(len(y)))
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The label of each row."""
        rows = self._rows(X)
        labels: npt.NDArray[Any] = self.order_[self.learner_.predict(rows)]
        return labels

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """`[rows, classes]`, the columns in the order of `classes_`; 0 for a class that was declared and never met."""
        rows = self._rows(X)
        return self.learner_.predict_proba(rows)[:, np.argsort(self.order_)]

    def _validated(self, X: Any, y: Any, first: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Rows and labels in the form that scikit-learn promises; whatever cannot be learned raises a ValueError."""
        X, y = validate_data(self, X, y, reset=first, dtype=self._dtype(X))
        check_classification_targets(y)
        if self.shape is not None and math.prod(self.shape) != X.shape[1]:
            raise ValueError(f"X has {X.shape[1]} columns, and an example of shape={self.shape} has {math.prod(self.shape)}")
        return X, y

    def _dtype(self, X: Any) -> type[np.number[Any]]:
        """Images may be bytes, as a learner takes them; all other numbers are floats."""
        return np.uint8 if self._of_images and getattr(X, "dtype", None) == np.uint8 else np.float32

    @property
    def _of_images(self) -> bool:
        return self.shape is not None and len(self.shape) == 3

    def _begin(self, X: npt.NDArray[Any], classes: npt.NDArray[Any] | None) -> None:
        """Make the learner; without `classes`, its heads grow."""
        shape, dtype = X.shape[1:] if self.shape is None else tuple(self.shape), torch.from_numpy(X[:0].copy()).dtype
        inputs = Images(shape, dtype=dtype) if self._of_images else Inputs(shape, dtype)
        self.learner_ = self._new_learner(self._of_images, classes=None if classes is None else len(classes), inputs=inputs)
        self.order_ = np.array([]) if classes is None else classes
        self.classes_ = self.order_

    def _learn(self, X: npt.NDArray[Any], y: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> None:
        """Learn the rows in this order, one step for each `batch` of them."""
        numbers = self._numbers(y)
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            self.learner_.learn(self._examples(X[rows]), numbers[rows])

    def _numbers(self, y: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The learner's class number of each label; where none were declared, labels that are new get the next ones."""
        new, first = np.unique(y[~np.isin(y, self.classes_)], return_index=True)
        if len(new) and self.learner_.labels.counted:
            raise ValueError(f"label {new[0]!r} is not one of the classes that were declared: {self.classes_.tolist()}")
        if len(new):
            new = new[np.argsort(first)]
            if len(self.order_) and (new.dtype.kind in "US") != (self.order_.dtype.kind in "US"):
                raise ValueError(f"label {new[0]!r} and label {self.order_[0]!r} are of two kinds; give all as texts or as numbers")
            self.order_ = np.concatenate([self.order_, new]) if len(self.order_) else new
            self.classes_ = np.sort(self.order_)
        return np.argsort(self.order_)[np.searchsorted(self.classes_, y)]

    def _rows(self, X: Any) -> npt.NDArray[Any]:
        """Rows to predict, as examples of the learner."""
        check_is_fitted(self)
        return self._examples(validate_data(self, X, reset=False, dtype=self._dtype(X)))

    def _examples(self, X: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows as examples, in memory that may be written to, as torch wants it."""
        return np.require(X, requirements="W").reshape(len(X), *(X.shape[1:] if self.shape is None else self.shape))
