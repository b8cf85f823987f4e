"""Processes that step when told to: for settings that only a process of its own can have, such as threads and the allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Floats, timed

ROOT = Path(__file__).parent.parent
"""where a process of ours must start to find this package"""
CHILD = "from benchmarks.workers import serve; serve()"


@dataclass(frozen=True)
class Setting:
    """What a process steps on, and how it is set up."""

    method: str
    net: str
    threads: int
    scene: dict[str, Any] = field(default_factory=dict)
    """further arguments of `Scene`"""
    launcher: bool = True
    """whether it keeps freed memory, as the command does"""
    environment: dict[str, str] = field(default_factory=dict)
    """variables to set for it; those of torch.distributed make it a process of a group that learns as one"""


class Worker:
    """A process with a learner in the middle of its stream. It is told numbers of steps and answers with seconds per step."""

    def __init__(self, setting: Setting) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | setting.environment
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self._tell(asdict(setting))
        self.warmup_seconds = 0.0
        """of the first two steps, with whatever is compiled in them"""

    def start(self, steps: int) -> None:
        self._tell(steps)

    def seconds(self) -> float:
        """Waits for the steps that were started; seconds that each of them took."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError("a process of the benchmark ended before its time; what it said stands above")
        return float(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()


@contextmanager
def workers(settings: Sequence[Setting]) -> Iterator[list[Worker]]:
    found: list[Worker] = []
    try:
        for setting in settings:
            found.append(Worker(setting))
        for worker in found:  # when all were started, as those of a group wait for each other
            worker.warmup_seconds = worker.seconds()
        yield found
    finally:
        for worker in found:
            worker.close()


def seconds_in_turns(groups: Sequence[Sequence[Worker]], repeats: int, steps: int) -> list[list[Floats]]:
    """Seconds a step, for each worker of each group and each repeat. The workers of a group run at once, the groups in turns."""
    taken = [[np.zeros(repeats) for _ in group] for group in groups]
    for repeat in range(repeats):
        order = range(len(groups)) if repeat % 2 == 0 else reversed(range(len(groups)))
        for number in order:
            for worker in groups[number]:
                worker.start(steps)
            for place, worker in enumerate(groups[number]):
                taken[number][place][repeat] = worker.seconds()
    return taken


def serve() -> None:
    """What a worker does all its life."""
    setting = Setting(**json.loads(sys.stdin.readline()))
    if setting.launcher:
        from gracecl.lab.runs import launch

        launch.keep_freed_memory()
    import torch

    from benchmarks.scene import Scene

    torch.set_num_threads(setting.threads)
    if "RANK" in setting.environment:
        torch.distributed.init_process_group("gloo")
    scene = Scene(setting.method, setting.net, **setting.scene)
    answer(timed(scene.step, 2))
    for line in sys.stdin:
        answer(timed(scene.step, int(line)) / int(line))


def answer(seconds: float) -> None:
    sys.stdout.write(f"{seconds}\n")
    sys.stdout.flush()
