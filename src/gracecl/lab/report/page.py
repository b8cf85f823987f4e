"""One HTML page about some runs: everything in one file, nothing fetched, to be opened from a folder or mailed.

The page draws itself, with Observable Plot and D3 (`assets/vendor`, with their licences), from the data that this module writes
into it. Statistics over the seeds a reader chooses, and tests of paired differences, are computed there, with the quantiles and the
limits of `functional/statistics.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from gracecl import __version__
from gracecl.files import finite, write_text
from gracecl.functional.metrics import ABOUT, ANYTIME_METRICS, HIGHER_IS_BETTER, MATRIX_METRICS, Array
from gracecl.functional.statistics import FEWEST_SEEDS, t_quantile
from gracecl.lab.report.beside_paper import METRICS, Column, about, column_for
from gracecl.lab.report.command import command
from gracecl.lab.report.evaluation_figures import FADING, image_steps, prequential_curves, window_of
from gracecl.lab.report.groups import COSTS, cost_of, group_runs
from gracecl.lab.report.measures import calibration_rows, gap_rows
from gracecl.lab.report.runs import Run, is_tap, measure
from gracecl.lab.report.tables import COMPARED, DECIMALS
from gracecl.lab.report.terms import terms
from gracecl.registry.options import docstring

MOST_NUMBERS = 120_000
"""of curves in a page, about 0.8 MB; curves of many runs are thinned to it"""
MOST_POINTS, FEWEST_POINTS = 250, 12
"""of one curve"""
SETTING = ("stream", "net", "memory", "taps", "optimizer", "augment", "commit")
"""told at the head of the page"""
ROWS = {
    "log/H": "entropy H (nats)",
    "log/gamma": "entropy weight γ",
    "log/alpha": "loss weight α",
    "log/accuracy": "accuracy on the images of the step",
}
"""what recorded rows are called in words; others go by their names"""
GAP = ("boundary", "step", "task", "before", "low", "steps_to_low", "steps_to_recover")
"""told of each stability gap"""
READING = (
    "Percent: mean ± sample standard deviation over the seeds; in the marked column also the 95 % Student-t interval of the mean, "
    f"from {FEWEST_SEEDS} seeds on. Seeds are paired: each gives every method the same stream. Only finished runs count."
)

DIFFERING = (
    "Difference to the chosen method on the seeds that both have, with its 95 % Student-t interval; p of the paired t-test after "
    "Holm's correction for all rows. A p of 0.05 or more is no evidence that two are equal; 'gracecl compare' also tests by ranks "
    "and says how many seeds would show a difference of this size."
)


def write(path: Path, runs: Sequence[Run], title: str, root: Path | None = None, paper: str = "auto") -> None:
    """Write the page; run folders are shown relative to `root`, `paper` selects the paper's numbers beside ours."""
    write_text(path, html(content(runs, title, root, paper)))


def html(data: dict[str, Any]) -> str:
    """Return the page with its scripts and data. No `<` is left in the data, so nothing there can end its element."""
    text = json.dumps(finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "style": _asset("page.css"),
        "d3": _vendored("d3.min.js", "d3"),
        "plot": _vendored("plot.umd.min.js", "plot", "interval-tree-1d", "binary-search-bounds", "isoformat"),
        "script": _asset("page.js"),
        "data": text,
    }
    page = _asset("page.html")
    for name, part in parts.items():
        before, after = page.split(f"/*{name}*/")
        page = before + part + after
    return page


