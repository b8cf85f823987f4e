"""What a net was at some moment: frozen copies, for teachers and averaged weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gracecl.core import Taps
from gracecl.nets.growth import Growth
from gracecl.nets.tapped import TappedNet


def frozen_copy(net: TappedNet) -> TappedNet:
    """Copy the net as it is now, in evaluation mode and without gradients: using the copy moves nothing. Both have one meter."""
    twin = copy.deepcopy(net)
    twin.meter = net.meter
    return twin.requires_grad_(False).eval()


class Teacher:
    """A frozen copy of a learner's net that its method renews; there is none before the first time."""

    def __init__(self, net: TappedNet, training: bool = False) -> None:
        """With `training` the copy stays in training mode: BatchNorm uses the statistics of the images it is shown."""
        self.net, self.training = net, training
        self.copy: TappedNet | None = None
        self.classes = torch.zeros(net.classes, dtype=torch.bool, device=net.classifier.weight.device)
        """`[C]` True for those it was told that it knows"""

    def __bool__(self) -> bool:
        return self.copy is not None

    def renew(self, knows: Sequence[int] = ()) -> None:
        """Make the net as it is now the teacher, of these classes and those from before."""
        self.copy = frozen_copy(self.net).train(self.training)
        self.classes[list(knows)] = True

    def __call__(self, x: Tensor) -> Taps:
        """Return the teacher's taps for normalised images."""
        if self.copy is None:
            raise RuntimeError("the teacher was asked before renew() made one")
        with torch.no_grad():
            taps: Taps = self.copy(x)
        self.net.meter.count(forward=len(x))
        return taps

    def grown(self, growth: Growth) -> Teacher:
        """Make room for new classes, which it does not know."""
        self.classes = growth.padded(self.classes, 0)
        if self.copy is not None:
            self.copy.grown(growth)
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"copy": None if self.copy is None else self.copy.state_dict(), "classes": self.classes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copy, self.classes = None, state["classes"].to(self.classes.device)
        if state["copy"] is not None:
            self.copy = frozen_copy(self.net).train(self.training)
            self.copy.load_state_dict(state["copy"])


class Average:
    """A frozen copy of a net that follows it as a moving average: weights, and BatchNorm statistics unless told otherwise."""

    def __init__(self, net: TappedNet, statistics: bool = True) -> None:
        self.copy = frozen_copy(net)
        trained, followed = entries(net), entries(self.copy) if statistics else dict(self.copy.named_parameters())
        self._pairs = [(value, trained[name]) for name, value in followed.items()]
        averaged = [pair for pair in self._pairs if pair[0].is_floating_point()]
        self._averages, self._latest = [own for own, _ in averaged], [latest for _, latest in averaged]
        self._counters = [pair for pair in self._pairs if not pair[0].is_floating_point()]

    def start_over(self) -> None:
        """Copy the net as it is now, and forget the average."""
        for own, latest in self._pairs:
            own.copy_(latest.detach())

    def update(self, momentum: float) -> None:
        """Set average <- momentum · average + (1 - momentum) · net; counters are copied."""
        average = get_ema_multi_avg_fn(momentum)  # type: ignore[no-untyped-call]
        average(self._averages, self._latest, None)
        for own, latest in self._counters:
            own.copy_(latest)

    def grown(self, growth: Growth) -> Average:
        """Make room for new classes, whose average begins where the net's own entries begin."""
        self.copy.grown(growth)
        return self

    def state_dict(self) -> dict[str, Any]:
        return self.copy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copy.load_state_dict(state)


def entries(net: TappedNet) -> dict[str, Tensor]:
    """Return everything a net's outputs depend on, by name: weights, and buffers such as BatchNorm's statistics."""
    return dict[str, Tensor](net.named_parameters()) | dict(net.named_buffers())
