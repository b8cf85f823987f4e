"""What a checkpoint holds of a part: the values of the attributes that it declares in `state`.

A plain name declares an attribute. `per_class(name, axis)` declares one with an axis over the classes, `per_weight(name)` a vector
of all weights (`nets/flat.py`): both get room for a class that arrives. Objects in `state` that have a method `grown` do so too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class per_class(str):
    """The name of a tensor with an axis over the classes; entries of a new class begin at 0."""

    axis: int

    def __new__(cls, name: str, axis: int = 0) -> per_class:
        entry = super().__new__(cls, name)
        entry.axis = axis
        return entry


class per_weight(str):
    """The name of a vector of the weights that `self.flat` is of; entries of new weights begin at 0, or as the weights do."""

    as_weights: bool

    def __new__(cls, name: str, as_weights: bool = False) -> per_weight:
        entry = super().__new__(cls, name)
        entry.as_weights = as_weights
        return entry


@runtime_checkable
class Saves(Protocol):
    """Has a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Loads(Saves, Protocol):
    """Takes its state back."""

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def saved(value: Any) -> Any:
    """A value as a checkpoint holds it: tensors, plain values, and what objects say by `state_dict`."""
    if isinstance(value, Saves):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: saved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [saved(item) for item in value]
    return value


def restored(now: Any, kept: Any, device: torch.device) -> Any:
    """The value that a checkpoint holds, of the kind that the attribute has now, with its tensors on the device."""
    if isinstance(now, Loads):
        now.load_state_dict(kept)
        return now
    if dataclasses.is_dataclass(now) and not isinstance(now, type):
        return dataclasses.replace(now, **restored(vars(now), kept, device))
    if isinstance(kept, Tensor):
        return kept.to(device)
    if isinstance(kept, dict):
        return {key: restored(None, item, device) for key, item in kept.items()}
    if isinstance(kept, list):
        return type(now)(kept) if isinstance(now, tuple) else list(kept)
    return kept
