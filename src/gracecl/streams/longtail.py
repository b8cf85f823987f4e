"""A long tail: classes with exponentially fewer images, below any other family.

Liu et al., Long-Tailed Class Incremental Learning, ECCV 2022::

    n_c = floor(n_max rho^(rank(c) / (C - 1))), rho = 1 / ratio; ordered: rank(c) is the place in the class order; shuffled: drawn

`shape='step'` gives the first half of the ranks n_max images and the other half n_max rho.

Differences from the paper: n_max is the number of images of the largest class, not of class 0, and the images
that stay are drawn by the run's seed, not by one for all runs. Test images stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch

from gracecl import rng
from gracecl.core import Ints
from gracecl.data import Data
from gracecl.data.dataset import with_own_statistics
from gracecl.data.domains import domains_of
from gracecl.registry import spec, streams
from gracecl.registry.spec import AtLeast
from gracecl.streams import Family, Stream
from gracecl.streams.parts import smallest
from gracecl.streams.split import class_order


@streams.register("longtail")
def longtail(
    inner: Family,
    data: Data,
    seed: int,
    ratio: Annotated[float, AtLeast(1)] = 100,
    tail: Literal["ordered", "shuffled"] = "ordered",
    shape: Literal["exponential", "step"] = "exponential",
) -> Stream:
    """Around a stream: its largest class has `ratio` times the images of its smallest; the test images stay balanced.

    Ordered, the first classes of the stream are the large ones; shuffled, sizes are dealt at random. Which images stay depends on
    the seed alone, and pixels are normalised by them alone.
    """
    spec.check_options(longtail, "longtail", {"ratio": ratio, "tail": tail, "shape": shape})
    ordered = class_order(data.classes, inner.options.get("order", "natural"))
    if tail == "shuffled":
        ordered = ordered[rng.generator(seed, "long tail").permutation(data.classes)]
    counts = np.bincount(data.train_y, minlength=data.classes)
    wanted = np.empty(data.classes, np.int64)
    wanted[ordered] = tail_counts(int(counts.max()), data.classes, ratio, shape)
    stay = [
        smallest(np.flatnonzero(data.train_y == label), wanted[label], seed, "long tail images") for label in range(data.classes)
    ]
    kept = np.sort(np.concatenate(stay))
    if len(kept) < len(data.train_y):
        images = data.train_x[torch.from_numpy(kept)]
        inputs = with_own_statistics(data.inputs, images)
        data = replace(data, train_x=images, train_y=data.train_y[kept], inputs=inputs, **domains_of(data, kept))
    return inner(data, seed)


def tail_counts(largest: int, classes: int, ratio: float, shape: str = "exponential") -> Ints:
    """Images of each class by rank, at least one."""
    rank = np.arange(classes)
    share = rank / max(classes - 1, 1) if shape == "exponential" else (rank >= -(-classes // 2)).astype(np.float64)
    counts: Ints = np.floor(largest * (1 / ratio) ** share).astype(np.int64)
    return np.maximum(counts, 1)
