"""Estimate what a study costs: the runs left, and time and memory from twenty steps of each configuration.

Each configuration is measured in its own process, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gracecl.engine.cost import flops, forward_flops
from gracecl.errors import UserError
from gracecl.lab.runs import launch
from gracecl.lab.runs.run import RunConfig, Work, learner_and_stream, with_threads
from gracecl.machine import memory, peak_memory
from gracecl.registry.plugins import in_use

WARM_UP, TIMED = 6, 14
"""steps before and during timing; half of the warm-up is in the first task, everything else in the second"""


@dataclass(frozen=True)
class Probe:
    """Measurements from twenty steps of a configuration."""

    steps: int
    """of a whole run"""
    images: float
    """per step, forward and backward"""
    flops: float
    """per step: an image's backward pass counts as two forward passes"""
    seconds: float
    """per step, without evaluation and fits"""
    peak_bytes: int
    """that the process held"""


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of one configuration over its seeds."""

    config: RunConfig
    left: int
    """runs that are not finished"""
    probe: Probe

    @property
    def hours(self) -> float:
        """Of all runs that are left, one after the other."""
        return self.left * self.probe.steps * self.probe.seconds / 3600

    @property
    def flops(self) -> float:
        return self.left * self.probe.steps * self.probe.flops

    @property
    def images(self) -> float:
        return self.left * self.probe.steps * self.probe.images


def estimates(works: Sequence[Work], threads: int = 1) -> Iterator[Estimate]:
    """Yield an estimate for each configuration that has runs left."""
    left: dict[RunConfig, list[Work]] = {}
    for work in works:
        if not work.finished:
            left.setdefault(replace(work.config, seed=0), []).append(work)
    for config, members in left.items():
        yield Estimate(config, len(members), in_a_process(replace(members[0], config=config), threads))


def in_a_process(work: Work, threads: int) -> Probe:
    """Probe a run in a process of its own."""
    order = json.dumps(asdict(work) | {"threads": threads}, default=str)
    done = subprocess.run(launch.child_command(__name__), input=order, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    if "refused" in found:
        raise UserError(f"{work.config.title}: {found['refused']}")
    if not found:
        raise UserError(f"{work.config.title}: its probe ended with exit code {done.returncode}; {done.stderr.strip()[-400:]}")
    return Probe(**found)


def serve() -> None:
    """Probe the run on standard input: the main function of that process."""
    order = json.loads(sys.stdin.read())
    try:
        with in_use(order["plugins"]), with_threads(order["threads"]):
            found = asdict(probe(RunConfig(**order["config"]), order["data_root"]))
    except UserError as error:
        found = {"refused": str(error)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def probe(config: RunConfig, data_root: str | None) -> Probe:
    """Time a few steps of the first task, then of the second, where every method has a past to deal with."""
    engine, stream = learner_and_stream(replace(config, features="off"), data_root)
    second = int(stream.marks[0]) + 1 if len(stream.marks) > 1 else WARM_UP // 2
    steps = [step for step in (*range(WARM_UP // 2), *range(second, second + WARM_UP // 2 + TIMED)) if step < len(stream)]
    forward, backward, started = 0, 0, time.perf_counter()
    for number, step in enumerate(steps):
        if number == WARM_UP:
            forward, backward, started = 0, 0, time.perf_counter()
        outcome = engine.learn(stream.batch(step))
        if outcome is not None:
            forward, backward = forward + outcome.forward, backward + outcome.backward
    taken = max(1, len(steps) - WARM_UP)
    seconds, held = (time.perf_counter() - started) / taken, peak_memory()
    if engine.device.type == "cuda":
        held = torch.cuda.max_memory_allocated(engine.device)
    taking = flops(forward_flops(engine), forward, backward) / taken
    return Probe(len(stream), (forward + backward) / taken, taking, seconds, held)


def line(found: Estimate) -> str:
    """Describe one estimate in a line."""
    config, probed = found.config, found.probe
    return (
        f"{found.left} × {config.method}, {config.stream}, memory {config.memory}: {probed.steps:,} steps of {probed.images:,.0f} "
        f"images, {probed.flops / 1e9:,.1f} GFLOP and {probed.seconds:.3f} s each; {found.hours:.2f} h in all, "
        f"{probed.peak_bytes / 1e6:,.0f} MB at most"
    )


def total(found: Sequence[Estimate], jobs: int) -> str:
    """Describe the total in a line."""
    runs, hours = sum(one.left for one in found), sum(one.hours for one in found)
    images, computed = sum(one.images for one in found), sum(one.flops for one in found)
    held = sum(sorted((one.probe.peak_bytes for one in found for _ in range(one.left)), reverse=True)[:jobs])
    of_all = "" if (there := memory()) is None else f" of {there / 1e9:.1f} here"
    return (
        f"{runs} runs are left, {images:,.0f} images forward and backward, {computed / 1e15:,.3g} PFLOP, about {hours:.1f} hours "
        f"of one core, {hours / jobs:.1f} with {jobs} runs at once, which hold {held / 1e9:.1f} GB{of_all}; "
        "evaluations and fits come on top"
    )
