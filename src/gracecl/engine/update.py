"""From a batch to moved weights: forward, losses, backward, one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Taps, is_loss, is_penalty, total
from gracecl.engine.finite import REMEDY, Norms, check_losses, check_scale
from gracecl.errors import UserError
from gracecl.functional.losses import entropy
from gracecl.methods.base import Chain
from gracecl.nets.tapped import TappedNet
from gracecl.registry.options import Precision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OBSERVE_EVERY = 10
"""steps between two that record each layer's entropy and accuracy"""


class Update:
    """One optimizer step on a batch: forward, losses, backward, step."""

    def __init__(
        self,
        chain: Chain,
        net: TappedNet,
        params: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        precision: Precision,
    ) -> None:
        self.chain, self.net, self.params = chain, net, params
        self.optimizer, self.scaler, self.precision = optimizer, scaler, precision
        self.device = net.classifier.weight.device
        self.may_autocast = torch.amp.is_autocast_available(self.device.type)
        """whether the program around the learner may have set a precision for the device"""
        self.norms = Norms(self.device, self._not_finite)
        self.order = 2.0 if self.device.type == "cpu" else math.inf
        """of the norm: the second is fastest on a CPU, where one that overflows can be looked into at once"""
        self.in_hand: Batch | None = None

    def __call__(self, batch: Batch) -> LossTable:
        """Return the table without gradients."""
        self.prepare(batch)
        out, table = self.losses(batch, self.forward)
        data, penalties = split(table)

        def after_backward() -> None:
            self.net.meter.count(backward=len(batch))
            self.chain.after_backward(batch)
            if penalties:
                total(penalties).backward()  # type: ignore[no-untyped-call]
            if not self.scaler.is_enabled():  # GradScaler skips a step whose gradients are not finite
                self.norms.note(batch.progress.step, torch.stack(torch._foreach_norm(gradients(self.params), self.order)))

        self.in_hand = batch
        descend(self.params, self.optimizer, self.scaler, total(data), after_backward)
        self.in_hand = None
        if batch.progress.step % self.norms.every == 0:
            check_scale(self.scaler, batch.progress.step)
        with torch.no_grad():
            self.chain.after_step(out, batch)
            if batch.progress.step % OBSERVE_EVERY == 0:
                table = observations(out, batch) | table
        return {term: value.detach() for term, value in table.items()}

    def _not_finite(self, step: int, position: int, norm: float) -> UserError | None:
        """Which weight, and while its batch is in hand, which term of which layer."""
        batch = self.in_hand
        if batch is not None and batch.progress.step == step and bool(gradients(self.params)[position].isfinite().all()):
            return None
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        weight = names[id([parameter for parameter in self.params if parameter.grad is not None][position])]
        term = self._first_not_finite(batch) if batch is not None and batch.progress.step == step else ""
        return UserError(f"the gradient of '{weight}' became {norm} at step {step}{term}; {REMEDY}")

    def _first_not_finite(self, batch: Batch) -> str:
        """Find the term and layer in another pass, by taking the gradient of each separately."""
        with torch.enable_grad():
            table = {term: values for term, values in self.losses(batch, self.forward)[1].items() if is_loss(term)}
        check_losses({term: values.tolist() for term, values in table.items()}, batch.progress.step)
        for term, values in table.items():
            for layer, value in enumerate(values if values.requires_grad else (), start=1):
                found = torch.autograd.grad(value, self.params, retain_graph=True, allow_unused=True)
                if not all(bool(gradient.isfinite().all()) for gradient in found if gradient is not None):
                    return f", from the term '{term}' of layer {layer}"
        return ""

    def prepare(self, batch: Batch) -> None:
        """Let the method change the images and ask its teachers."""
        with torch.no_grad():
            self.chain.prepare(batch)

    def forward(self, batch: Batch) -> Taps:
        """Run the net once for each group of blocks in the plan."""
        self.net.meter.count(forward=len(batch))
        groups = [group for group in batch.plan.forwards or () if group[0] in batch.blocks]
        if len(groups) <= 1:
            return self.net(batch.x)  # type: ignore[no-any-return]
        if [block for group in groups for block in group] != list(batch.blocks):
            raise UserError(f"{self.chain!r}: the forwards of a plan must name every block once and in order, not {groups}")
        spans = [slice(batch.blocks[group[0]].rows.start, batch.blocks[group[-1]].rows.stop) for group in groups]
        return Taps.join([self.net(batch.x[span]) for span in spans])

    def losses(self, batch: Batch, forward: Callable[[Batch], Taps]) -> tuple[Taps, LossTable]:
        """Return the net's output for the batch and the method's losses, in the run's precision."""
        with self.autocast():
            out = forward(batch)
            if batch.plan.shared_out is None:
                return out, self.chain.losses(out, batch)
            try:
                table = self.chain.losses(out, batch)
            except (RuntimeError, IndexError, KeyError) as error:
                raise UserError(f"{batch.plan.shared_out} ({error})") from error
            if not any(map(is_loss, table)):
                raise UserError(f"{batch.plan.shared_out} (a part of the images has no loss)")
            return out, table

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32" and not (self.may_autocast and torch.is_autocast_enabled(self.device.type)):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES.get(self.precision), enabled=self.precision != "fp32")


def descend(
    params: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    objective: Tensor,
    after_backward: Callable[[], None],
) -> None:
    """Make one optimizer step on an objective, scaled for half precision; `after_backward` may change the gradients."""
    for parameter in params:  # as zero_grad() does, without its bookkeeping, which a small step notices
        parameter.grad = None
    scale = scaler.scale(torch.ones((), device=params[0].device)) if scaler.is_enabled() else None
    objective.backward(scale)  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    after_backward()
    scaler.step(optimizer)
    scaler.update()


def gradients(params: list[torch.nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in params if parameter.grad is not None]


def split(table: LossTable) -> tuple[LossTable, LossTable]:
    """Split the table into terms that depend on the step's images and penalties on the weights."""
    data: LossTable = {}
    penalties: LossTable = {}
    for term, value in table.items():
        (penalties if is_penalty(term) else data)[term] = value
    return data, penalties


def observations(out: Taps, batch: Batch) -> LossTable:
    """Return what progress lines and curves show of any method: each layer's entropy and training accuracy."""
    logits = out.logits[:, batch.supervised]
    right = (logits.argmax(dim=-1) == batch.y[batch.supervised]).float().mean(dim=1)
    return {"log/H": entropy(logits), "log/accuracy": right}
