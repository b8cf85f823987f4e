"""Runs on real CIFAR-100 on a Ray cluster whose workers and nodes are killed at random, against the same runs undisturbed.

`python -m tests.faults.endurance` trains for an hour and prints what came of it; `--minutes` takes another time, `--seed` other
moments. The data set is looked for in $GRACECL_DATA.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.nodes import Nodes, nodes
from gracecl.lab.runs.cluster import HERE, Cluster
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.run import RunConfig, Work
from tests.faults.machine import results

CONFIG = RunConfig(
    method="er",
    stream="split-cifar100(classes='0-9', tasks=5, size=16)",
    net="resnet18(width=4)",
    memory=200,
    steps=100,
    device="cpu",
    checkpoint_every=10,
)
SEEDS = range(2)
NODES = 2
SECONDS_BETWEEN_KILLS = 30.0
"""on average"""
NODES_AMONG_KILLS = 0.3
TASK = b"ray::execute_and_tell"
"""title of a process that executes a run"""


def execute(out: Path, where: Cluster) -> Counter[str]:
    """Execute all runs; return how they ended."""
    works = [Work.new(replace(CONFIG, seed=seed), out) for seed in SEEDS]
    return Counter(outcome.status for outcome in run_all(works, 2, 1, where))


def workers(cluster: Nodes) -> list[int]:
    """Return the processes of a cluster that execute runs now."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        process = int(file.parent.name)
        with contextlib.suppress(OSError):
            if file.read_bytes().startswith(TASK) and cluster.holds(process):
                found.append(process)
    return sorted(found)


@contextlib.contextmanager
def killing(cluster: Nodes, draw: random.Random, kills: Counter[str]) -> Iterator[None]:
    """Kill a worker or a node now and then while the block runs; a while after a node died, another one joins."""
    over = threading.Event()

    def act() -> None:
        while not over.wait(draw.expovariate(1 / SECONDS_BETWEEN_KILLS)):
            if len(cluster.nodes) == NODES and draw.random() < NODES_AMONG_KILLS:
                cluster.kill(draw.choice(sorted(cluster.nodes)))
                kills["nodes"] += 1
            elif len(cluster.nodes) < NODES:
                with contextlib.suppress(
                    Exception
                ):  # Ray gives a node 30 s to start, which a busy machine may not manage; then later
                    cluster.add(f"node {NODES + kills['nodes']}")
            elif found := workers(cluster):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(found), signal.SIGKILL)
                    kills["workers"] += 1

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kills, ends, compared = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as place, nodes(*(f"node {number + 1}" for number in range(NODES))) as cluster:
        alone = Path(place) / "alone"
        assert execute(alone, HERE) == {"finished": len(SEEDS)}
        began, rounds = time.monotonic(), 0
        with killing(cluster, random.Random(given.seed), kills):
            while time.monotonic() - began < 60 * given.minutes:
                rounds += 1
                out = Path(place) / str(rounds)
                while (ended := execute(out, Cluster("ray", cluster.address))) != {"finished": len(SEEDS)}:
                    ends += ended  # a run that died too often in a row is given up, and goes on with the same command
                ends += ended
                for file in alone.rglob("config.json"):
                    run = file.parent.relative_to(alone)
                    same = results(out / run) == results(alone / run)
                    compared["identical" if same else "different"] += 1
                minutes = (time.monotonic() - began) / 60
                sys.stderr.write(f"{minutes:.1f} minutes, round {rounds}: {dict(kills)}, {dict(compared)}\n")
        minutes = (time.monotonic() - began) / 60
    lines = [
        f"{minutes:.1f} minutes, seed {given.seed}: {CONFIG.method} on {CONFIG.stream}, {CONFIG.net}, {CONFIG.steps} steps, "
        f"a checkpoint every {CONFIG.checkpoint_every}; {len(SEEDS)} seeds at once on two nodes of one core",
        f"killed: {kills['workers']} workers, {kills['nodes']} nodes",
        f"ends of runs: {dict(ends)}",
        f"{rounds} rounds, runs beside the undisturbed ones: {compared['identical']} identical, {compared['different']} different",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(bool(compared["different"]))


if __name__ == "__main__":
    main()
