"""Draw the figures of a run and of a comparison. Each function returns whether there was anything to draw."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gracecl.functional.metrics import HIGHER_IS_BETTER, Array, seen_rows
from gracecl.lab.report.groups import COUNTED, Group, group_runs, value_of
from gracecl.lab.report.runs import Run
from gracecl.lab.report.style import (
    INK,
    METHOD_COLOURS,
    MOST_NUMBERED_TASKS,
    QUIET,
    End,
    colour_bar,
    label_ends,
    layer_colours,
    mark_tasks,
    method_style,
    new_figure,
    plain,
    save,
    smoothed,
    verbatim,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gracecl.functional.statistics import Ranking
    from gracecl.lab.report.compare import Comparison

FEEDBACK = {
    "log/H": "entropy H (nats)",
    "log/gamma": "entropy weight γ",
    "log/alpha": "loss weight α",
}
"""what GRACE observes and decides at each layer, and the axis it is drawn on"""

MOST_LABELS, LONGEST_LABEL = 6, 32
"""methods are named at the ends of their lines up to this many and this long, beyond it in a legend below"""

FEW_STEPS = 60
"""a curve with fewer points is drawn as it is; a longer one also as a running mean"""


def accuracy_matrix(run: Run, path: str | Path) -> bool:
    """Draw the accuracy on each task after each task as a heat map, with the mean over the tasks seen."""
    a = run.matrix(run.rule)
    size = len(a)
    if not size:
        return False
    numbered = size <= MOST_NUMBERED_TASKS
    side = min(max(0.5 * size, 2.6), 5.0)
    figure = new_figure(side + 0.9, side + 2.4)
    tasks, means = figure.subplots(1, 2, sharey=True, width_ratios=[size, 1.0 if numbered else size / 20])
    for axes, block in ((tasks, a), (means, np.array([[mean_of_tested(row)] for row in seen_rows(a)]))):
        one_based = (0.5, block.shape[1] + 0.5, size + 0.5, 0.5)
        image = axes.imshow(block, cmap="cividis", vmin=0, vmax=100, aspect="auto", extent=one_based)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8, colors=QUIET)
        if numbered:
            _write_numbers(axes, block)
    if numbered:
        tasks.set(xticks=range(1, size + 1), yticks=range(1, size + 1))
    means.set(xticks=[1], xticklabels=["mean\nseen"])
    tasks.set_xlabel("accuracy on task", size=8.5, color=INK)
    tasks.set_ylabel("after training task", size=8.5, color=INK)
    colour_bar(figure, image, means, "accuracy (%)", fraction=0.6, pad=0.3, aspect=25)
    figure.suptitle(f"{run.title}\nrule {run.rule}", x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def layer_curves(run: Run, path: str | Path) -> bool:
    """Draw entropy, γ and α of each layer over the stream."""
    names = [name for name in FEEDBACK if name in run.term_names(observed=True)]
    if not names:
        return False
    figure = new_figure(1.75 * len(names) + 0.75)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        axes.set_ylabel(FEEDBACK[name])
        plain(axes)
        draw_layers(axes, run, name)
        mark_tasks(axes, run.task_ends, numbers=axes is panels[0])
    panels[-1].set_xlabel("step")
    figure.suptitle(run.title, x=0.01, ha="left", size=9, color=INK)
    for axes, name in zip(panels, names, strict=True):
        _name_layers(figure, axes, run, name)
    save(figure, path)
    return True


def loss_curves(run: Run, path: str | Path) -> bool:
    """Draw each term of the loss at each layer over the stream, one panel per term."""
    names = run.term_names(observed=False)
    if not names:
        return False
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = new_figure(1.85 * rows + 0.8)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels[: len(names)], names, strict=True):
        plain(axes, name)
        draw_layers(axes, run, name)
        mark_tasks(axes, run.task_ends, numbers=False)
    for unused in panels[len(names) :]:
        unused.set_axis_off()
    figure.supxlabel("step", size=8.5, color=INK)
    figure.suptitle(run.title, x=0.01, ha="left", size=9, color=INK)
    legend_of_layers(figure, max(run.series(name)[1].shape[1] for name in names))
    save(figure, path)
    return True


def comparison(runs: Sequence[Run], path: str | Path) -> bool:
    """Draw the accuracy on the tasks seen so far, one line per method, and the entropy of each layer in one run."""
    groups = [group for group in group_runs(runs) if group.runs]
    groups = [group for group in groups if all(any(tested_curve(*run.seen(group.rule))) for run in group.runs)]
    if not groups:
        return False
    with_entropies = [group.runs[0] for group in groups if "log/H" in group.runs[0].term_names(observed=True)]
    # The run with the most layers has the most to show; among equals the last named, usually the one of interest.
    watched = max(reversed(with_entropies), key=lambda run: run.config.get("layers", 1), default=None)
    crowded = len(groups) > MOST_LABELS or max(len(group.label) for group in groups) > LONGEST_LABEL
    figure = new_figure(3.3 + (0.2 * len(groups) if crowded else 0.0))
    panels = figure.subplots(1, 2 if watched else 1, squeeze=False)[0]
    ends = [_draw_group(panels[0], group, *method_style(index)) for index, group in enumerate(groups)]
    panels[0].set(xlabel="step", ylabel="accuracy on the tasks seen so far (%)")
    panels[0].set_xlim(left=0)
    plain(panels[0], f"accuracy over the stream, {_seeds(groups)}", above=14)
    mark_tasks(panels[0], groups[0].runs[0].task_ends)
    if watched:
        panels[1].set(xlabel="step", ylabel="entropy of each layer (nats)")
        plain(panels[1], f"{watched.config['method']}, seed {watched.config['seed']}", above=14)
        draw_layers(panels[1], watched, "log/H")
        mark_tasks(panels[1], watched.task_ends)
        _name_layers(figure, panels[1], watched, "log/H")
    if crowded:
        names = [end.text for end in ends]
        figure.legend(panels[0].get_lines()[: len(ends)], names, loc="outside lower left", fontsize=7.5, frameon=False)
    else:
        label_ends(figure, panels[0], ends)
    save(figure, path)
    return True


def seeds_and_intervals(groups: Sequence[Group], metric: str, path: str | Path) -> bool:
    """Draw a metric of each method: every seed, the mean, and its 95 % interval where there are enough seeds."""
    shown = [(group, group.summarise(metric)) for group in groups if group.runs]
    shown = [(group, values) for group, values in shown if math.isfinite(values.mean)]
    if not shown:
        return False
    shown.sort(key=lambda one: one[1].mean, reverse=not HIGHER_IS_BETTER.get(metric, False))
    figure = new_figure(1.0 + 0.26 * len(shown))
    axes = figure.subplots()
    for place, (group, values) in enumerate(shown):
        colour = METHOD_COLOURS[0]
        if math.isfinite(values.half_width):
            ends = [values.mean - values.half_width, values.mean + values.half_width]
            axes.plot(ends, [place, place], color=colour, linewidth=1.6, solid_capstyle="round")
        seeds = [value_of(run, metric, group.rule) for run in group.runs]
        axes.plot(seeds, [place] * len(seeds), "o", color="white", markeredgecolor=colour, markersize=4)
        axes.plot([values.mean], [place], "|", color=colour, markersize=11, markeredgewidth=2)
    axes.set_xlabel(f"{metric}: seeds, mean, 95 % interval from three seeds on")
    plain(axes)
    axes.margins(y=0.5 / len(shown))
    axes.set_yticks(range(len(shown)), [in_two_lines(group.label) for group, _ in shown], fontsize=6.5)
    save(figure, path)
    return True


def against(groups: Sequence[Group], metric: str, cost: str, label: str, path: str | Path) -> bool:
    """Draw a metric against its cost: one labelled point per method."""
    points = [(group, group.cost(cost), group.summarise(metric)) for group in groups if group.runs]
    points = [(group, paid, values) for group, paid, values in points if math.isfinite(paid) and math.isfinite(values.mean)]
    if len({paid for _, paid, _ in points}) < 2:
        return False
    figure = new_figure(3.6)
    axes = figure.subplots()
    for index, (_, paid, values) in enumerate(points):
        colour = method_style(index)[0]
        axes.errorbar(paid, values.mean, yerr=values.std if math.isfinite(values.std) else None, fmt="o", color=colour, linewidth=1)
    few = min(paid for _, paid, _ in points)
    if few > 0 and (cost in COUNTED or max(paid for _, paid, _ in points) > 20 * few):
        axes.set_xscale("log")
    axes.set(xlabel=label, ylabel=f"{metric}, mean ± std over seeds")
    axes.margins(0.12)
    plain(axes)
    named = [(paid, values.mean, shortened(group.label, LONGEST_LABEL)) for group, paid, values in points]
    label_points(figure, axes, named, [method_style(index)[0] for index in range(len(points))])
    save(figure, path)
    return True


def frontier(points: Sequence[tuple[str, float, float]], label: str, path: str | Path) -> bool:
    """Draw accuracies against a cost, of methods by name: those that none beats for less are joined by a line."""
    known = [point for point in points if point[1] > 0 and math.isfinite(point[2])]
    if len({paid for _, paid, _ in known}) < 2:
        return False
    figure = new_figure(4.8)
    draw_frontier(figure, figure.subplots(), known, label)
    save(figure, path)
    return True


def draw_frontier(figure: Figure, axes: Axes, points: Sequence[tuple[str, float, float]], label: str) -> None:
    """Draw on these axes. Long expressions that are beaten have no name, as the names of many methods have to fit."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    points = sorted(points, key=lambda point: (point[1], -point[2]))
    highest = np.maximum.accumulate([accuracy for _, _, accuracy in points])
    leads = [place == 0 or highest[place] > highest[place - 1] for place in range(len(points))]
    colours = [METHOD_COLOURS[0] if lead else QUIET for lead in leads]
    axes.step([paid for _, paid, _ in points], highest, where="post", color=METHOD_COLOURS[0], linewidth=1, alpha=0.5)
    for (_, paid, accuracy), lead, colour in zip(points, leads, colours, strict=True):
        axes.plot(paid, accuracy, "o", color=colour, markersize=4 if lead else 3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(EngFormatter() if points[-1][1] < 10 * points[0][1] else NullFormatter())
    axes.set(xlabel=label, ylabel="accuracy (%), mean over seeds")
    axes.margins(0.08)
    plain(axes)
    named = [
        (paid, accuracy, shortened(name, LONGEST_LABEL) if lead or len(name) <= LONGEST_LABEL else "")
        for (name, paid, accuracy), lead in zip(points, leads, strict=True)
    ]
    label_points(figure, axes, named, colours)


def task_curves(run: Run, path: str | Path) -> bool:
    """Draw the accuracy on each task over the stream, from its first evaluation on."""
    steps, rows = run.seen(run.rule)
    if not rows:
        return False
    count = max(map(len, rows))
    figure = new_figure(3.2)
    axes = figure.subplots()
    ends = []
    for task, colour in enumerate(layer_colours(count)):
        points = [(step, float(row[task])) for step, row in zip(steps, rows, strict=True) if len(row) > task]
        points = [(step, accuracy) for step, accuracy in points if not np.isnan(accuracy)]
        if not points:
            continue  # a task without test images
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, marker="o", markersize=2)
        ends.append(End(points[-1][1], f"task {task + 1}", colour))
    axes.set(xlabel="step", ylabel="accuracy on each task (%)", ylim=(0, 102))
    plain(axes, f"{run.title}, rule {run.rule}", above=14)
    mark_tasks(axes, run.task_ends)
    if count <= MOST_NUMBERED_TASKS:
        label_ends(figure, axes, ends, size=7)
    save(figure, path)
    return True


