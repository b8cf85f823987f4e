"""Training that predictions wait for: epochs over the images of a memory, on a net of its own.

A method that trains only before evaluation returns a `Fit` from `before_eval`. The engine assembles each batch and takes the losses
of the whole method, wrappers included, so that what acts on a table of losses acts here too. The learner's own net stays as it is,
and whatever is random is a function of the fit's seed and step, so that a fit can stop anywhere and go on to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracecl import rng
from gracecl.core import LossTable, Plan, Selection, total
from gracecl.engine.finite import REMEDY, Norms, check_scale
from gracecl.engine.update import descend
from gracecl.errors import UserError
from gracecl.functional import optim

if TYPE_CHECKING:
    from gracecl.nets.tapped import TappedNet


class Fit:
    """Train on shuffled epochs over a memory's images: `step` until `done`; then `net` predicts."""

    def __init__(
        self,
        net: TappedNet,
        optimizer: torch.optim.Optimizer,
        *,
        images: int,
        epochs: int,
        batch: int,
        rate: Callable[[int], float] = lambda epoch: 1.0,
        max_norm: float = float("inf"),
    ) -> None:
        """`rate` gives the part of the optimizer's learning rate that an epoch uses; gradients are cut to the norm `max_norm`."""
        self.net, self.optimizer, self.images, self.batch = net, optimizer, images, batch
        self.per_epoch = -(-images // batch)
        self.at, self.of = 0, epochs * self.per_epoch
        self.rate, self.max_norm = rate, max_norm
        self.norms = Norms(next(net.parameters()).device, self._not_finite)
        self._full_rates = [group["lr"] for group in optimizer.param_groups]
        net.train()

    def begin(self, seed: int, scaler: torch.amp.GradScaler) -> None:
        """What the learner gives it: the root of its randomness, and the loss scaling of half precision."""
        self.seed, self.scaler = seed, scaler

    def shorten(self, images: int) -> None:
        """End after at most so many images, and after one batch at the earliest."""
        epochs, rest = divmod(images, self.images)
        self.of = min(self.of, max(1, epochs * self.per_epoch + rest // self.batch))

    def __str__(self) -> str:
        return f"step {self.at} of {self.of} of the fit before its evaluation"

    @property
    def done(self) -> bool:
        return self.at >= self.of

    @property
    def trained_on(self) -> int:
        """Images that went through the net so far, each forward and backward once."""
        epochs, batches = divmod(self.at, self.per_epoch)
        return epochs * self.images + batches * self.batch

    def plan(self) -> Plan:
        """Return the memory slots of the next batch; the last batch of an epoch may be smaller."""
        epoch, batch = divmod(self.at, self.per_epoch)
        order = rng.generator(self.seed, "shuffle", epoch).permutation(self.images)
        return Plan({"all": Selection(slots=order[batch * self.batch : (batch + 1) * self.batch])})

    def step(self, table: LossTable) -> None:
        """Make one optimizer step on the losses of a batch, at the epoch's learning rate."""
        part = self.rate(self.at // self.per_epoch)
        for group, full in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = part * full
        params = list(self.net.parameters())
        descend(params, self.optimizer, self.scaler, total(table), lambda: self._clip(params))
        if self.at % self.norms.every == 0:
            check_scale(self.scaler, self.at)
        self.at += 1

    def _clip(self, params: list[torch.nn.Parameter]) -> None:
        norm = clip(params, self.max_norm)
        if not self.scaler.is_enabled():  # GradScaler skips a step whose gradients are not finite
            self.norms.note(self.at, norm[None])

    def _not_finite(self, step: int, position: int, norm: float) -> UserError:
        return UserError(f"the gradient of the fit before an evaluation became {norm} at its step {step}; {REMEDY}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.net.load_state_dict(state["net"])
        optim.restore(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def clip(params: list[torch.nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients to a norm; return their norm before."""
    return torch.nn.utils.clip_grad_norm_(params, max_norm)
