"""A pass through a backbone, shared by the processes of a group: each takes a part of the images, and all get the features of all.

    x [B, …]  →  this process's images  →  backbone  →  gather: features [L, B, D], the same in every process

Heads, losses and everything after them are computed from the features of all images in every process, so contrast, class means,
entropies and sums need no code of their own. Backward, each process follows the gradient of its own images, and the gradients of
the backbone's weights are added over the processes. BatchNorm normalises by the images of all processes (`exact`), so the numbers
are those of one process but for rounding, or by each process's own (`local_norm`), which sends less.

Passes with fewer than two images per process, and those inside `alone()`, are made by every process for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gracecl import processes
from gracecl.errors import UserError
from gracecl.inputs import Batched
from gracecl.registry.options import Sharing

LEAST = 2
"""images per process that a pass is shared for: from one image, BatchNorm may tell no spread"""
_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Make the passes of the block in this process, without the others."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def features_of_all(backbone: nn.Module, x: Batched, sharing: Sharing) -> Tensor:
    """Return the backbone's features `[L, B, D]`, computed by all processes together; each of them must make the same call."""
    if sharing == "off" or len(x) < LEAST * processes.count() or processes.count() == 1 or _alone.get():
        features: Tensor = backbone(x)
        return features
    weights = {name: value for name, value in backbone.named_parameters() if value.requires_grad and torch.is_grad_enabled()}
    of_images = [x] if isinstance(x, Tensor) and x.requires_grad else []  # such as those of an attack
    given = [*weights.values(), *of_images]
    copies: tuple[Tensor, ...] = _ToShares.apply(*given) if given else ()  # type: ignore[no-untyped-call]
    images = copies[-1] if of_images else x
    bounds = [len(x) * place // processes.count() for place in range(processes.count() + 1)]
    own = slice(*bounds[processes.rank() : processes.rank() + 2])
    norms = _NormsOfAll() if sharing == "exact" and backbone.training else nullcontext()
    with norms, _nothing_random(backbone, x.device):
        part: Tensor = functional_call(backbone, dict(zip(weights, copies, strict=False)), (images[own],))
    if sharing == "local_norm" and backbone.training:
        _average([buffer for buffer in backbone.buffers() if buffer.is_floating_point()])
    gathered: Tensor = _Gather.apply(part, own, len(x))  # type: ignore[no-untyped-call]
    return gathered


@contextmanager
def _nothing_random(backbone: nn.Module, device: torch.device) -> Iterator[None]:
    """Refuse a net that draws random numbers in training: each process would draw others than one process alone."""
    if not backbone.training:
        yield
        return
    before = _random_state(device)
    yield
    if not torch.equal(before, _random_state(device)):
        raise UserError(
            "the net draws random numbers in training, such as dropout, which several processes cannot share; "
            "set its rates to 0, or learn in one process"
        )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class _ToShares(Function):
    """Pass weights on to the shares of all processes; backward, add the gradients of all shares."""

    @staticmethod
    def forward(ctx: FunctionCtx, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [gradient for gradient in gradients if gradient is not None]
        added = iter(_added(there))
        return tuple(None if gradient is None else next(added) for gradient in gradients)


class _Gather(Function):
    """Gather the features of all processes; backward, follow those of this one: every process has the whole loss."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: slice, total: int) -> Tensor:
        ctx.own = own
        whole = part.new_zeros(len(part), total, *part.shape[2:])
        whole[:, own] = part
        distributed.all_reduce(whole)  # with zeros, which change nothing
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[:, ctx.own], None, None


class _NormsOfAll(TorchFunctionMode):
    """Let batch norms in training mode take the statistics of the images of all processes, in whatever module they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return _norm_of_all(*args, **named) if func is F.batch_norm else func(*args, **named)


def _norm_of_all(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` with the statistics of all processes."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    y, mean, var, total = _BatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean), momentum)
        running_var.lerp_((var * (total / (total - 1))).to(running_var), momentum)
    normalised: Tensor = y
    return normalised


class _BatchNorm(Function):
    """BatchNorm over the images of all processes; returns the mean, the biased variance and the count beside the values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own_var, own_mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, dim=_others(x), correction=0)
        var, mean = own_var.double(), own_mean.double()
        count = x.numel() // x.shape[1]
        sums = torch.stack([count * mean, count * (var + mean.square()), torch.full_like(mean, count)])
        distributed.all_reduce(sums)
        total = sums[2, 0]
        mean = sums[0] / total
        var = (sums[1] / total - mean.square()).clamp(min=0)
        ctx.mean, ctx.var, ctx.total, ctx.eps = mean.to(own_mean), var.to(own_mean), total, eps
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(mean, var, total)
        return F.batch_norm(x, ctx.mean, ctx.var, weight, bias, False, 0.0, eps), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # As if the statistics were constants; what they depend on follows below.
        dx, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, ctx.mean, ctx.var, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([of_weight, of_bias]).double()
        distributed.all_reduce(sums)
        scale = (ctx.var.double() + ctx.eps).rsqrt()
        slope = scale.square() * sums[0] / ctx.total
        shift = scale * sums[1] / ctx.total - slope * ctx.mean.double()
        if weight is not None:
            slope, shift = slope * weight.double(), shift * weight.double()
        shape = [1, -1, *(1 for _ in x.shape[2:])]
        dx -= torch.addcmul(shift.to(ctx.mean).view(shape), x, slope.to(ctx.mean).view(shape))
        return dx, None if weight is None else of_weight, None if weight is None else of_bias, None


def _others(x: Tensor) -> list[int]:
    """Return the axes that a batch norm sums over: all but the channels'."""
    return [axis for axis in range(x.ndim) if axis != 1]


def _added(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums over the processes, sent at once."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def _average(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their means over the processes; `.data`, as BatchNorm holds its statistics for a backward pass that does
    not use them.
    """
    for tensor, added in zip(tensors, _added(tensors), strict=True):
        tensor.data.copy_(added / processes.count())
