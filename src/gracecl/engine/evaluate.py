"""Evaluation: one batched pass for all tasks, all taps and all inference rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Ints, Progress, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional import metrics
from gracecl.methods.base import Method
from gracecl.registry import nearest


@dataclass(frozen=True)
class Evaluation:
    """Percent right per rule and task (None for a task without images), and how well the linear rules are calibrated."""

    accuracy: dict[str, list[float | None]]
    ece: dict[str, float]
    nll: dict[str, float]


def rule_scores(method: Method, out: Taps) -> dict[str, Tensor]:
    """`{rule: [B, C]}`: every family of scores by its last tap, by the mean over taps, and by each tap (numbered from 1)."""
    scores = {}
    for family, by_layer in method.rules(out).items():
        scores[f"{family}_last"], scores[f"{family}_mean"] = by_layer[-1], by_layer.mean(dim=0)
        if len(by_layer) > 1:
            scores |= {f"{family}_{tap}": layer for tap, layer in enumerate(by_layer, start=1)}
    return scores


def seen_scores(method: Method, out: Taps, progress: Progress, rule: str) -> tuple[Tensor, Tensor]:
    """Scores of the seen classes under one rule, and which class each column is: unseen classes are never predicted."""
    scores = rule_scores(method, out)
    if rule not in scores:
        raise UserError(f"unknown rule '{rule}'{nearest(rule, scores)} (this learner has: {', '.join(scores)})")
    columns = torch.tensor(progress.seen, device=out.logits.device)
    return scores[rule][:, columns], columns


def evaluate(engine: Engine, images: Tensor, labels: Ints, tasks: Ints) -> Evaluation:
    """Accuracy on each task among `tasks`, from one pass over the images. Ties go to the class met first."""
    net = engine.ready_to_predict()
    columns = torch.tensor(engine.progress.seen, device=engine.device)
    position = np.full(net.classes, -1, np.int64)
    position[list(engine.progress.seen)] = np.arange(len(columns))
    guesses: dict[str, list[Tensor]] = {}
    chances: dict[str, list[Tensor]] = {}
    for _, out in net.sweep(images):
        for rule, scores in rule_scores(engine.method, out).items():
            among_seen = scores[:, columns]
            guesses.setdefault(rule, []).append(among_seen.argmax(dim=1))
            if rule in ("linear_last", "linear_mean"):
                chances.setdefault(rule, []).append(among_seen.softmax(dim=1))
    target = position[labels]
    size = np.bincount(tasks)
    accuracy = {}
    for rule, parts in guesses.items():
        right = np.bincount(tasks, weights=torch.cat(parts).cpu().numpy() == target)
        accuracy[rule] = [100 * float(r) / int(n) if n else None for r, n in zip(right, size, strict=True)]
    known = target >= 0
    calibration = {rule: torch.cat(parts).cpu().numpy()[known] for rule, parts in chances.items()}
    return Evaluation(
        accuracy,
        {rule: metrics.ece(p, target[known]) for rule, p in calibration.items()},
        {rule: metrics.nll(p, target[known]) for rule, p in calibration.items()},
    )
