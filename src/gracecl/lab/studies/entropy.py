"""The entropy of each layer over the stream, without feedback and with it, side by side on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.lab.report import Run, figures, style
from gracecl.lab.report.table import Cell, Entry, Table
from gracecl.lab.studies.mechanism import pairs, show
from gracecl.lab.studies.results import Results, Section, needs_control
from gracecl.registry import renderers

ROW = "log/H"


@renderers.register("entropy")
@needs_control
def sections(results: Results) -> list[Section]:
    """Entropy of each layer without and with feedback: a picture of the first seed, the last task over all seeds."""
    methods = (results.control, f"grace({results.control})")
    found = pairs(results.runs, *methods)
    if not found:
        return []
    file = f"{results.name}-entropy.png"
    picture(*found[0], results.out / file, results.titled(f"Entropy of each layer, seed {found[0][0].config['seed']}"))
    data = {method: of_method([pair[side] for pair in found]) for side, method in enumerate(methods)}
    rows: list[list[Entry]] = [
        [Cell(method, code=True), show(values["layers"], 2), show([values["apart"]], 2), str(len(values["seeds"]))]
        for method, values in data.items()
    ]
    heads = ["method", "nats in the last task, first layer to last", "highest less lowest", "seeds"]
    text = "\n\n".join(
        [
            "## Entropy of each layer",
            f"![Entropy of each layer without and with feedback]({file})",
            Table(heads, "llrr", rows).to_markdown(tight=True),
            "Mean entropy of each layer's softmax over the images of a step, mean over the recorded steps of the last task and "
            "over seeds. If feedback brought the layers together, the highest less the lowest would be smaller with it.",
        ]
    )
    return [Section("entropy", text, data)]


def of_method(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the entropy of each layer in the last task, mean over seeds, and the spread between layers."""
    layers = np.mean([last_task(run) for run in runs], axis=0)
    return {
        "layers": layers.tolist(),
        "apart": float(layers.max() - layers.min()),
        "seeds": [run.config["seed"] for run in runs],
    }


def last_task(run: Run) -> Any:
    _, values, tasks = run.series(ROW)
    return values[tasks == tasks[-1]].mean(axis=0)


def picture(without: Run, with_feedback: Run, path: Path, title: str) -> None:
    figure = style.new_figure(3.0)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, run, words in zip(panels, (without, with_feedback), ("without feedback", "with feedback"), strict=True):
        figures.draw_layers(axes, run, ROW)
        style.plain(axes, f"{words}: {run.config['method']}", above=12)
        style.mark_tasks(axes, run.task_ends)
        axes.set_xlabel("step")
    panels[0].set_ylabel("nats")
    figures.legend_of_layers(figure, without.series(ROW)[1].shape[1])
    figure.suptitle(title, x=0.01, ha="left", size=9, color=style.INK)
    style.save(figure, path)
