"""What feedback does inside the net: with and without it, on the same seeds, and one seed side by side on one scale.

Entropy of each layer over the stream, α and γ over the stream, accuracy of each layer's head on the images it trains on and on the
test images, and the sharpness of the minimum, where the runs still have their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.functional.statistics import Paired, paired
from gracecl.lab.report import Run, figures, style
from gracecl.lab.report.compare import p_number
from gracecl.lab.report.groups import setting_of
from gracecl.lab.report.runs import measure
from gracecl.lab.report.table import Cell, Entry, Table, number
from gracecl.lab.report.tables import seeds_text
from gracecl.lab.studies.results import Results, Section, needs_control
from gracecl.registry import renderers

MEASURED = {"train": "accuracy on training images", "test": "accuracy on test images", "sharpness": "sharpness"}
ENTROPY, WEIGHTS = "log/H", "checkpoint.safetensors"
LAST_STEPS = 50
"""whose mean accuracy stands for that on training images"""
OF_METHODS = ("method", f"on training images, last {LAST_STEPS} steps", "on test images, at the end", "sharpness")
OF_CHANGES = ("with feedback less without, mean over layers", "difference", "95 % interval", "p", "seeds")


@renderers.register("mechanism")
@needs_control
def sections(results: Results) -> list[Section]:
    """Inside the net without and with feedback: figures over the seeds that both have, a picture of the fullest record."""
    found = pairs(results.runs, results.control, f"grace({results.control})")
    if not found:
        return []
    file = f"{results.name}-mechanism.png"
    shown = max(found, key=lambda pair: sum(len(run.series(ENTROPY)[0]) for run in pair))
    picture(*shown, results.out / file, results.titled(f"Inside the net, seed {shown[0].config['seed']}"))
    methods = [run.config["method"] for run in found[0]]
    kept = [all((run.path / WEIGHTS).exists() for run in pair) for pair in found]
    data = {method: over_seeds([pair[side] for pair in found], kept) for side, method in enumerate(methods)}
    means: list[list[Entry]] = [
        [Cell(method, code=True), *(show(mean(values[name])) for name in ("train", "test")), show([mean(values["sharpness"])], 3)]
        for method, values in data.items()
    ]
    differences = {name: difference(*(data[method][name] for method in reversed(methods))) for name in MEASURED}
    seeds = ", ".join(str(run.config["seed"]) for run, _ in found)
    changes = [row(MEASURED[name], values, 3 if name == "sharpness" else 1) for name, values in differences.items()]
    text = "\n\n".join(
        [
            "## Inside the net",
            f"`{found[0][0].config['stream']}`, seeds {seeds}. Accuracy of each layer's head, first to last; means over the seeds.",
            Table(OF_METHODS, "lllr", means).to_markdown(tight=True),
            Table(OF_CHANGES, "lrlrl", changes).to_markdown(tight=True),
            "Sharpness: the rise of the mean cross-entropy over heads on the memory's images when every weight tensor is moved by "
            "5 % of its norm in a random direction, mean over directions taken both ways; – where the weights were not kept.",
            f"![Entropy, strengths and weights of each layer]({file})",
        ]
    )
    return [Section("mechanism", text, data)]


def pairs(runs: Sequence[Run], without: str, with_feedback: str) -> list[tuple[Run, Run]]:
    """Pair the runs of both methods on each stream, by seed, in the setting where they share the most seeds."""
    found: dict[str, list[tuple[Run, Run]]] = {}
    others = {run.config["stream_hash"]: run for run in runs if run.config["method"] == with_feedback}
    for run in runs:
        if run.config["method"] == without and run.config["stream_hash"] in others:
            found.setdefault(setting_of(run), []).append((run, others[run.config["stream_hash"]]))
    most = max(found.values(), key=lambda members: len(members), default=[])
    return sorted(most, key=lambda pair: int(pair[0].config["seed"]))


def over_seeds(runs: Sequence[Run], kept: Sequence[bool]) -> dict[str, list[Any]]:
    """Measure each run, by seed; the sharpness is None where the weights of either run were not kept."""
    measured = [
        accuracies(run) | {"sharpness": sharpness_of(run) if weights else None} for run, weights in zip(runs, kept, strict=True)
    ]
    return {name: [values[name] for values in measured] for name in MEASURED}


def mean(values: Sequence[Any]) -> Any:
    """Average over the seeds that have a value; NaN where none has."""
    known = [value for value in values if value is not None]
    return np.mean(known, axis=0) if known else np.nan


def difference(with_feedback: Sequence[Any], without: Sequence[Any]) -> Paired:
    """Compare on the seeds where both are known, averaged over layers."""
    known = [(a, b) for a, b in zip(with_feedback, without, strict=True) if a is not None and b is not None]
    return paired([np.mean(a) for a, _ in known], [np.mean(b) for _, b in known])


def row(name: str, values: Paired, decimals: int) -> list[str]:
    interval = seeds_text(values.n) if np.isnan(values.p) else f"{values.low:+.{decimals}f} to {values.high:+.{decimals}f}"
    return [name, number(values.mean, decimals, "+"), interval, p_number(values.p), str(values.n)]


def picture(without: Run, with_feedback: Run, path: Path, title: str) -> None:
    figure = style.new_figure(4.6)
    (left, right), (alpha, gamma) = figure.subplots(2, 2)
    right.sharey(left)
    for axes, run in ((left, without), (right, with_feedback)):
        figures.draw_layers(axes, run, ENTROPY)
        style.plain(axes, f"entropy, {run.config['method']}", above=12)
        style.mark_tasks(axes, run.task_ends)
    left.set_ylabel("nats")
    for axes, name, above in (
        (alpha, "log/alpha", "α, weight of the cross-entropy"),
        (gamma, "log/gamma", "γ, weight of the entropy"),
    ):
        figures.draw_layers(axes, with_feedback, name)
        style.plain(axes, above)
        style.mark_tasks(axes, with_feedback.task_ends, numbers=False)
        axes.set_xlabel("step")
    figures.legend_of_layers(figure, with_feedback.series("log/alpha")[1].shape[1])
    figure.suptitle(title, x=0.01, ha="left", size=9, color=style.INK)
    style.save(figure, path)


def accuracies(run: Run) -> dict[str, Any]:
    """Return each layer's linear accuracy in percent: on the last steps' images, and on the test images at the end."""
    steps, values, _ = run.series("log/accuracy")
    layers = values.shape[1]
    last = values[steps > steps[-1] - LAST_STEPS] if len(steps) else values
    train = (100 * last.mean(axis=0)).tolist() if len(last) else []
    return {"train": train, "test": [measure(run, f"linear_{layer}").get("acc", float("nan")) for layer in range(1, layers + 1)]}


def sharpness_of(run: Run) -> float:
    from gracecl.lab.theory.sharpness import of_run

    return of_run(run.path)


def show(values: Sequence[float], decimals: int = 1) -> str:
    return " / ".join(number(value, decimals) for value in values)
