"""What several oracle tests begin with: random numbers, a stream of three tasks, a learner in the middle of it, whole streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gracecl.data import Data
from gracecl.engine.engine import Engine, StepResult
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import feed, toy_data, toy_engine


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def longer(tasks: int = 3) -> Stream:
    """Six classes of 60 images, in batches of 10."""
    return split(toy_data(6, 60), 0, tasks=tasks, batch=10)


def run(method: str, until: int = 9, memory: int = 100, **options: Any) -> Engine:
    """A learner after some steps of the longer stream."""
    engine = toy_engine(method, memory=memory, **options)
    feed(engine, longer(), until=until)
    return engine


def steps_of(
    engine: Engine, data: Data, tasks: int = 2, batch: int = 4, steps: int | None = None
) -> Iterator[tuple[int, StepResult | None]]:
    """Task and outcome of each step over a data set in natural order; a task ends when the next one begins."""
    stream = split(data, 0, tasks=tasks, batch=batch)
    for step in range(len(stream) if steps is None else steps):
        part = dataclasses.replace(stream.batch(step), last_of_task=False)
        yield part.task, engine.learn(part)
