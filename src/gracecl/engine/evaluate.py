"""Evaluation: one batched pass for all tasks, all taps and all inference rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gracecl.core import Ints, Progress, Taps
from gracecl.engine.engine import Engine
from gracecl.engine.finite import check_scores
from gracecl.errors import UserError
from gracecl.functional import metrics
from gracecl.methods.base import Chain, Method
from gracecl.registry import nearest

CALIBRATED = ("linear_last", "linear_mean", "linear_votes")
"""rules whose scores are logits, so that their softmax may be compared with how often they are right"""
MASKED = "_masked"
"""after the name of a rule that chooses among the classes of an image's task"""
DIGITS = 6
"""after the point, of recorded sums"""


@dataclass(frozen=True)
class Calibration:
    """Sums over the images of each task, of classes that were met: tables and sums may be added, whatever is pooled."""

    bins: list[list[list[float]]]
    """[tasks, 3, bins] see `metrics.calibration_bins`"""
    nll: list[float]
    brier: list[float]


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in percent per rule and task (None for a task without images), and calibration of the linear rules."""

    accuracy: dict[str, list[float | None]]
    ece: dict[str, float]
    nll: dict[str, float]
    brier: dict[str, float]
    images: list[int]
    """of each task"""
    confusion: list[list[int]]
    """class, predicted class and number of images, by the learner's own rule, where there are any"""
    task_found: dict[str, list[float | None]]
    """percent of each task's images that a rule takes for a class of their task; empty without `classes_of_task`"""
    calibration: Calibration | None
    """of the learner's own rule, if its scores are logits"""


def rule_scores(learner: Chain | Method, out: Taps, columns: Tensor) -> dict[str, Tensor]:
    """Return `{rule: [B, columns]}`: every family of scores by its last tap, by the mean over taps, and by each
    tap (numbered from 1).

    `linear_votes` is the mean over taps of the softmax among those columns, as a logarithm.
    """
    scores = {}
    for family, of_all in learner.rules(out).items():
        by_layer = of_all[..., columns]
        scores[f"{family}_last"], scores[f"{family}_mean"] = by_layer[-1], by_layer.mean(dim=0)
        if family == "linear":
            scores["linear_votes"] = by_layer.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(by_layer))
        if len(by_layer) > 1:
            scores |= {f"{family}_{tap}": layer for tap, layer in enumerate(by_layer, start=1)}
    return scores


def seen_scores(learner: Chain | Method, out: Taps, progress: Progress, rule: str) -> tuple[Tensor, Tensor]:
    """Return scores of the seen classes under one rule, and the class of each column: unseen classes are never
    predicted.
    """
    columns = torch.tensor(progress.seen, device=out.logits.device)
    scores = scores_by(rule, learner, out, columns)
    check_scores(scores, progress.step)
    return scores, columns


def scores_by(rule: str, learner: Chain | Method, out: Taps, columns: Tensor) -> Tensor:
    """Return `[B, columns]` under one rule; it depends on no value, so that a program can be exported of it."""
    scores = rule_scores(learner, out, columns)
    if rule not in scores:
        raise UserError(f"unknown rule '{rule}'{nearest(rule, scores)} (this learner has: {', '.join(scores)})")
    return scores[rule]


def evaluate(
    engine: Engine, images: Tensor, labels: Ints, tasks: Ints, classes_of_task: npt.NDArray[np.bool_] | None = None
) -> Evaluation:
    """Measure the accuracy on each task among `tasks`, in one pass over the images. Ties go to the class met first.

    With `classes_of_task`, `[tasks, classes]`, every rule is also read among the classes of each image's task: `<rule>_masked`.
    """
    net, seen = engine.ready_to_predict(), np.array(engine.progress.seen)
    columns = torch.from_numpy(seen).to(engine.device)
    position = np.full(max(net.classes, labels.max(initial=-1) + 1), -1, np.int64)
    position[seen] = np.arange(len(seen))
    guesses: dict[str, list[Tensor]] = {}
    chances: dict[str, list[Tensor]] = {}
    for rows, out in net.sweep(images):
        for rule, scores in rule_scores(engine.chain, out, columns).items():
            guesses.setdefault(rule, []).append(scores.argmax(dim=1))
            if classes_of_task is not None:
                allowed = torch.from_numpy(classes_of_task[tasks[rows]][:, seen]).to(scores.device)
                guesses.setdefault(f"{rule}{MASKED}", []).append(scores.masked_fill(~allowed, -math.inf).argmax(dim=1))
            if rule in CALIBRATED:
                chances.setdefault(rule, []).append(scores.softmax(dim=1))
    target, size = position[labels], np.bincount(tasks)
    guessed = {rule: torch.cat(parts).cpu().numpy() for rule, parts in guesses.items()}

    def percent(right: npt.NDArray[np.bool_]) -> list[float | None]:
        """Of each task's images."""
        counts = np.bincount(tasks, weights=right)
        return [100 * float(r) / int(n) if n else None for r, n in zip(counts, size, strict=True)]

    known = target >= 0
    whole = {rule: torch.cat(parts).cpu() for rule, parts in chances.items()}
    for scores in whole.values():
        check_scores(scores, engine.progress.step)
    calibrated = {rule: scores.numpy()[known] for rule, scores in whole.items()}
    own = engine.chain.rule
    return Evaluation(
        {rule: percent(guess == target) for rule, guess in guessed.items()},
        {rule: metrics.ece(p, target[known]) for rule, p in calibrated.items()},
        {rule: metrics.nll(p, target[known]) for rule, p in calibrated.items()},
        {rule: metrics.brier(p, target[known]) for rule, p in calibrated.items()},
        size.tolist(),
        confused(labels, seen[guessed.get(own, labels)]),  # without images neither has an entry
        {}
        if classes_of_task is None
        else {rule: percent(classes_of_task[tasks, seen[guess]]) for rule, guess in guessed.items() if not rule.endswith(MASKED)},
        calibration_of(calibrated[own], target[known], tasks[known], len(size)) if own in calibrated else None,
    )


def confused(labels: Ints, predictions: Ints) -> list[list[int]]:
    """Return `[class, predicted class, images]` for each pair that occurs, in their order."""
    pairs, counts = np.unique(np.stack([labels, predictions]), axis=1, return_counts=True)
    found: list[list[int]] = np.vstack([pairs, counts]).T.tolist()
    return found


def calibration_of(p: npt.NDArray[np.float32], target: Ints, tasks: Ints, count: int) -> Calibration:
    """Return the calibration of images by task: their probabilities `[n, classes]` and the column of each label."""
    bins, nll, brier = [], [], []
    for task in range(count):
        here = tasks == task
        images = int(here.sum())
        table = metrics.calibration_bins(p[here], target[here]) if images else np.zeros((3, metrics.BINS))
        bins.append(table.round(DIGITS).tolist())
        nll.append(round(images * metrics.nll(p[here], target[here]), DIGITS) if images else 0.0)
        brier.append(round(images * metrics.brier(p[here], target[here]), DIGITS) if images else 0.0)
    return Calibration(bins, nll, brier)
