"""Task after task, each with classes of its own: the usual class-incremental stream."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from gracecl import rng
from gracecl.core import NO_TASK, Ints
from gracecl.data import Data
from gracecl.data.splits import part_of
from gracecl.errors import UserError
from gracecl.machine import check_room
from gracecl.registry import spec, streams
from gracecl.registry.spec import Above, AtLeast, Below
from gracecl.streams import Stream, cut_into_batches


@streams.register("split")
def split(
    data: Data,
    seed: int,
    tasks: int | None = None,
    order: str | int = "natural",
    batch: Annotated[int, AtLeast(1)] = 10,
    epochs: Annotated[int, AtLeast(1)] = 1,
    per_class: Annotated[int, AtLeast(1)] | None = None,
    first: Annotated[int, AtLeast(1)] | None = None,
    validation: Annotated[float, Above(0), Below(1)] | None = None,
    marked: bool = True,
) -> Stream:
    """Classes split into tasks in natural or seeded order; each task's images shuffled per run, in small batches, once.

    With `per_class`, each run shows at most so many images of a class, chosen by its seed. `first` keeps the first tasks alone.
    `validation` holds out this share of each class's training images, chosen by the seed, and evaluates on them in place of the
    test images. What is left out so is in no part of the stream, nor are pixels normalised by it. With `marked=False` the learner
    is not told which task a batch belongs to, nor when one ends; images, order and evaluations are the same.
    """
    given = {"batch": batch, "epochs": epochs, "per_class": per_class, "first": first, "validation": validation, "marked": marked}
    spec.check_options(split, "split", given)
    tasks = data.tasks if tasks is None else tasks
    if not 1 <= tasks <= data.classes:
        raise UserError(f"split: {data.classes} classes cannot make {tasks} tasks; choose between 1 and {data.classes}")
    task_of_class = np.empty(data.classes, np.int64)
    for task, members in enumerate(np.array_split(class_order(data.classes, order), tasks)):
        task_of_class[members] = task
    if first is not None or validation is not None:
        shown = tasks if first is None else first
        if shown > tasks:
            raise UserError(f"split: there are no first {shown} of {tasks} tasks; choose between 1 and {tasks}")
        data, tasks = part_of(data, np.flatnonzero(task_of_class < shown), validation, seed), shown
    task_of_image = task_of_class[data.train_y]

    check_room(8 * epochs * len(data.train_y), f"the order of {epochs} epochs", "use fewer epochs")
    positions, ends, task_of_step, fresh = [], [], [], []
    used = 0
    for task in range(tasks):
        images = some_of_each(np.flatnonzero(task_of_image == task), data.train_y, per_class, seed)
        if len(images) == 0:
            raise UserError(f"split: task {task} has no training images in {data.name}; choose other classes or fewer tasks")
        for epoch in range(epochs):
            positions.append(images[rng.generator(seed, "stream order", task, epoch).permutation(len(images))])
            batches = cut_into_batches(len(images), batch, used)
            used += len(images)
            ends.append(batches)
            task_of_step.append(np.full(len(batches), task))
            fresh.append(np.full(len(batches), epoch == 0))
    steps = np.concatenate(task_of_step)
    return Stream(
        data=data,
        seed=seed,
        order=np.concatenate(positions),
        ends=np.concatenate(ends),
        task_of_step=steps if marked else np.full_like(steps, NO_TASK),
        marks=np.flatnonzero(np.diff(steps, append=tasks)),
        test_task=task_of_class[data.test_y],
        fresh=np.concatenate(fresh),
    )


def some_of_each(images: Ints, labels: Ints, per_class: int | None, seed: int) -> Ints:
    """Those images that stay if each class shows at most `per_class`, in their order."""
    if per_class is None:
        return images
    chosen = []
    for label in np.unique(labels[images]).tolist():
        of_class = images[labels[images] == label]
        chosen.append(of_class[rng.generator(seed, "images of a class", label).permutation(len(of_class))[:per_class]])
    return np.sort(np.concatenate(chosen)) if chosen else images


def class_order(classes: int, order: str | int) -> np.typing.NDArray[np.int64]:
    """0, 1, 2, … or a permutation drawn from a seed (1993 is the usual one in offline class-incremental work)."""
    if order == "natural":
        return np.arange(classes)
    if isinstance(order, int):
        return rng.generator(order, "class order").permutation(classes)
    raise UserError(f"split: order is 'natural' or the seed of a random class order, not {order!r}")
