"""Metrics of a run beyond the accuracy matrix: of evaluations between marks, of predictions before learning, beside a joint run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gracecl.functional import metrics
from gracecl.functional.boundaries import Matched, matched
from gracecl.functional.metrics import TOLERANCE, Array

if TYPE_CHECKING:
    from gracecl.lab.report.runs import Record, Run

OF_PREDICTIONS = ("prequential", "kappa", "kappa_majority", "kappa_temporal")
BASELINES = ("majority", "no_change")
"""what knows the labels so far and no image; no number of predictions stands without them"""
MASKED = "_masked"
"""after the name of a rule that chooses among the classes of an image's task"""


def of_evaluations(run: Run, rule: str) -> dict[str, float]:
    """Compute what the evaluations between marks give, and what the last one says beside its accuracy; only what was recorded."""
    last = next((record for record in reversed(run.evals) if record["task_end"]), {})
    found: dict[str, float] = {}
    for name in ("ece", "nll", "brier"):
        value = last.get(name, {}).get(rule)
        if value is not None:
            found[name] = float(value)
    if regular := [record for record in run.evals if record.get("regular") and "task_images" in record]:
        found["a_auc"] = metrics.a_auc([by_image(record, rule) for record in regular])
    if "task_images" in last:
        found["retention"] = by_image(last, rule)
    if gaps := gap_rows(run, rule):
        found["gap_depth"] = float(np.mean([gap["depth"] for gap in gaps]))
        found["gap_recovered"] = 100 * float(np.mean([gap["steps_to_recover"] is not None for gap in gaps]))
    if f"{rule}{MASKED}" in last.get("accuracy", {}):
        found["masked_acc"] = metrics.acc(run.matrix(f"{rule}{MASKED}"))
    if values := last.get("task_found", {}).get(rule):
        found["task_found"] = _mean_of_known(values)
    if rule == run.rule and (ahead := [record["next_task"] for record in run.evals if "next_task" in record]):
        found["forward_transfer"] = float(np.mean([one["accuracy"] - one["chance"] for one in ahead]))
    return found


def by_image(record: Record, rule: str) -> float:
    """Percent right of all images of an evaluation, whatever their task."""
    pairs = [
        (value, n) for value, n in zip(record["accuracy"].get(rule, []), record["task_images"], strict=False) if value is not None
    ]
    return metrics.accuracy_by_image([value * n for value, n in pairs], [n for _, n in pairs])


def gap_rows(run: Run, rule: str) -> list[dict[str, Any]]:
    """Return the stability gap of each old task at each boundary.

    None without evaluations in between, which alone show it, and none where a task has no test images.
    """
    steps, rows = run.seen(rule)
    between = any(not record["task_end"] for record in run.evals)
    if not between or np.isnan(run.matrix(rule)).all(axis=0).any() or any(np.isnan(row).any() for row in rows):
        return []
    return [
        {
            "boundary": gap.boundary,
            "step": steps[gap.at],
            "task": gap.task,
            "before": gap.before,
            "low": gap.low,
            "end": gap.end,
            "depth": gap.depth,
            "regained": gap.regained,
            "steps_to_low": steps[gap.at + gap.to_low] - steps[gap.at],
            "steps_to_recover": None if gap.to_recover is None else steps[gap.at + gap.to_recover] - steps[gap.at],
        }
        for gap in metrics.stability_gaps(rows, TOLERANCE)
    ]


def of_predictions(run: Run) -> dict[str, float]:
    """Compute what was right before it was learned, beside blind baselines, and what was right of later batches."""
    found = dict(run.predicted.measures)
    if run.near_future:
        labels, guesses = ([value for one in run.near_future for value in one[name]] for name in ("labels", "predictions"))
        found["near_future"] = 100 * float(metrics.right(labels, guesses).mean())
        if run.prequential:
            shift = int(run.near_future[0]["shift"])
            found["near_future_blind"] = 100 * metrics.blind_acc(run.predicted.labels, run.predicted.sizes, shift)
    return found


