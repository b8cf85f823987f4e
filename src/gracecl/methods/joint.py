"""Joint training, the upper bounds: the same network and step, but the data come in random order instead of task after task.

    iid++ (the default):  for each step: B_n <- next images of one shuffled pass over everything
                                         B_2 <- n_recall images of an independent endless pass over everything
                                         step on CE(B_n ∪ B_2)
    offline:              many shuffled passes over everything, in batches of offline_batch

iid++ spends exactly what ER spends per step, so it is the fair ceiling for replay; with n_recall = 0 it is iid-online.

Differences from the source (iid++ as in the AML code, offline as in the online-continual-learning code): the second batch has 64
images, as ER's has, and one mean runs over both batches; offline training uses the run's optimizer, not SGD at 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gracecl.core import Batch, LossTable, StreamBatch, Taps
from gracecl.functional.losses import cross_entropy
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast
from gracecl.streams import Stream
from gracecl.streams.iid import offline, shuffled


@methods.register("joint")
@dataclass(eq=False, repr=False)
class Joint(Method):
    """Training on all classes in random order, the upper bound at equal images per step; or offline for many epochs."""

    n_recall: Annotated[int, AtLeast(0)] = 64
    """images of the second, independent pass in each step"""
    offline_epochs: Annotated[int, AtLeast(0)] = 0
    """if above 0: that many epochs over everything instead of one pass with a second batch"""
    offline_batch: Annotated[int, AtLeast(1)] = 128
    """images per step of offline training"""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(order=self.reordered)

    def reordered(self, stream: Stream) -> Stream:
        """Return the images of a stream in random order."""
        if self.offline_epochs > 0:
            return offline(stream, self.offline_epochs, self.offline_batch)
        return shuffled(stream, self.n_recall)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {"ce/all": cross_entropy(out.logits, batch.y)}

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        """Keep nothing: it sees everything anyway."""
