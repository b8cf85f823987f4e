"""EMA. Soutif-Cormerais et al., Improving Online Continual Learning Performance and Stability with Temporal Ensembles, CoLLAs 2023.

    shadow <- copy of the net
    after optimizer step number k = 0, 1, …:
        μ <- 0.9 if k <= S else 0.99, with S the number of optimizer steps in the first task
        shadow <- μ · shadow + (1 - μ) · net, weights and BatchNorm statistics alike; counters are copied
    predict with the shadow

The shadow has no part in training, so `m` and `ema(m)` make the same steps to the bit at one seed, and the figures of the trained
net itself are those of a run of `m`. The paper's are `ema(derpp())` and `ema(rar())`, the latter there with three repeats and the
run's own augmentation: `ema(rar(er(), iterations=3, augmentation='run'))`. Inside GRACE, as in `grace(ema(m))`, the net that
predicts also gives the past accuracies, hence α; in `ema(grace(m))` the trained net does.

Differences from the paper: none known in the average. The authors' DER++ differs from ours (its memory looks ahead in the stream).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.core import NO_TASK, Batch, Progress, Taps
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Average
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast, Within

UNMARKED_WARM_UP = 500
"""S where no mark ends a first task: the batches of ten in one of ten tasks of CIFAR-100"""


@methods.register("ema")
@dataclass(eq=False, repr=False)
class EMA(Wrapper):
    """Predictions by an exponential moving average of the weights that any method trains."""

    inner: Method = "derpp()"  # type: ignore[assignment]
    """the method that trains; the paper's are derpp() and rar()"""
    momentum: Annotated[float, Within(0, 1)] = 0.99
    """μ, the share of the shadow that each step keeps"""
    early_momentum: Annotated[float, Within(0, 1)] = 0.9
    """μ of the first steps"""
    warm_up: Annotated[int, AtLeast(0)] | None = None
    """S, after how many optimizer steps μ changes; None is the length of the first task, or 500 on a stream without task marks"""
    within_task: Annotated[float, Above(0)] | None = None
    """the largest part of S that the shadow then goes back, so that it follows short tasks: μ is at most 1 - 1/(part · S). Our own;
    None is no limit"""

    traits = Traits(boundaries="used", instead=f"slows its average after {UNMARKED_WARM_UP} updates")
    state = ("average", "steps", "first_task")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.average = Average(net)
        self.steps = 0
        self.first_task: int | None = None
        """optimizer steps of the first task, once it is over"""

    @property
    def shadow(self) -> TappedNet:
        return self.average.copy

    def prepare(self, batch: Batch) -> None:
        if self.steps == 0:  # whatever weights the first step starts from, the shadow starts from too
            self.average.start_over()

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.average.update(self.momentum_now(batch.progress))
        self.steps += 1

    def momentum_now(self, progress: Progress) -> float:
        """Return μ of the next average."""
        warm_up = self.warm_up
        if warm_up is None:
            warm_up = UNMARKED_WARM_UP if progress.task == NO_TASK else self.first_task
        if warm_up is None or self.steps <= warm_up:
            return self.early_momentum
        if self.within_task is None:
            return self.momentum
        return min(self.momentum, 1 - 1 / max(1.0, self.within_task * warm_up))

    def end_task(self, memories: Memories, progress: Progress) -> None:
        if self.first_task is None:
            self.first_task = self.steps

    def eval_net(self, net: TappedNet) -> TappedNet:
        return self.shadow
