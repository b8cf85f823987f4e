"""The same images without tasks, in random order: what the upper bounds learn from. Evaluation marks stay at equal distances."""

from __future__ import annotations

import dataclasses

import numpy as np

from gracecl import rng
from gracecl.core import NO_TASK, Ints
from gracecl.machine import check_room
from gracecl.streams import Stream, cut_into_batches

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
