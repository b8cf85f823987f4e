"""Room for classes that arrive: how tensors with an axis over the classes become longer.

A net says which of its parameters have such an axis (`class_axes` of a module), a method which of its state does
(`methods/state.py`). The engine makes room in all of them at once, when a label is new. New entries of a parameter are a function
of seed, name and class, so that it does not matter when a class arrives, nor with which others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gracecl import rng

G = TypeVar("G")


@dataclass(frozen=True)
class ClassAxis:
    """Which axis of a parameter runs over the classes, and how entries of a new class begin."""

    axis: int
    blocks: int = 1
    """how often the axis runs over the classes, one time after the other"""
    bound: float | None = None
    """entries are drawn between -bound and bound; None takes the bound of a linear layer whose inputs are the classes so far"""


@dataclass(frozen=True)
class Growth:
    """From `before` classes to `after`."""

    before: int
    after: int
    seed: int

    def padded(self, value: Tensor, axis: int, blocks: int = 1, new: Tensor | None = None) -> Tensor:
        """A tensor with room for the new classes along an axis: 0, or the entries `new`, which has the new classes alone."""
        axis = axis % value.ndim
        if new is None:
            new = value.new_zeros(*value.shape[:axis], blocks * (self.after - self.before), *value.shape[axis + 1 :])
        parts = zip(value.tensor_split(blocks, axis), new.tensor_split(blocks, axis), strict=True)
        return torch.cat([part for both in parts for part in both], dim=axis)

    def grown(self, value: Tensor, name: str, along: ClassAxis) -> Tensor:
        """A parameter of this name, or what it was at some time, with the initial entries of the new classes."""
        axis = along.axis % value.ndim
        others = (*value.shape[:axis], *value.shape[axis + 1 :])
        drawn = np.stack([self._entries(name, label, along, others) for label in range(self.before, self.after)])
        new = torch.from_numpy(drawn).to(value).transpose(0, 1).flatten(0, 1)  # [blocks · new classes, others…]
        return self.padded(value, axis, along.blocks, new.movedim(0, axis))

    def shape_before(self, value: Tensor, along: ClassAxis | None) -> list[int]:
        """The shape that a parameter had before it grew."""
        shape = list(value.shape)
        if along is not None:
            shape[along.axis] = along.blocks * self.before
        return shape

    def _entries(self, name: str, label: int, along: ClassAxis, others: Iterable[int]) -> np.ndarray:
        bound = (along.blocks * (label + 1)) ** -0.5 if along.bound is None else along.bound
        return rng.generator(self.seed, "new class", name, label).uniform(-bound, bound, (along.blocks, *others))


@runtime_checkable
class Grows(Protocol):
    """Has room for a number of classes."""

    def grown(self: G, growth: Growth) -> G:
        """The same with room for more; it may be the object itself, changed."""
        ...
