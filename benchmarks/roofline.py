"""How much of the machine's arithmetic a step uses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Row, in_turns, row
from benchmarks.scene import CIFAR, Scene
from benchmarks.step_model import CLASSES, load

PRODUCT = 2048
"""rows and columns of the matrices whose product is the roof"""


def rows(quick: bool) -> Iterator[Row]:
    """The roofline: the step's arithmetic per second against that of a large matrix product in the same minute."""
    matrix = torch.randn(PRODUCT, PRODUCT)
    for width in (4,) if quick else (8, 20, 64):
        scene = Scene("mose()", f"resnet18(width={width})")
        flops = scene.images_per_step() * load(width, scene.engine.net.layers, CIFAR[1], CLASSES).flops
        step, product = in_turns(scene.step, lambda: matrix @ matrix, repeats=2 if quick else 9 if width < 64 else 3)
        achieved, roof = flops / step / 1e9, 2 * PRODUCT**3 / product / 1e9
        yield row(
            f"roofline, width {width}",
            "GFLOP/s of a mose step",
            f"GFLOP/s of a product of matrices of {PRODUCT} × {PRODUCT}",
            achieved / roof,
            aim=None,
            gflops=float(np.median(achieved)),
            gflops_against=float(np.median(roof)),
        )
