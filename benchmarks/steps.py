"""What a step costs beyond its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from benchmarks.hand import ReplayLoop, bare_step, two_layers
from benchmarks.measure import Row, added_row, compare, in_turns, timed
from benchmarks.scene import CIFAR, Scene
from benchmarks.step_model import CLASSES, load
from gracecl import rng
from gracecl.core import StreamBatch, Taps, total
from gracecl.images import augment

DIGIT = (1, 8, 8)
MOSE_IMAGES = 384
"""96 images in four views: 10 new and 22 of their task, and 64 of all tasks"""
STEPS_PER_TASK = 500
"""CIFAR-100 in ten tasks"""


def rows(quick: bool) -> Iterator[Row]:
    yield from small_steps(quick)
    yield replay_on_resnet(quick)
    for width in (4,) if quick else (20, 64):
        yield from layered_steps(width, quick)
    for width in (4,) if quick else (20, 64):
        yield taps(width, quick)
    yield augmentation(4 if quick else 20, quick)


def small_steps(quick: bool) -> Iterator[Row]:
    """Where the arithmetic is next to nothing, all else shows."""
    scenes = {}
    repeats, inner = (3, 50) if quick else (31, 300)
    for memory in (500, 5000):
        scene = scenes[memory] = Scene("er(n_recall=10)", "mlp(width=100, depth=2)", memory, DIGIT, 10, augment="none")
        hand = by_hand(scene, two_layers(64, 100, 10), memory, n_recall=10)
        yield compare(
            f"er step, 2-layer MLP, memory {memory:,}",
            "er, 10 + 10 images of 8×8, on a 2-layer MLP",
            "the same loop written by hand",
            scene.step,
            hand.step,
            aim=1.5,
            repeats=repeats,
            inner=inner,
            warmup=20,
        )
    yield compare(
        "er step, memory 5,000 against 500",
        "er on the MLP with a memory of 5,000 (meant to be equal)",
        "with one of 500",
        scenes[5000].step,
        scenes[500].step,
        aim=1.1,
        repeats=repeats,
        inner=inner,
    )


def replay_on_resnet(quick: bool) -> Row:
    width = 4 if quick else 20
    scene = Scene("er(n_recall=64)", f"resnet18(width={width})", augment="none")
    hand = by_hand(scene, OneHead(Scene("er", f"resnet18(width={width})").engine.net), 1000, n_recall=64)
    return compare(
        f"er step, ResNet-18 width {width}",
        "er, 10 + 64 images",
        "the same loop written by hand",
        scene.step,
        hand.step,
        aim=1.05,
        repeats=3 if quick else 31,
    )


def layered_steps(width: int, quick: bool) -> Iterator[Row]:
    net = f"resnet18(width={width})"
    repeats = 2 if quick else 15 if width < 64 else 5
    scenes = {method: Scene(method, net) for method in ("mose()", "grace(mose())")}
    for method, scene in scenes.items():
        assert scene.images_per_step() == MOSE_IMAGES
        yield compare(
            f"{method} step, ResNet-18 width {width}",
            f"{method} on {MOSE_IMAGES} images",
            f"forward, backward and optimizer of the same net on {MOSE_IMAGES} ready images, mean cross-entropy",
            scene.step,
            bare_step(scene.engine.net, torch.randn(MOSE_IMAGES, *CIFAR)),
            aim=1.15,
            repeats=repeats,
        )
    yield feedback(width, scenes["grace(mose())"], scenes["mose()"], repeats)


def feedback(width: int, grace: Scene, mose: Scene, repeats: int) -> Row:
    """What GRACE adds, timed by itself and added to MOSE's step: steps vary by more than it takes.

    It makes a longer table of losses, backward included, and scores the memory once a task.
    """
    with_it, without = (objective(scene) for scene in (grace, mose))
    both = np.array([in_turns(with_it, without, repeats=11) for _ in range(repeats)])
    added = np.median(both[:, 0] - both[:, 1], axis=1)
    added += timed(lambda: grace.engine.chain.end_task(grace.engine.memories, grace.engine.progress)) / STEPS_PER_TASK
    step = np.array([timed(mose.step) for _ in range(repeats)])
    what = f"a step of mose() with what grace adds to it, its look at the memory shared among {STEPS_PER_TASK} steps"
    return added_row(f"grace(mose()) against mose(), width {width}", what, added, step, aim=1.02)


def objective(scene: Scene) -> Callable[[], None]:
    """The method's losses and their gradients at the taps, on a step's images; the backbone is left out."""
    engine = scene.engine
    new = StreamBatch(scene.images[:10], scene.labels[:10], np.arange(10), progress=engine.progress)
    batch = engine.assemble(engine.plan(new), new)
    with torch.no_grad():
        out = engine.net(batch.x)
    features, logits = out.features.requires_grad_(), out.logits.requires_grad_()

    def work() -> None:
        total(engine.chain.losses(Taps(features, logits, engine.net.projector), batch)).backward()  # type: ignore[no-untyped-call]

    return work


def taps(width: int, quick: bool) -> Row:
    """What gates and separable chains cost beyond their share of the arithmetic."""
    tapped, plain = (Scene("er", f"resnet18(width={width})", memory=10, taps=taps).engine.net for taps in (4, 1))
    x = torch.randn(32 if quick else MOSE_IMAGES, *CIFAR)
    flops = [load(width, taps, CIFAR[1], CLASSES).flops for taps in (4, 1)]
    return compare(
        f"tapped net against plain, width {width}",
        "forward + backward of ResNet-18 with four taps, beyond the ratio of their FLOPs",
        "the plain ResNet-18 on the same images",
        lambda: forward_backward(tapped, x),
        lambda: forward_backward(plain, x),
        aim=1.15,
        repeats=2 if quick else 15 if width < 64 else 5,
        divide_by=flops[0] / flops[1],
        flops_ratio=flops[0] / flops[1],
        gflop=len(x) * flops[0] / 1e9,
        gflop_against=len(x) * flops[1] / 1e9,
    )


def augmentation(width: int, quick: bool) -> Row:
    """The four views of 96 images, as MOSE makes them, against the step they feed."""
    scene = Scene("mose()", f"resnet18(width={width})")
    pixels, tau = scene.engine.net.inputs, augment.augmentation("tau")
    views = (), (augment.Mirror(),), tau, (augment.Mirror(), *tau)
    images, ids = scene.images[: MOSE_IMAGES // 4], np.arange(MOSE_IMAGES // 4)

    def augmented() -> None:
        base = pixels.normalise(images)
        for number, view in enumerate(views):
            augment.apply(view, base, rng.uniform(number, ids, augment.draws(view)), pixels)

    return compare(
        f"augmentation, width {width}",
        f"making the {MOSE_IMAGES} images of a MOSE step",
        "the bare convolution step that they feed",
        augmented,
        bare_step(scene.engine.net, torch.randn(MOSE_IMAGES, *CIFAR)),
        aim=0.05,
        repeats=3 if quick else 15,
    )


class OneHead(nn.Module):
    """A plain ResNet-18 with a linear layer on top, as one writes it by hand."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.backbone = net.backbone
        self.head = nn.Linear(net.width, net.classes)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)[0])  # type: ignore[operator, no-any-return]


def by_hand(scene: Scene, net: nn.Module, memory: int, n_recall: int) -> ReplayLoop:
    return ReplayLoop(net, scene.images, torch.from_numpy(scene.labels), scene.engine.net.inputs, memory, n_recall)


def forward_backward(net: nn.Module, x: torch.Tensor) -> None:
    for parameter in net.parameters():
        parameter.grad = None
    net(x).logits.square().mean().backward()
