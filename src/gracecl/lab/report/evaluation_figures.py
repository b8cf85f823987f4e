"""Draw how a run was evaluated beyond its accuracies. Each function returns whether there was anything to draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gracecl.functional import metrics
from gracecl.functional.metrics import Array
from gracecl.lab.report.measures import calibration_rows, gap_rows
from gracecl.lab.report.runs import Run
from gracecl.lab.report.style import INK, METHOD_COLOURS, QUIET, colour_bar, mark_tasks, new_figure, plain, save

FADING = 0.999
SHARE_OF_STREAM = 50
"""a window holds this part of the stream"""
BLIND = {"majority": "most frequent label so far", "no_change": "last label"}


def window_of(run: Run) -> int:
    """Return the number of images that the curves of predictions are means of."""
    return max(100, len(run.predicted) // SHARE_OF_STREAM)


def prequential_curves(run: Run) -> dict[str, Array]:
    """Return percent right after each image of the stream: of the last `window_of(run)`, fading, and of the blind baselines."""
    found, window = run.predicted, window_of(run)
    blind = {
        BLIND[name]: 100 * metrics.sliding_acc(metrics.right(found.labels, guess), window)
        for name, guess in found.baselines.items()
    }
    return {"window": found.sliding(window), "fading": found.fading(FADING), **blind}


def image_steps(run: Run) -> Array:
    """Return the step of each predicted image, with the place inside its batch as a fraction."""
    sizes = run.predicted.sizes
    steps = np.repeat([record["step"] for record in run.prequential], sizes)
    within = np.arange(len(steps)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    placed: Array = steps + within / np.repeat(sizes, sizes)
    return placed


def prequential(run: Run, path: str | Path) -> bool:
    """Draw what was right before it was learned over the stream, beside blind baselines."""
    if not len(run.predicted):
        return False
    figure = new_figure(3.0)
    axes = figure.subplots()
    plain(axes)
    steps = image_steps(run)
    for (name, values), colour, width in zip(
        prequential_curves(run).items(), (METHOD_COLOURS[0], METHOD_COLOURS[1], QUIET, INK), (1.6, 1.2, 0.8, 0.8), strict=True
    ):
        about = {"window": f"last {window_of(run)} images", "fading": f"fading {FADING}"}.get(name, name)
        axes.plot(steps, values, color=colour, linewidth=width, label=about)
    mark_tasks(axes, run.task_ends)
    axes.set(xlabel="step", ylabel="right before learning (%)", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=7.5, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.06))
    figure.suptitle(run.title, x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def confusion(run: Run, path: str | Path) -> bool:
    """Draw which class was taken for which at the end: rows are classes, in percent of their images."""
    if not run.confusion or not (counts := run.confusion[-1]["counts"]):
        return False
    classes = max(max(label, predicted) for label, predicted, _ in counts) + 1
    table = np.zeros((classes, classes))
    for label, predicted, images in counts:
        table[label, predicted] = images
    shares = 100 * table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    figure = new_figure(4.4, 5.0)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=100)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=QUIET)
    axes.set_xlabel("predicted class", size=8.5, color=INK)
    axes.set_ylabel("class", size=8.5, color=INK)
    colour_bar(figure, image, axes, "of the class (%)", fraction=0.045)
    figure.suptitle(f"{run.title}\nrule {run.rule}", x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def calibration(run: Run, path: str | Path) -> bool:
    """Draw ECE, NLL and Brier score of all test images over the marks."""
    rows = [row for row in calibration_rows(run) if row["task"] is None]
    if not rows:
        return False
    figure = new_figure(2.4)
    for axes, name in zip(figure.subplots(1, 3), ("ece", "nll", "brier"), strict=True):
        plain(axes, name)
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], marker="o", markersize=3, color=METHOD_COLOURS[0])
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
    figure.suptitle(f"{run.title}, rule {run.rule}", x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True


def gaps(run: Run, path: str | Path) -> bool:
    """Draw how far each old task falls after each boundary, and where it stands when the next task ends."""
    rows = gap_rows(run, run.rule) if run.evals else []
    if not rows:
        return False
    figure = new_figure(2.8)
    axes = figure.subplots()
    plain(axes)
    places = [row["boundary"] + 0.5 * row["task"] / max(row["boundary"], 1) for row in rows]
    for name, colour in (("low", METHOD_COLOURS[1]), ("before", INK), ("end", METHOD_COLOURS[0])):
        axes.scatter(places, [row[name] for row in rows], s=14, color=colour, label=name, zorder=3)
    axes.vlines(places, [row["low"] for row in rows], [row["before"] for row in rows], color=QUIET, linewidth=0.8)
    ticks = range(1, max(row["boundary"] for row in rows) + 1)
    axes.set(xlabel="tasks that have ended", ylabel="accuracy on an old task (%)", ylim=(0, 100), xticks=ticks)
    axes.legend(frameon=False, fontsize=7.5, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    figure.suptitle(run.title, x=0.01, ha="left", size=9, color=INK)
    save(figure, path)
    return True
