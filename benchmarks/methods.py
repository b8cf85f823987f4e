"""What a method's step costs beyond its passes: the method against a bare loop over as many images, forward and backward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.measure import Row, compare
from benchmarks.scene import CIFAR, STREAM_BATCH, TASKS
from gracecl.core import StreamBatch
from gracecl.engine.engine import Engine, StepResult
from gracecl.engine.recipe import Recipe
from gracecl.inputs import Images
from gracecl.lab.catalogue import LEARNERS
from gracecl.nets import TappedNet
from gracecl.registry import spec

AIM = 1.3
CLASSES = 100
COUNTED_STEPS = 5
"""steps over which images are counted, as not every step of a method has as many"""
LONG_STEP = 5.0
"""seconds from which on a step is timed three times, not nine: ocm and onpro, which see 16 rotations of every image"""
SWEEP = 256
"""images at a time where no gradient is needed"""


def rows(quick: bool) -> Iterator[Row]:
    for method in LEARNERS:
        yield against_bare_loop(method, quick)


def against_bare_loop(method: str, quick: bool) -> Row:
    """A step of the stream, or of its fit for a method that has no other, against the same passes and optimizer steps alone."""
    width, shape, memory = (2, (3, 8, 8), 40) if quick else (20, CIFAR, 200)
    learner = Learner(method, width, shape, memory)
    engine = learner.engine
    started = time.perf_counter()
    outcomes = [learner.step() for _ in range(1 if quick else COUNTED_STEPS)]
    long = (time.perf_counter() - started) / len(outcomes) > LONG_STEP
    forward, backward = (
        round(float(np.mean(counts))) for counts in zip(*((found.forward, found.backward) for found in outcomes), strict=True)
    )
    net, optimizer = (engine.net, engine.optimizer) if engine.fit is None else (engine.fit.net, engine.fit.optimizer)
    updates = outcomes[-1].updates
    return compare(
        f"{method} step, width {width}",
        f"a step of {method}{'' if engine.fit is None else ' before evaluation'}",
        f"passes of the same net over {forward} images forward and {backward} backward, {updates} steps of the same optimizer",
        learner.step,
        bare_loop(net, optimizer, shape, forward, backward, updates),
        aim=AIM,
        repeats=1 if quick else 3 if long else 9,
        forward=forward,
        backward=backward,
        updates=updates,
    )


class Learner:
    """A learner in its last task, after it was taught all of them: its memory is full of all tasks' images, its teachers exist."""

    def __init__(self, method: str, width: int, shape: tuple[int, int, int], memory: int) -> None:
        self.rng = np.random.default_rng(0)
        self.shape = shape
        attention = spec.parse_method(method).chain.traits.attention
        net = f"vit(patch=4, dim={12 * width}, depth=4, heads=3)" if attention else f"resnet18(width={width})"
        recipe = Recipe(method=method, net=net, memory=memory, device="cpu")
        self.engine: Engine = recipe.build(Images(shape), CLASSES)
        for task in range(TASKS):
            for _ in range(math.ceil(memory / TASKS / (2 * STREAM_BATCH))):
                self.learn(2 * STREAM_BATCH, task)

    def learn(self, images: int, task: int) -> StepResult | None:
        per_task = CLASSES // TASKS
        labels = self.rng.integers(task * per_task, (task + 1) * per_task, images)
        pixels = torch.from_numpy(self.rng.integers(0, 256, (images, *self.shape), dtype=np.uint8))
        return self.engine.learn(StreamBatch(pixels, labels, task=task))

    def step(self) -> StepResult:
        """Ten more images of the last task, or where the stream is not trained on a step of the fit before evaluation."""
        if self.engine.chain.traits.trains == "never":
            before = self.engine.net.meter.forward
            self.learn(STREAM_BATCH, TASKS - 1)
            return StepResult({}, 0, self.engine.net.meter.forward - before)
        if self.engine.chain.traits.trains != "stream":
            self.engine.get_ready()
            assert self.engine.unfinished_fit is not None
            return self.engine.step_fit(self.engine.unfinished_fit)
        outcome = self.learn(STREAM_BATCH, TASKS - 1)
        assert outcome is not None
        return outcome


def bare_loop(
    net: TappedNet, optimizer: torch.optim.Optimizer, shape: tuple[int, int, int], forward: int, backward: int, updates: int
) -> Callable[[], None]:
    """Forward, mean cross-entropy, backward and optimizer, `updates` times over ready images; what is left goes forward alone."""
    x = torch.randn(round(backward / max(1, updates)), *shape)
    y = torch.randint(0, net.classes, (len(x),)).repeat(net.layers)
    looked_at = torch.randn(max(0, forward - updates * len(x)), *shape)

    def step() -> None:
        with torch.no_grad():
            for start in range(0, len(looked_at), SWEEP):
                net(looked_at[start : start + SWEEP])
        for _ in range(updates):
            loss = F.cross_entropy(net(x).logits.flatten(0, 1), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step
