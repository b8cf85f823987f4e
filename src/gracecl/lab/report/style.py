"""Style of all figures: colours, axes, labels at the ends of lines, task boundaries. The page has `assets/page.css`.

Figures are made without pyplot, so that a report leaves no global state behind and works without a display. matplotlib
is imported when the first figure is made.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gracecl.files import replacing
from gracecl.functional.metrics import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHOD_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with any colour vision"""
METHOD_DASHES = ("-", "--", ":", "-.")
"""the next one is taken each time the colours run out"""
INK, QUIET, FAINT = "#222222", "#666666", "#d9d9d9"
WIDTH, DPI = 7.4, 150
"""inches and dots per inch: 1110 pixels, the width of a README"""
MOST_NUMBERED_TASKS = 20
"""beyond this many tasks their numbers would run into each other"""


class End(NamedTuple):
    """A line's last value, and what to write beside it."""

    value: float
    text: str
    colour: str


def new_figure(height: float, width: float = WIDTH) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


@contextlib.contextmanager
def verbatim(figure: Figure) -> Iterator[None]:
    """Show text as it is: a `$` in a name begins no formula, and a letter that the font lacks is a box without a warning."""
    from matplotlib.text import Text

    axes = [axis for one in figure.axes for axis in (one.xaxis, one.yaxis)]
    ticks = [tick for axis in axes if axis.get_scale() == "log" for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    powers = {label for tick in ticks for label in (tick.label1, tick.label2)}  # 10³ is a formula
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in powers:
            text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def save(figure: Figure, path: str | Path) -> None:
    """As PNG, PDF or SVG, by the name; no date, so that the same figure gives the same file."""
    kind = Path(path).suffix.removeprefix(".")
    from matplotlib import rc_context

    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
    for_papers: dict[Any, Any] = {
        "pdf.fonttype": 42,
        "svg.hashsalt": "gracecl",
    }  # whole fonts, which publishers ask for; names that do not vary
    with replacing(Path(path)) as temporary, rc_context(for_papers), verbatim(figure):
        figure.savefig(temporary, format=kind, metadata=dates)


def method_style(index: int) -> tuple[str, str]:
    """Colour and dashes of the index-th method."""
    dashes = METHOD_DASHES[index // len(METHOD_COLOURS) % len(METHOD_DASHES)]
    return METHOD_COLOURS[index % len(METHOD_COLOURS)], dashes


def layer_colours(count: int) -> list[str]:
    """Shades of one map, light at the input and dark at the output, because layers have an order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](shade)) for shade in np.linspace(0.78, 0.05, count)] if count > 1 else [INK]


def plain(axes: Axes, title: str = "", *, above: float = 4.0) -> None:
    """Light grid, no box, quiet ticks, the title at the left where reading starts, `above` points over the axes."""
    axes.set_title(title, loc="left", fontsize=8.5, color=INK, pad=above)
    axes.grid(color=FAINT, linewidth=0.5, alpha=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(labelsize=8, colors=QUIET, length=2.5)
    axes.xaxis.label.set(size=8.5, color=INK)
    axes.yaxis.label.set(size=8.5, color=INK)


def colour_bar(figure: Figure, image: Any, axes: Axes, label: str, **place: Any) -> None:
    """Draw what the colours of an image mean beside it."""
    bar = figure.colorbar(image, ax=axes, **place)
    bar.set_label(label, size=8.5, color=INK)
    bar.ax.tick_params(labelsize=8, colors=QUIET, length=2)
    bar.outline.set_visible(False)


def mark_tasks(axes: Axes, last_steps: Sequence[int], *, numbers: bool = True) -> None:
    """A thin line where each task but the first begins, its number above its part of the stream."""
    ends = [step + 1 for step in last_steps]
    starts = [0, *ends[:-1]]
    few = len(ends) <= MOST_NUMBERED_TASKS
    for start in starts[1:]:
        axes.axvline(start, color=QUIET, linewidth=0.5, alpha=0.5 if few else 0.15, zorder=0)
    if numbers and few and len(ends) > 1:
        for task, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
            name = f"task {task}" if task == 1 else str(task)
            middle, above = (start + end) / 2, axes.get_xaxis_transform()
            axes.text(middle, 1.01, name, transform=above, ha="center", va="bottom", fontsize=6.5, color=QUIET)


def label_ends(figure: Figure, axes: Axes, ends: Sequence[End], *, size: float = 7.5) -> None:
    """Write at the right of the axes what each line is, pushed apart where lines end close together.

    Call it when everything else is drawn: the labels are placed in fractions of the axes' final height. A line that has
    no end (a value that is not finite) gets no label.
    """
    with verbatim(figure):
        figure.draw_without_rendering()
    low, high = axes.get_ylim()
    ends = [end for end in ends if np.isfinite(end.value)]
    if not ends:
        return
    height_points = figure.get_figheight() * 72 * axes.get_position().height
    wanted = np.array([(end.value - low) / (high - low) for end in ends])
    for end, at in zip(ends, spread(wanted, 1.25 * size / height_points), strict=True):
        axes.annotate(
            end.text,
            (1.0, float(at)),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            color=end.colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
        )


def spread(wanted: Array, height: float) -> Array:
    """Centres in [0, 1], as near to the wanted ones (in squares) as labels of this height can be without overlapping.

    Labels that touch form a block that sits where its members want to be on average.
    """
    order = np.argsort(wanted, kind="stable")
    offsets = height * (np.arange(len(wanted)) + 0.5)
    blocks: list[list[float]] = []
    for value in wanted[order] - offsets:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    placed: Array = np.empty_like(wanted)
    bottoms = np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])
    placed[order] = np.clip(bottoms, 0.0, max(0.0, 1.0 - height * len(wanted))) + offsets
    return placed


def smoothed(values: Array, tasks: npt.NDArray[np.int64], window: int) -> Array:
    """A centred running mean over time [S, layers]; at the ends of a task the window is cut, not moved beyond."""
    result: Array = values.copy()
    for task in np.unique(tasks):
        part = np.flatnonzero(tasks == task)
        for position, index in enumerate(part):
            near = part[max(0, position - window // 2) : position + window // 2 + 1]
            result[index] = values[near].mean(axis=0)
    return result
