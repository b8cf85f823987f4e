"""Test-then-train results: labels and what was predicted for them before they were learned, and every number made of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gracecl.functional import metrics
from gracecl.functional.metrics import Array, Ints


@dataclass(frozen=True, eq=False, repr=False)
class Prequential:
    """Labels and predictions of a stream, in its order. Accuracies are in percent; the blind baselines know what came before, and
    like the learner they know nothing of an item's own batch.
    """

    labels: Ints
    """class numbers"""
    predictions: Ints
    """-1 where nothing was predicted yet, which is wrong"""
    sizes: Ints
    """items of each batch"""
    probability: Array | None = None
    """that of each label; None where it was not noted"""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Prequential:
        """Join the batches of a record, each with `labels` and `predictions`."""
        batches = list(lines)
        labels, predictions = (_joined(batches, name, np.int64) for name in ("labels", "predictions"))
        noted = bool(batches) and all("probability" in batch for batch in batches)
        sizes = np.array([len(batch["labels"]) for batch in batches], np.int64)
        return cls(labels, predictions, sizes, _joined(batches, "probability", np.float64) if noted else None)

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def right(self) -> Array:
        """1 for each prediction that is the label, else 0."""
        return metrics.right(self.labels, self.predictions)

    @property
    def accuracy(self) -> float:
        """Of all items."""
        return 100 * float(self.right.mean()) if len(self) else float("nan")

    def fading(self, factor: float = 0.999) -> Array:
        """Accuracy after each item, older ones fading by this factor; it remembers about 1 / (1 - factor) items."""
        return 100 * metrics.prequential_acc(self.right, factor)

    def sliding(self, window: int = 1000) -> Array:
        """Accuracy over the last `window` items, after each item."""
        return 100 * metrics.sliding_acc(self.right, window)

    def tumbling(self, window: int = 1000) -> Array:
        """Accuracy of each `window` items, one after the other."""
        return 100 * metrics.tumbling_acc(self.right, window)

    @cached_property
    def baselines(self) -> dict[str, Ints]:
        """What blind baselines predict: `majority` the most frequent label so far, `no_change` the last one."""
        return {
            "majority": metrics.running_majority(self.labels, self.sizes),
            "no_change": metrics.no_change(self.labels, self.sizes),
        }

    @cached_property
    def measures(self) -> dict[str, float]:
        """Accuracy, that of the blind baselines, and κ: against chance, against the majority and against the last label."""
        blind = {name: 100 * float(metrics.right(self.labels, guess).mean()) for name, guess in self.baselines.items() if len(self)}
        if not blind:
            return {}
        return {
            "prequential": self.accuracy,
            **blind,
            "kappa": metrics.kappa(self.labels, self.predictions),
            "kappa_majority": metrics.better_than(self.accuracy / 100, blind["majority"] / 100),
            "kappa_temporal": metrics.better_than(self.accuracy / 100, blind["no_change"] / 100),
        }

    def __repr__(self) -> str:
        found = self.measures
        if not found:
            return "Prequential(nothing was predicted)"
        told = ", ".join(f"{name} {found[name]:.1f} %" for name in ("majority", "no_change"))
        kappas = ", ".join(f"{name} {found[name]:.3f}" for name in ("kappa", "kappa_temporal"))
        return f"Prequential({len(self)} items: {self.accuracy:.1f} % right; blind: {told}; {kappas})"


def _joined(batches: list[Mapping[str, Any]], name: str, kind: type) -> npt.NDArray[Any]:
    return np.array([value for batch in batches for value in batch[name]], kind)
