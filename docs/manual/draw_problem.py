"""Draw docs/start/problem.svg: what online continual learning is. Run: `python docs/manual/draw_problem.py`.

The curves are committed results: accuracy on the first task's test images in results/mini, mean of three seeds.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).parent.parent.parent
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
SHOWN = {
    "joint()": ("everything at once", "#999999"),
    "er()": ("replay (er)", "#0072b2"),
    "sgd()": ("no protection (sgd)", "#d55e00"),
}
NAMES = ("cats", "roses", "trains", "lamps", "bears")


def main() -> None:
    mpl.rcParams |= {"svg.hashsalt": "gracecl", "font.size": 11, "font.family": "DejaVu Sans", "svg.fonttype": "none"}
    figure, (story, curves) = plt.subplots(2, 1, figsize=(8.6, 6.4), height_ratios=(1.15, 1))
    draw_story(story)
    draw_curves(curves)
    figure.tight_layout(h_pad=2)
    figure.savefig(ROOT / "docs/start/problem.svg", metadata={"Date": None})


def draw_story(axes: Axes) -> None:
    """The stream with its tasks, the learner that sees a batch at a time, its small memory, and the question."""
    axes.set(xlim=(0, 100), ylim=(0, 44))
    axes.axis("off")
    axes.text(0, 41, "The stream: a few images at a time, each seen once, in tasks of new classes", weight="bold")
    for task, colour in enumerate(COLOURS):
        for batch in range(4):
            left = task * 20 + batch * 4.6
            axes.add_patch(Rectangle((left, 28), 3.8, 8, facecolor=colour, edgecolor="white", alpha=0.55 + 0.15 * (batch % 2)))
        axes.text(task * 20 + 9, 24.4, f"task {task + 1}: {NAMES[task]}", ha="center", fontsize=9.5)
    for left, title, below in ((30, "learner", "predicts and learns"), (66, "memory", "a few old images")):
        axes.add_patch(FancyBboxPatch((left, 5), 22, 11, boxstyle="round,pad=0.6", facecolor="#f4f4f4", edgecolor="#444444"))
        axes.text(left + 11, 12.3, title, ha="center", va="center", weight="bold")
        axes.text(left + 11, 7.8, below, ha="center", va="center", fontsize=9.5)
    arrow(axes, (42, 27), (41, 17.6))
    arrow(axes, (53.2, 12.2), (64.8, 12.2))
    arrow(axes, (64.8, 8.2), (53.2, 8.2))
    arrow(axes, (28.8, 10.5), (21, 10.5))
    axes.text(20, 10.5, "“Cat, rose, train\nor lamp?”", ha="right", va="center", style="italic")


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=13, color="#444444"))


def draw_curves(axes: Axes) -> None:
    """Accuracy on the first task after each task, by method."""
    for method, (name, colour) in SHOWN.items():
        accuracy = on_the_first_task(method)
        axes.plot(range(1, 6), accuracy, "o-", color=colour, linewidth=2.2)
        axes.annotate(
            name,
            (5, accuracy[-1]),
            (9, 9 if accuracy[-1] < 5 else 0),
            textcoords="offset points",
            color=colour,
            va="center",
            weight="bold",
        )
    axes.set(xlim=(0.9, 6.15), ylim=(0, 80), xticks=range(1, 6), xlabel="tasks learned so far", ylabel="accuracy on task 1, %")
    axes.set_title("The problem: what was learned first is forgotten", loc="left", weight="bold", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def on_the_first_task(method: str) -> np.ndarray:
    with (ROOT / "results/mini/runs.jsonl").open(encoding="utf-8") as kept:
        runs = [run for run in map(json.loads, kept) if run["config"]["method"] == method]
    return np.mean([[row[0] for row in run["accuracy"][run["summary"]["rule"]]] for run in runs], axis=0)


if __name__ == "__main__":
    main()
