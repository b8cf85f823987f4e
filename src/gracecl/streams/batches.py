"""Batches of a plain iterable, a `DataLoader` or a generator: `(x, y)`, `(x, y, task)` or a dict.

An indexed stream (`Stream`) promises more: any batch can be asked for by its step, so that learning continues exactly where it
stopped. A plain iterable is gone through once, from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gracecl.errors import UserError

LABELS = ("y", "labels", "label", "target", "targets")
"""what the labels are called in a batch that is a dict"""
TASK = "task"
FORMS = "(x, y), (x, y, task) or a dict with the labels under 'y' or 'labels'"


def batches_of(source: Iterable[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Input, labels and task (None where it is not said) of each batch."""
    try:
        items = iter(source)
    except TypeError:
        raise UserError(
            f"a learner fits a stream, a data set, or anything that yields batches {FORMS}, "
            f"not a value of type {type(source).__name__}"
        ) from None
    for number, item in enumerate(items, start=1):
        yield parts_of(item, number)


def parts_of(item: Any, number: int) -> tuple[Any, Any, Any]:
    """Input, labels and task of one batch; `number` names it in errors."""
    if isinstance(item, Mapping):
        return _from_mapping(item, number)
    if isinstance(item, (tuple, list)) and len(item) in (2, 3):
        x, y, task = (*item, None)[:3]
        if isinstance(task, (tuple, list)) or getattr(task, "ndim", 0) > 0:
            task = _only(task, number)
        return x, y, task
    what = f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list)) else type(item).__name__
    raise UserError(f"batch {number} is a {what}; a batch is {FORMS}")


def _from_mapping(item: Mapping[Any, Any], number: int) -> tuple[Any, Any, Any]:
    named = [name for name in LABELS if name in item]
    if len(named) != 1:
        found = ", ".join(map(str, item)) or "nothing"
        raise UserError(f"batch {number} is a dict of {found}; give the labels under one of {', '.join(LABELS)}")
    rest = {name: value for name, value in item.items() if name not in (named[0], TASK)}
    if not rest:
        raise UserError(f"batch {number} is a dict without an input; give the input beside '{named[0]}'")
    x = next(iter(rest.values())) if len(rest) == 1 else rest
    return parts_of((x, item[named[0]], item.get(TASK)), number)


def _only(tasks: Any, number: int) -> Any:
    """The task of all examples of a batch, where each comes with its own."""
    found = list(dict.fromkeys(tasks.tolist() if hasattr(tasks, "tolist") else tasks))
    if len(found) != 1:
        raise UserError(f"batch {number} holds examples of the tasks {found}; a batch belongs to one task")
    return found[0]
