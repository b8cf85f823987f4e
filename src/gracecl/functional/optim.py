"""Optimizers by expression: `adam(lr=0.001, weight_decay=0.0001)`.

The rate is constant along the stream; a method that lowers it says so in its hook `rate` (ccil, ssil), which the engine applies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gracecl.errors import UserError
from gracecl.registry import nearest, normal, spec

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
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)


OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "adamw": adamw, "sgd": sgd}


def build(expression: str, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    """The optimizer that an expression names; each group learns at its factor times the expression's learning rate."""
    call = spec.parse_call(expression)
    name = normal(call.name)
    if name not in OPTIMISERS:
        raise UserError(f"unknown optimizer '{call.name}'{nearest(call.name, OPTIMISERS)} (known: {', '.join(OPTIMISERS)})")
    try:
        optimizer: torch.optim.Optimizer = spec.checked_call(OPTIMISERS[name], call, [{"params": params} for _, params in groups])
    except ValueError as error:
        raise UserError(f"{expression}: {error}") from None
    for made, (factor, _) in zip(optimizer.param_groups, groups, strict=True):
        made["lr"] *= factor
    return optimizer


def check(expression: str) -> None:
    """Refuse an expression that names no optimizer, or options that it cannot have."""
    build(expression, [(1.0, [torch.nn.Parameter(torch.zeros(1))])])


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state, its moments laid out as the parameters are."""
    optimizer.load_state_dict(state)
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # Fused optimizers walk through both in the order of their memory.
                moments[name] = torch.empty_like(parameter).copy_(value)
