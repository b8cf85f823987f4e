"""A picture of a stream: which classes come when, where it is evaluated, and how many images each class has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.files import as_path, replacing
from gracecl.streams import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
MOST_COLUMNS, IMAGES_OF_A_COLUMN = 200, 12
"""pieces of time that are told apart, and how many images each has at least"""
MOST_NUMBERED = 20
"""classes that get a number each"""
INK, QUIET, BARS = "#222222", "#666666", "#0072B2"


def classes_over_time(stream: Stream, columns: int) -> tuple[npt.NDArray[np.float64], Ints]:
    """[classes, columns] the share of each class in each piece of the stream, and the images of each class in all."""
    labels = stream.labels(stream.order)
    column = np.arange(len(labels)) * columns // len(labels)
    counts = np.bincount(labels * columns + column, minlength=stream.data.classes * columns).reshape(-1, columns)
    return counts / np.maximum(counts.sum(axis=0), 1), counts.sum(axis=1)


def picture(stream: Stream, path: str | Path | None = None) -> Figure:
    """Classes over time with the evaluation marks, and images per class beside it; written to `path` if one is given."""
    from matplotlib.colors import PowerNorm

    from gracecl.streams.shown import ShownFigure

    place = None if path is None else as_path(path, "path")
    if place is not None and place.suffix not in KINDS:
        raise UserError(f"a picture is written as {', '.join(KINDS)}, and the name of {place} ends in none of them")
    shares, totals = classes_over_time(stream, min(MOST_COLUMNS, -(-len(stream.order) // IMAGES_OF_A_COLUMN)))
    classes, length = len(totals), len(stream.order)
    figure = ShownFigure(figsize=(7.4, 2.6), dpi=100, layout="constrained", facecolor="white")
    over_time, per_class = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    extent = (0, length, classes - 0.5, -0.5)
    by_root = PowerNorm(0.5, vmin=0, vmax=max(shares.max(), 1e-9))  # so that a single stray image is seen
    over_time.imshow(shares, aspect="auto", extent=extent, cmap="Greys", norm=by_root, interpolation="nearest")
    for mark in stream.marks[:-1]:
        over_time.axvline(stream.ends[mark], color=BARS, linewidth=0.8, linestyle="-" if stream.has_tasks else ":")
    few = classes <= MOST_NUMBERED
    per_class.barh(np.arange(classes), totals, color=BARS, height=0.8 if few else 1, antialiased=few)
    over_time.set_title(repr(stream).removeprefix("Stream(").removesuffix(")"), loc="left", fontsize=8, color=INK, parse_math=False)
    over_time.set(xlabel="images", ylabel="class")
    per_class.set(xlabel="images per class")
    if few:
        over_time.set_yticks(np.arange(classes))
    for axes in (over_time, per_class):
        axes.tick_params(labelsize=7, colors=QUIET, length=2)
        axes.xaxis.label.set(size=8, color=INK)
        axes.yaxis.label.set(size=8, color=INK)
    per_class.spines[["top", "right"]].set_visible(False)
    if place is not None:
        _save(figure, place)
    return figure


def _save(figure: Figure, place: Path) -> None:
    """Without a date, so that the same stream gives the same file."""
    from matplotlib import rc_context

    kind = place.suffix.removeprefix(".")
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
    with replacing(place) as temporary, rc_context({"svg.hashsalt": "gracecl", "svg.fonttype": "none"}):
        figure.savefig(temporary, format=kind, metadata=dates)
