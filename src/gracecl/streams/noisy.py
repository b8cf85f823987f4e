"""Wrong labels: some training images carry another class, around any other family.

`kind='symmetric'`: of each class, round(rate n) images get another class, each of the others equally likely.
`kind='pairs'`: they get the next class of their group.

An image stays in the task of its true class, so noise does not move it, and its label is another class of
that task; `across=True` takes any class. Which images are wrong is nested: a higher rate adds to those of a
lower one. Test images keep their labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from gracecl.core import Ints
from gracecl.data import Data
from gracecl.registry import spec, streams
from gracecl.registry.spec import Within
from gracecl.streams import Family, Stream
from gracecl.streams.parts import draws, smallest


@streams.register("noisy")
def noisy(
    inner: Family,
    data: Data,
    seed: int,
    rate: Annotated[float, Within(0, 1)] = 0.2,
    kind: Literal["symmetric", "pairs"] = "symmetric",
    across: bool = False,
) -> Stream:
    """Around a stream: wrong labels on a share `rate` of each class's training images, among the classes of their task.

    `kind='pairs'` turns a class into the next one of its task. With `across=True` a wrong label may be of any task. The true ones
    are in `clean_y`, which no learner sees.
    """
    spec.check_options(noisy, "noisy", {"rate": rate, "kind": kind, "across": across})
    stream = inner(data, seed)
    clean = stream.data.train_y
    members = stream.classes_of_task
    together = np.ones((1, stream.data.classes), bool) if across else members
    labels = wrong_labels(clean, (together.T.astype(np.int64) @ together) > 0, rate, kind, seed)
    return replace(stream, data=replace(stream.data, train_y=labels), clean_y=clean)


def wrong_labels(clean: Ints, possible: npt.NDArray[np.bool_], rate: float, kind: str, seed: int) -> Ints:
    """The labels after noise; `possible[c]` says which classes a label c may turn into."""
    labels: Ints = clean.copy()
    for label in np.unique(clean).tolist():
        others = np.flatnonzero(possible[label] & (np.arange(len(possible)) != label))
        if len(others) == 0:
            continue
        images = np.flatnonzero(clean == label)
        wrong = smallest(images, round(rate * len(images)), seed, "which labels are wrong")
        if kind == "pairs":
            labels[wrong] = others[np.searchsorted(others, label) % len(others)]
        else:
            labels[wrong] = others[(draws(seed, "wrong labels", wrong) * len(others)).astype(np.int64)]
    return labels
