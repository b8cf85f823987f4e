"""Which runs the paper's tables are made of, and how many images go through the net in each of them.

The runs are those of `gracecl.lab.paper`, a method's images per step those of the catalogue, which a test compares with the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracecl.lab import paper
from gracecl.lab.catalogue import FACTS
from gracecl.registry import spec

STREAM_BATCH = 10
"""new images in a step, as in the catalogue"""


@dataclass(frozen=True)
class DataSet:
    name: str
    """in the paper's tables"""
    learned: int
    tested: int
    classes: int
    side: int
    tasks: int = 10


CIFAR100 = DataSet("Split CIFAR-100", 50_000, 10_000, 100, 32)
TINY = DataSet("Split Tiny-ImageNet", 100_000, 10_000, 200, 64)


@dataclass(frozen=True)
class PaperRun:
    """One run: a row of the paper, a data set and a size of the memory."""

    row: str
    data: DataSet
    memory: int

    @property
    def method(self) -> Any:
        return spec.parse_method(paper.EXPRESSIONS[self.row])

    @property
    def taps(self) -> int:
        return 4 if self.method.chain.traits.all_taps else 1


@dataclass(frozen=True)
class PaperTable:
    name: str
    data: DataSet
    runs: tuple[PaperRun, ...]
    """each of them once per seed"""


def table(name: str, title: str, data: DataSet, rows: tuple[str, ...] = ()) -> PaperTable:
    """A table's runs on a data set, or those of some of its rows."""
    records = [record for record in paper.records(table=name, dataset=data.name) if not rows or record["method"] in rows]
    return PaperTable(title, data, tuple(PaperRun(record["method"], data, record["buffer_size"]) for record in records))


TABLES = tuple(
    table(name, title, data, rows)
    for name, title, sets, rows in (
        ("main_accuracy", "accuracy and forgetting", (CIFAR100, TINY), ()),
        ("main_accuracy", "the same, MOSE and GRACE alone", (CIFAR100, TINY), ("MOSE", "GRACE")),
        ("memory_efficiency", "small memories", (CIFAR100, TINY), ()),
        ("ablation", "ablation", (CIFAR100,), ()),
    )
    for data in sets
)


def minutes() -> dict[PaperRun, float]:
    """How long some runs took on the paper's GPU."""
    records = paper.records(table="training_cost", metric="time")
    return {PaperRun(record["method"], CIFAR100, record["buffer_size"]): record["mean"] for record in records}


@dataclass(frozen=True)
class Work:
    """Of one run."""

    steps: float
    learned: float
    """images"""
    scored: float
    """images: in the steps, and of the tests after each task on all classes met"""


def work(run: PaperRun) -> Work:
    """Every step as in the last task. Left out: what the end of a task does besides a fit (class means, BiC's correction)."""
    data, method, facts = run.data, run.method, FACTS[run.method.name]
    tested = data.tested * (data.tasks + 1) / 2  # after each task, images of the classes met so far
    if method.chain.traits.trains != "stream":
        fitted = data.tasks * method.epochs * run.memory
        return Work(fitted / method.batch, fitted, tested)
    steps = data.learned / STREAM_BATCH
    return Work(steps, steps * facts.backward, steps * (facts.forward - facts.backward) + tested)
