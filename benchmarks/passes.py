"""What evaluation and class means cost beyond one forward over their images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Row, compare
from benchmarks.scene import CIFAR, Scene, plain_forward
from gracecl.engine.evaluate import evaluate
from gracecl.nets.class_means import class_means


def rows(quick: bool) -> Iterator[Row]:
    width, tests, repeats = (4, 200, 2) if quick else (20, 2000, 15)
    scene = Scene("mose()", f"resnet18(width={width})")
    engine, memory = scene.engine, scene.engine.memories.replay
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 256, (tests, *CIFAR), dtype=np.uint8))
    labels = rng.integers(0, 100, tests)
    engine.ready_to_predict()
    yield compare(
        "evaluation",
        f"accuracy on {tests:,} test images of all tasks by all taps, linear and nearest mean, with calibration",
        "one batched forward over them",
        lambda: evaluate(engine, images, labels, labels // 20),
        plain_forward(scene, images, engine.net.at_once(images)),
        aim=1.1,
        repeats=repeats,
    )
    yield compare(
        "class means",
        f"class means of a memory of {len(memory):,} images at all taps",
        "one batched forward over them",
        lambda: class_means(engine.net, memory.images, memory.labels, engine.progress.seen),
        plain_forward(scene, memory.images, engine.net.at_once(memory.images)),
        aim=1.1,
        repeats=repeats,
    )
