"""Predict, then learn, on rows of 20 numbers whose classes drift: ours against river and scikit-learn, accuracy beside time."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.linear_model import SGDClassifier

from benchmarks.measure import Row, row
from gracecl.learner import Learner
from gracecl.sklearn import OnlineClassifier

FEATURES, CLASSES = 20, 3
BATCHES = (1, 10, 100)
AGAINST = "SGDClassifier"
Rows = np.ndarray[Any, np.dtype[np.float32]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Subject = tuple[Callable[[Rows], Any], Callable[[Rows, Numbers], Any]]
"""how labels are predicted, and how rows are learned"""


def drifting(rows: int) -> tuple[Rows, Numbers]:
    """Gaussian classes whose means turn slowly, and jump in the middle."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, rows)
    time_ = np.arange(rows) / rows
    angle = np.pi * time_ + np.pi * (time_ >= 0.5)
    start, end = rng.standard_normal((2, CLASSES, FEATURES))
    means = np.cos(angle)[:, None] * start[y] + np.sin(angle)[:, None] * end[y]
    return (means + rng.standard_normal((rows, FEATURES))).astype(np.float32), y


def subjects() -> dict[str, Callable[[int], Subject | None]]:
    """By name: what makes a new one for batches of a size; None where it takes single rows only."""

    def learner(method: str, net: str) -> Callable[[int], Subject]:
        def make(batch: int) -> Subject:
            made = Learner(method, net=net, classes=CLASSES, memory=500, optimizer="adam(lr=0.01)", device="cpu")
            return lambda x: made.predict(x, default=0), made.learn

        return make

    def of_sklearn(make: Callable[[int], Any]) -> Callable[[int], Subject]:
        def of(batch: int) -> Subject:
            model, classes = make(batch), np.arange(CLASSES)
            return (
                lambda x: model.predict(x) if hasattr(model, "classes_") else np.zeros(len(x), int),
                lambda x, y: model.partial_fit(x, y, classes),
            )

        return of

    ours: dict[str, Any] = {"optimizer": "adam(lr=0.01)", "memory": 500, "device": "cpu"}
    found: dict[str, Callable[[int], Subject | None]] = {
        AGAINST: of_sklearn(lambda batch: SGDClassifier(loss="log_loss", random_state=0)),
        "Learner sgd, identity": learner("sgd", "identity"),
        "Learner er, identity": learner("er(n_recall=10)", "identity"),
        "Learner er, mlp": learner("er(n_recall=10)", "mlp(width=32, depth=1)"),
        "Learner slda, identity": learner("slda", "identity"),
        "Learner closed, identity": learner("closed", "identity"),
        "OnlineClassifier er, identity": of_sklearn(
            lambda batch: OnlineClassifier("er(n_recall=10)", net="identity", batch=batch, **ours)
        ),
    }
    return found | (of_river(ours) if importlib.util.find_spec("river") else {})


def of_river(ours: dict[str, Any]) -> dict[str, Callable[[int], Subject | None]]:
    """River's classifiers, and ours behind its interface: one row at a time."""
    from river import linear_model, multiclass, naive_bayes, tree

    from gracecl.river import Classifier

    def single(make: Callable[[], Any]) -> Callable[[int], Subject | None]:
        def of(batch: int) -> Subject | None:
            if batch > 1:
                return None
            model = make()

            def item(x: Rows) -> dict[int, float]:
                return dict(enumerate(x[0].tolist()))

            return lambda x: [model.predict_one(item(x))], lambda x, y: model.learn_one(item(x), int(y[0]))

        return of

    return {
        "river logistic regression": single(lambda: multiclass.OneVsRestClassifier(linear_model.LogisticRegression())),
        "river softmax regression": single(linear_model.SoftmaxRegression),
        "river Hoeffding tree": single(tree.HoeffdingTreeClassifier),
        "river Gaussian naive Bayes": single(naive_bayes.GaussianNB),
        "river.Classifier er, identity": single(lambda: Classifier("er(n_recall=10)", net="identity", **ours)),
    }


def prequential(subject: Subject, x: Rows, y: Numbers, batch: int) -> tuple[float, float]:
    """Percent predicted right before they were learned, and the seconds of one row."""
    predict, learn = subject
    right, started = 0, time.perf_counter()
    for start in range(0, len(y), batch):
        rows, labels = x[start : start + batch], y[start : start + batch]
        right += int((np.asarray(predict(rows)) == labels).sum())
        learn(rows, labels)
    return 100 * right / len(y), (time.perf_counter() - started) / len(y)


def rows(quick: bool) -> Iterator[Row]:
    x, y = drifting(100 if quick else 5000)
    for batch in BATCHES:
        made = {name: make for name, make in subjects().items() if make(batch) is not None}
        accuracy, seconds = dict[str, float](), {name: list[float]() for name in made}
        for _ in range(1 if quick else 5):
            for name, make in made.items():
                subject = make(batch)
                assert subject is not None
                accuracy[name], took = prequential(subject, x, y, batch)
                seconds[name].append(took)
        for name in made:
            yield row(
                f"{name}, batches of {batch}: {accuracy[name]:.1f} %",
                f"predict, then learn, per row in batches of {batch}, by {name}",
                f"scikit-learn's {AGAINST}, {accuracy[AGAINST]:.1f} % right",
                np.array(seconds[name]) / np.array(seconds[AGAINST]),
                None,
                seconds=float(np.median(seconds[name])),
                seconds_against=float(np.median(seconds[AGAINST])),
                accuracy=accuracy[name],
            )
