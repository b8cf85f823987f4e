"""Class means for nearest-mean inference: one batched pass over the memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl import rng
from gracecl.core import Ints
from gracecl.nets.tapped import TappedNet


def class_means(net: TappedNet, images: Tensor, labels: Ints, seen: tuple[int, ...]) -> Tensor:
    """Return `[L, C, D]`: for each layer and class, the unit vector along the mean of the unit features of its images.

    A seen class without any image gets a random direction, chosen by when the class was first met, not by its number.
    """
    device = net.classifier.weight.device
    sums = net.classifier.weight.new_zeros(net.layers, net.classes, net.width)
    for rows, taps in net.sweep(images):
        # A product with the membership matrix, not a scatter: the order of summation is fixed on every device.
        member = F.one_hot(torch.from_numpy(labels[rows]).to(device), net.classes).T.to(sums.dtype)
        sums += member @ F.normalize(taps.features, dim=-1)
    present = np.bincount(labels, minlength=net.classes) > 0
    for rank, label in enumerate(seen):
        if not present[label]:
            direction = rng.generator("direction of a class without images", rank).standard_normal((net.layers, net.width))
            sums[:, label] = torch.from_numpy(direction).to(sums)
    return F.normalize(sums, dim=-1)


def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Return `[L, B, C]`: minus the squared distance of each image's unit features from each class's mean, both
    unit vectors.
    """
    return 2 * (F.normalize(features, dim=-1) @ means.transpose(1, 2)) - 2