def feedback_maps(run: Run, path: str | Path) -> bool:
    """Draw α and γ of each layer over the stream as heat maps."""
    names = [name for name in ("log/alpha", "log/gamma") if len(run.series(name)[0])]
    if not names:
        return False
    figure = new_figure(1.5 * len(names) + 0.5)
    for axes, name in zip(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], names, strict=True):
        steps, values, _ = run.series(name)
        layers = values.shape[1]
        extent = (float(steps[0]), float(steps[-1]) + 1, 0.5, layers + 0.5)
        image = axes.imshow(values.T, aspect="auto", origin="lower", extent=extent, cmap="viridis", interpolation="nearest")
        axes.set_yticks(range(1, layers + 1))
        axes.set_ylabel("layer", size=8.5, color=INK)
        axes.tick_params(labelsize=8, colors=QUIET, length=2)
        axes.set_title(FEEDBACK[name], loc="left", fontsize=8.5, color=INK)
        figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7, colors=QUIET)
    axes.set_xlabel("step", size=8.5, color=INK)
    figure.suptitle(run.title, x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def label_points(figure: Figure, axes: Axes, labelled: Sequence[tuple[float, float, str]], colours: Sequence[str]) -> None:
    """Label each point at the first place around it that no point and no earlier label occupies."""
    from matplotlib.transforms import Bbox

    with verbatim(figure):
        figure.draw_without_rendering()
        pixels = axes.transData.transform([(x, y) for x, y, _ in labelled])
        scale = figure.dpi / 72
        taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in pixels]
        places = [(x, y, side) for y in (0, 8, -8, 16, -16, 24, -24, 32, -32, 40, -40) for x, side in ((6, "left"), (-6, "right"))]
        for (x, y, text), colour in zip(labelled, colours, strict=True):
            for dx, dy, side in places:
                label = axes.annotate(
                    text,
                    (x, y),
                    xytext=(dx, dy),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    fontsize=7.5,
                    color=colour,
                    parse_math=False,
                )
                box = label.get_window_extent()
                if not any(box.overlaps(other) for other in taken) or (dx, dy, side) == places[-1]:
                    break
                label.remove()
            taken.append(box)
            if dy:
                line = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
                axes.annotate("", (x, y), xytext=(dx, dy), textcoords="offset points", arrowprops=line)