def content(runs: Sequence[Run], title: str, root: Path | None = None, paper: str = "auto") -> dict[str, Any]:
    """Collect the page's data as plain values."""
    groups = group_runs(runs)
    with_all = group_runs(runs, unfinished_too=True)
    columns = [column_for(group.runs, paper) for group in with_all]
    printed = [_printed(group.method, column) for group, column in zip(with_all, columns, strict=True)]
    shown = [(place, run) for place, group in enumerate(with_all) for run in group.runs]
    points = _points([run for _, run in shown])
    rules = dict.fromkeys(rule for _, run in shown for rule in run.rules())
    shared = [_shared(group.runs) for group in with_all]
    found = [_run(place, run, shared[place], root, points, run is with_all[place].runs[0]) for place, run in shown]
    measured = {name for run in found for rule in run["rules"].values() for name in rule["values"]}
    most = max((len(group.runs) for group in groups), default=0)
    return {
        "title": title,
        "setting": _setting(runs),
        "metrics": [_metric(name) for name in HIGHER_IS_BETTER if name in measured],
        "compared": [*COMPARED, "bwt"],
        "costs": [{"name": name, "about": about} for name, about in COSTS.items()],
        "rows": ROWS,
        "gap": GAP,
        "rules": sorted(rules, key=is_tap),
        "quantiles": {str(n): t_quantile(n) for n in range(FEWEST_SEEDS, most + 1)},
        "groups": [
            {"label": group.label, "rule": group.rule, "unfinished": group.unfinished, "paper": values, "config": config}
            for group, values, config in zip(groups, printed, shared, strict=True)
        ],
        "runs": found,
        "reading": " ".join([READING, *([about(used)] if (used := _used(columns, printed)) else []), terms(groups)]),
        "differing": DIFFERING,
        "footer": f"Made by gracecl {__version__} from {len(found)} runs. Drawn with Observable Plot and D3, whose licences are in "
        "this file.",
    }


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the entries of the configuration that all of these runs have; thousands of runs need not repeat them."""
    texts = [{name: repr(value) for name, value in run.config.items()} for run in runs]
    return {name: value for name, value in runs[0].config.items() if all(text.get(name) == texts[0][name] for text in texts)}


def _run(place: int, run: Run, shared: dict[str, Any], root: Path | None, points: int, first: bool) -> dict[str, Any]:
    kept = _evaluations(run, points)
    rules: dict[str, Any] = {}
    for rule in run.rules():
        rows = [kept_record["accuracy"].get(rule, [])[: kept_record["task"] + 1] for kept_record in kept]
        values = {name: round(value, 6) for name, value in measure(run, rule).items() if math.isfinite(value)}
        rules[rule] = {"values": values, "rows": [[_short(value) for value in row] for row in rows]}
    return {
        "group": place,
        "seed": run.config["seed"],
        "finished": run.finished,
        "folder": str(run.path.relative_to(root)) if root is not None and run.path.is_relative_to(root) else run.path.name,
        "command": command(run),
        "config": {name: value for name, value in run.config.items() if name not in shared},
        "costs": {name: cost_of(run, name) for name in COSTS},
        "evals": {
            name: [record[key] for record in kept] for name, key in (("steps", "step"), ("tasks", "task"), ("ends", "task_end"))
        },
        "rules": rules,
        "prequential": _predictions(run, points),
        "gaps": [[_short(row[name]) for name in GAP] for row in gap_rows(run, run.rule)] if run.evals else [],
        "calibration": [row for row in calibration_rows(run) if row["task"] is None],
        "confusion": run.confusion[-1]["counts"] if first and run.confusion else [],
        "series": {name: _thinned(run, name, points) for name in (*run.term_names(observed=True), *run.term_names(observed=False))},
    }


def _predictions(run: Run, most: int) -> dict[str, Any] | None:
    """Reduce what was right before it was learned to a few points of each curve."""
    if not len(run.predicted):
        return None
    chosen = np.unique(np.linspace(0, len(run.predicted) - 1, most).round().astype(int))
    return {
        "about": f"mean of the last {window_of(run)} images; fading factor {FADING}",
        "steps": [_short(value) for value in image_steps(run)[chosen]],
        "curves": {name: [_short(value) for value in values[chosen]] for name, values in prequential_curves(run).items()},
    }


def _printed(method: str, column: Column | None) -> dict[str, float]:
    """Return the paper's values for a method, by our metrics."""
    values = {metric: column.value(method, metric) for metric in METRICS} if column else {}
    return {metric: value for metric, value in values.items() if value is not None}


def _used(columns: Sequence[Column | None], printed: Sequence[dict[str, float]]) -> list[Column]:
    return [column for column, values in zip(columns, printed, strict=True) if column and values]


def _points(runs: Sequence[Run]) -> int:
    """Return the number of points per curve that keeps the page small."""
    curves = 0
    for run in runs:
        last = run.evals[-1] if run.evals else {"accuracy": {}}
        curves += sum(len(row) for row in last["accuracy"].values()) // 2  # the number of tasks seen grows to it
        curves += sum(len(values) for values in (run.steps[-1]["rows"] if run.steps else {}).values())
    return int(min(MOST_POINTS, max(FEWEST_POINTS, MOST_NUMBERS // max(curves, 1))))


def _evaluations(run: Run, most: int) -> list[dict[str, Any]]:
    """Return the evaluations at task ends, and as many of those between as fit."""
    between = sum(not record["task_end"] for record in run.evals)
    room = max(1, most - (len(run.evals) - between))
    every = math.ceil(between / room) if between else 1
    count, kept = 0, []
    for record in run.evals:
        count += not record["task_end"]
        if record["task_end"] or count % every == 0:
            kept.append(record)
    return kept


def _thinned(run: Run, name: str, most: int) -> dict[str, Any]:
    """Reduce a recorded term to a few points: means of neighbours within a task."""
    steps, values, tasks = run.series(name)
    size = math.ceil(len(steps) / most)
    parts = [
        part
        for task in np.unique(tasks)
        for part in np.array_split(np.flatnonzero(tasks == task), math.ceil(np.count_nonzero(tasks == task) / size))
    ]
    means: list[Array] = [values[part].mean(axis=0) for part in parts]
    return {
        "steps": [int(steps[part].mean()) for part in parts],
        "values": [[_short(value) for value in line] for line in zip(*means, strict=True)],
    }


def _short(value: float | None) -> float | None:
    """Round to five significant digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _metric(name: str) -> dict[str, Any]:
    functions: dict[str, Any] = {**MATRIX_METRICS, **ANYTIME_METRICS}
    sentence = docstring(functions[name]).splitlines()[0] if name in functions else ABOUT[name]
    return {"name": name, "higher": HIGHER_IS_BETTER[name], "decimals": DECIMALS.get(name, 2), "about": sentence}


def _setting(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Describe what all runs share, and count the values of what they do not."""
    told = []
    for name in SETTING:
        values = list(dict.fromkeys(str(run.config[name]) for run in runs if run.config.get(name) is not None))
        if values:
            told.append((name, values[0] if len(values) == 1 else f"{len(values)} different"))
    return told


def _vendored(script: str, *licences: str) -> str:
    texts = "\n\n".join(f"{name}:\n{_asset(f'vendor/{name}.LICENSE').strip()}" for name in licences)
    return f"/*\n{texts}\n*/\n{_asset(f'vendor/{script}')}"


@cache
def _asset(name: str) -> str:
    return (resources.files("gracecl.lab.report") / "assets" / name).read_text(encoding="utf-8")
