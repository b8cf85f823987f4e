"""Images in random order without tasks: a family of its own, and what the upper bounds learn from.

Evaluation marks stay at equal distances.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np

from gracecl import rng
from gracecl.core import NO_TASK, Ints
from gracecl.data import Data
from gracecl.machine import check_room
from gracecl.registry import spec, streams
from gracecl.registry.spec import AtLeast
from gracecl.streams import Stream, cut_into_batches
from gracecl.streams.parts import group_of_class, in_one_order, number_of_tasks

BYTES_OF_A_POSITION = 8


def shuffled(stream: Stream, extra: int) -> Stream:
    """One shuffled pass in batches of the stream's own size, each followed by `extra` images of an independent endless pass."""
    images = np.unique(stream.order)
    size = int(np.diff(stream.ends, prepend=0).max())  # the last batch of a task may be smaller
    first = images[rng.generator(stream.seed, "iid order").permutation(len(images))]
    ends = cut_into_batches(len(first), size)
    check_room(BYTES_OF_A_POSITION * extra * len(ends), f"the order of {extra} more images per step", "use a smaller n_recall")
    second = endless(images, extra * len(ends), stream.seed)
    batches = [
        part for step, end in enumerate(ends) for part in (first[step * size : end], second[step * extra : (step + 1) * extra])
    ]
    return without_tasks(stream, np.concatenate(batches), ends + extra * np.arange(1, len(ends) + 1))


def offline(stream: Stream, epochs: int, batch: int) -> Stream:
    """Many shuffled passes over everything."""
    images = np.unique(stream.order)
    check_room(BYTES_OF_A_POSITION * epochs * len(images), f"the order of {epochs} epochs", "use fewer offline_epochs")
    passes = [cut_into_batches(len(images), batch, epoch * len(images)) for epoch in range(epochs)]
    return without_tasks(stream, endless(images, epochs * len(images), stream.seed), np.concatenate(passes))


def endless(images: Ints, length: int, seed: int) -> Ints:
    """As many shuffled passes as it takes, one after the other."""
    passes = -(-length // len(images))
    orders = [images[rng.generator(seed, "iid pass", number).permutation(len(images))] for number in range(passes)]
    return np.concatenate([images[:0], *orders])[:length]


def without_tasks(stream: Stream, order: Ints, ends: Ints) -> Stream:
    steps = len(ends)
    marks = np.unique(np.ceil(np.arange(1, stream.tasks + 1) * steps / stream.tasks).astype(np.int64) - 1)
    return dataclasses.replace(
        stream,
        order=order,
        ends=ends,
        task_of_step=np.full(steps, NO_TASK),
        marks=marks,
        fresh=np.ones(steps, bool),
    )


@streams.register("iid")
def iid(data: Data, seed: int, tasks: int | None = None, batch: Annotated[int, AtLeast(1)] = 10) -> Stream:
    """All classes at once, in one random order: no tasks, nothing to forget.

    It is evaluated on all test images, `tasks` times at equal distances; the tables show groups of classes in natural order.
    """
    spec.check_options(iid, "iid", {"tasks": tasks, "batch": batch})
    tasks = number_of_tasks("iid", data, tasks)
    order = rng.generator(seed, "iid order").permutation(len(data.train_y))
    groups = np.array_split(np.arange(data.classes), tasks)
    test_task = group_of_class(groups, data.classes)[data.test_y]
    return in_one_order(data, seed, order, batch, tasks=tasks, test_task=test_task, rule="all")
