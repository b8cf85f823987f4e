"""A stream with a speed, for a learner that is too slow for it: some batches are learned, all are predicted.

Ghunaim et al., Real-Time Evaluation in Online Continual Learning: A New Hope, CVPR 2023. While a learner of complexity C learns
one batch, C batches arrive. It learns from the batches ⌊j C⌋, j = 0, 1, …; the others are neither learned nor stored. Batch i is
predicted by the model that has learned max {j : ⌊j C⌋ ≤ i} batches. All batches that one model predicts arrive before it learns
the next one, so that no copy of it is needed.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from gracecl.errors import UserError
from gracecl.functional.budgets import learned_batches, model_version
from gracecl.streams import Stream


def paced(stream: Stream, complexity: Fraction) -> Stream:
    """Return what a learner of this complexity learns of a stream; the stream itself up to 1.

    An evaluation after a batch sees the model that would predict the next one; what is being learned by then is not in it.
    """
    if complexity <= 1:
        return stream
    marks = np.array([model_version(int(mark) + 1, complexity) for mark in stream.marks]) - 1
    learned = learned_batches(len(stream), complexity)[: marks[-1] + 1]
    if marks[0] < 0 or len(np.unique(marks)) < len(marks):
        raise UserError(
            f"at this --pace {float(complexity):.3g} batches arrive while the method learns one, and tasks of "
            f"{int(np.diff(stream.marks, prepend=-1).min())} batches are too short for that; give the stream more FLOPs per batch"
        )
    starts, ends = np.append(0, stream.ends[:-1])[learned], stream.ends[learned]
    positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    # All batches before the next one that is learned are predicted by this model; after the last one, to the end of the stream.
    last_asked = np.append(learned[1:] - 1, len(stream) - 1)
    arrived = stream.ends if stream.arrived is None else stream.arrived
    return replace(
        stream,
        order=stream.order[np.concatenate(positions)],
        ends=np.cumsum(ends - starts),
        task_of_step=stream.task_of_step[learned],
        marks=marks,
        fresh=stream.fresh[learned],
        arriving=stream.order if stream.arriving is None else stream.arriving,
        arrived=arrived[last_asked],
        made_of=stream.hash,
    )
