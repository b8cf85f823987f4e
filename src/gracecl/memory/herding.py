"""Herding: an order of a class's images in which the mean of the first m stays near the mean of all, for every m.

Welling, Herding Dynamical Weights to Learn, ICML 2009; for exemplars Rebuffi et al., iCaRL, CVPR 2017, algorithm 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def herd(features: Tensor, count: int) -> Tensor:
    """Rows of the first `count` images (all, if they are fewer) of one class with features `[n, D]`, in the order of herding.

    Each next image brings the mean of those chosen nearest to the mean μ of all, features and μ being unit vectors: of the others,
    the argmin of ‖μ - (φ + Σ chosen) / k‖, which is the argmax of φ · (k μ - Σ chosen), as all φ have the same norm.
    """
    unit = F.normalize(features, dim=1)
    mean = F.normalize(unit.mean(dim=0), dim=0)
    missing, free = mean.clone(), torch.zeros(len(unit), dtype=unit.dtype, device=unit.device)
    chosen = []
    for _ in range(min(count, len(unit))):
        best = (unit @ missing + free).argmax(dim=0, keepdim=True)
        chosen.append(best)
        free[best] = -torch.inf
        missing = missing + mean - unit[best].squeeze(0)
    return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=unit.device)
