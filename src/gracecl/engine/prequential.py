"""Predictions of batches that are not learned yet: by the learner as it stands, before it sees their labels.

A batch is predicted as a whole, under the learner's own rule, in evaluation mode and without augmentation. Before the first step
nothing is predicted, and a class that was never met cannot be; both count as wrong.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gracecl.core import Ints, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import CALIBRATED, seen_scores
from gracecl.errors import Caution, UserError
from gracecl.functional.metrics import NO_PREDICTION
from gracecl.methods.base import Chain

DIGITS = 7
"""after the point, of recorded probabilities"""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Labels of a batch and what was predicted for it."""

    labels: Ints
    predictions: Ints
    """NO_PREDICTION where nothing was learned yet"""
    confidence: npt.NDArray[np.float64] | None = None
    """the largest probability; None where nobody asked, or the rule gives none"""
    probability: npt.NDArray[np.float64] | None = None
    """that of the label, 0 for a class never met"""

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each prediction is the label."""
        correct: npt.NDArray[np.bool_] = np.equal(self.labels, self.predictions)
        return correct

    def to_lists(self) -> dict[str, list[Any]]:
        """The fields of a line of the record."""
        return {name: values.tolist() for name, values in vars(self).items() if values is not None}


def check_predicts(learner: Chain, probabilities: bool = False) -> None:
    """Refuse a learner that has nothing to predict with between evaluations; say if its rule gives no probabilities."""
    if learner.traits.trains == "evaluation":
        raise UserError(
            f"{learner!r} trains its net only before an evaluation, so between two it has none to predict batches with; "
            "leave prequential and near_future out, and evaluate every so many steps (eval_every)"
        )
    if probabilities and learner.rule not in CALIBRATED:
        warnings.warn(
            f"the scores of {learner.rule}, by which {learner!r} predicts, are no logits, so no probabilities are recorded",
            Caution,
            stacklevel=2,
        )


def predict(engine: Engine, batch: StreamBatch, probabilities: bool = False) -> Predictions:
    """Predict a batch by the learner as it stands; nothing that training depends on is changed.

    With `probabilities`, the softmax over the classes met is noted too, where the rule's scores are logits.
    """
    labels, rule = batch.labels, engine.chain.rule
    probabilities = probabilities and rule in CALIBRATED
    if not engine.progress.seen:
        no_chance = np.zeros(len(labels)) if probabilities else None
        return Predictions(labels, np.full(len(labels), NO_PREDICTION, np.int64), no_chance, no_chance)
    net = engine.ready_to_predict(exact=False)
    classes, largest, of_label = [], [], []
    for rows, out in net.sweep(batch.x):
        scores, columns = seen_scores(engine.chain, out, engine.progress, rule)
        classes.append(columns[scores.argmax(dim=1)].cpu().numpy())
        if probabilities:
            chances = scores.softmax(dim=1).double().cpu().numpy().round(DIGITS)
            largest.append(chances.max(axis=1))
            of_label.append(np.where(labels[rows, None] == columns.cpu().numpy(), chances, 0).sum(axis=1))
    if not probabilities:
        return Predictions(labels, np.concatenate(classes))
    return Predictions(labels, *map(np.concatenate, (classes, largest, of_label)))