def of_boundaries(run: Run) -> dict[str, float]:
    """Compare the tasks that a learner began by a detector with where the stream's evaluation marks lie."""
    true, found = own_boundaries(run), guessed_boundaries(run)
    if found is None:
        return {}
    measured = {"false_alarms": float(len(found.false))}
    if true:
        measured["boundaries_found"] = 100 * len(found.delays(true)) / len(true)
    if delays := found.delays(true):
        measured["boundary_delay"] = float(np.mean(delays))
    return measured


def own_boundaries(run: Run) -> list[int]:
    """Return the first step after each evaluation mark but the last: where the stream's tasks begin, if it has any."""
    return [record["step"] + 1 for record in run.evals if record["task_end"]][:-1]


def guessed_boundaries(run: Run) -> Matched | None:
    """Match the tasks that a detector began with those of the stream; None where the learner went by marks."""
    if run.config.get("boundaries", "auto") == "auto":
        return None
    return matched([record["step"] + 1 for record in run.tasks], own_boundaries(run))


def boundary_rows(run: Run) -> list[dict[str, Any]]:
    """Return a row for each boundary of the stream, with the task that was begun there, and for each false alarm."""
    found = guessed_boundaries(run)
    if found is None:
        return []
    rows = [
        {"step": step, "began": began, "delay": None if began is None else began - step}
        for step, began in zip(own_boundaries(run), found.first, strict=True)
    ]
    return rows + [{"step": None, "began": began, "delay": None} for began in found.false]


def with_baselines(names: Sequence[str]) -> list[str]:
    """Return columns of a table, with those of the blind baselines beside numbers of predictions."""
    asked = any(name in OF_PREDICTIONS for name in names)
    return list(dict.fromkeys([*names, *(BASELINES if asked else ())]))


def calibration_rows(run: Run) -> list[dict[str, Any]]:
    """Return ECE, NLL and Brier score at each mark, of each task and of all (`task` None), by the run's own rule."""
    rows = []
    for record in (record for record in run.evals if "calibration" in record):
        sums = record["calibration"]
        bins = np.array(sums["bins"])
        for task, chosen in [*((task, [task]) for task in range(len(bins))), (None, list(range(len(bins))))]:
            table = bins[chosen].sum(axis=0)
            images = table[0].sum()
            if images:
                nll, brier = (float(np.sum([sums[name][one] for one in chosen]) / images) for name in ("nll", "brier"))
                values = {"ece": metrics.ece_of_bins(table), "nll": nll, "brier": brier}
                rows.append({"step": record["step"], "task": task, "images": int(images), **values})
    return rows


def retention_curve(run: Run, rule: str) -> Array:
    """Percent right by the last model on test images of the newest task, the newest two, …; the last value is the retention."""
    last = next((record for record in reversed(run.evals) if record["task_end"] and "task_images" in record), None)
    if last is None:
        return np.empty(0)
    known = [(value, n) for value, n in zip(last["accuracy"][rule], last["task_images"], strict=True) if value is not None]
    return metrics.information_retention([value * n for value, n in known], [n for _, n in known])


def link_joint(runs: Sequence[Run]) -> None:
    """Let each run know the accuracies of the finished joint run on its stream, net and seed, if there is one among these."""

    def key(run: Run) -> tuple[Any, ...]:
        return tuple(repr(run.config.get(name)) for name in ("stream", "net", "seed", "steps", "eval_images"))

    joint = {key(run): run for run in runs if run.finished and is_joint(run)}
    for run in runs:
        other = joint.get(key(run))
        run.joint = None if other is None or is_joint(run) else other


def is_joint(run: Run) -> bool:
    return str(run.config["method"]).startswith("joint(")


def intransigence(run: Run, rule: str) -> float:
    """Compute what is missing from the last model of the joint run, under its own rule, on each task when that was new."""
    if run.joint is None:
        return math.nan
    matrix = run.matrix(rule)
    last: Record = next((record for record in reversed(run.joint.evals) if record["task_end"]), {"accuracy": {}})
    row = last["accuracy"].get(run.joint.rule, [])
    if len(row) != len(matrix) or None in row:
        return math.nan
    return metrics.intransigence(matrix, row)


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan
