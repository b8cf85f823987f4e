"""The order of the world: images as they were taken, by a time of each or by a file that says the order.

The seed changes nothing here but the learner. A file is text with a value per line, CSV with a header and the
name of a `column`, or `.npy`; times are numbers or dates such as 2012-04-30.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from gracecl.core import Ints
from gracecl.data import Data
from gracecl.errors import UserError
from gracecl.files import without_nul
from gracecl.registry import nearest, spec, streams
from gracecl.registry.spec import AtLeast
from gracecl.streams import Stream
from gracecl.streams.parts import group_of_class, in_tasks, number_of_tasks


@streams.register("timed")
def timed(
    data: Data,
    seed: int,
    times: str | None = None,
    order_file: str | None = None,
    test_times: str | None = None,
    column: str | None = None,
    tasks: Annotated[int, AtLeast(1)] | None = None,
    batch: Annotated[int, AtLeast(1)] = 10,
    marked: bool = False,
) -> Stream:
    """Images in the order in which they were taken: by the `times` of a file, by an `order_file`, or as the data have them.

    `times` has a value for each training image, `order_file` the numbers of training images, from 0. The stream has `tasks` periods
    of equally many images. With `test_times`, accuracy is that of test images of the periods so far; without, of all test images,
    and the tables show groups of classes.
    """
    given = {"times": times, "order_file": order_file, "test_times": test_times, "column": column}
    spec.check_options(timed, "timed", given | {"tasks": tasks, "batch": batch, "marked": marked})
    if times is not None and order_file is not None:
        raise UserError("timed: times and order_file both say the order; leave one of them out")
    if test_times is not None and times is None:
        raise UserError("timed: test_times are compared with the times of training images; give times, too")
    order = np.arange(len(data.train_y))
    taken: npt.NDArray[Any] | None = None
    if order_file is not None:
        order = as_order(values_of(order_file, column), len(data.train_y), order_file)
    if times is not None:
        taken = values_of(times, column, len(data.train_y))
        order = np.argsort(taken, kind="stable")
    if taken is None or test_times is None:
        tasks = number_of_tasks("timed", data, tasks)
        groups = np.array_split(np.arange(data.classes), tasks)
        test_task = group_of_class(groups, data.classes)[data.test_y]
    else:
        tasks = data.tasks if tasks is None else tasks
    if tasks > len(order):
        raise UserError(f"timed: {len(order)} images cannot make {tasks} periods; use fewer tasks")
    parts = np.array_split(order, tasks)
    if taken is None or test_times is None:
        return in_tasks(data, seed, parts, batch, marked=marked, test_task=test_task, rule="all")
    begins = np.array([taken[part[0]] for part in parts[1:]], taken.dtype)
    when = values_of(test_times, column, len(data.test_y))
    if when.dtype.kind != taken.dtype.kind:
        raise UserError(f"timed: one of {times} and {test_times} holds dates and the other numbers; use one kind")
    test_task = np.searchsorted(begins, when, side="right")
    return in_tasks(data, seed, parts, batch, marked=marked, test_task=test_task, rule="tasks so far")


def as_order(values: npt.NDArray[Any], images: int, file: str) -> Ints:
    """Numbers of training images, each at most once."""
    if values.dtype.kind != "f" or not np.array_equal(values, np.floor(values)):
        raise UserError(f"timed: {file} must hold whole numbers of training images, from 0")
    order: Ints = values.astype(np.int64)
    if len(order) == 0 or order.min() < 0 or order.max() >= images:
        raise UserError(f"timed: {file} must hold numbers of training images, 0 to {images - 1}, at least one")
    if len(np.unique(order)) < len(order):
        raise UserError(f"timed: {file} names some image twice; name each once")
    return order


def values_of(file: str, column: str | None, count: int | None = None) -> npt.NDArray[Any]:
    """The numbers or dates of a file, as many as `count`."""
    place = without_nul(Path(file).expanduser())
    if not place.is_file():
        raise UserError(f"timed: there is no file {place}")
    if place.suffix == ".npy":
        try:
            values: npt.NDArray[Any] = np.load(place, allow_pickle=False)
        except ValueError as error:
            raise UserError(f"timed: {place} is not an array of numbers or dates ({error})") from None
        values = values.astype(np.float64) if values.dtype.kind in "iuf" else values
    else:
        values = parsed(written_values(place, column), place)
    if values.ndim != 1 or values.dtype.kind not in "fM" or not np.isfinite(values).all():
        raise UserError(f"timed: {place} must hold one list of finite numbers, or of dates")
    if count is not None and len(values) != count:
        raise UserError(f"timed: {place} has {len(values)} values, and there are {count} images; give one for each")
    return values


def written_values(place: Path, column: str | None) -> list[str]:
    """The lines of a text file, or a column of a CSV file."""
    try:
        text = place.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"timed: {place} is not text in UTF-8; write a value per line") from None
    if column is None:
        return text.split()
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or column not in rows[0]:
        there = [str(name) for name in rows[0]] if rows else []
        raise UserError(
            f"timed: {place} has no column '{column}'{nearest(column, there)} (there are: {', '.join(there) or 'none'})"
        )
    return [row[column] or "" for row in rows]


def parsed(words: list[str], place: Path) -> npt.NDArray[Any]:
    """All as numbers, or all as dates."""
    try:
        return np.array(words, np.float64)
    except ValueError:
        pass
    try:
        return np.array(words, "datetime64[s]")
    except ValueError as error:
        raise UserError(f"timed: {place} holds neither numbers nor dates such as 2012-04-30 ({error})") from None
