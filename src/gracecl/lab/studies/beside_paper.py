"""A study's numbers beside those of one of the paper's tables, with the difference: a table for each data set and memory there.

The study's file names the paper's records for each run by fields such as `table`, `dataset`, `buffer_size` or `variant`. The
paper's row is that of the run's method, whatever its options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gracecl.functional.metrics import HIGHER_IS_BETTER
from gracecl.functional.statistics import Summary
from gracecl.lab import paper
from gracecl.lab.report import Run
from gracecl.lab.report.beside_paper import row_of
from gracecl.lab.report.groups import Group, group_runs
from gracecl.lab.report.sheet import Value
from gracecl.lab.report.table import NOTHING, Cell, Entry
from gracecl.lab.report.tables import method_table, spread_text
from gracecl.lab.studies.results import Results, Section
from gracecl.registry import renderers

OURS = {"ACC": "acc", "A_Final": "acc", "AF": "forgetting_mose", "Forgetting": "forgetting"}
"""the paper's name of a metric, and ours of the same definition"""
COSTS = {"time": ("seconds", 60.0, "minutes"), "parameters": ("parameters", 1e6, "million parameters")}
"""the paper's name of a cost: ours, the divisor, and the heading"""


@dataclass(frozen=True)
class PaperRow:
    """A row of one of the paper's tables: one method."""

    dataset: str | None
    memory: int | None
    row: str | None
    """in the paper"""
    group: Group
    values: dict[str, Value]
    """by the paper's names of metrics"""


def lines(runs: Sequence[Run], beside: Sequence[Mapping[str, Any] | None]) -> list[PaperRow]:
    """Return the rows table by table; in each the best first, by its first metric."""
    tables: dict[tuple[Any, Any], list[tuple[Run, Mapping[str, Any]]]] = {}
    for run, where in zip(runs, beside, strict=True):
        if where is not None:
            tables.setdefault((where.get("dataset"), where.get("buffer_size")), []).append((run, where))
    found = []
    for (dataset, memory), members in tables.items():
        where_of = {run.path: where for run, where in members}
        here = [
            PaperRow(dataset, memory, row_of(group.method), group, values(group, where_of[group.runs[0].path]))
            for group in group_runs([run for run, _ in members])
            if group.runs
        ]
        found += sorted(here, key=_order)
    return found


def values(group: Group, where: Mapping[str, Any]) -> dict[str, Value]:
    """Return our value and the paper's for each metric of the paper's table."""
    metrics = list(dict.fromkeys(record["metric"] for record in paper.records(table=where["table"])))
    row, made = row_of(group.method), {}
    for metric in metrics:
        records = paper.records(**where, method=row, metric=metric)
        record = records[0] if records else {}
        made[metric] = Value(ours(group, metric), record.get("mean"), record.get("std"))
    return made


def ours(group: Group, metric: str) -> Summary:
    """Return our summary of the paper's metric, in its unit."""
    if metric in OURS:
        return group.summarise(OURS[metric])
    name, unit, _ = COSTS[metric]
    if name == "seconds":
        found = group.summarise(name)
        return Summary(found.mean / unit, found.std / unit, found.half_width / unit, found.n)
    return Summary(group.cost(name) / unit, math.nan, math.nan, len(group.runs))


def _order(line: PaperRow) -> tuple[bool, float]:
    metric, first = next(iter(line.values.items()))
    sign = -1 if HIGHER_IS_BETTER.get(OURS.get(metric, ""), False) else 1
    return math.isnan(first.ours.mean), sign * first.ours.mean


@renderers.register("beside_paper")
def sections(results: Results) -> list[Section]:
    """Our numbers beside the paper's: a table for each data set and memory there."""
    found = lines(results.runs, results.beside)
    if not found:
        return []
    parts = ["## Beside the paper's table"]
    for dataset, memory in dict.fromkeys((line.dataset, line.memory) for line in found):
        here = [line for line in found if (line.dataset, line.memory) == (dataset, memory)]
        settings = dict.fromkeys(
            f"`{run.config['stream']}` with a memory of {run.config['memory']:,}" for line in here for run in line.group.runs
        )
        stated = "a memory that is not stated" if memory is None else f"a memory of {memory:,}"
        parts.append(
            f"**{dataset or 'The paper'}, {stated}** in the paper; here, at scale {results.scale}, {' and '.join(settings)}:"
        )
        parts.append(markdown(here))
    notes = (
        "Ours: mean ± sample standard deviation over seeds. The paper's as printed; most of its rows are copied there from other "
        "papers. The difference is ours minus the paper's."
    )
    reduced = (
        f" At scale {results.scale} net, images, classes and steps are not the paper's, so a difference says more about the "
        "setting than about the method."
    )
    parts.append(notes if results.scale == "full" else notes + reduced)
    return [Section("beside_paper", "\n\n".join(parts), [as_data(line) for line in found])]


def markdown(found: Sequence[PaperRow]) -> str:
    """Return one table."""
    heads = ["method", "row", "seeds"]
    for metric in found[0].values:
        heads += [heading(metric), "paper", "difference"]
    rows = []
    for line in found:
        row: list[Entry] = [Cell(line.group.label, code=True), line.row or NOTHING, str(len(line.group.runs))]
        for value in line.values.values():
            row += [spread_text(value.ours, 1), *value.paper_entries()]
        rows.append(row)
    return method_table(heads, rows).to_markdown()


def heading(metric: str) -> str:
    """Return our name of a metric and the paper's."""
    if metric in COSTS:
        return COSTS[metric][2]
    return f"{OURS[metric]} ({metric}) {'↑' if HIGHER_IS_BETTER[OURS[metric]] else '↓'}"


def as_data(line: PaperRow) -> dict[str, Any]:
    """Convert to plain values for JSON."""
    metrics = {
        metric: {
            "ours": value.ours.mean,
            "ours_std": value.ours.std,
            "paper": value.paper,
            "paper_std": value.paper_std,
            "difference": value.difference,
        }
        for metric, value in line.values.items()
    }
    setting = {"dataset": line.dataset, "memory": line.memory, "row": line.row, "method": line.group.label}
    return setting | {"seeds": [run.config["seed"] for run in line.group.runs], "metrics": metrics}
