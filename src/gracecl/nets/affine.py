"""The affine layers of a net as plain matrices: inputs as rows, weights as `[…, inputs, outputs]`, a bias as one more input of 1.

A convolution is a product, too: of the patches of its input, one row for each position of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.nets.heads import CosineHead
from gracecl.nets.mode import in_mode
from gracecl.nets.tapped import StackedLinear, TappedNet


class Affine:
    """A linear layer, an ungrouped convolution, or the stacked heads of all tapped layers, which are a product for each."""

    def __init__(self, module: nn.Linear | nn.Conv2d | StackedLinear) -> None:
        self.module = module
        self.parameters = list(module.parameters(recurse=False))
        """the weight, and the bias if there is one"""

    def rows(self, x: Tensor) -> tuple[Tensor, int]:
        """Return `[…, rows, inputs]`, what the matrix is multiplied with, and the rows of each image."""
        module, images = self.module, x.shape[0]
        if isinstance(module, StackedLinear):
            images = x.shape[1]
        elif isinstance(module, nn.Conv2d):
            size, padding = module.kernel_size, module.padding
            assert isinstance(padding, tuple)
            x = F.unfold(x, size, module.dilation, padding, module.stride).transpose(1, 2).flatten(0, 1)
        else:
            x = x.flatten(0, -2)
        if len(self.parameters) > 1:
            x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)
        return x, x.shape[-2] // images

    def matrix(self, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Return `[…, inputs, outputs]`: something that each parameter has one of, such as its gradient, in the
        shape of a product.
        """
        weight, *bias = (of(parameter) for parameter in self.parameters)
        if isinstance(self.module, StackedLinear):
            return torch.cat([weight, *bias], dim=-2)
        return torch.cat([weight.flatten(1).T, *(value[None] for value in bias)])

    def put(self, matrix: Tensor, into: Callable[[nn.Parameter], Tensor]) -> None:
        """The inverse of `matrix`: writes it to where that was read."""
        weight, *bias = (into(parameter) for parameter in self.parameters)
        inputs = matrix.shape[-2] - len(bias)
        product = matrix[..., :inputs, :]
        weight.copy_(product if isinstance(self.module, StackedLinear) else product.T.reshape(weight.shape))
        for value in bias:
            value.copy_(matrix[..., inputs:, :].reshape(value.shape))


def affine_layers(net: TappedNet) -> dict[str, Affine]:
    """Those of the net, its heads included, by name. Left out are grouped convolutions, those whose padding is not a number of
    zeros, cosine heads, and what methods add, which a plain pass does not reach.
    """
    found = {}
    for name, module in net.named_modules():
        product = isinstance(module, nn.Linear | StackedLinear) and not isinstance(module, CosineHead)
        plain = isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros"
        if (product or (plain and isinstance(module.padding, tuple))) and not name.startswith("extras."):
            found[name] = Affine(module)
    return found


@contextmanager
def watched(layers: dict[str, Affine], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """`see(name, input)` at each call of a layer."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: see(name, inputs[0])

    handles = [layer.module.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def second_moments(net: TappedNet, layers: dict[str, Affine], images: Tensor, batch: int = 100) -> dict[str, tuple[Tensor, int]]:
    """For each layer `ZᵀZ / n` of its inputs Z on n raw images, and how many rows an image has in Z. The net stays as it is.

    In double precision: where inputs are large, rounding in single precision leaves more behind than the identity that LPR adds.
    """
    sums: dict[str, Tensor] = {}
    rows_per_image: dict[str, int] = {}

    def add(name: str, x: Tensor) -> None:
        rows, rows_per_image[name] = layers[name].rows(x.double())
        product = rows.transpose(-2, -1) @ rows
        sums[name] = sums[name] + product if name in sums else product

    with in_mode(net, training=False), torch.no_grad(), watched(layers, add):
        for start in range(0, len(images), batch):
            # Not by a call of the backbone, which may be compiled: hooks set later would not be seen there.
            features = net.backbone.forward(net.inputs.normalise(images[start : start + batch].to(net.classifier.weight.device)))
            net.classifier(features)
            if isinstance(net.projector, StackedLinear):
                net.projector(features)
    net.meter.count(forward=len(images))
    return {name: (total / len(images), rows_per_image[name]) for name, total in sums.items()}
