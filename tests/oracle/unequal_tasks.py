"""Two tasks of unequal size for methods that know old, new and unmet classes, taught batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, StreamBatch, Taps
from gracecl.engine.engine import Engine, StepResult
from gracecl.testing import toy_data, toy_engine

DATA = toy_data(6, 60)
FIRST, SECOND = (5, 1), (3, 0, 4)
"""class 2 never comes"""
DECAYING = "sgd(lr=0.05, momentum=0.9, weight_decay=0.01)"


def images(labels: list[int], seed: int) -> tuple[Tensor, np.ndarray]:
    """Images of these classes, in this order."""
    generator = np.random.default_rng(seed)
    rows = np.array([generator.choice(np.flatnonzero(DATA.train_y == label)) for label in labels])
    return DATA.train_x[torch.from_numpy(rows)], DATA.train_y[rows]


def teach(engine: Engine, classes: tuple[int, ...], task: int, steps: int = 4) -> list[StepResult]:
    """So many batches of ten, each with all classes of a task."""
    found = []
    for step in range(steps):
        outcome = engine.learn(StreamBatch(*images((10 * list(classes))[:10], seed=100 * task + step), task=task))
        assert outcome is not None
        found.append(outcome)
    return found


def second_task(method: str, optimizer: str = DECAYING, **options: Any) -> Engine:
    """In the middle of the second task."""
    engine = toy_engine(method, memory=100, optimizer=optimizer, **options)
    teach(engine, FIRST, 0)
    engine.end_task()
    teach(engine, SECOND, 1)
    return engine


def assembled(engine: Engine, labels: list[int], task: int = 1) -> tuple[Batch, Taps]:
    """The batch that the engine's next step would train on, and what the net says of it."""
    x, y = images(labels, seed=77)
    new = engine.meet(StreamBatch(x, y, np.arange(len(y)), task))
    batch = engine.assemble(engine.plan(new), new, 0)
    engine.update.prepare(batch)
    return batch, engine.update.forward(batch)
