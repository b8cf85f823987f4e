"""A training and a test part for sets that come without: the same on every machine and under every numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gracecl.data.dataset import Labels


def held_out(keys: Sequence[str], labels: Labels, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which rows are for testing: of each class, the given fraction, chosen by the hash of (seed, key).

    The choice goes by key, not by position, so a file that is added later moves few others. A class of two or more
    images has at least one on each side.
    """
    order = np.array([hashlib.sha256(f"{seed}:{key}".encode()).hexdigest() for key in keys])
    chosen = np.zeros(len(keys), dtype=np.bool_)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = round(fraction * len(rows))
        if len(rows) > 1:
            count = min(max(count, 1), len(rows) - 1)
        chosen[rows[np.argsort(order[rows])[:count]]] = True
    return chosen
