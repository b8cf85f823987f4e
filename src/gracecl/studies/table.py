"""The table of a study: what each method reached and what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.files import write_json, write_text
from gracecl.report import Run
from gracecl.report.groups import Group, group_runs

SETTING = ("stream", "net", "memory", "optimizer", "augment")
"""what all runs of a study have in common"""


@dataclass(frozen=True)
class Section:
    """What a study has beyond its table."""

    key: str
    """of `data` in the study's JSON"""
    text: str
    """for the study's page, below the table"""
    data: Any


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


def write(out: Path, name: str, about: str, command: str, runs: Sequence[Run], sections: Sequence[Section] = ()) -> str:
    """`<name>.md` and `<name>.json` beside the runs; returns the table."""
    found = lines(runs)
    configs = [run.config for run in runs]
    setting = {key: list(dict.fromkeys(config[key] for config in configs)) for key in SETTING}
    commits = list(dict.fromkeys(str(config.get("commit")) for config in configs))
    seeds = sorted({config["seed"] for config in configs})
    steps = sorted({line.steps for line in found})
    table = markdown(found)
    told = "; ".join(f"{key} {' / '.join(f'`{value}`' for value in values)}" for key, values in setting.items())
    notes = (
        "Percent: mean ± sample standard deviation over seeds; seeds are paired, each gives every method the same stream. Images "
        "and seconds are those of training, per step of the stream, with scoring, teachers, ends of tasks and fits before "
        "evaluation; the evaluation itself is not in them. Runs side by side share a machine, so seconds are rough."
    )
    made_by = f"Command: `{command}`. Commit: {', '.join(f'`{commit}`' for commit in commits)}. "
    made_by += f"Seeds: {', '.join(map(str, seeds))}. Steps: {', '.join(map(str, steps))}."
    write_text(
        out / f"{name}.md",
        "\n\n".join([f"# Study {name}", about, told, table, notes, made_by, *(part.text for part in sections)]) + "\n",
    )
    described = {"study": name, "command": command, "commits": commits, "seeds": seeds, "setting": setting}
    more = {part.key: part.data for part in sections}
    write_json(out / f"{name}.json", described | {"lines": [asdict(line) for line in found]} | more)
    return table


def _spread(mean: float, std: float) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.1f}" if math.isnan(std) else f"{mean:.1f} ± {std:.1f}"
