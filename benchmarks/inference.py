"""A net that does not learn, by layout, batch and backend; scoring passes with 256 images at once and with what caches hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.measure import Row, compare
from gracecl import nets
from gracecl.engine.recipe import memory_format
from gracecl.inputs import Images
from gracecl.nets.inference import Inference, Vectors, example_images

LARGE, SMALL = 250, 256
"""images at once without regard to caches: of the trunk, and of scoring passes before they went by the maps"""


def rows(quick: bool) -> Iterator[Row]:
    yield from trunk(quick)
    for width in (8, 20):
        yield sweep(width, quick)


def trunk(quick: bool) -> Iterator[Row]:
    """EfficientNet-Lite0 at 128 px, or a small net where quick."""
    name, side, count, repeats = ("resnet18(width=4)", 16, 32, 2) if quick else ("efficientnet_lite0", 128, LARGE, 5)
    inputs = Images((3, side, side))
    net, images = nets.build(name, inputs, 1, 1).eval(), example_images(inputs, count)
    plain = Vectors(net.backbone, inputs).eval().requires_grad_(False)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ways = {"channels last": passes(last, images, count), "by cache, folded": by(Inference(net, inputs, "torch"), images)}
    if find_spec("onnxruntime") and find_spec("onnx"):
        ways["ONNX Runtime"] = by(Inference(net, inputs, "onnx"), images)
    for way, ours in ways.items():
        yield compare(
            f"frozen trunk, {way}",
            f"images per second of {name} at {side} px, {way}",
            f"contiguous, {count} images at once",
            passes(plain, images, count),
            ours,
            aim=None,
            repeats=repeats,
            images=count,
        )


def sweep(width: int, quick: bool) -> Row:
    """A scoring pass at 32 px."""
    inputs, count, repeats = Images((3, 32, 32)), 256 if quick else 1024, 2 if quick else 9
    net = nets.build(f"resnet18(width={width})", inputs, 100, 4).eval()
    net = net.to(memory_format=memory_format("auto", net, torch.device("cpu"), 32))  # type: ignore[call-overload]
    images = example_images(inputs, count)

    def scored(batch: int | None) -> Callable[[], None]:
        return lambda: [None for _ in net.sweep(images, batch)].clear()

    return compare(
        f"scoring pass, width {width}",
        f"images per second of a sweep with {net.at_once(images)} images at once",
        f"{SMALL} at once",
        scored(SMALL),
        scored(None),
        aim=None,
        repeats=repeats,
        images=count,
    )


def passes(module: torch.nn.Module, images: Tensor, batch: int) -> Callable[[], None]:
    def call() -> None:
        with torch.inference_mode():
            for start in range(0, len(images), batch):
                module(images[start : start + batch])

    return call


def by(inference: Inference, images: Tensor) -> Callable[[], None]:
    array = images.numpy()

    def call() -> None:
        inference(array)

    return call
