"""Learners in the middle of a stream of random images: the benchmark's subjects. Speed does not depend on what the pixels show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Ints, StreamBatch
from gracecl.engine.engine import Engine, StepResult
from gracecl.engine.recipe import Recipe
from gracecl.inputs import Images

CIFAR = (3, 32, 32)
STREAM_BATCH = 10
TASKS = 5


class Scene:
    """An engine in its last task, its memory full of all tasks' images and at twice its capacity of images offered."""

    def __init__(
        self, method: str, net: str, memory: int = 1000, shape: tuple[int, int, int] = CIFAR, classes: int = 100, **recipe: Any
    ) -> None:
        rng = np.random.default_rng(0)
        self.engine: Engine = Recipe(method=method, net=net, memory=memory, **recipe).build(Images(shape), classes)
        per_task = classes // TASKS
        self.images = torch.from_numpy(rng.integers(0, 256, (max(memory, 200), *shape), dtype=np.uint8))
        offered = 2 * memory // TASKS
        for task in range(TASKS):
            labels = rng.integers(task * per_task, (task + 1) * per_task, offered)
            self.engine.memories.replay.add(rng, self.images[np.arange(offered) % len(self.images)], labels, task)
        current = tuple(range((TASKS - 1) * per_task, TASKS * per_task))
        self.engine.progress = replace(
            self.engine.progress, step=1, task=TASKS - 1, seen=tuple(range(TASKS * per_task)), current=current
        )
        self.labels: Ints = rng.integers(current[0], current[-1] + 1, len(self.images))
        self._at = 0

    def step(self) -> StepResult | None:
        """Learns the next ten images."""
        start = self._at % (len(self.images) - STREAM_BATCH + 1)
        self._at += STREAM_BATCH
        rows = slice(start, start + STREAM_BATCH)
        return self.engine.learn(StreamBatch(self.images[rows], self.labels[rows], task=TASKS - 1))

    def images_per_step(self) -> int:
        outcome = self.step()
        assert outcome is not None
        return outcome.images


def plain_forward(scene: Scene, images: Tensor, batch: int) -> Callable[[], None]:
    """One batched forward over images in evaluation mode, and nothing done with what comes out."""
    net = scene.engine.net

    def forward() -> None:
        net.eval()
        with torch.no_grad():
            for start in range(0, len(images), batch):
                net(net.inputs.normalise(images[start : start + batch]))
        net.train()

    return forward
