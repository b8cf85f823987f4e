"""RanPAC. McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023.

    W <- normal numbers, drawn once, from D features to M projections
    for each image (x, y) from the stream:
        h <- relu(f W), f the features of x, from a net that stays as it is
        G <- G + h hᵀ;  C <- C + h eᵀ_y, so that column k is the sum of the h of class k, its prototype
    whenever predictions are wanted:
        V <- (G + λ I)⁻¹ C;  scores <- relu(f W) V

G and C are sums, so the order of the stream does not matter, and V is ridge regression to one-hot labels on all images so far:
scikit-learn's Ridge(alpha=λ, fit_intercept=False). See methods/closed_form.py for what it does not do.

λ may be given; else it is that of 10⁻⁸, 10⁻⁷, …, 10⁸ which regresses best from four fifths of the images to the rest. No image is
needed for that: with sums kept apart for every fifth image, the squared error on those is tr VᵀG'V - 2 tr VᵀC' + n'.

Differences from the paper and its program: no parameter-efficient training of the net on the first task; M is 2,000 (the paper's
10,000 takes 0.8 GB for each tapped layer, twice that while λ is open, and a minute for each evaluation); λ is chosen on every fifth
image of the whole stream (the program: on the last fifth of the newest task, whose images it has at once), for each tapped layer,
and not below what double precision can tell from 0; the program's scores have one factor for all classes, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Progress, Taps
from gracecl.machine import check_room
from gracecl.memory import Memories
from gracecl.methods.closed_form import ClosedForm
from gracecl.methods.state import per_class
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast

RIDGES = [10.0**power for power in range(-8, 9)]
HELD_OUT_EVERY = 5
BYTES_OF_A_DOUBLE = 8
RIDGE_OF_FIRST_IMAGES = 1.0
"""where none was held out yet"""


@methods.register("ranpac")
@dataclass(eq=False, repr=False)
class RanPAC(ClosedForm):
    """RanPAC: ridge regression on random projections of a pretrained net's features, in closed form; no training, no memory."""

    projections: Annotated[int, AtLeast(1)] = 2000
    """M, the number of random features; the paper's is 10000"""
    ridge: Annotated[float, Above(0)] | None = None
    """λ; None chooses it at each evaluation by the error on every fifth image"""

    state = ("projection", "gram", per_class("prototypes", axis=3), "images")
    family: ClassVar[str] = "ridge"

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        device, size = net.classifier.weight.device, self.projections
        parts = 1 if self.ridge is not None else 2  # images to regress from, and those held out to choose the ridge by
        numbers = net.layers * size * (net.width + parts * (size + net.classes))
        check_room(BYTES_OF_A_DOUBLE * numbers, f"{size} projections", "use fewer projections")
        self.projection = torch.randn(net.layers, net.width, size, dtype=torch.float64).to(device)
        self.gram = torch.zeros(parts, net.layers, size, size, dtype=torch.float64, device=device)
        self.prototypes = torch.zeros(parts, net.layers, size, net.classes, dtype=torch.float64, device=device)
        self.images = torch.zeros(parts, dtype=torch.int64)

    def projected(self, features: Tensor) -> Tensor:
        return torch.relu(features.double() @ self.projection)

    def add(self, features: Tensor, labels: Tensor) -> None:
        h, y = self.projected(features), F.one_hot(labels, self.net.classes).double()
        number = int(self.images.sum()) + torch.arange(len(labels))
        held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 if len(self.gram) > 1 else torch.zeros_like(number).bool()
        for part, chosen in enumerate((~held_out, held_out)[: len(self.gram)]):
            rows = chosen.nonzero().squeeze(1)
            some, targets = h[:, rows.to(h.device)], y[rows.to(h.device)]
            self.gram[part] += some.transpose(1, 2) @ some
            self.prototypes[part] += some.transpose(1, 2) @ targets
            self.images[part] += len(rows)

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        gram = self.gram.sum(dim=0)
        gram.diagonal(dim1=1, dim2=2).add_(self.ridges()[:, None])
        self.weight = torch.linalg.solve(gram, self.prototypes.sum(dim=0))

    def ridges(self) -> Tensor:
        """`[L]`: λ for each layer."""
        layers = self.gram.new_ones(self.net.layers)
        if self.ridge is not None or self.images[1] == 0:
            return layers * (self.ridge or RIDGE_OF_FIRST_IMAGES)
        # In the basis of eigenvectors, each ridge costs a division instead of a solution.
        values, basis = torch.linalg.eigh(self.gram[0])
        learned, wanted = (basis.transpose(1, 2) @ prototypes for prototypes in self.prototypes)
        gram = basis.transpose(1, 2) @ self.gram[1] @ basis
        smallest = values[:, -1] * self.projections * torch.finfo(values.dtype).eps
        tried = torch.maximum(torch.tensor(RIDGES, dtype=values.dtype, device=values.device)[:, None], smallest)  # [ridges, L]
        errors = []
        for ridge in tried:
            solution = learned / (values.clamp(min=0) + ridge[:, None])[..., None]
            errors.append((solution * (gram @ solution - 2 * wanted)).sum(dim=(1, 2)))  # n', the same for all, is left out
        return tried.gather(0, torch.stack(errors).argmin(dim=0, keepdim=True)).squeeze(0)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        return {self.family: self.projected(out.features) @ self.weight}
