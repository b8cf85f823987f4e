"""The best learner of the library's own so far. A method of our own, made of MOSE, small updates and a momentum teacher.

    best() = mirrored(mkd(multi_update(mose(inference='linear_votes'), updates=4, lr_factor=4), strength=2, layers='all'))

    for each batch of the stream, four times, each time with images drawn anew and one of MOSE's four views:
        step on MOSE's losses + λ/L Σ_l T² mean KL( teacher's head l ‖ the net's head l ), at four times the run's learning rate
        teacher <- 0.99 teacher + 0.01 net
    predict with the mean of the net's and the teacher's weights:
        z_l <- mean output of head l for the image and its mirror image;  class <- argmax Σ_l softmax(z_l)

MOSE spends 384 images on one step; here they buy four. The teacher costs a forward pass on top, a third of what MOSE costs in
arithmetic. The learning rate is one at which MOSE is past its best. Task marks are used where there are any and not needed (see
mose.py). Measured in docs/best.md.

Differences from a paper: there is none. From MOSE: several updates per batch, their learning rate, a teacher, linear heads in place
of class means at inference, mirror images there. From MKD: see mkd.py; λ is smaller, and every tapped layer has its share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gracecl.methods.base import Method
from gracecl.methods.mirrored import Mirrored
from gracecl.registry import methods


@methods.register("best")
@dataclass(eq=False, repr=False)
class Best(Mirrored):
    """Our best learner so far: MOSE in four small updates per batch beside a momentum teacher, predictions from mirrored images."""

    inner: Method = "mkd(multi_update(mose(inference='linear_votes'), lr_factor=4.0), strength=2.0, layers='all')"  # type: ignore[assignment]
    """the learner that is taught"""
