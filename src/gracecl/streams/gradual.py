"""Tasks that fade into one another: along a sigmoid, or with weights that rise and fall linearly.

Sigmoid, after CapyMOA::

    at the boundary of L and R, for t = 0, 1, …:
        the next image is R's with probability sigmoid(4 (t - |L|) / (w min(|L|, |R|))), else L's
    an exhausted L yields to R; when R is asked for and empty, the rest of L follows (there it is dropped: keep=False)
    what came is cut in two at |L| / (|L| + |R|) of its length; the second part is L at the next boundary

Linear, after Zeno et al., Task-Agnostic Continual Learning Using Online Variational Bayes with Fixed-Point
Updates (FOO-VB)::

    of I steps, task k of T rises from 0 at (b k - 1) I / (b T) to 1 at (b k + 1) I / (b T) and falls so one task later;
    the first and the last do not rise or fall at the ends; the weights of a step are made to sum to 1
    an image of task k comes at a time drawn with a density proportional to the weight of k

Differences from the sources: draws belong to places and images, not to one generator for all boundaries; with
linear weights every image comes once instead of by chance.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from gracecl.core import Ints
from gracecl.data import Data
from gracecl.errors import UserError
from gracecl.registry import spec, streams
from gracecl.registry.spec import Above, AtLeast, Within
from gracecl.streams import Stream
from gracecl.streams.i_blurry import in_random_order
from gracecl.streams.parts import draws, group_of_class, in_one_order, in_tasks, number_of_tasks
from gracecl.streams.split import class_order


@streams.register("gradual")
def gradual(
    data: Data,
    seed: int,
    shape: Literal["sigmoid", "linear"] = "sigmoid",
    width: Annotated[float, Within(0, 1)] = 0.5,
    beta: Annotated[float, Above(1)] = 4,
    keep: bool = True,
    tasks: int | None = None,
    order: str | int = "natural",
    batch: Annotated[int, AtLeast(1)] = 10,
    marked: bool = False,
) -> Stream:
    """Tasks that fade into one another, along a sigmoid or linearly.

    With `shape='sigmoid'`, images of the next task take over within about `width` of the smaller task; `keep=False` drops what is
    then left of the task before. With `shape='linear'`, about 2 / `beta` of the stream is mixed. Accuracy is that of the tasks so
    far.
    """
    given = {"shape": shape, "width": width, "beta": beta, "keep": keep, "tasks": tasks, "batch": batch, "marked": marked}
    spec.check_options(gradual, "gradual", given)
    tasks = number_of_tasks("gradual", data, tasks)
    task_of_class = group_of_class(np.array_split(class_order(data.classes, order), tasks), data.classes)
    task_of_image, test_task = task_of_class[data.train_y], task_of_class[data.test_y]
    if shape == "linear":
        if marked:
            raise UserError("gradual: tasks that mix linearly have no ends to mark; leave marked out, or use shape='sigmoid'")
        steps = -(-len(data.train_y) // batch)
        by_time: Ints = np.argsort(fading_times(task_of_image, linear_shares(steps, tasks, beta), seed), kind="stable")
        return in_one_order(data, seed, by_time, batch, tasks=tasks, test_task=test_task, rule="tasks so far")
    parts = [in_random_order(np.flatnonzero(task_of_image == task), seed, task) for task in range(tasks)]
    for boundary in range(tasks - 1):
        left, right = parts[boundary], parts[boundary + 1]
        chance = draws(seed, f"boundary {boundary}", np.arange(len(left) + len(right)))
        parts[boundary : boundary + 2] = blended(left, right, chance < sigmoid_shares(len(left), len(right), width), keep)
    return in_tasks(data, seed, parts, batch, marked=marked, test_task=test_task, rule="tasks so far")


def sigmoid_shares(left: int, right: int, width: float) -> npt.NDArray[np.float64]:
    """The chance of each place to show an image of the right task."""
    place = np.arange(left + right) - left
    if width == 0:
        return (place >= 0).astype(np.float64)
    with np.errstate(over="ignore"):
        shares: npt.NDArray[np.float64] = 1 / (1 + np.exp(-4 * place / (width * min(left, right))))
    return shares


def blended(left: Ints, right: Ints, from_right: npt.NDArray[np.bool_], keep: bool) -> tuple[Ints, Ints]:
    """Both tasks, each in its own order, taken from the right one where `from_right` says so; cut in two in their proportion."""
    taken: list[int] = []
    used_left = used_right = 0
    for right_now in from_right.tolist():
        if right_now or used_left == len(left):
            if used_right == len(right):
                break
            taken.append(right[used_right])
            used_right += 1
        else:
            taken.append(left[used_left])
            used_left += 1
    if keep:
        taken += left[used_left:].tolist()
    mixed = np.array(taken, np.int64)
    middle = len(left) * len(mixed) // (len(left) + len(right))
    return mixed[:middle], mixed[middle:]


def linear_shares(steps: int, tasks: int, beta: float) -> npt.NDArray[np.float64]:
    """[steps, tasks] the share of each task at each step"""
    unit = steps / (beta * tasks)
    step, task = np.arange(steps)[:, None], np.arange(tasks)[None, :]
    rise = (step - (beta * task - 1) * unit) / (2 * unit)
    fall = ((beta * (task + 1) + 1) * unit - step) / (2 * unit)
    rise[:, 0] = fall[:, -1] = 1
    weights = np.clip(np.minimum(rise, fall), 0, 1)
    shares: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return shares


def fading_times(task_of_image: Ints, shares: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    """A time in steps for each image, drawn with the density of its task."""
    chance = draws(seed, "fading", np.arange(len(task_of_image)))
    times = np.empty(len(chance))
    for task in range(shares.shape[1]):
        own = task_of_image == task
        reached = np.concatenate([[0], np.cumsum(shares[:, task])])
        times[own] = np.interp(chance[own] * reached[-1], reached, np.arange(len(reached)))
    return times
