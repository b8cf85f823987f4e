"""Si-Blurry: as i-Blurry, with tasks of random size.

Moon et al., Online Class Incremental Learning on Stochastic Blurry Task Boundary via Mask and Visual Prompt
Tuning, ICCV 2023::

    D disjoint classes are cut at T - 1 places, drawn from {0 … D - 1} and sorted; the blurry classes likewise
    K = M % of the blurry images are cut in the same way into k_1 … k_T
    k_i images leave the blurry ones of task i; all that left are shuffled; k_i of them come to task i

Differences from the paper: strays are drawn, not the first of the file; no more leave a task than it has, the
rest are dealt to other tasks; no class is left out; tasks without a class are left out and the others
numbered anew.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from gracecl import rng
from gracecl.core import Ints
from gracecl.data import Data
from gracecl.registry import spec, streams
from gracecl.registry.spec import AtLeast, Within
from gracecl.streams import Stream
from gracecl.streams.i_blurry import in_random_order
from gracecl.streams.parts import deal, group_of_class, in_tasks, number_of_tasks, smallest
from gracecl.streams.split import class_order


@streams.register("si_blurry")
def si_blurry(
    data: Data,
    seed: int,
    tasks: int | None = None,
    disjoint: Annotated[float, Within(0, 100)] = 50,
    blur: Annotated[float, Within(0, 100)] = 10,
    order: str | int = "natural",
    batch: Annotated[int, AtLeast(1)] = 10,
    marked: bool = False,
) -> Stream:
    """Tasks of random size that share classes: i-Blurry with random numbers of classes and of straying images.

    There may be fewer than `tasks` tasks, as those that get no class are left out.
    """
    given = {"tasks": tasks, "disjoint": disjoint, "blur": blur, "batch": batch, "marked": marked}
    spec.check_options(si_blurry, "si-blurry", given)
    tasks = number_of_tasks("si-blurry", data, tasks)
    ordered = class_order(data.classes, order)
    number = round(data.classes * disjoint / 100)
    of_one_task = cut(ordered[:number], tasks, rng.generator(seed, "disjoint classes"))
    of_any_task = cut(ordered[number:], tasks, rng.generator(seed, "blurry classes"))
    home = group_of_class([np.concatenate(kinds) for kinds in zip(of_one_task, of_any_task, strict=True)], data.classes)
    blurry = np.flatnonzero(np.isin(data.train_y, ordered[number:]))
    after = exchanged(blurry, home[data.train_y[blurry]], tasks, int(blur / 100 * len(blurry)), seed)
    task_of_image = home[data.train_y]
    task_of_image[blurry] = after
    there = np.unique(task_of_image)
    parts = [in_random_order(np.flatnonzero(task_of_image == task), seed, task) for task in there.tolist()]
    test_task = np.minimum(np.searchsorted(there, home[data.test_y]), len(there) - 1)
    return in_tasks(data, seed, parts, batch, marked=marked, test_task=test_task, rule="classes met")


def cut(things: Ints, tasks: int, generator: np.random.Generator) -> list[Ints]:
    """The things between sorted cuts that are drawn among their places: any part but the last may be empty."""
    cuts = np.sort(generator.integers(0, len(things), tasks - 1)) if len(things) else np.zeros(tasks - 1, np.int64)
    return np.split(things, cuts)


def exchanged(images: Ints, task: Ints, tasks: int, number: int, seed: int) -> Ints:
    """The tasks of the images after `number` of them changed places: every task ends with as many as before."""
    drawn = [len(part) for part in cut(np.arange(number), tasks, rng.generator(seed, "stray numbers"))]
    have = np.bincount(task, minlength=tasks)
    leave = np.minimum(drawn, have)
    leave += deal(number - int(leave.sum()), have - leave)
    left = np.sort(np.concatenate([smallest(images[task == i], leave[i], seed, "strays") for i in range(tasks)]))
    places = np.repeat(np.arange(tasks), leave)
    after: Ints = task.copy()
    after[np.searchsorted(images, left)] = places[rng.generator(seed, "stray images").permutation(len(left))]
    return after
