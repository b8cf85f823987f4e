"""i-Blurry-N-M: disjoint classes of one task each, and blurry classes some of whose images stray into every
task.

Koh et al., Online Continual Learning on Class Incremental Blurry Task Configuration with Anytime Inference,
ICLR 2022::

    N % of the classes are disjoint, the others blurry; each kind is dealt evenly to T tasks
    of each blurry class, M % of the images are strays
    strays of all blurry classes are pooled, shuffled and dealt evenly to all T tasks, their own included

So a blurry class of n images has n (1 - m + m / T) of them in its own task and n m / T in each other one.

Differences from the paper: none known. Its lists are files without a program; the law is what they show.
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
from gracecl.streams.parts import group_of_class, in_tasks, number_of_tasks, smallest
from gracecl.streams.split import class_order


@streams.register("i_blurry")
def i_blurry(
    data: Data,
    seed: int,
    tasks: int | None = None,
    disjoint: Annotated[float, Within(0, 100)] = 50,
    blur: Annotated[float, Within(0, 100)] = 10,
    order: str | int = "natural",
    batch: Annotated[int, AtLeast(1)] = 10,
    marked: bool = False,
) -> Stream:
    """Tasks that share classes: `disjoint` % of the classes are in one task each, `blur` % of the others' images in any.

    Accuracy is that of the test images whose class was met. With `marked=True` the learner is told where tasks end.
    """
    given = {"tasks": tasks, "disjoint": disjoint, "blur": blur, "batch": batch, "marked": marked}
    spec.check_options(i_blurry, "i-blurry", given)
    tasks = number_of_tasks("i-blurry", data, tasks)
    ordered = class_order(data.classes, order)
    number = round(data.classes * disjoint / 100)
    groups = [
        np.concatenate(kinds)
        for kinds in zip(np.array_split(ordered[:number], tasks), np.array_split(ordered[number:], tasks), strict=True)
    ]
    home = group_of_class(groups, data.classes)
    strays = stray_images(data.train_y, ordered[number:], blur / 100, seed)
    at_home = np.setdiff1d(np.arange(len(data.train_y)), strays)
    dealt = np.array_split(strays[rng.generator(seed, "stray images").permutation(len(strays))], tasks)
    parts = [
        in_random_order(np.concatenate([at_home[home[data.train_y[at_home]] == task], dealt[task]]), seed, task)
        for task in range(tasks)
    ]
    return in_tasks(data, seed, parts, batch, marked=marked, test_task=home[data.test_y], rule="classes met")


def stray_images(labels: Ints, blurry: Ints, share: float, seed: int) -> Ints:
    """Of each blurry class this share of its images, in their order."""
    chosen = []
    for label in blurry.tolist():
        images = np.flatnonzero(labels == label)
        chosen.append(smallest(images, round(share * len(images)), seed, "strays"))
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def in_random_order(images: Ints, seed: int, task: int) -> Ints:
    """A task's images as a split stream shows them in its first epoch."""
    return np.sort(images)[rng.generator(seed, "stream order", task, 0).permutation(len(images))]
