"""What a learner keeps from one step to the next, in bytes by part.

It is counted from the learner's state, which a checkpoint holds too, so that a finished run can be asked as well. Counted are
images as they are stored, their labels, what stands beside them (logits), the net with its running statistics, modules that
methods add to it, the optimizer's moments, teachers and other copies of the net, statistics. The numbers of tasks and lists of
slots, by which images are found faster, are not, nor is what lives for one step or one evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PARTS = ("images", "labels", "values", "net", "extras", "optimizer", "teachers", "statistics")
"""values are what methods store beside images"""
A_NET = "classifier.weight"
"""an entry that the state of every net has"""


def bytes_by_part(state: dict[str, Any]) -> dict[str, int]:
    """Count the bytes of each part of an engine's state, whose tensors may be anything that has `nbytes`."""
    found = dict.fromkeys(PARTS, 0)
    for store in state["memories"].values():
        images = store["images"]
        found["images"] += images["on_disk"] if isinstance(images, dict) and "on_disk" in images else _size(images)
        found["labels"] += _size(store["labels"])
        found["values"] += _size(store["attributes"])
    for name, value in state["net"].items():
        found["extras" if name.startswith("extras.") else "net"] += _size(value)
    found["optimizer"] = _size(state["optimizer"])
    for nets, value in _leaves(state["method"]):
        found["teachers" if nets else "statistics"] += value.nbytes
    return found


def bytes_in(state: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of an engine's state as a run's timing has them: in all, and by part."""
    found = bytes_by_part(state)
    return {"bytes": sum(found.values())} | {f"bytes_{part}": size for part, size in found.items()}


def _size(tree: Any) -> int:
    return sum(value.nbytes for _, value in _leaves(tree))


def _leaves(tree: Any, in_a_net: bool = False) -> Iterator[tuple[bool, Any]]:
    """Yield tensors and arrays, each with whether it belongs to a copy of the net."""
    if hasattr(tree, "nbytes"):
        yield in_a_net, tree
    elif isinstance(tree, dict | list | tuple):
        within = in_a_net or (isinstance(tree, dict) and A_NET in tree)
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item, within)
