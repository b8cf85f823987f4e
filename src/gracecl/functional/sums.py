"""Sums over labelled features: all that a closed form ever keeps of its images.

Counts n_k, class means μ_k and the scatter within classes S_w = Σ (h - μ_y)(h - μ_y)ᵀ hold the same as counts, class sums
C = Σ h e_yᵀ and the Gram matrix G = Σ h hᵀ, and do not cancel where means are far from the origin. Two sets of sums are added
exactly (Chan, Golub, LeVeque 1979)::

    d_k <- μ'_k - μ_k
    S_w <- S_w + S'_w + Σ_k n_k n'_k / (n_k + n'_k) · d_k d_kᵀ
    μ_k <- μ_k + n'_k / (n_k + n'_k) · d_k;  n_k <- n_k + n'_k

A batch is such a set, and so is a learner of another machine: any order, any batching and any split over machines gives the same
sums up to rounding. Everything is in double precision; the layer is the first axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Ints

if TYPE_CHECKING:
    from gracecl.nets.growth import Growth


COLUMNS = 2048
"""of the scatter that are computed at once; beyond so many, only what is on or below the diagonal"""


class Sums:
    """Counts `[C]`, means `[L, C, M]` and the scatter within classes `[L, M, M]`, or that of each class, `[L, C, M, M]`."""

    def __init__(self, layers: int, classes: int, size: int, device: torch.device | None = None, each_class: bool = False) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.means = torch.zeros(layers, classes, size, dtype=torch.float64, device=device)
        self.scatter = self.counts.new_zeros(layers, *([classes] if each_class else []), size, size)

    def add(self, features: Tensor, labels: Ints) -> None:
        """Add images with features `[L, B, M]`."""
        classes, position = np.unique(labels, return_inverse=True)
        h, member = features.double(), torch.from_numpy(position).to(features.device)
        some = torch.from_numpy(classes).to(features.device)
        one_hot = torch.nn.functional.one_hot(member, len(classes)).double()
        counts = one_hot.sum(dim=0)
        means = one_hot.T @ h / counts[:, None]
        apart, weight = self._take_in(some, counts, means)
        rows = torch.cat([h - means[:, member], weight.sqrt()[:, None] * apart], dim=1)
        if self.scatter.ndim == 3:
            for start in range(0, rows.shape[2], COLUMNS):
                stop = start + COLUMNS
                self.scatter[:, start:stop, :stop].baddbmm_(rows[..., start:stop].transpose(1, 2), rows[..., :stop])
            return
        of_row = np.concatenate([position, np.arange(len(classes))])
        for number, label in enumerate(classes.tolist()):
            own = rows[:, torch.from_numpy(np.flatnonzero(of_row == number)).to(rows.device)]
            self.scatter[:, label].baddbmm_(own.transpose(1, 2), own)

    def merge(self, other: Sums, numbers: Tensor | None = None) -> None:
        """Add the images that another set of sums is of. `numbers [C']` are the classes of its columns here; None is the same."""
        some = other.met
        own = some if numbers is None else numbers[some]
        apart, weight = self._take_in(own, other.counts[some], other.means[:, some])
        if self.scatter.ndim == 3:
            self.scatter += other.scatter + (weight[:, None] * apart).transpose(1, 2) @ apart
        else:
            between = weight[:, None, None] * apart[..., None] * apart[..., None, :]
            self.scatter[:, own] += other.scatter[:, some] + between

    def _take_in(self, classes: Tensor, counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """Move counts and means; return how far the new means were from the old ones, and the weight of that in the scatter."""
        before = self.counts[classes]
        after = before + counts
        apart = means - self.means[:, classes]
        self.means[:, classes] += (counts / after)[:, None] * apart
        self.counts[classes] = after
        return apart, before * counts / after

    # What follows from them.

    @property
    def images(self) -> Tensor:
        """n"""
        return self.counts.sum()

    @property
    def met(self) -> Tensor:
        """`[K]`: the classes that have images."""
        return self.counts.nonzero().squeeze(1)

    @property
    def within(self) -> Tensor:
        """`[L, M, M]`: S_w, whether or not classes are kept apart."""
        if self.scatter.ndim == 4:
            return self.scatter.sum(dim=1)
        if self.scatter.shape[2] <= COLUMNS:
            return self.scatter
        return self.scatter.tril() + self.scatter.tril(-1).transpose(1, 2)

    @property
    def class_sums(self) -> Tensor:
        """`[L, M, C]`: C"""
        return (self.counts[:, None] * self.means).transpose(1, 2)

    @property
    def gram(self) -> Tensor:
        """`[L, M, M]`: G"""
        return self.within + self.class_sums @ self.means

    def __len__(self) -> int:
        return int(self.images)

    # Checkpoints, and classes that arrive.

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value.to(self.counts.device, copy=True))  # aligned as new ones are: products depend on it

    def grown(self, growth: Growth) -> Sums:
        """The same with room for new classes."""
        self.counts, self.means = growth.padded(self.counts, 0), growth.padded(self.means, 1)
        if self.scatter.ndim == 4:
            self.scatter = growth.padded(self.scatter, 1)
        return self
