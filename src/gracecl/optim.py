"""Optimisers by expression: `adam(lr=0.001, weight_decay=0.0001)`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gracecl import spec
from gracecl.errors import UserError
from gracecl.registry import nearest, normal

DEFAULT = "adam(lr=0.001, weight_decay=0.0001)"


def adam(
    params: list[torch.nn.Parameter],
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> torch.optim.Optimizer:
    """Adam; weight decay is added to the gradient."""
    return torch.optim.Adam(params, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), fused=True)


def adamw(
    params: list[torch.nn.Parameter],
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), fused=True)


def sgd(
    params: list[torch.nn.Parameter], lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Stochastic gradient descent."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)


OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "adamw": adamw, "sgd": sgd}


def build(expression: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    call = spec.parse_call(expression)
    name = normal(call.name)
    if name not in OPTIMISERS:
        raise UserError(f"unknown optimiser '{call.name}'{nearest(call.name, OPTIMISERS)} (known: {', '.join(OPTIMISERS)})")
    try:
        optimiser: torch.optim.Optimizer = spec.checked_call(OPTIMISERS[name], call, params)
    except ValueError as error:
        raise UserError(f"{expression}: {error}") from None
    return optimiser
