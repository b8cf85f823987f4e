"""Arithmetic of budgets and of streams with a speed, in fractions: the same on every machine."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

FINEST = 6
"""largest denominator of a complexity"""


def updates_before(step: int, per_step: Fraction) -> int:
    """Return the optimizer steps made before a step of the stream: ⌊t u⌋."""
    return math.floor(step * per_step)


def updates_at(step: int, per_step: Fraction) -> int:
    """Return the optimizer steps of a step of the stream: ⌊(t + 1) u⌋ − ⌊t u⌋."""
    return updates_before(step + 1, per_step) - updates_before(step, per_step)


def complexity(step: Fraction, pace: Fraction) -> Fraction:
    """Return how many batches pass while one is learned, C, to the nearest fraction with a denominator of at most 6.

    Ghunaim et al., Real-Time Evaluation in Online Continual Learning, CVPR 2023.
    """
    return (step / pace).limit_denominator(FINEST)


def learned_batches(batches: int, complexity: Fraction) -> npt.NDArray[np.int64]:
    """Return the batches that a learner is free for, ⌊j C⌋ for j = 0, 1, …; C is at least 1."""
    count = math.ceil(batches / complexity)
    return np.array([j * complexity.numerator // complexity.denominator for j in range(count)], np.int64)


def model_version(batch: int, complexity: Fraction) -> int:
    """Return how many batches the model that predicts a batch has learned: max {j : ⌊j C⌋ ≤ i}."""
    return math.ceil((batch + 1) / complexity) - 1
