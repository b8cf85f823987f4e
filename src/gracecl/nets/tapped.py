"""A backbone and a head at each tap: images in, `Taps` with the layer as first axis out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.augment import Pixels
from gracecl.core import Taps

M = TypeVar("M", bound=nn.Module)


class Backbone(nn.Module):
    """Normalised images `[B, channels, height, width]` → features `[L, B, D]` of the tapped layers, the deepest last."""

    layers: int
    """L"""
    width: int
    """D"""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def stack_layers(features: list[Tensor]) -> Tensor:
    """`[L, B, D]` from the features of each layer; a single layer is not copied."""
    return torch.stack(features) if len(features) > 1 else features[0].unsqueeze(0)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm that uses its running statistics where a batch has one value per channel, from which no spread can be told."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.shape[0] * x.shape[2] * x.shape[3] == 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class StackedLinear(nn.Module):
    """One linear layer per tap, `[L, B, in] → [L, B, out]` in one product. Initialised as `nn.Linear` initialises each."""

    def __init__(self, layers: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(layers, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(layers, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.weight) == 1:  # the plain product has less overhead, which a small net's step notices
            return torch.addmm(self.bias.squeeze(0), x.squeeze(0), self.weight.squeeze(0)).unsqueeze(0)
        return torch.baddbmm(self.bias, x, self.weight)


class TappedNet(nn.Module):
    """Backbone, and per tap a linear classifier and a linear projector for contrastive terms."""

    def __init__(self, backbone: Backbone, classes: int, pixels: Pixels, embedding: int = 128) -> None:
        super().__init__()
        self.backbone = backbone
        self.layers, self.width, self.classes = backbone.layers, backbone.width, classes
        self.classifier = StackedLinear(self.layers, self.width, classes)
        self.projector = StackedLinear(self.layers, self.width, embedding)
        self.extras = nn.ModuleDict()
        """modules that methods add, trained and saved with the net"""
        self.pixels = pixels

    def forward(self, x: Tensor) -> Taps:
        features = self.backbone(x)
        return Taps(features, self.classifier(features), self.projector)

    def extra(self, name: str, module: M) -> M:
        """Adds a method's own module, on the net's device."""
        self.extras[name] = module.to(self.classifier.weight.device)
        return module

    def sweep(self, images: Tensor, batch: int = 256) -> Iterator[tuple[slice, Taps]]:
        """A scoring pass over raw images, in evaluation mode and full precision; it leaves the net as it was."""
        device = self.classifier.weight.device
        training = self.training
        self.eval()
        try:
            for start in range(0, len(images), batch):
                rows = slice(start, min(start + batch, len(images)))
                # Not inside the generator's yield: the caller's code must run under the caller's own gradient mode.
                with torch.no_grad():
                    taps = self(self.pixels.normalise(images[rows].to(device)))
                yield rows, taps
        finally:
            self.train(training)
