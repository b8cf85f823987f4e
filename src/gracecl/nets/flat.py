"""All trainable weights of a net as one vector, sorted by the first tapped layer that depends on each.

A penalty on weights becomes a row `[L]` of the loss table by summing its entries layer by layer. Which layer a parameter belongs to
is found by autograd, not by names: it is the first tap whose features have a gradient there, and heads are their own tap's. A
parameter that no tap depends on, such as a module that only a loss uses, counts for the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gracecl.inputs import Inputs
from gracecl.nets.growth import Growth
from gracecl.nets.mode import in_mode
from gracecl.nets.tapped import StackedLinear, TappedNet


@dataclass(frozen=True)
class Piece:
    """A parameter, or the part of a stacked one that belongs to one layer."""

    parameter: nn.Parameter
    part: int | None
    layer: int
    head: bool

    def of(self, value: Tensor) -> Tensor:
        """Return this piece of the parameter itself, or of anything of its shape."""
        return (value if self.part is None else value[self.part]).reshape(-1)

    @property
    def size(self) -> int:
        return self.parameter.numel() // (1 if self.part is None else len(self.parameter))


class FlatParameters:
    """The trainable weights of a net as one vector `[P]`; entries of the same tapped layer stand together."""

    def __init__(self, net: TappedNet, inputs: Inputs) -> None:
        """`inputs` are what the net is fed with in the pass that finds each parameter's layer."""
        self.net, self._counted = net, -1
        self.pieces = sorted(find_pieces(net, inputs), key=lambda piece: piece.layer)
        self.parameters = list({id(piece.parameter): piece.parameter for piece in self.pieces}.values())

    @property
    def sizes(self) -> list[int]:
        """How many weights each layer has."""
        if self._counted != self.net.classes:
            self._counted, layers = self.net.classes, range(self.net.layers)
            self._sizes = [sum(piece.size for piece in self.pieces if piece.layer == layer) for layer in layers]
        return self._sizes

    def gather(self, value_of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Gather `[P]` from one tensor per parameter, each of the parameter's shape."""
        values = {id(parameter): value_of(parameter) for parameter in self.parameters}
        return torch.cat([piece.of(values[id(piece.parameter)]) for piece in self.pieces])

    def vector(self) -> Tensor:
        """Return the current weights; gradients flow back into them."""
        return self.gather(lambda parameter: parameter)

    def snapshot(self) -> Tensor:
        """Copy the current weights."""
        return self.vector().detach()

    def gradient(self) -> Tensor:
        """Return `.grad` of all weights, 0 where there is none."""
        return self.gather(lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach()

    def scatter(self, vector: Tensor) -> dict[nn.Parameter, Tensor]:
        """Split a vector into one tensor per parameter, in the parameter's shape."""
        return self._scatter(vector, {parameter: torch.empty_like(parameter) for parameter in self.parameters})

    def _scatter(self, vector: Tensor, values: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        parts = [values[piece.parameter] if piece.part is None else values[piece.parameter][piece.part] for piece in self.pieces]
        for part, entries in zip(parts, torch.split(vector, [part.numel() for part in parts]), strict=True):
            part.copy_(entries.view(part.shape))
        return values

    @torch.no_grad()
    def grown(self, vector: Tensor, growth: Growth, as_weights: bool) -> Tensor:
        """A vector of before the net grew, with entries for its new weights: their initial values, or 0."""
        axes = {self.net.get_parameter(name): (name, axis) for name, axis in self.net.class_axes.items()}
        shapes = {value: growth.shape_before(value, axes[value][1] if value in axes else None) for value in self.parameters}
        values = self._scatter(vector, {value: value.new_empty(shape) for value, shape in shapes.items()})
        for parameter, (name, along) in axes.items():
            if parameter in values:
                before = values[parameter]
                values[parameter] = (
                    growth.grown(before, name, along) if as_weights else growth.padded(before, along.axis, along.blocks)
                )
        return self.gather(values.__getitem__)

    def set_gradient(self, vector: Tensor) -> None:
        """Write the vector to `.grad`; parameters without a gradient keep none."""
        for parameter, value in self.scatter(vector).items():
            if parameter.grad is not None:
                parameter.grad.copy_(value)

    def by_layer(self, values: Tensor) -> Tensor:
        """Sum a vector `[P]` over the entries of each layer, to `[L]`."""
        if len(self.sizes) == 1:
            return values.sum().unsqueeze(0)
        return torch.stack([part.sum() for part in torch.split(values, self.sizes)])

    @property
    def is_head(self) -> Tensor:
        """Return `[P]`: True for entries of the classification heads."""
        return torch.cat([torch.full((piece.size,), piece.head, device=piece.parameter.device) for piece in self.pieces])


def find_pieces(net: TappedNet, inputs: Inputs) -> list[Piece]:
    """Find every trainable parameter's layer; stacked ones are split into one piece per layer."""
    stacked = {
        id(parameter): module
        for module in net.modules()
        if isinstance(module, StackedLinear)
        for parameter in module.parameters(recurse=False)
    }
    heads = {id(parameter) for parameter in net.classifier.parameters()}
    layer_of = first_taps(net, inputs)
    pieces = []
    for parameter in net.parameters():
        if not parameter.requires_grad:
            continue
        head = id(parameter) in heads
        if id(parameter) in stacked and len(parameter) == net.layers:
            pieces += [Piece(parameter, layer, layer, head) for layer in range(net.layers)]
        else:
            pieces.append(Piece(parameter, None, layer_of.get(id(parameter), net.layers - 1), head))
    return pieces


def first_taps(net: TappedNet, inputs: Inputs) -> dict[int, int]:
    """Return `{id of a parameter: first tap that depends on it}`, by one small pass and a gradient per tap.

    The pass runs on weights with a little noise, so that those which start at zero do not hide what lies behind them, and in
    evaluation mode, so that no statistics move.
    """
    if net.layers == 1:
        return {id(parameter): 0 for parameter in net.parameters()}
    trainable = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    device = net.classifier.weight.device
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return 0.1 * torch.randn(like.shape, generator=generator).to(device, like.dtype)

    noisy = {name: (parameter.detach() + noise(parameter)).requires_grad_() for name, parameter in trainable.items()}
    x = inputs.seen(4, lambda sizes: 10 * noise(torch.empty(sizes))).to(device)
    found: dict[int, int] = {}
    with in_mode(net, training=False), torch.enable_grad():
        features = functional_call(net, noisy, (x,)).features
        for tap in range(net.layers if features.requires_grad else 0):  # a frozen trunk's do not
            left = {name: value for name, value in noisy.items() if id(trainable[name]) not in found}
            gradients = torch.autograd.grad(features[tap].square().sum(), list(left.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(left, gradients, strict=True):
                if gradient is not None and bool(gradient.any()):
                    found[id(trainable[name])] = tap
    return found
