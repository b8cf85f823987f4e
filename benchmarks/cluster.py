"""What a Ray cluster costs: two nodes of one core against two jobs here, and the command's part of each run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import Row, in_turns, row
from benchmarks.nodes import Nodes, nodes
from gracecl.lab.runs.cluster import Cluster
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.run import RunConfig, Work
from gracecl.lab.runs.watch import Board

SHORT = RunConfig(method="er", stream="split-digits(tasks=2)", net="mlp(width=4)", memory=20, device="cpu", augment="none", steps=2)
LONG = RunConfig(method="er", stream="split-digits(size=16)", net="resnet18(width=4)", memory=200, device="cpu")
SIMULATED = 8
"""nodes of one core each, processes of this machine"""
RUNS = 2_000
PER_BLOCK = 100


def rows(quick: bool) -> Iterator[Row]:
    with nodes("first", "second") as cluster:
        yield two_nodes(cluster, quick)
    with nodes(*(f"node {number}" for number in range(2 if quick else SIMULATED))) as cluster:
        yield from part_of_the_command(cluster, quick)


def two_nodes(cluster: Nodes, quick: bool) -> Row:
    """Runs per hour on two nodes of one core against two jobs here; both start their processes anew each time."""
    runs = 2 if quick else 8
    config = SHORT if quick else LONG

    def execute(where: Cluster) -> Callable[[], None]:
        def work() -> None:
            with tempfile.TemporaryDirectory() as out:
                works = [Work.new(replace(config, seed=seed), Path(out)) for seed in range(runs)]
                assert all(outcome.status == "finished" for outcome in run_all(works, 2, 1, where))

        return work

    on_ray, here = in_turns(execute(Cluster("ray", cluster.address)), execute(Cluster()), repeats=1 if quick else 3)
    return row(
        "two nodes of one core",
        f"runs per hour of {runs} runs of {config.method}, {config.net}, on a Ray cluster of two nodes of one core on this machine",
        "per hour with --jobs 2",
        here / on_ray,
        aim=0.95,
        sense="at least",
        seconds=float(np.median(on_ray)),
        seconds_against=float(np.median(here)),
    )


def part_of_the_command(cluster: Nodes, quick: bool) -> Iterator[Row]:
    """Processor time and memory of the command while runs of two steps go through a cluster."""
    runs, block = (20, 5) if quick else (RUNS, PER_BLOCK)
    with tempfile.TemporaryDirectory() as out:
        executor = Cluster("ray", cluster.address).executor(None, 1, Board(runs, 0))
        for seed in range(runs):
            executor.submit(Work.new(replace(SHORT, seed=seed), Path(out)))
        began, marks = time.monotonic(), [(time.process_time(), resident())]
        for number, outcome in enumerate(executor.outcomes(), start=1):
            assert outcome.status == "finished", outcome
            if number % block == 0:
                marks.append((time.process_time(), resident()))
        wall = (time.monotonic() - began) / runs
    busy, held = np.array(marks).T
    simulated = f"{len(cluster.nodes)} simulated nodes of one core, {runs} runs of {SHORT.steps} steps"
    yield row(
        "the command's part of a run",
        f"seconds of a processor that the command takes per run (not a ratio); {simulated}",
        "nothing",
        np.diff(busy) / block,
        aim=0.05,
        wall_seconds_per_run=wall,
    )
    yield row(
        "memory of the command",
        f"bytes in memory at the end; {simulated}",
        f"after {block} runs",
        held[-1:] / held[1],
        aim=1.05,
        bytes=float(held[-1]),
        bytes_against=float(held[1]),
    )


def resident() -> int:
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return 1024 * int(fields[0])
