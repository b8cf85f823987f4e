"""How a ratio is measured: two things in turns in one process, many times, so that a busy or slow machine disturbs both alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Sense = Literal["at most", "at least"]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Row:
    """One figure of the benchmark: `what` took `ratio` times `against`."""

    name: str
    what: str
    against: str
    ratio: float
    """median over the repeats"""
    low: float
    """first quartile"""
    high: float
    """third quartile"""
    aim: float | None = None
    """None for a figure that is told and not judged"""
    sense: Sense = "at most"
    repeats: int = 1
    details: dict[str, Any] = field(default_factory=dict)
    """whatever else was measured: seconds of both sides, FLOPs"""

    def __str__(self) -> str:
        aim = "" if self.aim is None else f", aim {self.sense} {self.aim:g}: {'met' if self.met else 'missed'}"
        return f"{self.name:<46} {self.ratio:7.3f} ({self.low:.3f} to {self.high:.3f}){aim}"

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.ratio <= self.aim if self.sense == "at most" else self.ratio >= self.aim


def compare(
    name: str,
    what: str,
    against: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    aim: float | None,
    *,
    repeats: int,
    inner: int = 1,
    warmup: int = 1,
    sense: Sense = "at most",
    divide_by: float = 1.0,
    **details: Any,
) -> Row:
    """The row for two callables, each called `inner` times per repeat. `divide_by` is a ratio that is expected by itself."""
    a, b = in_turns(ours, theirs, repeats, inner, warmup)
    measured = {"seconds": float(np.median(a)) / inner, "seconds_against": float(np.median(b)) / inner}
    return row(name, what, against, a / b / divide_by, aim, sense=sense, **(measured | details))


def row(name: str, what: str, against: str, ratios: Any, aim: float | None, *, sense: Sense = "at most", **details: Any) -> Row:
    """The row for ratios that were measured already."""
    ratios = np.atleast_1d(np.asarray(ratios, dtype=np.float64))
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return Row(name, what, against, float(middle), float(low), float(high), aim, sense, len(ratios), details)


def added_row(name: str, what: str, added: Floats, step: Floats, aim: float) -> Row:
    """The row for something too small to be seen in whole steps: timed by itself, told as a step with it against one without."""
    whole, alone = float(np.median(step + added)), float(np.median(step))
    return row(name, what, "the step alone", 1 + added / step, aim, seconds=whole, seconds_against=alone)


def in_turns(
    first: Callable[[], Any], second: Callable[[], Any], repeats: int, inner: int = 1, warmup: int = 1
) -> tuple[Floats, Floats]:
    """Seconds of each, repeat after repeat: a b, b a, a b, … so that neither always follows the other."""
    for _ in range(warmup):
        first()
        second()
    seconds = np.zeros((2, repeats))
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that what is collected between repeats is what they left, and not the whole program again
    try:
        for repeat in range(repeats):
            for side in (0, 1) if repeat % 2 == 0 else (1, 0):
                seconds[side, repeat] = timed(second if side else first, inner)
            gc.collect()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return seconds[0], seconds[1]


def timed(work: Callable[[], Any], inner: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(inner):
        work()
    return time.perf_counter() - started
