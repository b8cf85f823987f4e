"""The table of a study: what each method reached and what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gracecl.lab.report import Run
from gracecl.lab.report.groups import Group, group_runs, setting_of
from gracecl.lab.report.table import Cell, Entry, Table, number
from gracecl.lab.report.terms import terms

HEADS = ("method", "acc ↑", "forgetting ↓", "images per step, forward", "backward", "seconds per step", "predicts by", "seeds")


@dataclass(frozen=True)
class StudyRow:
    """A row of the study's table: a method in one setting, means over its seeds."""

    setting: str
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


def lines(runs: Sequence[Run]) -> list[StudyRow]:
    """Return a row for each method, by setting, the most accurate first."""
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(setting_of(run), []).append(run)
    found = []
    for setting, members in by_setting.items():
        here = [_line(setting, group) for group in group_runs(members) if group.runs]
        found += sorted(here, key=lambda line: (math.isnan(line.acc), -line.acc, line.method))
    return found


def _line(setting: str, group: Group) -> StudyRow:
    acc, forgetting = group.summarise("acc"), group.summarise("forgetting")
    return StudyRow(
        setting=setting,
        method=group.label,
        rule=group.rule,
        seeds=[run.config["seed"] for run in group.runs],
        acc=acc.mean,
        acc_std=acc.std,
        forgetting=forgetting.mean,
        forgetting_std=forgetting.std,
        forward=group.per_step("forward", "fit_images"),
        backward=group.per_step("backward", "fit_images"),
        seconds=group.per_step("train_seconds", "fit_seconds"),
        steps=group.runs[0].length,
    )


def markdown(found: Sequence[StudyRow], runs: Sequence[Run] = ()) -> str:
    """Return the tables, one per setting, each below its setting's name where there are several; `runs` are those they are of."""
    settings = list(dict.fromkeys(line.setting for line in found))
    tables = [
        Table(
            HEADS,
            "lrrrrrll",
            [_row(line) for line in found if line.setting == setting],
            setting if len(settings) > 1 else "",
            terms(group_runs([run for run in runs if setting_of(run) == setting])),
        )
        for setting in settings
    ]
    return "\n\n".join(table.to_markdown(tight=True) for table in tables)


def _row(line: StudyRow) -> list[Entry]:
    return [
        Cell(line.method, code=True),
        _spread(line.acc, line.acc_std),
        _spread(line.forgetting, line.forgetting_std),
        number(line.forward, 0, ","),
        number(line.backward, 0, ","),
        number(line.seconds, 3),
        Cell(line.rule, code=True),
        ", ".join(map(str, line.seeds)),
    ]


def _spread(mean: float, std: float) -> str:
    return number(mean, 1) if math.isnan(mean) or math.isnan(std) else f"{mean:.1f} ± {std:.1f}"
