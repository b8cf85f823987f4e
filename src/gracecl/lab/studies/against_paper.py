"""A study's accuracies beside those that the GRACE paper reports on Split CIFAR-100 with a memory of 1,000: a picture, and whether
the methods come in the same order.

The settings differ (net, image size, and for most rows the program), so only ranks are compared: by Spearman's correlation, and
outliers are the methods whose two ranks differ by a third of the number of methods or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.lab import paper
from gracecl.lab.report import Run, figures, style
from gracecl.lab.report.beside_paper import row_of
from gracecl.lab.report.groups import group_runs
from gracecl.lab.report.table import Cell, Entry, Table
from gracecl.lab.studies.results import Results, Section
from gracecl.registry import renderers

OUTLIER = 1 / 3
"""an outlier's two ranks differ by at least this share of all ranks"""
FEWEST = 3
"""fewest methods whose order is compared"""
ENOUGH = 10
"""fewest methods for which p is reported"""


@dataclass(frozen=True)
class Point:
    """A method that the paper has a value for."""

    row: str
    method: str
    ours: float
    paper: float
    our_rank: float
    """1 is the most accurate; equal ones share the mean of their ranks"""
    paper_rank: float
    outlier: bool


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation."""

    rho: float
    p: float | None
    """of the hypothesis that the two orders have nothing to do with each other; None for few methods"""


def points(runs: Sequence[Run]) -> list[Point]:
    """Return the runs' methods that the paper has, in its order."""
    from scipy.stats import rankdata

    reported = paper.accuracies()
    order = list(reported)
    found = []
    for group in group_runs(runs):
        row = row_of(group.method) if group.runs else None
        if row in reported and np.isfinite(accuracy := group.summarise("acc").mean):
            found.append((order.index(row), row, group.label, accuracy))
    found.sort()
    ours, theirs = rankdata([-one[-1] for one in found]), rankdata([-reported[one[1]] for one in found])
    return [
        Point(row, label, accuracy, reported[row], float(mine), float(its), bool(abs(mine - its) >= OUTLIER * len(found)))
        for (_, row, label, accuracy), mine, its in zip(found, ours, theirs, strict=True)
    ]


def correlation(found: Sequence[Point]) -> Correlation | None:
    """Compute Spearman's correlation; None for fewer methods than have an order worth comparing."""
    if len(found) < FEWEST:
        return None
    from scipy.stats import spearmanr

    rho, p = spearmanr([point.ours for point in found], [point.paper for point in found])
    return Correlation(float(rho), float(p) if len(found) >= ENOUGH else None)


@renderers.register("against_paper")
def sections(results: Results) -> list[Section]:
    """The order of methods beside the paper's, with a picture; nothing where the paper has fewer than two of them."""
    found = points([run for run, where in zip(results.runs, results.beside, strict=True) if in_column(where)])
    if len(found) < 2:
        return []
    agreement = correlation(found)
    picture = f"{results.name}-against-paper.png"
    draw(found, agreement, results.out / picture, results.scale)
    rows: list[list[Entry]] = [
        [
            f"{point.row}{' ✱' if point.outlier else ''}",
            Cell(point.method, code=True),
            f"{point.ours:.1f}",
            f"{point.paper:.1f}",
            f"{point.our_rank:g}",
            f"{point.paper_rank:g}",
        ]
        for point in found
    ]
    heads = ["row", "method", "ours", "paper", "our rank", "paper's rank"]
    text = "\n\n".join(
        [
            "## The order of methods beside the paper's",
            f"![Our accuracy against the paper's]({picture})",
            "The paper's are those on Split CIFAR-100 in ten tasks with a memory of 1,000, in another setting than this one, and "
            "most are copied from other papers. So only the order of methods is compared.",
            verdict(found, agreement),
            Table(heads, "llrrrr", rows).to_markdown(tight=True),
        ]
    )
    data = {
        "column": paper.ACCURACY,
        "spearman": None if agreement is None else asdict(agreement),
        "points": [asdict(point) for point in found],
        "outliers": [point.row for point in found if point.outlier],
    }
    return [Section("against_paper", text, data)]


def in_column(where: Mapping[str, Any] | None) -> bool:
    """Return whether a run belongs to the column that methods are ranked by, or to none."""
    return where is None or all(where.get(name) == paper.ACCURACY[name] for name in ("dataset", "buffer_size"))


def verdict(found: Sequence[Point], agreement: Correlation | None) -> str:
    """State Spearman's correlation and the outliers."""
    if agreement is None:
        return f"{len(found)} methods have no order worth comparing."
    chance = "" if agreement.p is None else f" (p = {agreement.p:.2g})"
    told = f"Spearman's rank correlation over {len(found)} methods is {agreement.rho:.2f}{chance}."
    outliers = [
        f"{point.row} (ours {point.our_rank:g}, paper {point.paper_rank:g})"
        for point in sorted(found, key=lambda point: -abs(point.our_rank - point.paper_rank))
        if point.outlier
    ]
    share = f"whose ranks differ by {OUTLIER * len(found):.1f} or more"
    return f"{told} Outliers, {share}: {', '.join(outliers) or 'none'}."


def draw(found: Sequence[Point], agreement: Correlation | None, path: Path, scale: str) -> None:
    """Draw a labelled point per method, outliers in another colour."""
    figure = style.new_figure(5.2)
    axes = figure.subplots()
    ordinary, unlike = style.METHOD_COLOURS[:2]
    colours = [unlike if point.outlier else ordinary for point in found]
    axes.scatter([point.paper for point in found], [point.ours for point in found], s=22, color=colours, zorder=3)
    axes.margins(0.08)
    axes.set_xlabel("accuracy in the GRACE paper, Split CIFAR-100, memory 1,000 (%)")
    axes.set_ylabel("accuracy here (%)")
    about = "" if agreement is None else f": Spearman's ρ = {agreement.rho:.2f}"
    several = len({point.row for point in found}) < len(found)
    outliers = "; outliers in orange" if any(point.outlier for point in found) else ""
    style.plain(axes, f"{len(found)} methods at scale {scale}{about}{outliers}")
    figures.label_points(
        figure, axes, [(point.paper, point.ours, point.method if several else point.row) for point in found], colours
    )
    style.save(figure, path)
