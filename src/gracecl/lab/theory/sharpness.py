"""How sharp a minimum is: the rise of the loss when the weights are moved a little, in proportion to their size.

    sharpness = mean over directions d of [ L(w + d) + L(w - d) ] / 2 - L(w),   |d_i| = radius · |w_i| for every weight tensor i

d is uniform on the sphere of its norm, tensor by tensor, so that the scale of a layer before a BatchNorm does not matter. Both ways
of each direction are taken, so that the slope drops out and the curvature is left: for L = ½ wᵀ A w the expectation is
½ Σ_i radius² |w_i|² tr(A_ii) / n_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl import checkpoint, rng
from gracecl.core import Ints
from gracecl.lab.runs.run import Work, learner_and_stream
from gracecl.nets.tapped import TappedNet

RADIUS, DIRECTIONS = 0.05, 10


def sharpness(
    loss: Callable[[], float], weights: Sequence[Tensor], radius: float = RADIUS, directions: int = DIRECTIONS, seed: int = 0
) -> float:
    """Return the mean rise of `loss()` when the weights are moved; they are restored afterwards."""
    here, rises = loss(), []
    saved = [value.detach().clone() for value in weights]
    try:
        for number in range(directions):
            draws = rng.generator(seed, "sharpness", number)
            moves = [direction(value, radius, draws) for value in saved]
            both = []
            for sign in (1, -1):
                put(weights, [value + sign * move for value, move in zip(saved, moves, strict=True)])
                both.append(loss())
            rises.append(sum(both) / 2 - here)
    finally:
        put(weights, saved)
    return sum(rises) / len(rises)


def direction(value: Tensor, radius: float, draws: np.random.Generator) -> Tensor:
    """Draw uniformly from the sphere with this fraction of the tensor's norm as radius."""
    drawn = torch.from_numpy(draws.standard_normal(tuple(value.shape))).to(value)
    moved: Tensor = drawn * (radius * value.norm() / drawn.norm().clamp(min=1e-30))
    return moved


def put(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


def mean_cross_entropy(net: TappedNet, images: Tensor, labels: Ints) -> float:
    """Return the mean over images and heads, in evaluation mode."""
    total = 0.0
    for rows, taps in net.sweep(images):
        y = torch.from_numpy(labels[rows]).to(taps.logits.device)
        total += float(F.cross_entropy(taps.logits.flatten(0, 1), y.repeat(net.layers), reduction="sum")) / net.layers
    return total / len(labels)


def of_run(folder: Path) -> float:
    """Return the sharpness at a finished run's last weights, on the images of its memory."""
    work = Work.begun(folder)
    engine, _ = learner_and_stream(work.as_begun(), work.data_root, allotted=work.allotted)
    engine.load_state_dict(checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"])
    memory = engine.memories.replay
    images, labels, _ = memory.examples
    return sharpness(lambda: mean_cross_entropy(engine.net, images, labels), list(engine.net.backbone.parameters()))
