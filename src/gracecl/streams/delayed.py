"""Late labels: what is learned at a step arrived some steps ago, around any other family.

Csaba et al., Label Delay in Online Continual Learning, NeurIPS 2024: at step t the labels of batch t - d
come, none before step d, and those of the last d batches never, unless `drain=True`.

The learner meets the same batches in the same order, since none here uses images without labels; what changes
is when: an evaluation after step t sees a learner that has learned the batches 0 … t - d, and predictions
before learning (`Stream.arrivals`) are of batch t by the learner that knows the batches 0 … t - d - 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np

from gracecl.data import Data
from gracecl.errors import UserError
from gracecl.registry import spec, streams
from gracecl.registry.spec import AtLeast
from gracecl.streams import Family, Stream


@streams.register("delayed")
def delayed(inner: Family, data: Data, seed: int, delay: Annotated[int, AtLeast(0)] = 50, drain: bool = False) -> Stream:
    """Around a stream: labels come `delay` steps after their images, and evaluations see a learner that is so far behind.

    The labels of the last steps never come, unless `drain=True` waits for them before the last evaluation.
    """
    spec.check_options(delayed, "delayed", {"delay": delay, "drain": drain})
    stream = inner(data, seed)
    if stream.marks[0] < delay:
        raise UserError(
            f"delayed: the first evaluation comes after {int(stream.marks[0]) + 1} steps, before any label that is {delay} steps "
            "late; use a smaller delay, fewer tasks or a smaller batch"
        )
    arrived = stream.ends if stream.arrived is None else stream.arrived
    late = replace(
        stream,
        arriving=stream.order if stream.arriving is None else stream.arriving,
        arrived=arrived[np.minimum(np.arange(len(stream)) + delay, len(stream) - 1)],
    )
    if drain:
        return replace(late, marks=np.append(stream.marks[:-1] - delay, stream.marks[-1]))
    return replace(late, marks=stream.marks - delay).cut(len(stream) - delay)
