"""What families of streams are made of: groups of classes, draws per image, orders of parts, marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracecl import rng
from gracecl.core import NO_TASK, Ints
from gracecl.data import Data
from gracecl.errors import UserError
from gracecl.streams import Rule, Stream, cut_into_batches


def number_of_tasks(family: str, data: Data, tasks: int | None) -> int:
    """The tasks asked for, or the data set's usual number; at most one for each class."""
    tasks = data.tasks if tasks is None else tasks
    if not 1 <= tasks <= data.classes:
        raise UserError(f"{family}: {data.classes} classes cannot make {tasks} tasks; choose between 1 and {data.classes}")
    return tasks


def group_of_class(groups: Sequence[Ints], classes: int) -> Ints:
    """The number of the group that each class is in."""
    group = np.empty(classes, np.int64)
    for number, members in enumerate(groups):
        group[members] = number
    return group


def draws(seed: int, purpose: str, images: Ints) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each image, which depends on no other image."""
    return rng.uniform(rng.key(seed, purpose), images, 1)[:, 0]


def smallest(images: Ints, number: int, seed: int, purpose: str) -> Ints:
    """Those `number` of the images whose draws are the smallest: with a larger number, the same ones and more."""
    return images[np.argsort(draws(seed, purpose, images), kind="stable")[:number]]


def deal(total: int, room: Ints) -> Ints:
    """How many of `total` each place gets, as evenly as its room allows, the first places one more."""
    given = np.zeros_like(room)
    while (left := min(total, int(room.sum())) - int(given.sum())) > 0:
        open_places = np.flatnonzero(given < room)
        share = np.array([len(part) for part in np.array_split(np.empty(left), len(open_places))])
        given[open_places] = np.minimum(given[open_places] + share, room[open_places])
    return given


def in_tasks(
    data: Data, seed: int, parts: Sequence[Ints], batch: int, *, marked: bool, test_task: Ints, rule: Rule, **more: Any
) -> Stream:
    """Part after part, in batches that end where a part ends, evaluated there; told to the learner as tasks if `marked`."""
    ends, steps, used = [], [], 0
    for task, part in enumerate(parts):
        ends.append(cut_into_batches(len(part), batch, used))
        steps.append(np.full(len(ends[-1]), task))
        used += len(part)
    task_of_step = np.concatenate(steps)
    return Stream(
        data=data,
        seed=seed,
        order=np.concatenate(list(parts)),
        ends=np.concatenate(ends),
        task_of_step=task_of_step if marked else np.full_like(task_of_step, NO_TASK),
        marks=np.flatnonzero(np.diff(task_of_step, append=len(parts))),
        test_task=test_task,
        fresh=np.ones(len(task_of_step), bool),
        rule=rule,
        **more,
    )


def in_one_order(data: Data, seed: int, order: Ints, batch: int, *, tasks: int, test_task: Ints, rule: Rule) -> Stream:
    """One order in batches of one size, evaluated `tasks` times at equal distances."""
    ends = cut_into_batches(len(order), batch)
    if len(ends) < tasks:
        raise UserError(f"{data.name} makes {len(ends)} batches of {batch} images, too few to evaluate after each of {tasks} tasks")
    return Stream(
        data=data,
        seed=seed,
        order=order,
        ends=ends,
        task_of_step=np.full(len(ends), NO_TASK),
        marks=reaching(ends, -(-np.arange(1, tasks + 1) * len(order) // tasks)),
        test_task=test_task,
        fresh=np.ones(len(ends), bool),
        rule=rule,
    )


def reaching(ends: Ints, positions: Ints) -> Ints:
    """The first steps that end at these positions or beyond, each once."""
    return np.unique(np.searchsorted(ends, positions))
