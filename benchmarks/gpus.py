"""What the paper's main table would take on many GPUs of a cluster: on paper, from FLOPs; no GPU was measured."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from benchmarks.cost import GPU, GPUS, HOST_SECONDS, PAPER_WIDTH, SEEDS, flops_of, gpu_seconds, markdown_table
from benchmarks.paper_runs import TABLES, PaperTable, work

DEVICES = (1, 8, 64, 512)
SECONDS_TO_START = 30.0
"""assumed, of each run: a process, its data, the first steps on a GPU"""


def text(quick: bool) -> str:
    table = TABLES[0]
    rows = [[gpu.name, *(f"{hours(table, gpu, devices):.1f}" for devices in DEVICES)] for gpu in GPUS]
    lines = [
        f"### Hours of the table '{table.name}' ({table.data.name}, width {PAPER_WIDTH}) on several GPUs",
        "",
        f"{len(table.runs) * SEEDS} runs, one at a time on each GPU, longest first. Seconds of a run are **estimated from FLOPs, "
        "not measured**: at an assumed share of the vendor's peak (25% in fp32, 10% on tensor cores), no step in less than "
        f"an assumed {1e3 * HOST_SECONDS:.0f} ms, and an assumed {SECONDS_TO_START:.0f} s to start each run. More GPUs do not "
        f"shorten the longest run: {', '.join(f'{max(seconds(table, gpu)) / 60:.0f} min ({gpu.name})' for gpu in GPUS)}.",
        "",
        markdown_table("GPU, " + ", ".join(str(devices) for devices in DEVICES), rows),
    ]
    return "\n".join(lines)


def seconds(table: PaperTable, gpu: GPU) -> list[float]:
    """Return the seconds of each run of a table, of one seed."""
    return [SECONDS_TO_START + gpu_seconds(gpu, work(run), flops_of(run, PAPER_WIDTH)) for run in table.runs]


def hours(table: PaperTable, gpu: GPU, devices: int) -> float:
    return makespan([taken for taken in seconds(table, gpu) for _ in range(SEEDS)], devices) / 3600


def makespan(seconds: Iterable[float], devices: int) -> float:
    """Return when the last run ends if each device takes the longest run that is left."""
    free_at = [0.0] * devices
    for taken in sorted(seconds, reverse=True):
        heapq.heapreplace(free_at, free_at[0] + taken)
    return max(free_at)
