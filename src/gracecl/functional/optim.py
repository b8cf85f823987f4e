"""Optimizers and learning-rate schedules by expression: `adam(lr=0.001, weight_decay=0.0001)`, `cosine(steps=500)`.

Without a schedule the rate is constant along the stream. Plans of a method that lowers it (ccil, ssil) scale the schedule's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch

from gracecl.errors import UserError
from gracecl.registry import nearest, normal, spec
from gracecl.registry.spec import AtLeast, Within

ParameterGroup = tuple[float, list[torch.nn.Parameter]]
"""a factor of the learning rate and the parameters it holds for"""
Parameters = list[dict[str, Any]]
"""as PyTorch's optimizers take them, in groups"""


def adam(
    params: Parameters,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> torch.optim.Optimizer:
    """Adam; weight decay is added to the gradient."""
    return torch.optim.Adam(params, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), fused=True)


def adamw(
    params: Parameters,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), fused=True)


def sgd(params: Parameters, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Stochastic gradient descent."""
    made = torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
    if momentum:
        made.register_step_pre_hook(give_momentum)
    return made


def give_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Begin with a momentum of 0 for every parameter.

    The fused step takes momentum of all parameters or of none, while a penalty reaches some of them later than others.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if "momentum_buffer" not in optimizer.state[parameter]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "adamw": adamw, "sgd": sgd}


OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def build(given: str | OptimizerFactory, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    """Build the optimizer that an expression names or a function makes; each group learns at its factor times the
    learning rate.

    A function receives the parameters, or groups of them where parts of the net learn at different rates.
    """
    listed: Parameters = [{"params": params} for _, params in groups]
    if not isinstance(given, str):
        return _made(given, listed, [factor for factor, _ in groups])
    optimizer = _named(given, listed)
    for made, (factor, _) in zip(optimizer.param_groups, groups, strict=True):
        made["lr"] *= factor
    return optimizer


def _named(expression: str, groups: Parameters) -> torch.optim.Optimizer:
    call = spec.parse_call(expression)
    name = normal(call.name)
    if name not in OPTIMISERS:
        raise UserError(f"unknown optimizer '{call.name}'{nearest(call.name, OPTIMISERS)} (known: {', '.join(OPTIMISERS)})")
    try:
        optimizer: torch.optim.Optimizer = spec.checked_call(OPTIMISERS[name], call, groups)
    except ValueError as error:
        raise UserError(f"{expression}: {error}") from None
    return optimizer


def _made(make: OptimizerFactory, groups: Parameters, factors: list[float]) -> torch.optim.Optimizer:
    """An optimizer of one's own; where the net has several rates, it keeps the groups it received."""
    optimizer: Any = make(groups[0]["params"] if factors == [1.0] else groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            "optimizer is an expression, or a function of the parameters that returns a torch.optim.Optimizer, not a "
            f"{type(optimizer).__name__}; write optimizer=lambda params: torch.optim.AdamW(params, 1e-3)"
        )
    given = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(id(parameter) in given for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("the optimizer trains none of the learner's weights; make it of the parameters that the function receives")
    if factors == [1.0]:
        return optimizer
    if len(optimizer.param_groups) != len(groups):
        raise UserError(
            f"parts of this net learn at {len(groups)} rates (trunk_lr), and the optimizer has {len(optimizer.param_groups)} "
            "groups; make it of the groups as they come"
        )
    for made, factor in zip(optimizer.param_groups, factors, strict=True):
        made["lr"] *= factor
    return optimizer


def check(expression: str) -> None:
    """Refuse an expression that names no optimizer, or options that it cannot have."""
    build(expression, [(1.0, [torch.nn.Parameter(torch.zeros(1))])])


Factor = Callable[[int], float]
"""of the learning rate, after so many steps or tasks"""
Count = Annotated[int, AtLeast(1)]
Share = Annotated[float, Within(0, 1)]


def cosine(steps: Count, lowest: Share = 0.0) -> Factor:
    """Go down half a cosine from 1 to `lowest` in so many steps, and stay there."""
    return partial(_cosine, steps, lowest)


def _cosine(steps: int, lowest: float, step: int) -> float:
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2


def linear(steps: Count, lowest: Share = 0.0) -> Factor:
    """Go down a straight line from 1 to `lowest` in so many steps, and stay there."""
    return partial(_linear, steps, lowest)


def _linear(steps: int, lowest: float, step: int) -> float:
    return 1 - (1 - lowest) * min(step / steps, 1)


def warmup(steps: Count) -> Factor:
    """Go up a straight line to 1, which step number `steps` has first."""
    return partial(_warmup, steps)


def _warmup(steps: int, step: int) -> float:
    return min((step + 1) / steps, 1)


def drop(at: list, factor: Share = 0.1) -> Factor:  # type: ignore[type-arg]
    """Multiply by `factor` at each of these steps."""
    if not at or not all(isinstance(step, int) and not isinstance(step, bool) and step >= 1 for step in at):
        raise UserError(f"drop: at is a list of steps such as [100, 200], not {at!r}")
    return partial(_drop, tuple(at), factor)


def _drop(at: tuple[int, ...], factor: float, step: int) -> float:
    return factor ** sum(step >= place for place in at)


SCHEDULES: dict[str, Callable[..., Factor]] = {"cosine": cosine, "linear": linear, "warmup": warmup, "drop": drop}


def scheduler(expression: str) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """What makes the schedule that an expression names, of an optimizer."""
    call = spec.parse_call(expression)
    name = normal(call.name)
    if name not in SCHEDULES:
        raise UserError(f"unknown scheduler '{call.name}'{nearest(call.name, SCHEDULES)} (known: {', '.join(SCHEDULES)})")
    factor = spec.checked_call(SCHEDULES[name], call)
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state, its moments laid out as the parameters are."""
    optimizer.load_state_dict(state)
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # Fused optimizers walk through both in the order of their memory.
                moments[name] = torch.empty_like(parameter).copy_(value)
