"""No boundaries: each class comes and goes along a bell curve.

Arrival times, after Koh et al., Online Boundary-Free Continual Learning by Scheduled Data Prior, ICLR 2023::

    class c, the rank(c)-th of C, has its peak at mu_c = (rank(c) + 1/2) / C of the stream
    image i of class c arrives at tau_i = mu_c + sigma z_i, z_i standard normal; the order is that of arrival
    with R periods, an image also draws its period r from 0 … R - 1 and arrives at r + mu_c + sigma z_i

Differences from the paper: none in the order. Its program puts the peak at rank(c) / C, which moves all arrivals alike.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from gracecl import rng
from gracecl.core import Ints
from gracecl.data import Data
from gracecl.registry import spec, streams
from gracecl.registry.spec import AtLeast
from gracecl.streams import Stream
from gracecl.streams.parts import group_of_class, in_one_order, number_of_tasks
from gracecl.streams.split import class_order


@streams.register("gaussian")
def gaussian(
    data: Data,
    seed: int,
    sigma: Annotated[float, AtLeast(0)] = 0.1,
    periods: Annotated[int, AtLeast(1)] = 1,
    tasks: int | None = None,
    order: str | int = "natural",
    batch: Annotated[int, AtLeast(1)] = 10,
) -> Stream:
    """No task boundaries: every class comes and goes along a bell curve of width `sigma` of the stream, every image once.

    `periods` repeats the round of classes, each time with other images. Evaluated `tasks` times at equal distances on the classes
    met; the tables show groups of classes in the order of their peaks.
    """
    given = {"sigma": sigma, "periods": periods, "tasks": tasks, "batch": batch}
    spec.check_options(gaussian, "gaussian", given)
    tasks = number_of_tasks("gaussian", data, tasks)
    ordered = class_order(data.classes, order)
    peaks = np.empty(data.classes)
    peaks[ordered] = (np.arange(data.classes) + 0.5) / data.classes
    arrivals = arrival_times(peaks[data.train_y], sigma, periods, seed)
    test_task = group_of_class(np.array_split(ordered, tasks), data.classes)[data.test_y]
    by_arrival: Ints = np.argsort(arrivals, kind="stable")
    return in_one_order(data, seed, by_arrival, batch, tasks=tasks, test_task=test_task, rule="classes met")


def arrival_times(peaks: npt.NDArray[np.float64], sigma: float, periods: int, seed: int) -> npt.NDArray[np.float64]:
    """When each image comes, from the peak of its class and two draws of its own."""
    chance = rng.uniform(rng.key(seed, "arrival"), np.arange(len(peaks)), 2)
    bell = ndtri(chance[:, 0] + 2.0**-54)  # zero would be infinitely early
    times: npt.NDArray[np.float64] = np.floor(periods * chance[:, 1]) + peaks + sigma * bell
    return times
