"""A training and a test part for sets that come without, and parts of a set: the same on every machine and under every numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from gracecl.data.dataset import Data, Labels, with_own_statistics
from gracecl.errors import UserError


def held_out(keys: Sequence[str], labels: Labels, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which rows are for testing: of each class the given fraction, chosen by the hash of (seed, key).

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


def part_of(data: Data, classes: Labels, validation: float | None, seed: int) -> Data:
    """The images of some classes, which keep their numbers. With `validation`, this share of their training images is in the place
    of the test images.

    No other image is looked at: mean and standard deviation are those of the training images that are left.
    """
    train = np.flatnonzero(np.isin(data.train_y, classes))
    test, from_x, from_y = np.flatnonzero(np.isin(data.test_y, classes)), data.test_x, data.test_y
    if validation is not None:
        chosen = held_out([str(row) for row in train], data.train_y[train], validation, seed)
        train, test, from_x, from_y = train[~chosen], train[chosen], data.train_x, data.train_y
    if not len(train) or not len(test):
        raise UserError(f"{data.name} has too few images of these classes to train on some and to evaluate on others; choose more")
    images = data.train_x[torch.from_numpy(train)]
    return replace(
        data,
        train_x=images,
        train_y=data.train_y[train],
        test_x=from_x[torch.from_numpy(test)],
        test_y=from_y[test],
        inputs=with_own_statistics(data.inputs, images),
    )
