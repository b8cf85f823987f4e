"""What closed forms cost when each batch is predicted and then learned, against the trunk's own passes; and on vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Row, row
from gracecl import Learner
from gracecl.inputs import Inputs

BATCH, CLASSES = 10, 100
FIRST = 500
"""images that the warm-up learns"""
AIM = 3.0
"""passes of the trunk for a prediction and a step, of which two are the trunk's own"""


def rows(quick: bool) -> Iterator[Row]:
    pixels, sizes, batches = (32, (50,), 4) if quick else (128, (2000, 5000), 60)
    for size in sizes:
        yield after_each_batch(f"ranpac(projections={size})", pixels, batches, AIM if size <= 2000 else None)
    yield after_each_batch("closed()", pixels, batches, AIM)
    yield of_vectors("closed()", 20, 20 if quick else 500)


def after_each_batch(method: str, pixels: int, batches: int, aim: float | None) -> Row:
    """Over a stretch of the stream, solutions included, in multiples of the trunk's pass over the same images."""
    rng = np.random.default_rng(0)
    learner = Learner(method, net="efficientnet_lite0(freeze=True)", shape=(3, pixels, pixels))
    images = torch.from_numpy(rng.integers(0, 256, (FIRST + BATCH * batches, 3, pixels, pixels), dtype=np.uint8))
    labels = rng.integers(0, CLASSES, len(images))
    labels[:CLASSES] = np.arange(CLASSES)
    learner.learn(images[:FIRST], labels[:FIRST])
    learner.predict(images[:BATCH])
    trunk, whole = 0.0, 0.0
    for start in range(FIRST, len(images), BATCH):
        x, y = images[start : start + BATCH], labels[start : start + BATCH]
        trunk += seconds(list, learner.net.sweep(x))
        whole += seconds(learner.predict, x) + seconds(learner.learn, x, y)
    return row(
        f"prequential, {method}",
        f"predict and learn {batches} batches of {BATCH} images of {pixels} px, solutions included, after {FIRST} images",
        "the trunk's pass over them",
        whole / trunk,
        aim,
        seconds=whole / batches,
        seconds_against=trunk / batches,
    )


def of_vectors(method: str, width: int, rounds: int) -> Row:
    """One row of a table at a time, against a learner that does next to nothing with it."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100 + rounds, 1, width)).astype(np.float32), rng.integers(0, 2, (100 + rounds, 1))
    ours, least = (Learner(name, net="identity()", inputs=Inputs((width,))) for name in (method, "ncm()"))

    def run(learner: Learner) -> float:
        for start in range(100):
            learner.learn(x[start], y[start])
        learner.predict(x[0])
        return sum(seconds(learner.predict, x[at]) + seconds(learner.learn, x[at], y[at]) for at in range(100, 100 + rounds))

    a, b = run(ours), run(least)
    return row(
        f"one row of {width} numbers, {method}",
        "predict and learn it",
        "ncm(), whose solution costs nothing",
        a / b,
        None,
        seconds=a / rounds,
        seconds_against=b / rounds,
    )


def seconds(work: Callable[..., object], *given: Any) -> float:
    started = time.perf_counter()
    work(*given)
    return time.perf_counter() - started
