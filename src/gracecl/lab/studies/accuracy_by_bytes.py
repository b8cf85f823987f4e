"""What each method of a study reached and what it keeps, in bytes: a table for each setting and a picture of the first."""

from __future__ import annotations

import math
from typing import Any

from gracecl.lab.report import Run, figures
from gracecl.lab.report.groups import Group, group_runs, setting_of
from gracecl.lab.report.table import Cell, Entry, Table, number
from gracecl.lab.studies.results import Results, Section
from gracecl.registry import renderers

HEADS = {
    "acc": "acc ↑",
    "aaa": "aaa ↑",
    "a_auc": "a_auc ↑",
    "forgetting": "forgetting ↓",
    "seconds": "seconds of training",
    "megabytes": "MB kept",
}
SOMETIMES = "a_auc"
"""a column only where runs were evaluated at equal distances"""


@renderers.register("accuracy_by_bytes")
def sections(results: Results) -> list[Section]:
    """Accuracy and the bytes of the learner's file, weights included: images, features or sums that it keeps."""
    members: dict[str, list[Run]] = {}
    for run in results.runs:
        members.setdefault(setting_of(run), []).append(run)
    by_setting = {setting: [group for group in group_runs(runs) if group.runs] for setting, runs in members.items()}
    by_setting = {setting: groups for setting, groups in by_setting.items() if groups}
    if not by_setting:
        return []
    tables, data = [], {}
    for setting, groups in by_setting.items():
        found = sorted((of_group(group) for group in groups), key=lambda line: -line["acc"])
        tables.append(table(found, setting).to_markdown(tight=True))
        data[setting] = found
    setting, groups = next(iter(by_setting.items()))
    file = f"{results.name}-bytes.png"
    picture = [f"![Accuracy against bytes kept]({file})"]
    if not figures.against(groups, "acc", "bytes", f"bytes kept, {setting}", results.out / file):
        picture = []
    told = (
        "Kept is what the learner's file holds at the end: trained weights, optimizer, memory and sums; – where it was not counted."
    )
    return [Section("accuracy_by_bytes", "\n\n".join(["## Accuracy and bytes kept", *picture, *tables, told]), data)]


def of_group(group: Group) -> dict[str, Any]:
    """Return the means over seeds."""
    measured = {name: group.summarise(name).mean for name in ("acc", "aaa", "a_auc", "forgetting")}
    costs = {"seconds": group.cost("seconds"), "megabytes": group.cost("bytes") / 1e6}
    return {"method": group.label} | measured | costs | {"seeds": len(group.runs)}


def table(lines: list[dict[str, Any]], setting: str) -> Table:
    """Make a row of each method's means."""
    names = [name for name in HEADS if name != SOMETIMES or any(math.isfinite(line[name]) for line in lines)]
    rows: list[list[Entry]] = [
        [Cell(line["method"], code=True), *(number(line[name], 1) for name in names), str(line["seeds"])] for line in lines
    ]
    return Table(["method", *(HEADS[name] for name in names), "seeds"], "l" + "r" * (len(names) + 1), rows, setting)
