"""What it costs to keep data and memory outside RAM: a stream from shards, a memory on disk and one of JPEG bytes, against RAM."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, compare, row
from benchmarks.memory import AGE, CLASSES, DRAWN, TASKS, offer, random_batch
from benchmarks.scene import CIFAR, STREAM_BATCH
from benchmarks.workers import ROOT
from gracecl import stream
from gracecl.data import Data, from_shards, pack
from gracecl.engine.read_ahead import read_ahead
from gracecl.engine.recipe import Recipe
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.rows import Numbers, Rows

LIMIT = 1_000_000_000
"""bytes that the process may hold while it learns from three times as many"""
LARGE, SMALL = 1_000_000, 20_000
"""images of the set that does not fit, and of that which is compared with RAM"""
STEPS = 200
SLOTS = 1_000_000


def rows(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from_memory_or_shards(Path(folder) / "small", quick)
        yield peak(Path(folder) / "large", quick)
    slots = 20_000 if quick else SLOTS
    for store, aim in (("disk", 1.5), ("jpeg(quality=90)", None)):
        held = slots if store == "disk" else slots // 10
        yield compare(
            f"memory {store.partition('(')[0]}, add + draw, {held:,}",
            f"offering {STREAM_BATCH} images of 3×32×32 to a full memory with --store {store}, drawing and gathering {DRAWN}",
            "the same in RAM",
            stepping(store, held),
            stepping("ram", held),
            aim=aim,
            repeats=3 if quick else 31,
            inner=20 if quick else 200,
        )


class Generated:
    """Images that are computed of their numbers."""

    dtype = torch.uint8

    def __init__(self, count: int) -> None:
        self.shape: tuple[int, ...] = (count, *CIFAR)
        self._table = np.random.default_rng(0).integers(0, 256, (997, *CIFAR), np.uint8)

    def read(self, numbers: Numbers) -> Tensor:
        shift = (numbers % 251).astype(np.uint8)[:, None, None, None]
        return torch.from_numpy(self._table[numbers % 997] + shift)


def generated(count: int) -> Data:
    labels = np.arange(count) % CLASSES
    names = tuple(map(str, range(CLASSES)))
    x, test = Rows(Generated(count)), Generated(500).read(np.arange(500))
    return Data("generated", x, labels, test, labels[:500], Images(CIFAR), names, TASKS)


def from_memory_or_shards(folder: Path, quick: bool) -> Row:
    """A step of `er` at width 20, whose images come from shards or from RAM."""
    made = generated(SMALL)
    packed, held = pack(made, folder, show=False), made.train_x.loaded()
    in_ram = Data("generated", held, made.train_y, made.test_x, made.test_y, made.inputs, made.class_names, TASKS)
    return compare(
        "stream from shards",
        "a step of er on resnet18(width=20), its ten images read from shards in the background",
        "the same with the images in RAM",
        learning(packed),
        learning(in_ram),
        aim=1 / 0.95,
        repeats=3 if quick else 31,
        inner=2 if quick else 10,
    )


def learning(data: Data) -> Callable[[], None]:
    """The steps of a learner, one per call."""
    images = stream(data, tasks=TASKS)
    engine = Recipe(method="er()", net="resnet18(width=20)", memory=1000).build(data.inputs, data.classes)
    read, steps = read_ahead(images), iter(range(len(images)))
    return lambda: (engine.learn(read(next(steps))), None)[1]


def peak(folder: Path, quick: bool) -> Row:
    """The peak of a fresh process that learns from 3 GB."""
    count = SMALL if quick else LARGE
    command = [sys.executable, "-c", f"from {__name__} import learn_within; learn_within({str(folder)!r}, {count})"]
    held = int(subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True).stdout.split()[-1])
    return row(
        "peak with shards",
        f"the most bytes that a process holds which packs {count:,} images of 3×32×32 and learns {STEPS} batches of them",
        "1 GB",
        held / LIMIT,
        aim=1.0,
        bytes=held,
        bytes_against=LIMIT,
    )


def learn_within(folder: str, count: int) -> None:
    """Pack, learn, and print the peak of this process."""
    from gracecl.machine import peak_memory

    pack(generated(count), folder, show=False)
    step = learning(from_shards(folder))
    for _ in range(STEPS):
        step()
    sys.stdout.write(f"{peak_memory()}\n")


def stepping(store: str, slots: int) -> Callable[[], None]:
    """Adding to and drawing from a full memory, one step per call."""
    memory, rng = Memories(slots, Images(CIFAR), store=store).replay, np.random.default_rng(0)
    offer(memory, rng, images=AGE * slots, at_once=1000, tasks=TASKS, classes=CLASSES)
    x, labels = random_batch(memory, rng, STREAM_BATCH, CLASSES)

    def step() -> None:
        memory.add(rng, x, labels, 0)
        memory.offered = AGE * slots  # held at one age, every step writes equally many
        memory[memory.draw(DRAWN, rng)]

    return step
