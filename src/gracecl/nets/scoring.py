"""Passes that look at a net without moving it: losses of single images, gradients, a step that is not taken, features.

None of them touches parameters, `.grad`, BatchNorm statistics, the net's mode or torch's random state. Images are normalised
already, precision is full, and a loss is the cross-entropy summed over the tapped layers. What the passes cost is added to the
net's meter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gracecl import rng
from gracecl.core import Taps
from gracecl.functional.losses import cross_entropy, cross_entropy_of_each
from gracecl.inputs import leaves
from gracecl.nets.mode import in_mode
from gracecl.nets.sharing import alone
from gracecl.nets.tapped import TappedNet

Normalisation = Literal["frozen", "eval", "train"]
"""what BatchNorm does with a scored batch: `frozen` normalises by the batch and keeps the running statistics, `eval` normalises by
the running statistics, `train` normalises by the batch and moves the running statistics as a training step does"""

RATE_WITHOUT_SGD = 0.1

Weights = dict[str, Tensor]
"""parameters, or gradients of them, by name"""


@contextmanager
def scoring(net: TappedNet, normalisation: Normalisation = "eval") -> Iterator[None]:
    """A block of passes after which the net is as it was; under `train` its running statistics alone have moved."""
    held = [(buffer, buffer.clone()) for buffer in net.buffers()] if normalisation == "frozen" else []
    # Dropout draws the same in every block, so that two can be compared.
    seed = rng.torch_seed("scoring", device=net.classifier.weight.device)
    try:
        with in_mode(net, training=normalisation != "eval"), seed:
            yield
    finally:
        with torch.no_grad():
            for buffer, before in held:
                buffer.copy_(before)


def loss_of_each(
    net: TappedNet, x: Tensor, y: Tensor, weights: Weights | None = None, normalisation: Normalisation = "eval"
) -> Tensor:
    """Return `[B]`: the loss of each image, under the net's own weights or others in their place."""
    return cross_entropy_of_each(outputs(net, x, weights, normalisation).logits, y).sum(dim=0)


def outputs(net: TappedNet, x: Tensor, weights: Weights | None = None, normalisation: Normalisation = "eval") -> Taps:
    """What the net says of images, under its own weights or others in their place."""
    with scoring(net, normalisation), torch.no_grad():
        taps: Taps = functional_call(net, weights or {}, (x,))
    net.meter.count(forward=len(x))
    return taps


def gradient(net: TappedNet, x: Tensor, y: Tensor, normalisation: Normalisation = "eval") -> Weights:
    """The gradient of the batch's mean loss, by the name of each trainable parameter that has one."""
    return gradient_of(net, x, lambda taps: cross_entropy(taps.logits, y).sum(), normalisation)


def gradient_of(net: TappedNet, x: Tensor, objective: Callable[[Taps], Tensor], normalisation: Normalisation = "eval") -> Weights:
    """The gradient of any objective of the net's outputs, by the name of each trainable parameter that has one."""
    weights = {name: value for name, value in net.named_parameters() if value.requires_grad}
    with scoring(net, normalisation), torch.enable_grad():
        gradients = torch.autograd.grad(objective(net(x)), list(weights.values()), allow_unused=True)
    net.meter.count(forward=len(x), backward=len(x))
    return {name: value for name, value in zip(weights, gradients, strict=True) if value is not None}


def rate_ahead(asked: float | None, of_sgd: float | None) -> float:
    """How far to look ahead: as asked, else as far as gradient descent goes, else 0.1: other optimizers' rates mean otherwise."""
    if asked is not None:
        return asked
    return RATE_WITHOUT_SGD if of_sgd is None else of_sgd


def step_ahead(net: TappedNet, direction: Weights, rate: float) -> Weights:
    """The weights after one plain step of gradient descent that is not taken."""
    weights = dict(net.named_parameters())
    return {name: weights[name].detach() - rate * value for name, value in direction.items()}


def gradients_of_groups(net: TappedNet, x: Tensor, y: Tensor, scope: Literal["all", "heads"] = "all") -> Tensor:
    """Return `[n, P]`: for each of n groups of images `x [n, b, …]`, `y [n, b]`, the gradient of the group's mean
    loss as one vector.

    Groups of one image give gradients of single images. BatchNorm uses its running statistics, so that no image of a group, and no
    group, changes what another gives. `heads` leaves out all weights but those of the classification heads.
    """
    trained = trainable(net)
    if scope == "heads":
        trained = {name: value for name, value in trained.items() if name.startswith("classifier.")}
    if y.shape[1] > 1:  # a plain pass for each group takes two thirds of the time of one for all groups at once
        vectors = next(iter(trained.values())).new_empty(len(x), sum(value.numel() for value in trained.values()))
        for group, (labels, vector) in enumerate(zip(y, vectors, strict=True)):
            found = gradient(net, x[group], labels)
            parts = [found[name] if name in found else torch.zeros_like(value) for name, value in trained.items()]
            torch.cat([part.flatten() for part in parts], out=vector)
        return vectors
    every = gradients_of_each(net, trained, lambda logits, labels: cross_entropy(logits, labels).sum(), x, y)
    return torch.cat([value.flatten(1) for value in every.values()], dim=1)


def trainable(net: TappedNet) -> Weights:
    return {name: value.detach() for name, value in net.named_parameters() if value.requires_grad}


def gradients_of_each(net: TappedNet, weights: Weights, score: Callable[..., Tensor], x: Tensor, *given: Tensor) -> Weights:
    """Return `{name: [n, …]}`: the gradients of `score(logits, *given)` for each of n groups of images `x [n, b,
    …]`, by `torch.func`.

    `given` are tensors whose first axis is the group, such as labels `[n, b]`. BatchNorm uses its running statistics.
    """
    others = {name: value.detach() for name, value in net.named_parameters() if name not in weights}

    def of_one(weights: Weights, images: Tensor, *rest: Tensor) -> Tensor:
        return score(functional_call(net, (weights, others), (images,)).logits, *rest)

    images = next(leaf.shape[0] * leaf.shape[1] for _, leaf in leaves(x))
    # Fused attention has no rule for many gradients at once and would fall back to one after the other.
    with scoring(net, "eval"), sdpa_kernel(SDPBackend.MATH), alone():
        found: Weights = vmap(grad(of_one), in_dims=(None, *(0 for _ in (x, *given))))(weights, x, *given)
    net.meter.count(forward=images, backward=images)
    return found


def features_of(net: TappedNet, images: Tensor) -> Tensor:
    """Return `[B, D]`: the deepest tapped layer's features of raw images, in evaluation mode."""
    parts = [taps.features[-1] for _, taps in net.sweep(images)]
    return torch.cat(parts) if parts else torch.zeros(0, net.width, device=net.classifier.weight.device)
