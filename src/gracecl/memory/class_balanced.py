"""Greedy class-balanced writing: every class gets an equal share of the slots, and inside a class the first images win.

Prabhu et al., GDumb, ECCV 2020. Deciding needs nothing but labels, so the same stream and seed give the same memory for any net.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gracecl.core import NO_TASK, Ints
from gracecl.memory.reservoir import Memory


def add_balanced(
    memory: Memory, rng: np.random.Generator, x: Tensor, labels: Ints, task: int = NO_TASK, **attributes: Tensor
) -> None:
    """Offer a batch, image after image: one of a new class, or of a class below its share, is kept.

    When the memory is full it takes the place of a random image of the largest class; of equally large ones, that met first. The
    share is the capacity over the classes met, without remainder; classes above theirs shrink only when room is needed.
    """
    memory.offered += len(labels)
    if memory.capacity == 0:
        return
    for row, label in enumerate(labels.tolist()):
        held = memory.held()
        if label in held and held[label] >= memory.capacity // len(held):
            continue
        if len(memory) < memory.capacity:
            slot = np.array([len(memory)])
        else:
            slot = memory.draw(1, rng, labels=[max(held, key=held.__getitem__)])
        memory.put(slot, x, np.array([row]), labels, task, attributes)


def place_in_class(labels: Ints) -> Ints:
    """Count, for each label, the equal ones before it."""
    by_class = np.argsort(labels, kind="stable")
    grouped = labels[by_class]
    place = np.empty(len(labels), np.int64)
    place[by_class] = np.arange(len(labels)) - np.searchsorted(grouped, grouped)
    return place
