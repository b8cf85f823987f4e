"""A run of 200,000 steps: time of a step, memory and file sizes at its end against its start.

`python tests/faults/long_run.py` prints the table; `--steps N` takes another number, of 10,000 or more. Times are of the
processor, as the machine may be busy.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gracecl.lab.report.runs import CHECKPOINT, RECORD
from gracecl.lab.runs import launch
from gracecl.lab.runs.run import RunConfig, Work
from gracecl.lab.runs.trainer import Trainer
from gracecl.lab.runs.watch import Watch

STEPS = 200_000
ROWS = 10
FEWEST_STEPS = 2 * ROWS * RunConfig.checkpoint_every
"""so that every row has a checkpoint"""
IMAGES_PER_TASK = 1250


@dataclass(frozen=True)
class Sample:
    """What the process and its files are like at a step."""

    step: int
    processor: float
    """seconds that the process has used"""
    resident: int
    checkpoint: int
    record: int
    """bytes in memory, of the checkpoint and of the record"""


class Sampling(Watch):
    """Note samples at evenly spaced steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.samples: list[Sample] = []

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        self.trainer = trainer
        self.samples.append(self._sample())
        yield
        self.samples.append(self._sample())

    def advance(self) -> None:
        at = self.trainer.at
        if at % self.every == 0 and at < len(self.trainer.stream):
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        self.trainer.recorder.flush()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        checkpoint, record = (self.folder / name for name in (CHECKPOINT, RECORD))
        return Sample(
            self.trainer.at,
            time.process_time(),
            pages * os.sysconf("SC_PAGE_SIZE"),
            checkpoint.stat().st_size if checkpoint.exists() else 0,
            record.stat().st_size if record.exists() else 0,
        )


def table(samples: list[Sample]) -> str:
    """One line for each part of the run, and the last against the first."""
    lines = [["steps", "ms of a processor per step", "MB in memory", "kB of the checkpoint", "record, bytes per step"]]
    lines.append(["---:"] * len(lines[0]))
    parts = []
    for before, after in pairwise(samples):
        steps = after.step - before.step
        parts.append(
            (
                1e3 * (after.processor - before.processor) / steps,
                after.resident / 1e6,
                after.checkpoint / 1e3,
                (after.record - before.record) / steps,
            )
        )
        lines.append([f"{before.step:,} to {after.step:,}", *(f"{value:.2f}" for value in parts[-1])])
    ratios = [last / first for first, last in zip(parts[0], parts[-1], strict=True)]
    lines.append(["last part against the first", *(f"{ratio:.3f}" for ratio in ratios)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    if steps < FEWEST_STEPS:
        parser.error(f"--steps must be at least {FEWEST_STEPS}, not {steps}")
    launch.keep_freed_memory()
    with tempfile.TemporaryDirectory() as place:
        tasks = -(-steps // IMAGES_PER_TASK)
        config = RunConfig(
            method="er",
            stream=f"repeat-digits(tasks={tasks}, draw='sampled', first=0.9, again=1.0, images={IMAGES_PER_TASK}, batch=1)",
            net="mlp(width=8)",
            memory=200,
            augment="none",
            device="cpu",
            steps=steps,
        )
        work = Work.new(config, Path(place))
        sampling = Sampling(work.folder, steps // ROWS)
        began = time.monotonic()
        work.run(sampling, threads=1)
        seconds = time.monotonic() - began
    sys.stdout.write(
        f"{steps:,} steps of {config.title}, {config.net}, one thread, in {seconds / 60:.1f} min\n\n{table(sampling.samples)}\n"
    )


if __name__ == "__main__":
    main()
