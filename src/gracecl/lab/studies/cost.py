"""What each method of a study costs: minutes, images, parameters, and the most memory that its runs held."""

from __future__ import annotations

import math
from typing import Any

from gracecl.lab.report.groups import Group, group_runs
from gracecl.lab.report.table import Cell, Entry, number
from gracecl.lab.report.tables import method_table
from gracecl.lab.studies.results import Results, Section
from gracecl.registry import renderers

COLUMNS = {
    "minutes": ("minutes of training", 1),
    "evaluation_minutes": ("of evaluation", 1),
    "forward": ("million images forward", 2),
    "backward": ("backward", 2),
    "parameters": ("million parameters", 2),
    "peak_memory": ("peak memory, MB", 0),
}
"""head and decimals of each"""


@renderers.register("cost")
def sections(results: Results) -> list[Section]:
    """Minutes, images, parameters and peak memory of each method and setting, in the order of the runs."""
    found = [of_group(group) for group in group_runs(results.runs) if group.runs]
    if not found:
        return []
    rows: list[list[Entry]] = [
        [Cell(line["method"], code=True), *(number(line[name], decimals) for name, (_, decimals) in COLUMNS.items())]
        for line in found
    ]
    text = "\n\n".join(
        [
            "## What it costs",
            method_table(["method", *(head for head, _ in COLUMNS.values())], rows).to_markdown(),
            "Means over seeds. Minutes of training are without evaluation, and are to be compared only where nothing else ran "
            "meanwhile (`--jobs 1`). Peak memory is the most that the run's process held, Python and PyTorch and the data set "
            "included; on a GPU, the most that its tensors took there. – where a run did not record it.",
        ]
    )
    return [Section("cost", text, found)]


def of_group(group: Group) -> dict[str, Any]:
    """Return the means over seeds."""

    def mean(*names: str, unit: float) -> float:
        values = [sum(float(run.timing.get(name, math.nan)) for name in names) / unit for run in group.runs]
        return sum(values) / len(values)

    return {
        "method": group.label,
        "minutes": mean("train_seconds", "fit_seconds", unit=60),
        "evaluation_minutes": mean("eval_seconds", unit=60),
        "forward": mean("forward", "fit_images", unit=1e6),
        "backward": mean("backward", "fit_images", unit=1e6),
        "parameters": group.cost("parameters") / 1e6,
        "peak_memory": mean("peak_bytes", unit=1e6) or math.nan,
    }
