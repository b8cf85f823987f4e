"""Gradient-based sample selection: which stored image makes room for which new one. Aljundi et al., 2019, the greedy variant.

An image's score is the largest cosine between its gradient and those of a random part of memory: near 1, memory has something like
it already; near -1, it pulls the weights where nothing stored does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gracecl.core import Ints

Floats = npt.NDArray[np.float64]

SMALLEST_NORMS = 1e-8
SPREAD_FLOOR = 0.01
"""added to the range of scores, so that equal scores are no division by zero"""


def similarity(gradients: Tensor, others: Tensor) -> Tensor:
    """Return `[B]`: for each gradient `[B, P]`, its largest cosine with the others `[n, P]`."""
    norms = torch.outer(torch.linalg.vector_norm(gradients, dim=1), torch.linalg.vector_norm(others, dim=1))
    return (gradients @ others.T / norms.clamp(min=SMALLEST_NORMS)).amax(dim=1).clamp(-1, 1)  # rounding may go beyond


def draw_groups(filled: int, at_most: int, size: int, rng: np.random.Generator) -> Ints:
    """Draw `[n, b]` slots of disjoint random groups; fewer or smaller ones if memory has not enough images."""
    size = min(size, filled)
    count = min(at_most, filled // size)
    return rng.permutation(filled)[: count * size].reshape(count, size)


def victim_weights(scores: Floats) -> Floats:
    """Return unnormalised weights with which slots are offered for replacement: the score scaled to [0, 1]."""
    weights: Floats = (scores - scores.min()) / (scores.max() - scores.min() + SPREAD_FLOOR)
    return weights


def draw_victims(weights: Floats, n: int, rng: np.random.Generator) -> Ints:
    """Draw n different slots by weight; uniformly where fewer than n have any weight."""
    n = min(n, len(weights))
    chances = weights / weights.sum() if np.count_nonzero(weights) >= n else None
    return rng.choice(len(weights), n, replace=False, p=chances)


def replacement_chance(item: Floats, slot: Floats) -> Floats:
    """Return the probability that a new image with score `item` replaces a stored one with score `slot`."""
    total = (item + 1) + (slot + 1)
    chance: Floats = np.where(total > 0, (slot + 1) / np.where(total > 0, total, 1), 0.0)
    return chance
