"""What an image is worth to the images around it: exact Shapley values of a nearest-neighbour classifier. Jia et al., 2019.

The game: candidates are the players, and a set of them is worth the share of an evaluation point's label among its K nearest in
the set (counted over K, also where the set is smaller). Sorting the candidates by distance gives every player's value at once.

On a GPU it waits for the device, as the host keeps the list of slots.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Ints
from gracecl.memory.class_balanced import place_in_class


def shapley_values(features: Tensor, labels: Tensor, candidates: Tensor, candidate_labels: Tensor, k: int) -> Tensor:
    """Return `[E, N]`: what each of N candidates is worth to each of E evaluation points.

    With candidates from the nearest to the farthest, a_i = 1 where the i-th has the point's label: s_N = a_N min(K, N) / (K N) and
    s_i = s_{i+1} + (a_i - a_{i+1}) min(K, i) / (K i), here as one sum from the far end.
    """
    n = len(candidates)
    if n == 0 or len(features) == 0:
        return features.new_zeros(len(features), n)
    distance = torch.cdist(features, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    order = distance.argsort(dim=1, stable=True)
    match = (candidate_labels[order] == labels[:, None]).to(features.dtype)
    rank = torch.arange(1, n + 1, device=features.device, dtype=features.dtype)
    steps = (match - torch.nn.functional.pad(match[:, 1:], (0, 1))) * rank.clamp(max=k) / (k * rank)
    values = steps.flip(1).cumsum(dim=1).flip(1)
    return torch.empty_like(values).scatter_(1, order, values)


def adversarial_values(cooperative: Tensor, adversarial: Tensor, variant: str) -> Tensor:
    """Return `[N]`: how much each candidate helps the memory (`[E, N]`) and hurts the new images (`[B, N]`).

    `asvm` takes means over the evaluation points, `asv` the largest help and the smallest (most negative) value to the new ones,
    `neg_sv` only the latter's sum.
    """
    if variant == "neg_sv":
        return -adversarial.sum(dim=0)
    nothing = adversarial.new_zeros(adversarial.shape[1])
    if variant == "asv":
        return (cooperative.amax(dim=0) if len(cooperative) else nothing) - adversarial.amin(dim=0)
    return (cooperative.mean(dim=0) if len(cooperative) else nothing) - adversarial.mean(dim=0)


def balanced_draws(labels: Ints, per_class: int, rng: np.random.Generator, times: int = 1) -> list[Ints]:
    """So many draws of at most `per_class` positions of each class, uniform within the class; no position is in two of them."""
    shuffled = rng.permutation(len(labels))
    place = place_in_class(labels[shuffled])
    return [shuffled[place // per_class == draw] for draw in range(times)]


def exchanges(values: Tensor, stored: int) -> tuple[Ints, Ints]:
    """Which new images replace which stored ones, in pairs, when the first `stored` of the values are memory's and the rest new.

    The most valuable entries stay, as many as there are stored ones; both answers count from the first of their own kind.
    """
    order: Ints = values.argsort(descending=True, stable=True).cpu().numpy()
    kept, dropped = order[:stored], order[stored:]
    return kept[kept >= stored] - stored, dropped[dropped < stored]
