"""What a run gets under `budget`, `bytes` and `pace`: updates per step, images of fits, slots of the memory, its complexity.

Everything is a function of the step and of fractions that a dry run gave, so that a run which continues goes on as it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gracecl.engine.cost import StepCost
from gracecl.errors import UserError
from gracecl.functional.budgets import complexity, updates_before
from gracecl.registry import quantity
from gracecl.registry.quantity import Quantity, shown


@dataclass(frozen=True)
class Allotment:
    """What a run may do; None is no limit."""

    updates: Fraction | None = None
    """optimizer steps per step of the stream"""
    fit_images: int | None = None
    """that each fit before an evaluation may train on"""
    memory: int | None = None
    """slots"""
    complexity: Fraction | None = None
    """batches that pass while one is learned"""

    def as_text(self) -> dict[str, Any]:
        """Return the limits that there are, as JSON can hold them."""
        return {
            name: str(value) if isinstance(value, Fraction) else value for name, value in vars(self).items() if value is not None
        }

    @classmethod
    def of(cls, written: dict[str, Any]) -> Allotment:
        """Read what `as_text` wrote."""
        read: dict[str, Any] = {name: Fraction(value) if isinstance(value, str) else value for name, value in written.items()}
        return cls(**read)


def slots_within(limit: Fraction, cost: StepCost, wanted: int) -> int:
    """Return the largest memory of at most `wanted` images that fits into so many bytes; negative where nothing fits."""
    if limit < cost.fixed:
        return -1
    return min(wanted, math.floor((limit - cost.fixed) / cost.slot)) if cost.slot else wanted


def allot(
    options: dict[str, str | None],
    cost_of: Callable[[str | None], StepCost],
    *,
    method: str,
    trains: str,
    memory: int,
    steps: int,
    evaluations: int,
) -> Allotment:
    """Turn the options `budget`, `bytes` and `pace` into what a run of `steps` may do.

    `cost_of` measures a method in the run's setting; None is the run's own. `trains` is when that trains, `memory` the slots that
    the run asks for, `evaluations` how often it is evaluated.
    """
    limits = {name: quantity.parse(text, name) for name, text in options.items() if text is not None}
    own = cost_of(None)
    found: dict[str, Any] = {}
    if kept := limits.get("bytes"):
        found["memory"] = _memory(_bytes(kept, cost_of, memory), own, memory, method)
    if speed := limits.get("pace"):
        found["complexity"] = complexity(own.step, _flops(speed, cost_of))
    if budget := limits.get("budget"):
        per_step = _flops(budget, cost_of) / (steps if budget.method is None and not budget.per else 1)
        if trains == "evaluation":
            found["fit_images"] = _fit_images(per_step * steps, own, evaluations, method)
        else:
            found["updates"] = _updates(per_step, own, steps, method)
    return Allotment(**found)


def _flops(limit: Quantity, cost_of: Callable[[str | None], StepCost]) -> Fraction:
    if limit.method is None:
        return limit.number
    reference = cost_of(limit.method).step
    if reference == 0:
        raise UserError(f"{limit.method} computes nothing while the stream passes; name a method that does, such as er()")
    return limit.number * reference


def _bytes(limit: Quantity, cost_of: Callable[[str | None], StepCost], memory: int) -> Fraction:
    if limit.method is None:
        return limit.number
    reference = cost_of(limit.method)
    return limit.number * (reference.fixed + memory * reference.slot)


def _memory(limit: Fraction, cost: StepCost, wanted: int, method: str) -> int:
    slots = slots_within(limit, cost, wanted)
    if slots < 0:
        raise UserError(
            f"{method} keeps {shown(cost.fixed, 'B')} without any image in its memory, and --bytes allows "
            f"{shown(float(limit), 'B')}; allow more, or use a smaller net"
        )
    return slots


def _updates(per_step: Fraction, cost: StepCost, steps: int, method: str) -> Fraction | None:
    """Return updates per step; None where the budget is enough for all that the method makes."""
    if per_step >= cost.step:
        return None
    takes = f"{method} takes {shown(float(cost.step), 'FLOP')} per step, and --budget allows {shown(float(per_step), 'FLOP')}"
    if cost.updates == 0 or cost.step == cost.beside:
        raise UserError(f"{takes}; it makes no updates that could be left out, so allow more")
    updates = (per_step - cost.beside) / cost.update
    if updates_before(steps, max(updates, Fraction(0))) == 0:
        raise UserError(f"{takes}, which is not one update in {steps} steps; allow more")
    return updates


def _fit_images(total: Fraction, cost: StepCost, evaluations: int, method: str) -> int:
    """Return the images that each fit may train on, where all fits share what the stream's steps were allowed."""
    images = math.floor(total / evaluations / (3 * cost.per_image))
    if images == 0:
        raise UserError(f"--budget allows {method} not one image before each of {evaluations} evaluations; allow more")
    return images
