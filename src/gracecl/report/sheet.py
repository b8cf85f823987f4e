"""The table of a comparison as values, and as LaTeX and CSV."""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gracecl.files import as_cell
from gracecl.functional.metrics import HIGHER_IS_BETTER
from gracecl.functional.statistics import Summary
from gracecl.report.beside_paper import Column
from gracecl.report.groups import Group


class Cell(NamedTuple):
    """A method's metric over its seeds."""

    ours: Summary
    place: int | None
    """0 is the best of the column, 1 the second; None for all others and where there is nothing to compare"""
    paper: float | None

    @property
    def difference(self) -> float:
        """Ours minus the paper's."""
        return math.nan if self.paper is None else self.ours.mean - self.paper


@dataclass(frozen=True)
class Line:
    """A method."""

    group: Group
    cells: dict[str, Cell]
    seconds: Summary


def lines(groups: Sequence[Group], metrics: Sequence[str], column: Column | None = None) -> list[Line]:
    """A line per group, in their order."""
    values = {metric: [group.summarise(metric) for group in groups] for metric in metrics}
    places = {metric: _places(found, HIGHER_IS_BETTER[metric]) for metric, found in values.items()}
    return [
        Line(
            group,
            {
                metric: Cell(values[metric][at], places[metric][at], column.value(group.method, metric) if column else None)
                for metric in metrics
            },
            group.summarise("seconds"),
        )
        for at, group in enumerate(groups)
    ]


def beside(found: Sequence[Line], metrics: Sequence[str]) -> list[str]:
    """The metrics that the paper has a number of, for at least one method."""
    return [metric for metric in metrics if any(line.cells[metric].paper is not None for line in found)]


def _places(values: Sequence[Summary], higher_is_better: bool) -> list[int | None]:
    known = sorted({value.mean for value in values if math.isfinite(value.mean)}, reverse=higher_is_better)
    if len(values) < 2:
        return [None] * len(values)
    return [known.index(value.mean) if value.mean in known[:2] else None for value in values]


def latex(found: Sequence[Line], metrics: Sequence[str], caption: str, decimals: int = 1) -> str:
    """A booktabs table: the best in bold, the second underlined, the paper's value and the difference beside ours."""
    printed = beside(found, metrics)
    heads, spans = ["Method"], []
    for metric in metrics:
        title = _tex(metric) + (r" $\uparrow$" if HIGHER_IS_BETTER[metric] else r" $\downarrow$")
        heads += [title, "paper", r"$\Delta$"] if metric in printed else [title]
        spans.append("rrr" if metric in printed else "r")
    rows = []
    for line in found:
        cells = [rf"\texttt{{{_tex(line.group.label)}}}"]
        for metric in metrics:
            cell = line.cells[metric]
            cells.append(_tex_cell(cell, decimals if metric not in ("ece", "nll") else 3))
            if metric in printed:
                printed_there = math.nan if cell.paper is None else cell.paper
                cells += [_tex_number(printed_there, 1), _tex_number(cell.difference, decimals, "+")]
        rows.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_tex(caption)}}}",
            rf"  \begin{{tabular}}{{l{''.join(spans)}}}",
            r"    \toprule",
            f"    {' & '.join(heads)} " + r"\\",
            r"    \midrule",
            *(f"    {row}" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def csv(found: Sequence[Line], metrics: Sequence[str]) -> str:
    """One row per method; every number in full."""
    printed = beside(found, metrics)
    header = ["method", "rule", "seeds"]
    for metric in metrics:
        header += [metric, f"{metric}_std", f"{metric}_half_width"]
        header += [f"{metric}_paper", f"{metric}_difference"] if metric in printed else []
    text = io.StringIO()
    writer = comma_separated.writer(text, lineterminator="\n")
    writer.writerow([*header, "seconds"])
    for line in found:
        row: list[object] = [as_cell(line.group.label), as_cell(line.group.rule), len(line.group.runs)]
        for metric in metrics:
            cell = line.cells[metric]
            row += [_plain(value) for value in cell.ours[:3]]
            row += ["" if cell.paper is None else cell.paper, _plain(cell.difference)] if metric in printed else []
        writer.writerow([*row, _plain(line.seconds.mean)])
    return text.getvalue()


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else ""


def _tex_cell(cell: Cell, decimals: int) -> str:
    mean, std = _tex_number(cell.ours.mean, decimals), cell.ours.std
    marked = {0: rf"\textbf{{{mean}}}", 1: rf"\underline{{{mean}}}"}.get(cell.place, mean) if cell.place is not None else mean
    return marked if math.isnan(std) else rf"{marked} {{\scriptsize $\pm$ {std:.{decimals}f}}}"


def _tex_number(value: float, decimals: int, sign: str = "") -> str:
    if math.isnan(value):
        return "--"
    text = f"{value:{sign}.{decimals}f}"
    return f"${text}$" if text[0] in "+-" else text


ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(ESCAPED.get(character, character) for character in text).replace("±", r"$\pm$").replace("−", "$-$")
