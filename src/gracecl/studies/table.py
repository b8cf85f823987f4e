"""The table of a study: what each method reached and what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gracecl.report import Run
from gracecl.report.groups import Group, group_runs


@dataclass(frozen=True)
class Line:
    """A method of the table; means over its seeds."""

    method: str
    rule: str
    seeds: list[int]
    acc: float
    acc_std: float
    forgetting: float
    forgetting_std: float
    forward: float
    """images through the net per step of the stream, those of teachers, scores, ends of tasks and fits too"""
    backward: float
    """images per step that a gradient was taken of"""
    seconds: float
    """of training per step, without evaluation"""
    steps: int


def lines(runs: Sequence[Run]) -> list[Line]:
    """A line for each method, the most accurate first."""
    found = [_line(group) for group in group_runs(runs) if group.runs]
    return sorted(found, key=lambda line: (math.isnan(line.acc), -line.acc, line.method))


def _line(group: Group) -> Line:
    acc, forgetting = group.summarise("acc"), group.summarise("forgetting")
    timings = [run.timing for run in group.runs]

    def per_step(*names: str) -> float:
        return float(np.mean([sum(timing[name] for name in names) / timing["steps"] for timing in timings]))

    return Line(
        method=group.label,
        rule=group.rule,
        seeds=[run.config["seed"] for run in group.runs],
        acc=acc.mean,
        acc_std=acc.std,
        forgetting=forgetting.mean,
        forgetting_std=forgetting.std,
        forward=per_step("forward", "fit_images"),
        backward=per_step("backward", "fit_images"),
        seconds=per_step("train_seconds", "fit_seconds"),
        steps=int(timings[0]["steps"]),
    )


def markdown(found: Sequence[Line]) -> str:
    """The table alone."""
    header = "| method | acc ↑ | forgetting ↓ | images per step, forward | backward | seconds per step | predicts by | seeds |"
    rows = [
        f"| `{line.method}` | {_spread(line.acc, line.acc_std)} | {_spread(line.forgetting, line.forgetting_std)} "
        f"| {line.forward:,.0f} | {line.backward:,.0f} | {line.seconds:.3f} | `{line.rule}` | {', '.join(map(str, line.seeds))} |"
        for line in found
    ]
    return "\n".join([header, "|---|---:|---:|---:|---:|---:|---|---|", *rows])


def _spread(mean: float, std: float) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.1f}" if math.isnan(std) else f"{mean:.1f} ± {std:.1f}"
