"""What the paper's tables would cost: on this CPU by a model of measured steps, on GPUs by FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.measure import Row
from benchmarks.paper_runs import TABLES, PaperRun, PaperTable, Work, minutes, work
from benchmarks.step_model import CostModel, Point, error, fit, leave_one_out, load, measure, ratios

WIDTHS = (20, 64)
"""of the nets that the tables are costed for; 64 is the paper's"""
SEEDS = 10
"""runs of everything in the paper"""


# What a GPU does, by its vendor.


@dataclass(frozen=True)
class GPU:
    name: str
    teraflops: float
    """the vendor's peak"""
    utilisation: float
    """assumed"""

    @property
    def rate(self) -> float:
        """FLOPs per second that are reckoned with."""
        return self.teraflops * 1e12 * self.utilisation


PLAIN, TENSOR = 0.25, 0.1
"""utilisation of the peaks of plain fp32 and of tensor cores; small nets reach less of the larger"""
GPUS = (
    GPU("T4 fp32", 8.1, PLAIN),
    GPU("T4 fp16", 65, TENSOR),
    GPU("RTX 3090 fp32", 35.6, PLAIN),
    GPU("A100 fp32", 19.5, PLAIN),
    GPU("A100 tf32", 156, TENSOR),
    GPU("H100 SXM fp32", 67, PLAIN),
)
HOST_SECONDS = 0.01
"""assumed for the host to issue a step, which is 300 (er) to 1,100 (grace) operations, whatever the GPU"""
PAPER_GPU, PAPER_TERAFLOPS, PAPER_WIDTH = "an RTX 2080 Ti", 13.4, 64


# What a table costs.


@dataclass(frozen=True)
class TableCost:
    """A table at one width: all its runs together."""

    table: str
    data: str
    side: int
    width: int
    methods: int
    runs: int
    steps: float
    learned: float
    petaflops: float
    cpu_hours: float
    """estimated from measured steps; as many runs at once as there are cores"""
    gpu_hours: dict[str, float]
    """estimated from FLOPs, not measured; one run at a time"""


def tables(model: CostModel, seeds: int = SEEDS, cores: int | None = None) -> list[TableCost]:
    cores = cores or machine()["cores"]
    return [table_cost(model, table, width, seeds, cores) for table in TABLES for width in WIDTHS]


def table_cost(model: CostModel, table: PaperTable, width: int, seeds: int, cores: int) -> TableCost:
    data, works = table.data, [work(run) for run in table.runs]
    flops = [flops_of(run, width) for run in table.runs]
    cpu = [
        model.seconds(width, run.taps, done.learned + model.scored * done.scored, data.side, data.classes, done.steps)
        for run, done in zip(table.runs, works, strict=True)
    ]
    gpus = {gpu.name: sum(gpu_seconds(gpu, done, f) for done, f in zip(works, flops, strict=True)) for gpu in GPUS}
    return TableCost(
        table.name,
        data.name,
        data.side,
        width,
        methods=len({run.row for run in table.runs}),
        runs=seeds * len(works),
        steps=seeds * sum(done.steps for done in works),
        learned=seeds * sum(done.learned for done in works),
        petaflops=seeds * sum(flops) / 1e15,
        cpu_hours=seeds * sum(cpu) / 3600 / cores,
        gpu_hours={name: seeds * seconds / 3600 for name, seconds in gpus.items()},
    )


def flops_of(run: PaperRun, width: int) -> float:
    image, done = load(width, run.taps, run.data.side, run.data.classes), work(run)
    return done.learned * image.flops + done.scored * image.forward_flops


def gpu_seconds(gpu: GPU, done: Work, flops: float) -> float:
    return max(flops / gpu.rate, done.steps * HOST_SECONDS)


def paper_utilisation() -> dict[str, float]:
    """What the paper's own times amount to, as a share of its GPU's fp32 peak (with mixed precision)."""
    peak = PAPER_TERAFLOPS * 1e12
    return {run.row: flops_of(run, PAPER_WIDTH) / (60 * taken) / peak for run, taken in minutes().items()}


# The report.


@dataclass(frozen=True)
class CostReport:
    points: list[Point]
    model: CostModel
    errors: list[float]
    """of each point, relative, by the model fitted to the others"""
    ratios: list[Row]
    tables: list[TableCost]
    machine: dict[str, Any]

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        return float(np.max(np.abs(self.errors)))

    def markdown(self) -> str:
        return "\n\n".join([self._fit(), self._ratios(), self._tables()])

    def _fit(self) -> str:
        model = self.model
        rows = []
        for point, left_out in zip(self.points, self.errors, strict=True):
            wrong = error(model, point)
            setting = (point.method, point.width, point.taps, f"{point.side}×{point.side}", point.images)
            times = f"{point.seconds:.3f}", f"{point.seconds * (1 + wrong):.3f}"
            rows.append((*setting, *times, f"{wrong:+.1%}", f"{left_out:+.1%}"))
        return (
            "### Seconds per step\n\n"
            f"Measured on one thread ({self.machine['processor']}, 100 classes, memory 1,000), the fastest of several rounds. "
            f"The model: {1e3 * model.overhead:.1f} ms + images · ({1e12 * model.per_flop:.2f} s per TFLOP "
            f"+ {1e9 * model.per_byte:.2f} s per GB of activations). Fitted to all points but one, it errs at that one by "
            f"{self.median_error:.1%} (median) and {self.worst_error:.1%} (worst).\n\n"
            + markdown_table("method, width, taps, image, images, measured s, model s, error, error if left out", rows)
        )

    def _ratios(self) -> str:
        rows = ([row.what, row.against, f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}"] for row in self.ratios)
        return "### Classes, memory, images only scored\n\n" + markdown_table("seconds of, over those of, ratio, quartiles", rows)

    def _tables(self) -> str:
        used = ", ".join(f"{name} {share:.0%}" for name, share in paper_utilisation().items())
        rows = []
        for cost in self.tables:
            which = cost.table, f"{cost.data}, {cost.side}×{cost.side}", cost.width, cost.methods, cost.runs
            amounts = f"{cost.steps / 1e6:.2f}", f"{cost.learned / 1e6:,.0f}", f"{cost.petaflops:,.0f}"
            hours = (f"{h:,.1f}" if h < 100 else f"{h:,.0f}" for h in (cost.cpu_hours, *cost.gpu_hours.values()))
            rows.append((*which, *amounts, *hours))
        return (
            "### Hours for the paper's tables\n\n"
            f"This CPU: estimated from the model above, {self.machine['cores']} runs at once on as many cores, as if none slowed "
            f"another. GPUs: **estimated from FLOPs, not measured**, one run at a time, at an assumed {PLAIN:.0%} of the vendor's "
            f"peak in fp32 and {TENSOR:.0%} on tensor cores, no step in less than an assumed {1e3 * HOST_SECONDS:.0f} ms. The "
            f"paper's own times, in mixed precision, amount to these shares of the fp32 peak of {PAPER_GPU}: {used}. Runs that "
            "two tables share are counted in both.\n\n"
            + markdown_table(
                "table, data, width, methods, runs, million steps, million images learned, PFLOP, this CPU, "
                + ", ".join(gpu.name for gpu in GPUS),
                rows,
            )
        )


def markdown_table(header: str, rows: Iterable[Sequence[Any]]) -> str:
    names = header.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(quick: bool) -> CostReport:
    points, small = measure(quick), ratios(quick)
    model = fit(points, scored=small[-1].ratio)
    return CostReport(points, model, leave_one_out(points), small, tables(model), machine())


def text(quick: bool) -> str:
    """The report in Markdown."""
    return report(quick).markdown()
