"""What one example looks like, and how a batch of examples becomes what the net sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gracecl.errors import UserError

Kind = TypeVar("Kind", bound="Inputs")


FULL = {torch.uint8: 255, torch.uint16: 65535, torch.float16: 1, torch.float32: 1, torch.float64: 1}
"""the value of a white pixel, for each type that images may have"""


class Inputs:
    """Inputs that the net takes as they come; `Images` are those that are normalised first."""

    def __init__(self, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> None:
        """`shape` is that of one example, without the batch axis; left out where nobody needs to know."""
        self.shape, self.dtype = tuple(map(int, shape)), dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {str(self.dtype).removeprefix('torch.')})"

    def blank(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """So many raw examples of zeros."""
        return torch.zeros((count, *self.shape), dtype=self.dtype, device=device)

    @property
    def bytes(self) -> int:
        """of one raw example"""
        return math.prod(self.shape) * self.dtype.itemsize

    def normalise(self, x: Tensor) -> Tensor:
        """What the net sees of a raw batch."""
        return x

    @property
    def images(self) -> Images:
        """Itself, for what is defined on images alone."""
        raise UserError(f"only images can be looked at in other views, and the inputs are {self!r}; use augment='none'")

    def to(self: Kind, device: torch.device | str) -> Kind:
        """The same for batches on a device."""
        return self


class Images(Inputs):
    """Images `[channels, height, width]`: bytes, or numbers of a kind in `FULL`, scaled to [0, 1], then normalised per channel."""

    def __init__(
        self,
        shape: Sequence[int],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        """`mean` and `std` are those of the pixels scaled to [0, 1], per channel; the default is 1/2 and 1/4."""
        if not isinstance(shape, Sequence) or len(shape) != 3 or not all(map(is_count, shape)):
            raise UserError(f"shape is (channels, height, width), whole numbers of at least 1, not {shape!r}")
        super().__init__(shape, dtype)
        channels = shape[0]
        try:
            means = (0.5,) * channels if mean is None else tuple(map(float, mean))
            stds = (0.25,) * channels if std is None else tuple(map(float, std))
        except (TypeError, ValueError):
            raise UserError(f"mean and std are lists of numbers, not {mean!r} and {std!r}") from None
        if not len(means) == len(stds) == channels:
            raise UserError(f"mean and std need one number for each of the {channels} channels")
        if not all(map(math.isfinite, (*means, *stds))) or min(stds) <= 0:
            raise UserError(f"mean and std of the pixels must be finite and std above 0, not mean {means} and std {stds}")
        self.statistics = means, stds
        """mean and std as they were given"""
        self._number = torch.float64 if dtype == torch.float64 else torch.float32
        self.mean, self.std = (torch.tensor(values, dtype=self._number).view(1, -1, 1, 1) for values in self.statistics)
        self._scale = 1 / (FULL[dtype] * self.std)
        self._shift = -self.mean / self.std
        self.black = self._shift

    def normalise(self, x: Tensor) -> Tensor:
        return torch.addcmul(self._shift, x.to(self._number), self._scale)

    @property
    def images(self) -> Images:
        return self

    def restore(self, x: Tensor) -> Tensor:
        """Back to [0, 1], for operations that are defined on colours."""
        return x * self.std + self.mean

    def to(self, device: torch.device | str) -> Images:
        moved = copy.copy(self)
        for name in ("mean", "std", "_scale", "_shift", "black"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved


def is_count(value: Any) -> bool:
    """Whether it is a whole number that things can be counted with."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(1 <= value < 1 << 31)
