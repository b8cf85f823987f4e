"""What a study would take: the runs that are left, and an estimate of their time from a few steps of each configuration."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gracecl.runs.run import RunConfig, Work, learner_and_stream, with_threads

WARM_UP, TIMED = 6, 10
"""steps before and in the timing; half of the first are of the first task, the rest and all of the timed ones of the second"""


@dataclass(frozen=True)
class Estimate:
    """One configuration, whatever its seed."""

    config: RunConfig
    left: int
    """runs that are not finished"""
    steps: int
    images: float
    """per step, forward and backward"""
    seconds: float
    """per step, without evaluation and fits"""

    @property
    def hours(self) -> float:
        """Of all runs that are left, one after the other."""
        return self.left * self.steps * self.seconds / 3600


def estimates(works: Sequence[Work], threads: int = 1) -> Iterator[Estimate]:
    """One for each configuration that has runs left, as soon as it is made."""
    left: dict[RunConfig, list[Work]] = {}
    for work in works:
        if not work.finished:
            left.setdefault(replace(work.config, seed=0), []).append(work)
    for config, members in left.items():
        with with_threads(threads):
            yield probe(config, members)


def probe(config: RunConfig, members: Sequence[Work]) -> Estimate:
    """A few steps at the start of the first task, then of the second, where every method has a past to deal with."""
    engine, stream = learner_and_stream(config, members[0].data_root)
    second = int(stream.marks[0]) + 1 if len(stream.marks) > 1 else WARM_UP // 2
    steps = [*range(WARM_UP // 2), *range(second, second + WARM_UP // 2 + TIMED)]
    images, started = 0, 0.0
    for number, step in enumerate(step for step in steps if step < len(stream)):
        if number == WARM_UP:
            images, started = 0, time.perf_counter()
        batch = stream.batch(step)
        outcome = engine.learn(batch)
        images += outcome.forward + outcome.backward if outcome is not None else 0
    taken = max(1, min(len(steps), len(stream)) - WARM_UP)
    return Estimate(config, len(members), len(stream), images / taken, (time.perf_counter() - started) / taken)


def line(found: Estimate) -> str:
    """One configuration, in a line."""
    config = found.config
    return (
        f"{found.left} × {config.method}, {config.stream}, memory {config.memory}: {found.steps:,} steps of {found.images:,.0f} "
        f"images, {found.seconds:.3f} s each, {found.hours:.2f} h in all"
    )


def total(found: Sequence[Estimate], jobs: int) -> str:
    """All that is left, in a line."""
    hours, runs = sum(one.hours for one in found), sum(one.left for one in found)
    images = sum(one.left * one.steps * one.images for one in found)
    return (
        f"{runs} runs are left, {images:,.0f} images forward and backward, about {hours:.1f} hours of one core, "
        f"{hours / jobs:.1f} with {jobs} runs at once; evaluations and fits come on top"
    )
