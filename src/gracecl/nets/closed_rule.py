"""Discriminant analysis and ridge regression on a memory's features, as rules of methods that replay: one pass over the memory."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gracecl.core import Ints
from gracecl.functional import closed_forms as forms
from gracecl.functional.closed_forms import Linear
from gracecl.functional.sums import Sums
from gracecl.nets.tapped import TappedNet

ClosedRule = Literal["lda", "ridge"]
CLOSED_RULES: tuple[ClosedRule, ...] = ("lda", "ridge")


def closed_rule(net: TappedNet, images: Tensor, labels: Ints, rule: ClosedRule) -> Linear:
    """The classifier that follows from the features of images: shrunk by OAS, or with λ by evidence, at each layer.

    The net trains on, so its features of earlier images are out of date: sums are taken anew before an evaluation. A class without
    images is never predicted; with no image at all nothing is known and all scores are 0.
    """
    sums = Sums(net.layers, net.classes, net.width, net.classifier.weight.device)
    for rows, taps in net.sweep(images):
        sums.add(taps.features, labels[rows])
    if len(sums) == 0:
        nothing = Linear.of_nothing(net.layers, net.width, net.classes, sums.counts.device)
        return Linear(nothing.weight, torch.zeros_like(nothing.bias))
    if rule == "ridge":
        ridge = forms.Ridge(sums, intercept=True)
        return ridge.at(forms.by_evidence(ridge))
    covariance = sums.within / sums.images
    return forms.discriminant(sums, forms.shrunk(covariance, forms.oas(covariance, sums.images - len(sums.met))))
