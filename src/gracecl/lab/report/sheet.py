"""The numbers of a comparison, and their tables for LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gracecl.functional.metrics import HIGHER_IS_BETTER, NOT_PERCENT
from gracecl.functional.statistics import Summary
from gracecl.lab.report.beside_paper import Column
from gracecl.lab.report.groups import Group
from gracecl.lab.report.table import NOTHING, Cell, Entry, Table, number


class Value(NamedTuple):
    """A method's metric over its seeds, and the paper's value."""

    ours: Summary
    paper: float | None
    paper_std: float | None = None
    place: int | None = None
    """0 is the best of the column, 1 the second; None for all others and where there is nothing to compare"""

    @property
    def difference(self) -> float:
        """Ours minus the paper's."""
        return math.nan if self.paper is None else self.ours.mean - self.paper

    def paper_entries(self) -> list[Entry]:
        """Return the paper's number and our difference to it."""
        if self.paper is None:
            return [NOTHING, NOTHING]
        spread = "" if self.paper_std is None else f" ± {self.paper_std:.1f}"
        return [f"{self.paper:.1f}{spread}", number(self.difference, 1, "+")]

    def marked(self, text: str) -> Cell:
        """Return the text, bold for the best of a column, underlined for the second."""
        return Cell(text, bold=self.place == 0, underline=self.place == 1)


@dataclass(frozen=True)
class MethodRow:
    """A row of the comparison: one method."""

    group: Group
    values: dict[str, Value]
    seconds: Summary

    def entries(self, show: Callable[[str, Value], Entry], printed: Sequence[str]) -> list[Entry]:
        """Return each metric formatted by `show`, followed by the paper's number and the difference for metrics in
        `printed`.
        """
        found: list[Entry] = []
        for metric, value in self.values.items():
            found += [show(metric, value), *(value.paper_entries() if metric in printed else [])]
        return found


def lines(groups: Sequence[Group], metrics: Sequence[str], column: Column | None = None) -> list[MethodRow]:
    """Return a row per group, in their order."""
    values = {metric: [group.summarise(metric) for group in groups] for metric in metrics}
    places = {metric: _places(found, HIGHER_IS_BETTER[metric]) for metric, found in values.items()}
    return [
        MethodRow(
            group,
            {
                metric: Value(values[metric][at], column.value(group.method, metric) if column else None, place=places[metric][at])
                for metric in metrics
            },
            group.summarise("seconds"),
        )
        for at, group in enumerate(groups)
    ]


def beside(found: Sequence[MethodRow], metrics: Sequence[str]) -> list[str]:
    """The metrics that the paper has a number of, for at least one method."""
    return [metric for metric in metrics if any(line.values[metric].paper is not None for line in found)]


def heads(metrics: Sequence[str], printed: Sequence[str], difference: str) -> list[str]:
    """Those of `MethodRow.entries`."""
    return [head for metric in metrics for head in (heading(metric), *(("paper", difference) if metric in printed else ()))]


def _places(values: Sequence[Summary], higher_is_better: bool) -> list[int | None]:
    known = sorted({value.mean for value in values if math.isfinite(value.mean)}, reverse=higher_is_better)
    if len(known) < 2:
        return [None] * len(values)
    return [known.index(value.mean) if value.mean in known[:2] else None for value in values]


def latex(found: Sequence[MethodRow], metrics: Sequence[str], caption: str, decimals: int = 1) -> str:
    """A booktabs table: the best in bold, the second underlined, the paper's value and the difference beside ours."""

    def show(metric: str, value: Value) -> Entry:
        places = 3 if metric in NOT_PERCENT else decimals
        mean, std = value.marked(number(value.ours.mean, places)), value.ours.std
        return mean if math.isnan(std) else (mean, Cell(f"± {std:.{places}f}", small=True))

    printed = beside(found, metrics)
    above = ["Method", *heads(metrics, printed, "Δ")]
    rows = [[Cell(line.group.label, code=True), *line.entries(show, printed)] for line in found]
    return Table(above, "l" + "r" * (len(above) - 1), rows, caption=caption).to_latex()


def csv(found: Sequence[MethodRow], metrics: Sequence[str]) -> str:
    """One row per method; every number in full."""
    printed = beside(found, metrics)
    header = ["method", "rule", "seeds"]
    for metric in metrics:
        header += [metric, f"{metric}_std", f"{metric}_half_width"]
        header += [f"{metric}_paper", f"{metric}_difference"] if metric in printed else []
    rows = []
    for line in found:
        row: list[Entry] = [line.group.label, line.group.rule, len(line.group.runs)]
        for metric, value in line.values.items():
            row += value.ours[:3]
            row += ["" if value.paper is None else value.paper, value.difference] if metric in printed else []
        rows.append([*row, line.seconds.mean])
    return Table([*header, "seconds"], "ll" + "r" * (len(header) - 1), rows).to_csv()


def heading(metric: str) -> str:
    return f"{metric} {'↑' if HIGHER_IS_BETTER.get(metric, False) else '↓'}"
