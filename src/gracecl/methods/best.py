"""The best learner of the library's own so far. A method of our own, made of MOSE, small updates and an average of the weights.

    best(cost=c): B = 128 c, U = 8 c and at least 4, r = 10 c and at most 5
    for each batch of the stream, U times, each time with memory images drawn anew and a share of two views of each image:
        step on MOSE's losses without its contrast, in blocks made up to B images, at r times the run's learning rate
        average <- μ average + (1 - μ) net,  μ = 1 - 1/(25 U), 0.9 in the first task; less if that was short (ema.py)
    predict with the average:
        z_l <- mean output of head l for the image and its mirror image;  class <- argmax Σ_l softmax(z_l)

MOSE spends 384 images on one step: four views in blocks made up to 64. What lifts it is more and smaller steps, from fewer images,
at a rate that it could not take without the average, which costs no pass and forgets less than the net. `cost` is the arithmetic to
spend, with MOSE's as 1. The rule was found on classes 0-19 of CIFAR-100; docs/best.md has what it reaches on others, and where it
fails. Task marks are used where there are any and not needed (see mose.py).

Differences from a paper: there is none. From MOSE: several updates per batch, their learning rate, no contrast, two views of four,
linear heads in place of class means at inference, mirror images there, the average (ema.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.errors import UserError
from gracecl.methods.base import Method
from gracecl.methods.mirrored import Mirrored
from gracecl.registry import methods, spec
from gracecl.registry.spec import Within

VIEWS = 2
BLOCK = 128
"""B / c: MOSE shows four views in blocks made up to 64 images, at cost 1"""
UPDATES, FEWEST = 8, 4
"""U / c, for about 48 images in each; and the least U"""
RATE, FASTEST = 10.0, 5.0
"""r / c, and the largest r"""
HORIZON = 25
"""batches of the stream that the average goes back"""
TASK = 0.3
"""of the first task, where that is shorter"""


@methods.register("best")
@dataclass(eq=False, repr=False)
class Best(Mirrored):
    """Our best learner so far: MOSE without contrast in small fast updates, predictions by an average of the weights."""

    inner: Method | None = None  # type: ignore[assignment]
    """a learner to use in place of the one that cost stands for"""
    cost: Annotated[float, Within(0.1, 4)] = 0.5
    """arithmetic to spend on each batch, as a multiple of MOSE's"""

    def __post_init__(self) -> None:
        spec.check_fields(self, self.name)
        self.by_cost = self.inner is None
        if self.by_cost:
            self.inner = learner_at(self.cost)  # type: ignore[assignment]
        elif self.cost != Best.cost:
            raise UserError(f"{self.name} takes a cost or a learner, not both; leave one of them out")
        super().__post_init__()

    def __repr__(self) -> str:
        if not self.by_cost:
            return super().__repr__()
        return f"{self.name}({'' if self.cost == Best.cost else f'cost={self.cost!r}'})"


def learner_at(cost: float) -> str:
    """Return the expression of the learner that spends `cost` times MOSE's arithmetic."""
    inner = f"mose(views={VIEWS}, n_recall={round(BLOCK * cost)}, contrast=0.0, inference='linear_votes')"
    updates, rate = max(FEWEST, VIEWS * round(UPDATES * cost / VIEWS)), min(RATE * cost, FASTEST)
    average = f"momentum={1 - 1 / (HORIZON * updates)!r}, within_task={TASK!r}"
    return f"ema(multi_update({inner}, updates={updates}, lr_factor={rate!r}), {average})"