def differences(found: Sequence[Comparison], path: str | Path, title: str) -> bool:
    """Draw each difference with its interval, one panel per setting."""
    if not found:
        return False
    settings = list(dict.fromkeys(line.setting for line in found))
    parts = [
        sorted((line for line in found if line.setting == setting), key=lambda line: line.difference.mean) for setting in settings
    ]
    figure = new_figure(0.9 + 0.55 * len(parts) + 0.24 * len(found))
    panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=[1 + len(part) for part in parts])[:, 0]
    for axes, setting, part in zip(panels, settings, parts, strict=True):
        for place, line in enumerate(part):
            colour = {"above": METHOD_COLOURS[2], "below": METHOD_COLOURS[1]}.get(line.verdict, QUIET)
            axes.plot(
                [line.difference.low, line.difference.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="round"
            )
            axes.plot([line.difference.mean], [place], "o", color=colour, markersize=4)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.margins(y=0.5 / len(part))
        plain(axes, setting)
        axes.set_yticks(range(len(part)), [in_two_lines(line.method) for line in part], fontsize=6.5)
    panels[-1].set_xlabel(f"points of {found[0].metric} above (+) or below (-) it, 95 % interval over paired seeds")
    figure.suptitle(title, x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def ranks(found: Mapping[str, Sequence[float]], columns: Sequence[str], path: str | Path, title: str) -> bool:
    """Draw the rank of each method in each column as a line between them, named at both ends; NaN leaves a gap."""
    if not found or not columns:
        return False
    figure = new_figure(1.3 + 0.26 * len(found))
    axes, last = figure.subplots(), len(columns) - 1
    for number, (method, places) in enumerate(found.items()):
        colour, dashes = method_style(number)
        axes.plot(range(len(columns)), places, color=colour, linestyle=dashes, linewidth=1.6, marker="o", markersize=9)
        for step, rank in enumerate(places):
            if not math.isnan(rank):
                axes.annotate(f"{rank:.0f}", (step, rank), ha="center", va="center_baseline", fontsize=6, color="white")
        for step, side, sideways in ((0, -9, "right"), (last, 9, "left")):
            if not math.isnan(places[step]):
                axes.annotate(
                    method if len(method) <= LONGEST_LABEL else f"{method.split('(')[0]}(…)",
                    (step, places[step]),
                    xytext=(side, 0),
                    textcoords="offset points",
                    ha=sideways,
                    va="center",
                    color=colour,
                    fontsize=7,
                )
    plain(axes)
    axes.set(xlim=(-1.1, last + 1.1), ylim=(len(found) + 0.6, 0.4))
    axes.set_xticks(range(len(columns)), [textwrap.fill(name, 14) for name in columns], fontsize=7.5)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    figure.suptitle(title, x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def shortened(label: str, most: int) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def in_two_lines(label: str, width: int = 58) -> str:
    """Wrap a title to two lines and cut what does not fit."""
    return "\n".join(textwrap.wrap(label, width, max_lines=2, placeholder=" …"))


def critical_difference(methods: Sequence[str], found: Ranking, path: str | Path, metric: str) -> bool:
    """Draw mean ranks over settings on one line, best at the left; bars join methods that cannot be told apart
    (Demšar 2006).
    """
    order = sorted(range(len(methods)), key=lambda index: found.ranks[index])
    ranks = [found.ranks[index] for index in order]
    bars = alike(ranks, found.critical)
    half = math.ceil(len(order) / 2)
    figure = new_figure(1.5 + 0.22 * half + 0.12 * len(bars))
    axes = figure.subplots()
    axes.set_axis_off()
    below = 0.6 + 0.35 * len(bars)
    width = len(methods) - 1
    axes.set(xlim=(1 - 0.45 * width, len(methods) + 0.45 * width), ylim=(-(below + 0.8 * half), 2.4))
    axes.plot([1, len(methods)], [0, 0], color=INK, linewidth=1)
    for rank in range(1, len(methods) + 1):
        axes.plot([rank, rank], [0, 0.15], color=INK, linewidth=1)
        axes.text(rank, 0.25, str(rank), ha="center", va="bottom", fontsize=7.5, color=QUIET)
    for place, (first, last) in enumerate(bars):
        level = -0.35 * (place + 1)
        axes.plot([ranks[first] - 0.03, ranks[last] + 0.03], [level, level], color=INK, linewidth=3, solid_capstyle="butt")
    for place, index in enumerate(order):
        left = place < half
        level = -(below + 0.8 * (place if left else len(order) - 1 - place))
        side = 1 - 0.08 * width if left else len(methods) + 0.08 * width
        axes.plot([ranks[place], ranks[place], side], [0, level, level], color=QUIET, linewidth=0.8)
        text, towards = f"{methods[index]}  {ranks[place]:.2f}", "right" if left else "left"
        axes.text(side, level, f" {text} ", ha=towards, va="center", fontsize=7.5, color=INK)
    axes.plot([1, 1 + found.critical], [1.5, 1.5], color=INK, linewidth=1.2, marker="|")
    axes.text(1, 1.7, f"critical difference {found.critical:.2f}", ha="left", va="bottom", fontsize=7.5, color=INK)
    about = f"mean ranks by {metric} over {found.settings} settings; Friedman's test p = {found.p:.2g}"
    figure.suptitle(about, x=0.01, ha="left", size=8.5, color=INK)
    save(figure, path)
    return True


def alike(ranks: Sequence[float], critical: float) -> list[tuple[int, int]]:
    """Return first and last index of each longest stretch of sorted ranks that lie within the critical difference."""
    found: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = max(place for place, other in enumerate(ranks) if other - rank < critical)
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


def _write_numbers(axes: Axes, block: Array) -> None:
    for (row, column), value in np.ndenumerate(block):
        if not np.isnan(value):
            colour = "white" if value < 55 else INK
            axes.text(column + 1, row + 1, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=colour)


def draw_layers(axes: Axes, run: Run, name: str) -> None:
    """One line per layer, broken where a task begins. A long curve is drawn twice: faint as recorded, and
    strong as a running mean."""
    steps, values, tasks = run.series(name)
    window = _window(steps, tasks)
    means = smoothed(values, tasks, window)
    for layer, colour in enumerate(layer_colours(values.shape[1])):
        for part in (tasks == task for task in np.unique(tasks)):
            if window > 1:
                axes.plot(steps[part], values[part, layer], color=colour, linewidth=0.5, alpha=0.3)
            axes.plot(steps[part], means[part, layer], color=colour, linewidth=1.4)
    axes.margins(x=0.01)


def _window(steps: npt.NDArray[np.int64], tasks: npt.NDArray[np.int64]) -> int:
    """Return the length of a running mean: a fraction of the curve, small enough to keep each task's course visible."""
    if len(steps) <= FEW_STEPS:
        return 1
    return max(1, min(len(steps) // 40, len(steps) // len(np.unique(tasks)) // 8))


def _name_layers(figure: Figure, axes: Axes, run: Run, name: str) -> None:
    steps, values, tasks = run.series(name)
    last = smoothed(values, tasks, _window(steps, tasks))[-1]
    colours = layer_colours(values.shape[1])
    names = [f"layer {layer}" for layer in range(1, len(colours) + 1)]
    label_ends(figure, axes, [End(*end) for end in zip(last, names, colours, strict=True)])


def legend_of_layers(figure: Figure, count: int) -> None:
    from matplotlib.lines import Line2D

    if count > 1:
        lines = [Line2D([], [], color=colour, linewidth=1.4) for colour in layer_colours(count)]
        names = [f"layer {layer}" for layer in range(1, count + 1)]
        columns = min(count, 6)
        figure.legend(lines, names, loc="outside upper right", ncols=columns, fontsize=7.5, frameon=False)


def mean_of_tested(row: Array) -> float:
    """Average accuracies over the tasks that have test images; NaN where none has."""
    known = row[~np.isnan(row)]
    return float(known.mean()) if len(known) else float("nan")


def tested_curve(steps: Sequence[int], rows: Sequence[Array]) -> tuple[list[int], list[float]]:
    """Return the evaluations with some test images: their steps and mean accuracies."""
    points = [(step, mean) for step, row in zip(steps, rows, strict=True) if not np.isnan(mean := mean_of_tested(row))]
    return [step for step, _ in points], [mean for _, mean in points]


def _seeds(groups: list[Group]) -> str:
    fewest, most = min(len(group.runs) for group in groups), max(len(group.runs) for group in groups)
    if most == 1:
        return "1 seed"
    return f"{most if fewest == most else f'{fewest}–{most}'} seeds, mean ± std"


def _draw_group(axes: Axes, group: Group, colour: str, dashes: str) -> End:
    """Draw the mean over seeds in a band of one standard deviation, over the steps that all seeds reach.

    Seeds of a stream without fixed task lengths are evaluated at different steps: between two evaluations a seed's
    accuracy is taken from the straight line that its curve would show.
    """
    curves = [tested_curve(*run.seen(group.rule)) for run in group.runs]
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    grid = sorted({step for steps, _ in curves for step in steps if first <= step <= last})
    values = np.array([np.interp(grid, steps, accuracies) for steps, accuracies in curves])
    mean = values.mean(axis=0)
    axes.plot(grid, mean, dashes, color=colour, linewidth=1.5)
    if len(curves) > 1:
        std = values.std(axis=0, ddof=1)
        axes.fill_between(grid, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    final = float(np.mean([accuracies[-1] for _, accuracies in curves]))
    return End(final, f"{group.label}  {final:.1f}", colour)
