"""What it costs to keep data and memory outside RAM: a stream from shards, a memory on disk and one of JPEG bytes, against RAM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, compare, in_turns, row, timed
from benchmarks.memory import AGE, CLASSES, DRAWN, TASKS, offer, random_batch
from benchmarks.scene import CIFAR, STREAM_BATCH
from benchmarks.workers import ROOT
from gracecl import stream
from gracecl.data import Data, pack
from gracecl.engine.read_ahead import read_ahead
from gracecl.engine.recipe import Recipe
from gracecl.inputs import Images
from gracecl.machine import peak_memory
from gracecl.memory import Memories, Memory
from gracecl.memory.on_disk import PIECE, DiskMemory
from gracecl.rows import Numbers, Rows

LIMIT = 1_000_000_000
"""bytes that the process may hold while it learns from three times as many"""
LARGE, SMALL = 1_000_000, 5_000
"""images of the set that does not fit, and of that which is compared with it in RAM"""
SLOTS = 1_000_000
CHECKPOINTS = 10
"""while a memory is filled"""


def rows(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from within_limit(Path(folder), quick)
        slots = 20_000 if quick else SLOTS
        for store, aim in (("disk", 1.5), ("jpeg(quality=90)", None)):
            held = slots if store == "disk" else slots // 10
            yield memory_against_ram(store, held, aim, Path(folder), quick)


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


def within_limit(folder: Path, quick: bool) -> Iterator[Row]:
    """What a fresh process measures that may not hold more than `LIMIT` bytes."""
    count = SMALL if quick else LARGE
    command = [
        sys.executable,
        "-c",
        f"from {__name__} import learn_within; learn_within({str(folder / 'shards')!r}, {count}, {quick})",
    ]
    few_arenas = os.environ | {"MALLOC_ARENA_MAX": "2"}  # the limit counts what allocators reserve for threads, used or not
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True, env=few_arenas)
    found = json.loads(ended.stdout.splitlines()[-1])
    shards, ram = np.array(found["seconds"])
    yield row(
        "stream from shards",
        f"a step of er on resnet18(width=20), its ten images read in the background from shards of {count:,} images of 3×32×32, "
        "in a process limited to 1 GB",
        f"the same with {SMALL:,} images in RAM",
        shards / ram,
        aim=1 / 0.95,
        seconds=float(np.median(shards)),
        seconds_against=float(np.median(ram)),
    )
    yield row(
        "peak with shards",
        f"the most bytes that this process held, which packed the {count:,} images too",
        "1 GB",
        found["peak"] / LIMIT,
        aim=1.0,
        bytes=found["peak"],
        bytes_against=LIMIT,
    )


def learn_within(folder: str, count: int, quick: bool) -> None:
    """Pack and learn with at most `LIMIT` bytes; print the seconds of steps and the peak of this process."""
    limit_memory(LIMIT)
    packed, small = pack(generated(count), folder, show=False), generated(SMALL)
    in_ram = replace(small, train_x=small.train_x.loaded())
    repeats, steps = (3, 2) if quick else (31, 10)
    seconds = in_turns(learning(packed), learning(in_ram), repeats, steps)
    measured = {"seconds": [(taken / steps).tolist() for taken in seconds], "peak": peak_memory()}
    sys.stdout.write(f"{json.dumps(measured)}\n")


def limit_memory(limit: int) -> None:
    """Let allocations beyond `limit` bytes fail, where the system can count them."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def learning(data: Data) -> Callable[[], None]:
    """The steps of a learner, one per call."""
    images = stream(data, tasks=TASKS)
    engine = Recipe(method="er()", net="resnet18(width=20)", memory=1000).build(data.inputs, data.classes)
    read, steps = read_ahead(images), iter(range(len(images)))
    return lambda: (engine.learn(read(next(steps))), None)[1]


def memory_against_ram(store: str, slots: int, aim: float | None, folder: Path, quick: bool) -> Row:
    """Adding to and drawing from a full memory; one on disk is then loaded from its file, and compared."""
    kept, ram = (full_memory(of, slots, folder / "memory") for of in (store, "ram"))
    measured = compare(
        f"memory {store.partition('(')[0]}, add + draw, {slots:,}",
        f"offering {STREAM_BATCH} images of 3×32×32 to a full memory with --store {store}, drawing and gathering {DRAWN}",
        "the same in RAM",
        stepping(kept),
        stepping(ram),
        aim=aim,
        repeats=3 if quick else 31,
        inner=20 if quick else 200,
        warmup=20 if quick else 2000,  # until most pages of the file are mapped, as in the middle of a run
    )
    more: dict[str, float] = {"bytes": image_bytes(kept), "bytes_against": image_bytes(ram)}
    if isinstance(kept, DiskMemory):
        with kept.checkpointing():
            state = kept.state_dict()
        again = DiskMemory(slots, Images(CIFAR), file=kept.file)
        more["seconds_to_resume"] = round(timed(lambda: again.load_state_dict(state)), 2)
        check_same(again, ram)
    return replace(measured, details=measured.details | more)


def full_memory(store: str, slots: int, folder: Path) -> Memory:
    """A memory whose images, if they are on disk, are in the file, as after checkpoints of a run."""
    memory, rng = Memories(slots, Images(CIFAR), store=store, folder=folder).replay, np.random.default_rng(0)
    for _ in range(CHECKPOINTS):
        offer(memory, rng, images=slots // CHECKPOINTS, at_once=1000, tasks=TASKS, classes=CLASSES)
        with memory.checkpointing():
            pass
    return memory


def stepping(memory: Memory) -> Callable[[], None]:
    """Adding to and drawing from a full memory, one step per call."""
    rng = np.random.default_rng(1)
    x, labels = random_batch(memory, rng, STREAM_BATCH, CLASSES)

    def step() -> None:
        memory.add(rng, x, labels, 0)
        memory.offered = AGE * memory.capacity  # held at one age, every step writes equally many
        memory[memory.draw(DRAWN, rng)]

    return step


def image_bytes(memory: Memory) -> int:
    """The bytes of a memory's images as a learner's file holds them."""
    saved = memory.saved_images()
    return int(saved["jpeg"].nbytes if isinstance(saved, dict) else saved.nbytes)


def check_same(one: Memory, other: Memory) -> None:
    """Fail unless two memories hold the same images and labels."""
    for start in range(0, len(other), PIECE):
        slots = np.arange(start, min(start + PIECE, len(other)))
        assert torch.equal(one[slots], other[slots])
    assert np.array_equal(one.labels, other.labels)
