"""What feedback does inside the net: one seed with and without it, side by side on one scale.

Entropy of each layer over the stream, α and γ over the stream, accuracy of each layer's head on the images it trains on and on the
test images, and the sharpness of the minimum, where the runs still have their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.report import Run, figures, style
from gracecl.report.runs import measure
from gracecl.studies.results import Results, Section

LAST_STEPS = 50
"""whose mean accuracy stands for that on training images"""


def sections(results: Results) -> list[Section]:
    """For the first seed on which the control is finished with and without feedback: a picture and the figures in it."""
    found = pair(results.runs, results.control, f"grace({results.control})")
    if found is None:
        return []
    file = f"{results.name}-mechanism.png"
    picture(*found, results.out / file, results.titled("Inside the net"))
    data = {run.config["method"]: accuracies(run) | sharpness_of(run) for run in found}
    rows = [
        f"| `{method}` | {show(values['train'])} | {show(values['test'])} | {show([values.get('sharpness')], 3)} |"
        for method, values in data.items()
    ]
    text = "\n".join(
        [
            "## Inside the net",
            "",
            f"Seed {found[0].config['seed']} of `{found[0].config['stream']}`. Accuracy of each layer's head, first to last.",
            "",
            f"| method | on training images, last {LAST_STEPS} steps | on test images, at the end | sharpness |",
            "|---|---|---|---:|",
            *rows,
            "",
            "Sharpness: the rise of the mean cross-entropy over heads on the memory's images when every weight tensor is moved by "
            "5 % of its norm in a random direction, mean over directions taken both ways; – where the weights were not kept.",
            "",
            f"![Entropy, strengths and weights of each layer]({file})",
        ]
    )
    return [Section("mechanism", text, data)]


def pair(runs: Sequence[Run], without: str, with_feedback: str) -> tuple[Run, Run] | None:
    """Two runs on the same stream."""
    for run in runs:
        for other in runs:
            methods = (run.config["method"], other.config["method"])
            if methods == (without, with_feedback) and run.config["stream_hash"] == other.config["stream_hash"]:
                return run, other
    return None


def picture(without: Run, with_feedback: Run, path: Path, title: str) -> None:
    figure = style.new_figure(4.6)
    (left, right), (alpha, gamma) = figure.subplots(2, 2)
    right.sharey(left)
    for axes, run in ((left, without), (right, with_feedback)):
        figures.draw_layers(axes, run, "log/H")
        style.plain(axes, f"entropy, {run.config['method']}", above=12)
        style.mark_tasks(axes, run.task_ends)
    left.set_ylabel("nats")
    for axes, name, title in (
        (alpha, "log/alpha", "α, weight of the cross-entropy"),
        (gamma, "log/gamma", "γ, weight of the entropy"),
    ):
        figures.draw_layers(axes, with_feedback, name)
        style.plain(axes, title)
        style.mark_tasks(axes, with_feedback.task_ends, numbers=False)
        axes.set_xlabel("step")
    figures.legend_of_layers(figure, with_feedback.series("log/alpha")[1].shape[1])
    figure.suptitle(title, x=0.01, ha="left", size=9, color=style.INK)
    style.save(figure, path)


def accuracies(run: Run) -> dict[str, Any]:
    """Of each layer's linear head, in percent: on the images of the last steps, and on the test images at the end."""
    steps, values, _ = run.series("log/accuracy")
    layers = values.shape[1]
    last = values[steps > steps[-1] - LAST_STEPS] if len(steps) else values
    train = (100 * last.mean(axis=0)).tolist() if len(last) else []
    return {"train": train, "test": [measure(run, f"linear_{layer}").get("acc", float("nan")) for layer in range(1, layers + 1)]}


def sharpness_of(run: Run) -> dict[str, float]:
    """Nothing where the run's weights are not there."""
    if not (run.path / "checkpoint.safetensors").exists():
        return {}
    from gracecl.theory.sharpness import of_run

    return {"sharpness": of_run(run.path)}


def show(values: Sequence[float | None], decimals: int = 1) -> str:
    return " / ".join("–" if value is None or not np.isfinite(value) else f"{value:.{decimals}f}" for value in values) or "–"
