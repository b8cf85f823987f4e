"""ADWIN. Bifet and Gavaldà, Learning from Time-Changing Data with Adaptive Windowing, SDM 2007.

    a window W of the last errors, kept as buckets of 1, 2, 4, … items: in each size at most M + 1, of which the two oldest merge
    every `clock` items, for each cut of W into an older part of n₀ and a newer part of n₁ items:
        m <- 1 / (1 / (n₀ - w + 1) + 1 / (n₁ - w + 1)),  δ' <- ln(2 ln |W| / δ)
        ε <- √(2/m · var(W) · δ') + 2/(3m) · δ'
        if |mean₀ - mean₁| > ε: drop the oldest bucket; there is a change
    after a change a new window begins

It is the ADWIN2 of MOA and river, item by item (the test compares detections with river's). ADWIN looks both ways, and a learner
that gets better is a change as well: a falling learning curve alone gives about two alarms in 4,000 items. A task therefore begins
only if the error **rose**, that is if the mean of the window is larger after the item than before it.

Differences from river's: the state is plain numbers, so that a checkpoint holds it and a resumed run goes on to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from gracecl.detectors.base import Detector
from gracecl.registry import detectors
from gracecl.registry.spec import Above, AtLeast, Below


@detectors.register("adwin")
@dataclass(eq=False, repr=False)
class Adwin(Detector):
    """ADWIN on prediction errors: a task begins after the error rose."""

    delta: Annotated[float, Above(0), Below(1)] = 0.002
    """δ, how readily a difference is taken for a change"""
    clock: Annotated[int, AtLeast(1)] = 32
    """items between two looks at the window"""
    max_buckets: Annotated[int, AtLeast(2)] = 5
    """M, buckets of each size"""
    min_window_length: Annotated[int, AtLeast(1)] = 5
    """w, the fewest items of each part of the window"""
    grace_period: Annotated[int, AtLeast(0)] = 10
    """items without any look at the start of a window"""
    rising: bool = True
    """whether a change counts only if the error rose; False is ADWIN itself"""

    state = ("rows", "width", "total", "variance", "ticks")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start_over()

    def start_over(self) -> None:
        """Begin an empty window."""
        self.rows: list[list[list[float]]] = [[]]
        """`rows[i]` has the buckets of 2^i items, the oldest first, each a total and a sum of squared deviations"""
        self.width, self.ticks = 0, 0
        self.total, self.variance = 0.0, 0.0
        """of all items: their sum, and the sum of their squared deviations from the mean"""

    def update(self, errors: npt.NDArray[np.bool_]) -> bool:
        """Add the errors of a batch, one by one."""
        alarms = [self.add(float(error)) for error in errors]
        return any(alarms)

    def add(self, value: float) -> bool:
        """Add an item to the window; return whether there is a change that counts."""
        before = self.mean
        self.insert(value)
        self.ticks += 1
        changed = False
        if self.ticks % self.clock == 0 and self.width > self.grace_period:
            while self.has_cut():
                self.drop_oldest()
                changed = True
        rose = self.mean > before
        if changed:
            self.start_over()
        return changed and (rose or not self.rising)

    @property
    def mean(self) -> float:
        return self.total / self.width if self.width else 0.0

    def insert(self, value: float) -> None:
        """Put an item into a bucket of its own, and merge buckets of which there are too many."""
        if self.width:
            self.variance += self.width * (value - self.mean) ** 2 / (self.width + 1)
        self.width += 1
        self.total += value
        self.rows[0].append([value, 0.0])
        for i, row in enumerate(self.rows):
            if len(row) <= self.max_buckets:
                break
            if i + 1 == len(self.rows):
                self.rows.append([])
            (first, spread), (second, other) = row[:2]
            del row[:2]
            between = ((first - second) / 2**i) ** 2 * 2**i / 2
            self.rows[i + 1].append([first + second, spread + other + between])

    def drop_oldest(self) -> None:
        """Remove the oldest bucket from the window."""
        items = 2 ** (len(self.rows) - 1)
        total, spread = self.rows[-1].pop(0)
        self.width -= items
        self.total -= total
        between = items * self.width * (total / items - self.mean) ** 2 / (items + self.width)
        self.variance -= spread + between
        if not self.rows[-1]:
            self.rows.pop()

    def has_cut(self) -> bool:
        """Return whether some cut leaves two parts whose means differ too much."""
        if self.width < 2 or self.variance < 0:  # by rounding, where all items are equal
            return False
        older, sum_older = 0, 0.0
        confidence = math.log(2 * math.log(self.width) / self.delta)
        for items, total in self.oldest_first():
            older, sum_older = older + items, sum_older + total
            newer = self.width - older
            if min(older, newer) >= self.min_window_length:
                inverse = 1 / (older - self.min_window_length + 1) + 1 / (newer - self.min_window_length + 1)
                difference = abs(sum_older / older - (self.total - sum_older) / newer)
                bound = math.sqrt(2 * inverse * self.variance / self.width * confidence) + 2 / 3 * inverse * confidence
                if difference > bound:
                    return True
        return False

    def oldest_first(self) -> Iterator[tuple[int, float]]:
        """Yield the items and the total of each bucket."""
        for i in range(len(self.rows) - 1, -1, -1):
            for total, _ in self.rows[i]:
                yield 2**i, total
