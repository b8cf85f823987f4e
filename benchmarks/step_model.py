"""Seconds per step as a function of the net and the images: measured, and a model fitted to what was measured.

    seconds = overhead + images · (FLOPs / rate + bytes of activations / bandwidth)

FLOPs are those of an image's forward and backward, bytes those that its forward writes, both with channels rounded up to whole
vectors of the CPU: its convolutions work on such blocks, so that the first stage of width 12 costs what that of 16 would. Overhead,
rate and bandwidth are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor, nn

from benchmarks.measure import Row, compare, timed
from benchmarks.scene import Scene
from gracecl import nets, rng
from gracecl.inputs import Images
from gracecl.lab.runs.run import with_threads
from gracecl.nets.tapped import BatchNorm

LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""floats in a vector of this CPU, hence channels in a block of its convolutions"""
CLASSES = 100

# What an image asks of a net, counted.


@dataclass(frozen=True)
class Load:
    """Of one image. FLOPs are those of the convolutions and the classifiers."""

    forward_flops: float
    flops: float
    """forward and backward"""
    blocked_flops: float
    """the same with channels in whole blocks"""
    blocked_bytes: float
    """written by convolutions and BatchNorms in a forward, with channels in whole blocks"""


@lru_cache
def load(width: int, taps: int, side: int, classes: int) -> Load:
    """Noted while one image goes through the net.

    Not by torch's FlopCounterMode, which counts the gradient of a depthwise kernel as if each channel met all others.
    """
    with rng.torch_seed(0, "bench cost"):
        net = nets.build(f"resnet18(width={width})", Images((3, side, side)), classes, taps)
    forward = flops = blocked_flops = blocked_bytes = 0

    def note(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        nonlocal forward, flops, blocked_flops, blocked_bytes
        blocked_bytes += out[:, 0].nbytes * blocks(out.shape[1])
        if isinstance(module, nn.Conv2d):
            outputs, into, *kernel = module.weight.shape
            per_pair = 2 * out[:, 0].numel() * prod(kernel)
            times = 2 + inputs[0].requires_grad  # forward, gradient of the kernel, and of the input unless it is the image
            forward += per_pair * outputs * into
            flops += times * per_pair * outputs * into
            blocked_flops += times * per_pair * blocks(outputs) * (into if module.groups > 1 else blocks(into))

    for module in net.modules():
        if isinstance(module, (nn.Conv2d, BatchNorm)):
            module.register_forward_hook(note)
    net(torch.zeros(1, 3, side, side))
    heads = 2 * net.classifier.weight.numel()
    return Load(forward + heads, flops + 3 * heads, blocked_flops + 3 * heads, blocked_bytes)


def blocks(channels: int) -> int:
    """The channels that a convolution works on for the sake of these."""
    return -(-channels // LANES) * LANES


# What a step takes, measured.


@dataclass(frozen=True)
class Point:
    """A step on one thread, with 100 classes and a memory of 1,000."""

    method: str
    width: int
    taps: int
    side: int
    images: int
    seconds: float


def measure(quick: bool) -> list[Point]:
    """In rounds over all settings, and of each the fastest round: another program can only make a step slower."""
    recalls, widths = ((64,), (4, 8)) if quick else ((64, 128, 256), (8, 12, 20))
    er = [(f"er(n_recall={recalled})", taps) for recalled in recalls for taps in (1, 4)]
    settings = [(method, width, taps, 32) for width in widths for method, taps in [*er, ("mose()", 4)]]
    # A wide net (the paper's) and Tiny-ImageNet's size, once each: leaving these out shows how far the model carries.
    settings += [("er(n_recall=64)", 16 if quick else 64, 1, 32), ("er(n_recall=64)", widths[0], 1, 64)]
    with with_threads(1):  # as each of several runs side by side has
        scenes = [
            Scene(method, f"resnet18(width={width})", shape=(3, side, side), classes=CLASSES, taps=taps, device="cpu")
            for method, width, taps, side in settings
        ]
        images = [scene.images_per_step() for scene in scenes]
        seconds = np.min([[timed(scene.step) for scene in scenes] for _ in range(1 if quick else 5)], axis=0)
    return [Point(*setting, n, float(s)) for setting, n, s in zip(settings, images, seconds, strict=True)]


def ratios(quick: bool) -> list[Row]:
    """What a step hardly depends on, and an image that is only scored against one that is learned."""
    width, repeats = (4, 2) if quick else (8, 15)

    def er(memory: int = 200, classes: int = 10) -> Callable[[], Any]:
        return Scene("er", f"resnet18(width={width})", memory, classes=classes, taps=4, device="cpu").step

    with with_threads(1):
        scene = Scene("er", f"resnet18(width={4 if quick else 20})", taps=4, device="cpu")
        net, scored = scene.engine.net, scene.images[: scene.images_per_step()]
        return [
            compare("classes", "an er step, 200 classes", "10 classes", er(classes=200), er(), None, repeats=repeats),
            compare("memory", "an er step, a memory of 5,000", "one of 200", er(memory=5_000), er(), None, repeats=repeats),
            compare(
                "scored", "an image scored", "an image learned", lambda: [*net.sweep(scored)], scene.step, None, repeats=repeats
            ),
        ]


# The model.


@dataclass(frozen=True)
class CostModel:
    """Seconds on one thread."""

    overhead: float
    """of a step, whatever its images"""
    per_flop: float
    per_byte: float
    scored: float = 1 / 3
    """what an image costs that is only scored, in images learned"""

    def seconds(self, width: int, taps: int, images: float, side: int = 32, classes: int = CLASSES, steps: float = 1) -> float:
        """Of so many steps, with so many images learned in all of them together."""
        each = load(width, taps, side, classes)
        return steps * self.overhead + images * (self.per_flop * each.blocked_flops + self.per_byte * each.blocked_bytes)


def fit(points: Sequence[Point], scored: float = 1 / 3) -> CostModel:
    """Least squares of the relative errors, with no term negative."""
    loads = [(point.images, load(point.width, point.taps, point.side, CLASSES)) for point in points]
    terms = np.array([[1, images * each.blocked_flops, images * each.blocked_bytes] for images, each in loads])
    relative = terms / [[point.seconds] for point in points]
    scale = relative.max(axis=0)
    found = LinearRegression(positive=True, fit_intercept=False).fit(relative / scale, np.ones(len(points)))
    overhead, per_flop, per_byte = (found.coef_ / scale).tolist()
    return CostModel(overhead, per_flop, per_byte, scored)


def error(model: CostModel, point: Point) -> float:
    """Relative: predicted over measured, less one."""
    return model.seconds(point.width, point.taps, point.images, point.side) / point.seconds - 1


def leave_one_out(points: Sequence[Point]) -> list[float]:
    """At each point the error of the model that was fitted to all others."""
    return [error(fit([*points[:at], *points[at + 1 :]]), point) for at, point in enumerate(points)]
