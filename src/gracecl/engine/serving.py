"""Predictions while another thread learns: from a snapshot of what predicts, made at the end of each step.

Nothing is copied before a prediction had to wait for another thread. From then on the thread that learns publishes a snapshot
whenever it has finished a step; whoever predicts takes the latest, without waiting for the step in progress. A snapshot in use is
never written to: the next goes to another one, as in double buffering. After `LULL` steps without a prediction there are none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gracecl.core import Progress
from gracecl.data.labels import ClassLabels
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import seen_scores
from gracecl.errors import UserError
from gracecl.forking import Turns
from gracecl.inputs import Batched
from gracecl.methods.base import Method
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import entries

LULL = 100
"""steps without a prediction after which snapshots are no longer made"""


@dataclass(eq=False)
class Snapshot:
    """What predicts at some step: a net, the learner whose rules score its features, and the classes met."""

    net: TappedNet
    learner: Method
    progress: Progress
    labels: ClassLabels
    readers: int = 0
    """predictions in progress"""

    @classmethod
    def of(cls, engine: Engine, labels: ClassLabels, exact: bool = False) -> Snapshot:
        """The engine as it is, without a copy."""
        return cls(engine.ready_to_predict(exact), engine.chain.learner, engine.progress, labels)

    def scores(self, images: Batched, rule: str | None) -> list[tuple[Tensor, Tensor]]:
        """The scores of the classes met, and the number of each column's class, for each part of the images."""
        rule = rule or self.learner.rule
        return [seen_scores(self.learner, out, self.progress, rule) for _, out in self.net.sweep(images)]


class Serving:
    """The snapshots of a learner: the latest, and earlier ones that predictions still use or that may be used again."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.latest: Snapshot | None = None
        self._made: list[Snapshot] = []
        self._wanted = False
        self._unused = 0
        """steps since the last prediction"""

    def wanted(self) -> bool:
        """Ask for snapshots; return whether there is one already."""
        self._wanted = True
        return self.latest is not None

    @contextmanager
    def reading(self) -> Iterator[Snapshot | None]:
        """The latest snapshot, which stays as it is within the block; None if there is none."""
        with self._turns.changed:
            snapshot = self.latest
            if snapshot is not None:
                snapshot.readers += 1
                self._unused = 0
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                with self._turns.changed:
                    snapshot.readers -= 1

    def publish(self, engine: Engine, labels: ClassLabels) -> None:
        """Make the snapshot of a step that is finished, if any are wanted. Fits are not made for it: predictions wait for them."""
        if not self._wanted:
            return
        self._unused += 1
        latest: Snapshot | None = None
        if self._unused > LULL or engine.chain.traits.trains == "evaluation" or not engine.progress.seen:
            self._wanted, self._made = False, []
        else:
            try:
                latest = self._copied(engine, labels)
            except UserError:  # weights that are not finite: whoever predicts is told
                self._made = []
        with self._turns.changed:
            self.latest = latest
            self._turns.changed.notify_all()

    def _copied(self, engine: Engine, labels: ClassLabels) -> Snapshot:
        """A snapshot that no later step changes: rules assign what they are made of anew, so that only the net is copied."""
        now = Snapshot.of(engine, labels)
        with self._turns.changed:
            idle = next((one for one in self._made if one is not self.latest and not one.readers), None)
        net = copied(now.net, None if idle is None else idle.net, frozen=engine.chain.traits.trains == "never")
        learner = copy.copy(now.learner)
        learner.net = net
        known = self.latest.labels if self.latest is not None and len(self.latest.labels) == len(labels) else copy.deepcopy(labels)
        made = Snapshot(net, learner, now.progress, known)
        self._made = [one for one in self._made if one is not idle] + [made]
        return made


@torch.no_grad()
def copied(net: TappedNet, into: TappedNet | None, frozen: bool) -> TappedNet:
    """A copy of a net in evaluation mode: `into` with its values, if that has room for them, else another.

    The tensors of a backbone that is never trained (`frozen`) are shared, as only its mode may change.
    """
    shared = [*net.backbone.parameters(), *net.backbone.buffers()] if frozen else []

    def changing(of: TappedNet) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in entries(of).items() if not (frozen and name.startswith("backbone."))}

    latest, own = changing(net), {} if into is None else changing(into)
    if into is None or {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in latest.items()}:
        return copy.deepcopy(net, {id(value): value for value in shared}).eval()
    torch._foreach_copy_(list(own.values()), list(latest.values()))
    into.mirrored = net.mirrored
    return into
