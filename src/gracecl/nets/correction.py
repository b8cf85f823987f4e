"""Two numbers at each tap that bring the logits of some classes to the level of the others: a · logit + b. Wu et al., BiC, 2019."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gracecl.functional.losses import cross_entropy, full_precision
from gracecl.nets.growth import Growth

STEPS, HALVINGS = 100, 50
CONVERGED = 1e-12
REACH = 5.0
"""how far a and b may go from 1 and 0: separable images would take them to infinity"""


@dataclass(frozen=True)
class Correction:
    """Rescales the logits of the classes marked in `classes [C]`, at each tap by its own `scale [L]` and `shift [L]`."""

    scale: Tensor
    shift: Tensor
    classes: Tensor

    @classmethod
    def none(cls, layers: int, classes: int, device: torch.device) -> Correction:
        """The one that changes nothing."""
        ones = torch.ones(layers, dtype=torch.float64, device=device)
        return cls(ones, torch.zeros_like(ones), torch.zeros(classes, dtype=torch.bool, device=device))

    def __call__(self, logits: Tensor) -> Tensor:
        logits = full_precision(logits)
        scale, shift = (value.to(logits.dtype)[:, None, None] for value in (self.scale, self.shift))
        return torch.where(self.classes, scale * logits + shift, logits)

    def objective(self, logits: Tensor, y: Tensor, among: Tensor, penalty: float) -> Tensor:
        """Return `[L]`: cross-entropy of the corrected logits, over the classes marked in `among [C]`, plus
        penalty · b².
        """
        return cross_entropy(self(logits), y, among) + penalty * self.shift**2

    def grown(self, growth: Growth) -> Correction:
        """Leaves new classes as they are."""
        return replace(self, classes=growth.padded(self.classes, 0))

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> Correction:
        return cls(**{name: value.to(device) for name, value in state.items()})


def fit_correction(logits: Tensor, y: Tensor, classes: Tensor, among: Tensor, penalty: float) -> Correction:
    """The correction of `classes` with the least objective, by Newton's method from a = 1, b = 0, for all taps at once.

    The objective is convex. Each step is halved until it does no harm, and ends at REACH, as a minimum may not exist: the result is
    the least within it.
    """
    logits = logits.double()
    z = logits[..., among]
    corrected = classes[among].to(z.dtype)
    truth = (among.cumsum(0) - 1)[y].expand(len(z), -1)[..., None, None].expand(-1, -1, 1, 2)
    slopes = torch.stack([z * corrected, corrected.expand_as(z)], dim=-1)  # of each corrected logit along a and b
    of_truth = slopes.gather(2, truth).squeeze(2)
    ridge = z.new_tensor([0.0, 2 * penalty])
    start, identity = z.new_tensor([1.0, 0.0]), torch.eye(2).to(z)
    found = start.repeat(len(z), 1)

    def objective(at: Tensor) -> Tensor:
        return Correction(at[:, 0], at[:, 1], classes).objective(logits, y, among, penalty)

    for _ in range(STEPS):
        p = (z * (1 - corrected) + (slopes * found[:, None, None]).sum(dim=-1)).softmax(dim=-1)
        mean = (p[..., None] * slopes).sum(dim=2)
        gradient = (mean - of_truth).mean(dim=1) + ridge * found
        at_end = (found - start).abs() > REACH - CONVERGED
        gradient = torch.where(at_end & (gradient * (found - start) < 0), 0, gradient)  # less is only beyond the end
        if gradient.abs().max() < CONVERGED:
            break
        second = torch.einsum("lvk,lvki,lvkj->lij", p, slopes, slopes) - torch.einsum("lvi,lvj->lij", mean, mean)
        second = second / len(y) + torch.diag(ridge)
        damping = 1e-10 * second.diagonal(dim1=1, dim2=2).sum(dim=1) + CONVERGED
        second = second + damping[:, None, None] * identity
        # At the end of one of them each goes by its own curvature, so that none pushes the other over it.
        second = torch.where(at_end.any(dim=1)[:, None, None], second * identity, second)
        step = -torch.linalg.solve_ex(second, gradient)[0]
        room = (REACH - (found - start) * step.sign()) / step.abs().clamp(min=CONVERGED)
        length = room.amin(dim=1, keepdim=True).clamp(0, 1)
        before = objective(found)
        for _ in range(HALVINGS):
            worse = objective(found + length * step) > before
            if not worse.any():
                break
            length = torch.where(worse[:, None], length / 2, length)
        moved = torch.where(worse[:, None], 0, length * step)
        found = found + moved
        if moved.abs().max() < CONVERGED:
            break
    return Correction(found[:, 0], found[:, 1], classes)
