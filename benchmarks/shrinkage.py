"""What λ by evidence and OAS cost in accuracy: closed forms by the number of images, against the best λ in hindsight.

One set of sums serves all rules of a row. Images come in random order, of all classes and of the first few; accuracy is that on all
test images of the classes met. The grid has half powers of ten, as multiples of the mean eigenvalue of G that is not 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import gracecl
from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.functional import closed_forms as forms
from gracecl.functional.closed_forms import Linear
from gracecl.functional.sums import Sums

FEATURES = Path("cifar100.feat")
POWERS = np.arange(-5, 1.5, 0.5)
RULES = ("class means", "SLDA, ε 1e-4", "LDA, OAS", "ridge, evidence", "best λ", "10^j chosen", "best 10^j")
HEADS = ("images", "classes", "map", *RULES)
CHUNK = 1000


def text(quick: bool) -> str:
    """A table of accuracies: the digits' pixels if quick, else the features in cifar100.feat."""
    if not quick and not FEATURES.exists():
        made_by = f"gracecl features efficientnet_lite0 cifar100 --size 128 --normalise half --out {FEATURES}"
        raise UserError(f"there is no {FEATURES} here; make it first: {made_by}")
    source, few = ("iid-digits(size=8{})", "0-4") if quick else (f"iid-features(path='{FEATURES}'{{}})", "0-19")
    every, some = (gracecl.stream(source.format(picked)).data for picked in ("", f", classes='{few}'"))
    sizes, steps, once = ([0, 100], [100, 400], [50]) if quick else ([0, 3000], [1000, 3000, 10_000, 50_000], [4000])
    lines = ["# Closed forms by number of images, accuracy in percent", "", f"| {' | '.join(HEADS)} |", f"|{'---:|' * len(HEADS)}"]
    for size in sizes:
        lines += [f"| {' | '.join(row)} |" for row in rows(every, size, steps) + rows(some, size, once)]
    return "\n".join(lines)


def rows(data: Any, size: int, steps: list[int]) -> list[list[str]]:
    """The rows of one map, `size` relu features or none, after so many images."""
    train, test = (torch.as_tensor(x).flatten(1) for x in (data.train_x, data.test_x))
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(train.shape[1], size, dtype=torch.float64, generator=generator) if size else None

    def mapped(x: Tensor) -> Tensor:
        return x.double() if weights is None else (x.double() @ weights).relu()

    order, sums, at, found = np.random.default_rng(0).permutation(len(data.train_y)), None, 0, []
    for images in steps:
        for start in range(at, min(images, len(order)), CHUNK):
            chosen = order[start : min(start + CHUNK, images)]
            h = mapped(train[torch.from_numpy(chosen)])[None]
            sums = sums or Sums(1, data.classes, h.shape[2])
            sums.add(h, data.train_y[chosen])
        assert sums is not None
        at = images
        known = np.isin(data.test_y, sums.met.numpy())
        accuracies = measured(sums, mapped(test[torch.from_numpy(known)]), data.test_y[known])
        found.append([f"{len(sums):,}", str(len(sums.met)), f"relu {size}" if size else "none", *accuracies])
    return found


def measured(sums: Sums, h: Tensor, labels: Ints) -> list[str]:
    """The accuracy of every rule, the power that the evidence chose and the best one."""

    def percent(solution: Linear, h: Tensor) -> float:
        return 100 * float((solution(h[None])[0].argmax(dim=1).numpy() == labels).mean())

    covariance, one = sums.within / sums.images, sums.means.new_ones(1)
    by_oas = forms.shrunk(covariance, forms.oas(covariance, sums.images - len(sums.met)))
    ridge = forms.Ridge(sums, intercept=True)
    chosen = forms.by_evidence(ridge)
    tried = {power: percent(forms.Ridge(sums, intercept=True).at(ridge.scale * 10**power), h) for power in POWERS}
    best = max(tried, key=lambda power: tried[power])
    accuracies = (
        percent(forms.nearest_means(sums, "cosine"), F.normalize(h, dim=1)),
        percent(forms.discriminant(sums, forms.shrunk(covariance, 1e-4 * one, "identity")), h),
        percent(forms.discriminant(sums, by_oas), h),
        percent(ridge.at(chosen), h),
        tried[best],
    )
    return [*(f"{value:.1f}" for value in accuracies), f"{float((chosen / ridge.scale).log10()):.1f}", f"{best:.1f}"]
