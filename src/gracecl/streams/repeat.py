"""Classes that come back: class-incremental learning with repetition.

Hemati et al., Class-Incremental Learning with Repetition, CoLLAs 2023. `draw='slots'`::

    N experiences of K slots; each of C classes is cut into D slots of equally many images, some into D + 1 (N K = D C + rest)
    from the last experience to the first: K different classes, uniformly among those with slots left
    (where fewer than K are left, with repeats)

`draw='sampled'`::

    class c first comes in experience i with a probability proportional to (1 - p)^i p
    in each later experience it comes back with probability `again`
    experiences without a class are left out; the others share `images` evenly among their classes, drawn anew each time

Differences from the paper: a class with fewer images than its share leaves the rest to others. As there, what
is left after cutting a class into slots of equal size (2 of 500 images into 3 slots) is not shown.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from gracecl import rng
from gracecl.core import Ints
from gracecl.data import Data
from gracecl.errors import UserError
from gracecl.registry import spec, streams
from gracecl.registry.spec import Above, AtLeast, Below, Within
from gracecl.streams import Stream
from gracecl.streams.i_blurry import in_random_order
from gracecl.streams.parts import deal, in_tasks


@streams.register("repeat")
def repeat(
    data: Data,
    seed: int,
    tasks: Annotated[int, AtLeast(1)] | None = None,
    draw: Literal["slots", "sampled"] = "slots",
    slots: Annotated[int, AtLeast(1)] | None = None,
    first: Annotated[float, Above(0), Below(1)] = 0.01,
    again: Annotated[float, Within(0, 1)] = 0.2,
    images: Annotated[int, AtLeast(1)] = 500,
    batch: Annotated[int, AtLeast(1)] = 10,
    marked: bool = True,
) -> Stream:
    """Classes that come back: `tasks` experiences, each with some of the classes, old and new.

    With `draw='slots'`, each experience has `slots` classes (3 of 10, or as many as it takes to show all), and every image is
    shown at most once. With `draw='sampled'`, a class first comes after a geometric time with `first`, comes back with
    probability `again`, and each experience has `images` images. Accuracy is that of the classes met; a class belongs to the
    experience that brought it.
    """
    given = {"tasks": tasks, "draw": draw, "slots": slots, "first": first, "again": again, "images": images, "batch": batch}
    spec.check_options(repeat, "repeat", given | {"marked": marked})
    tasks = data.tasks if tasks is None else tasks
    if draw == "slots":
        slots = max(round(0.3 * data.classes), -(-data.classes // tasks)) if slots is None else slots
        table = slot_table(tasks, slots, data.classes, seed)
        shown = [np.concatenate(members) for members in images_of_slots(table, data.train_y)]
    else:
        table = sampled_table(tasks, data.classes, first, again, seed)
        shown = [sampled_images(row, data.train_y, images, seed, number) for number, row in enumerate(table)]
    parts = [in_random_order(part, seed, number) for number, part in enumerate(shown)]
    unmet = ~table.any(axis=0)
    if np.isin(data.test_y, np.flatnonzero(unmet)).any():
        raise UserError(f"repeat: class {np.flatnonzero(unmet)[0]} is in none of the {tasks} experiences; use more tasks or slots")
    test_task = (table > 0).argmax(axis=0)[data.test_y]
    return in_tasks(data, seed, parts, batch, marked=marked, test_task=test_task, rule="classes met")


def slot_table(experiences: int, slots: int, classes: int, seed: int) -> Ints:
    """[experiences, classes] how many slots each class has in each experience; a row sums to `slots`"""
    generator = rng.generator(seed, "slots of experiences")
    each, rest = divmod(experiences * slots, classes)
    left = np.full(classes, each)
    left[generator.permutation(classes)[:rest]] += 1
    table = np.zeros((experiences, classes), np.int64)
    for row in table[::-1]:
        there = np.flatnonzero(left)
        if len(there) >= slots:
            row[generator.permutation(there)[:slots]] = 1
        else:
            row[:] = np.bincount(generator.permutation(np.repeat(there, left[there]))[:slots], minlength=classes)
        left -= row
    return table


def images_of_slots(table: Ints, labels: Ints) -> list[list[Ints]]:
    """The images of each class in each experience, every slot of a class with equally many."""
    shown: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in table]
    for label in range(table.shape[1]):
        own, used, slots = np.flatnonzero(labels == label), 0, int(table[:, label].sum())
        size = len(own) // slots if slots else 0
        if slots and not size:
            raise UserError(f"repeat: class {label} has {len(own)} images for {slots} slots; use fewer tasks or slots")
        for number in np.flatnonzero(table[:, label]).tolist():
            more = size * int(table[number, label])
            shown[number].append(own[used : used + more])
            used += more
    return shown


def first_experiences(experiences: int, chance: float) -> npt.NDArray[np.float64]:
    """The probability of each experience to be a class's first: geometric, cut off after the last."""
    weights = chance * (1 - chance) ** np.arange(experiences)
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def sampled_table(experiences: int, classes: int, first: float, again: float, seed: int) -> Ints:
    """[experiences, classes] 1 where a class comes; experiences without any are left out"""
    generator = rng.generator(seed, "classes of experiences")
    begin = generator.choice(experiences, classes, p=first_experiences(experiences, first))
    number = np.arange(experiences)[:, None]
    comes = (number == begin) | ((number > begin) & (generator.random((experiences, classes)) < again))
    table: Ints = comes[comes.any(axis=1)].astype(np.int64)
    return table


def sampled_images(row: Ints, labels: Ints, images: int, seed: int, number: int) -> Ints:
    """The images of an experience: shared evenly among its classes, which of them get one more is drawn."""
    members = rng.generator(seed, "order of classes", number).permutation(np.flatnonzero(row))
    own = [np.flatnonzero(labels == label) for label in members.tolist()]
    counts = deal(images, np.array([len(of_class) for of_class in own]))
    drawn = [
        of_class[rng.generator(seed, "images of an experience", label, number).permutation(len(of_class))[:count]]
        for label, of_class, count in zip(members.tolist(), own, counts.tolist(), strict=True)
    ]
    return np.concatenate(drawn)
