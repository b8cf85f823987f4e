"""What the memory costs: the time of a step as it grows, and the bytes it holds beside the pixels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Row, compare, row
from benchmarks.scene import STREAM_BATCH
from benchmarks.workers import ROOT
from gracecl.core import Ints
from gracecl.inputs import Images
from gracecl.memory import Memory

SMALL = 1_000
LARGER = (100_000, 1_000_000)
DRAWN = 64
TASKS = 5
CLASSES = 10
AGE = 2
"""images offered so far, in capacities: at twice the capacity a reservoir keeps every second image it is offered"""

TINY_IMAGENET = (3, 64, 64)
HELD = 10_000

RESIDENT = Path("/proc/self/statm")


def rows(quick: bool) -> Iterator[Row]:
    """Adding and drawing at three sizes; the bytes of one. The latter asks Linux, and is left out elsewhere."""
    small = SteadyMemory(SMALL)
    for slots in LARGER:
        yield compare(
            f"memory add + draw, {slots:,}",
            f"offering {STREAM_BATCH} images to a full memory of {slots:,}, drawing and gathering {DRAWN} of other tasks"
            " (meant to be flat; caches make a few per cent)",
            f"the same with {SMALL:,}",
            SteadyMemory(slots).step,
            small.step,
            aim=1.25,
            repeats=3 if quick else 31,
            inner=50 if quick else 300,
        )
    if RESIDENT.exists():
        yield bytes_held(quick)


class SteadyMemory:
    """A full memory whose steps all cost the same: it neither ages nor changes its share of tasks, whatever its size."""

    def __init__(self, slots: int) -> None:
        self.memory, self.rng, self.at = Memory(slots, Images((1, 8, 8))), np.random.default_rng(0), 0
        offer(self.memory, self.rng, images=AGE * slots, at_once=SMALL // TASKS, tasks=TASKS, classes=CLASSES)
        self.x, self.labels = random_batch(self.memory, self.rng, STREAM_BATCH, CLASSES)

    def step(self) -> None:
        task = self.at % TASKS
        self.memory.add(self.rng, self.x, self.labels, task)
        # A reservoir keeps ever fewer of the images it is offered, a small one sooner; held at one age, all write equally many.
        self.memory.offered = AGE * self.memory.capacity
        self.memory[self.memory.draw(DRAWN, self.rng, except_task=task)]
        self.at += 1


def bytes_held(quick: bool) -> Row:
    """The growth of a fresh process, for freed memory of a used one would be taken again unseen."""
    command = [sys.executable, "-c", f"from {__name__} import growth; print(growth())"]
    grown = [int(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout) for _ in range(1 if quick else 5)]
    pixels = HELD * int(np.prod(TINY_IMAGENET))
    return row(
        "memory held",
        f"resident bytes gained by filling a memory of {HELD:,} images of 3×64×64, with its labels, tasks and slot lists",
        "the pixels alone",
        np.array(grown) / pixels,
        aim=1.05,
        bytes=int(np.median(grown)),
        bytes_against=pixels,
    )


def growth() -> int:
    """Bytes by which this process grows when a memory is filled from a stream, batch by batch."""
    rng = np.random.default_rng(0)
    fill = {"at_once": STREAM_BATCH, "tasks": 20, "classes": 200}
    # What torch and NumPy allocate for themselves at first use is not the memory's.
    offer(Memory(STREAM_BATCH, Images(TINY_IMAGENET)), rng, images=AGE * STREAM_BATCH, **fill)
    before = resident_bytes()
    memory = Memory(HELD, Images(TINY_IMAGENET))
    offer(memory, rng, images=AGE * HELD, **fill)
    return resident_bytes() - before


def offer(memory: Memory, rng: np.random.Generator, *, images: int, at_once: int, tasks: int, classes: int) -> None:
    """Random images, one task's batch after another's."""
    x, _ = random_batch(memory, rng, at_once, classes)
    for number in range(images // at_once):
        memory.add(rng, x, rng.integers(0, classes, at_once), number % tasks)


def random_batch(memory: Memory, rng: np.random.Generator, images: int, classes: int) -> tuple[torch.Tensor, Ints]:
    shape = (images, *memory.images.shape[1:])
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)), rng.integers(0, classes, images)


def resident_bytes() -> int:
    """What of this process is in main memory now, pages never touched not included."""
    return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
