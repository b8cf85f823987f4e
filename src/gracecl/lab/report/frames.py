"""Convert runs to pandas tables, and write those as files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from gracecl.errors import UserError
from gracecl.files import as_cell, as_path, replacing
from gracecl.lab.report.groups import cost_of
from gracecl.lab.report.measures import calibration_rows, gap_rows
from gracecl.lab.report.runs import PER_IMAGE, Run, find_runs, measure

What = Literal["runs", "evaluations", "steps", "predictions", "gaps", "calibration", "confusion"]
Rows = list[dict[str, Any]]


def load_runs(folder: str | Path, what: What = "runs", rule: str | None = None) -> Any:
    """Load the runs in a folder and below as a pandas DataFrame.

    `runs` has a row for each run: its configuration, whether it is finished, its metrics under its own inference rule or another,
    and its seconds. `evaluations` has a row for each evaluation, rule and task; `steps` one for each step, recorded term and layer;
    `predictions` one for each image that was predicted before it was learned (`ahead` steps before); `gaps` one for each boundary
    and old task; `calibration` one for each mark and task, and for all tasks together; `confusion` one for each pair of a class and
    a predicted class at the end.
    """
    return frame(table(find_runs(as_path(folder, "folder")), what, rule))


def table(runs: Sequence[Run], what: What = "runs", rule: str | None = None) -> Rows:
    """Return the rows of all runs, each with its folder, method and seed."""
    rows_of: dict[str, Callable[[Run], Rows]] = {
        "runs": lambda run: [run_row(run, rule)],
        "evaluations": evaluation_rows,
        "steps": step_rows,
        "predictions": prediction_rows,
        "gaps": lambda run: gap_rows(run, rule or run.rule),
        "calibration": calibration_rows,
        "confusion": confusion_rows,
    }
    if what not in rows_of:
        raise UserError(f"runs have the tables {', '.join(rows_of)}, not '{what}'")
    owner = ("method", "stream", "seed")
    return [
        {"folder": str(run.path), **{key: run.config[key] for key in owner}, **row} for run in runs for row in rows_of[what](run)
    ]


def run_row(run: Run, rule: str | None = None) -> dict[str, Any]:
    """Return a run as one row of single values."""
    plain = {key: value for key, value in run.config.items() if not isinstance(value, (dict, list))}
    chosen = rule or run.rule
    return plain | {"rule": chosen, "finished": run.finished, **measure(run, chosen), "seconds": cost_of(run, "seconds")}


def evaluation_rows(run: Run) -> Rows:
    """Return a row for each evaluation, rule and task."""
    return [
        {"step": found["step"], "task_end": found["task_end"], "rule": rule, "task": task, "accuracy": percent}
        for found in run.evals
        for rule, percents in found["accuracy"].items()
        for task, percent in enumerate(percents)
    ]


def step_rows(run: Run) -> Rows:
    """Return a row for each step, recorded term and tapped layer, counted from 1."""
    return [
        {"step": step["step"], "task": step["task"], "term": term, "layer": layer, "value": value}
        for step in run.steps
        for term, values in step["rows"].items()
        for layer, value in enumerate(values, start=1)
    ]


def prediction_rows(run: Run) -> Rows:
    """Return a row for each image of a batch that was predicted before it was learned."""
    return [
        {"step": found["step"], "ahead": found.get("shift", 0), **{PER_IMAGE[name]: found[name][image] for name in noted}}
        for found in (*run.prequential, *run.near_future)
        for noted in [[name for name in PER_IMAGE if name in found]]
        for image in range(len(found["labels"]))
    ]


def confusion_rows(run: Run) -> Rows:
    """Return a row for each pair of a class and a predicted class of the last evaluation."""
    names = ("label", "prediction", "images")
    return [dict(zip(names, counts, strict=True)) for found in run.confusion[-1:] for counts in found["counts"]]


def frame(rows: Rows) -> Any:
    """Convert rows to a pandas DataFrame."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise UserError("a DataFrame needs pandas; install it with: pip install pandas") from None
    return pandas.DataFrame(rows)


def write_table(runs: Sequence[Run], file: Path, what: What = "runs", rule: str | None = None) -> int:
    """Write a table as .csv or .parquet, by the file's name; return the number of rows."""
    rows = table(runs, what, rule)
    if file.suffix == ".csv":
        rows = [{as_cell(name): as_cell(value) for name, value in row.items()} for row in rows]
    found = frame(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        if file.suffix == ".csv":
            found.to_csv(temporary, index=False)
        else:
            try:
                found.to_parquet(temporary, index=False)
            except ImportError:
                raise UserError("Parquet needs pyarrow; install it with: pip install pyarrow, or write a .csv") from None
    return len(found)
