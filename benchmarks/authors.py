"""MOSE's step here and in its authors' program, from the user's own checkout of https://github.com/AnAppleCore/MOSE.

Nothing of that program is part of gracecl. Its net, buffer and agent are imported from the checkout and used as its own command
uses them: `agent.train(task, loader)`, plain Adam, images normalised beforehand. Two things differ: it is written for a GPU and
runs here on the CPU in full precision, and its net's width is chosen by the argument `nf` that it has for that.

The loop over batches is inside `agent.train`, so turns are taken in the loader: whenever the loop asks for its next batch, a step
of ours is made and timed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import io
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import Floats, Row, row, timed
from benchmarks.scene import CIFAR, STREAM_BATCH, TASKS, Scene
from gracecl.core import Batch, Block, total
from gracecl.errors import UserError
from gracecl.lab.runs.jobs import cores
from gracecl.nets import TappedNet

ADDRESS = "https://github.com/AnAppleCore/MOSE"
FILES = ("agent/mose.py", "models/Resnet18_SD.py", "models/buffer.py", "losses/loss.py", "utils/__init__.py")
PACKAGES = ("agent", "models", "losses", "utils")
UNUSED = ("kornia", "kornia.augmentation", "kornia.augmentation.auto")
"""imported by the program for augmentations that MOSE does not use"""
REPEATS = {8: 21, 20: 11, 64: 5}
"""width -> steps of each side"""
WARMUP = 2
"""the first step of a task has fewer images, and the second meets the last of its classes"""
TASK = TASKS - 1
MEMORY, CLASSES = 1000, 100
PER_TASK = CLASSES // TASKS


def rows(quick: bool, checkout: Path) -> Iterator[Row]:
    """Seconds per step, ours over theirs, with one thread and two; and how far the losses and gradients of both are apart."""
    program = Program(checkout)
    shape = (3, 8, 8) if quick else CIFAR
    threads = torch.get_num_threads()
    try:
        for width in (4,) if quick else REPEATS:
            yield same_objective(program, width, shape)
            for number in (1,) if quick else range(1, min(2, cores()) + 1):
                torch.set_num_threads(number)
                yield step_against_theirs(program, width, shape, number, 2 if quick else REPEATS[width])
    finally:
        torch.set_num_threads(threads)


def check(checkout: Path | None) -> Path:
    """The folder of the authors' program, or a sentence that says what is wrong with it."""
    if checkout is None:
        raise UserError(f"the part 'authors' needs your own checkout of {ADDRESS}; say where it is with --mose PATH")
    if not checkout.is_dir():
        raise UserError(f"there is no folder {checkout}; --mose takes a checkout of {ADDRESS}")
    missing = [name for name in FILES if not (checkout / name).is_file()]
    if missing:
        raise UserError(f"{checkout} is no checkout of {ADDRESS}: it has no {', '.join(missing)}")
    return checkout


class Program:
    """The authors' modules, imported from a checkout."""

    def __init__(self, checkout: Path) -> None:
        path = check(checkout).resolve()
        with as_on_gpu(), their_modules(path):
            try:
                self.agent: Any = importlib.import_module("agent.mose")
                self.net: Any = importlib.import_module("models.Resnet18_SD").resnet18_sd
                self.buffer: Any = importlib.import_module("models.buffer").Buffer
            except (ImportError, AttributeError, SyntaxError, RuntimeError, OSError) as error:
                raise UserError(f"the program in {checkout} cannot be imported ({type(error).__name__}: {error})") from None

    def learner(self, width: int, scene: Scene) -> Any:
        """Their agent where the scene's engine is: in the last task, with a full memory of all tasks' images."""
        options = SimpleNamespace(
            dataset="cifar100",
            n_classes=CLASSES,
            batch_size=STREAM_BATCH,
            buffer_size=MEMORY,
            buffer_batch_size=64,
            epoch=1,
            ins_t=0.07,
            expert="3",
            classifier="ncm",
            augmentation="ocm",
        )
        shape = tuple(scene.images.shape[1:])
        with as_on_gpu():
            net, buffer = self.net(CLASSES, nf=width), self.buffer(options, shape)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4)
            agent = self.agent.MOSE(model=net, buffer=buffer, optimizer=optimizer, input_size=shape, args=options)
            images = scene.engine.net.inputs.normalise(scene.images)
            rng = np.random.default_rng(0)
            for task in range(TASKS):
                labels = torch.from_numpy(rng.integers(task * PER_TASK, (task + 1) * PER_TASK, len(images)))
                buffer.add_reservoir(x=images, y=labels, logits=None, t=task)
            agent.class_holder = list(range(TASK * PER_TASK))
        return agent


def step_against_theirs(program: Program, width: int, shape: tuple[int, int, int], threads: int, repeats: int) -> Row:
    scene = Scene("mose()", f"resnet18(width={width})", MEMORY, shape, CLASSES)
    agent = program.learner(width, scene)
    sizes: list[int] = []
    agent.model.conv1.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    ours, theirs = in_turns_with(agent, scene, repeats)
    return row(
        f"mose() step, width {width}, {threads} thread{'s' if threads > 1 else ''}",
        f"mose() on {scene.images_per_step()} images",
        f"a step of its authors' program on {sizes[-1]} images",
        ours / theirs,
        1.0,
        seconds=float(np.median(ours)),
        seconds_against=float(np.median(theirs)),
        images=scene.images_per_step(),
        images_against=sizes[-1],
        threads=threads,
    )


def in_turns_with(agent: Any, scene: Scene, repeats: int) -> tuple[Floats, Floats]:
    """Seconds of our steps and of theirs: a b, b a, a b, … as in `measure.in_turns`."""
    ours, theirs = np.zeros(repeats), np.zeros(repeats)

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        batches = stream(scene)
        for batch in itertools.islice(batches, WARMUP):
            scene.step()
            yield batch
        for repeat, batch in enumerate(itertools.islice(batches, repeats)):
            if repeat % 2 == 0:
                ours[repeat] = timed(scene.step)
            started = time.perf_counter()
            yield batch
            theirs[repeat] = time.perf_counter() - started
            if repeat % 2 == 1:
                ours[repeat] = timed(scene.step)
            gc.collect()

    gc.disable()
    try:
        with as_on_gpu():
            agent.train(TASK, loader())
    finally:
        gc.enable()
    return ours, theirs


def stream(scene: Scene) -> Iterator[tuple[Tensor, Tensor]]:
    """The scene's images, ten at a time, as the authors' loader gives them; two batches bring all classes of the task."""
    images = scene.engine.net.inputs.normalise(scene.images)
    labels = TASK * PER_TASK + torch.arange(len(images)) % PER_TASK
    for start in itertools.cycle(range(0, len(images) - STREAM_BATCH + 1, STREAM_BATCH)):
        yield images[start : start + STREAM_BATCH], labels[start : start + STREAM_BATCH]


def same_objective(program: Program, width: int, shape: tuple[int, int, int]) -> Row:
    """How far both are apart, from equal weights on equal images in double precision: each loss, and the gradient as a whole.

    Double precision, because in single precision a ReLU that flips at the last bit moves gradients by up to a hundredth.
    """
    scene = Scene("mose()", f"resnet18(width={width})", MEMORY, shape, CLASSES, layout="contiguous")
    agent = program.learner(width, scene)
    net, method = scene.engine.net.double(), scene.engine.method
    for mine, weight in zip(ours_in_order(net, data), theirs_in_order(agent.model.double(), data), strict=True):
        mine.copy_(weight)
    x, labels, theirs, their_gradient = one_step(program, agent, next(stream(scene)))
    images = STREAM_BATCH * 4
    blocks = {
        "new": Block(0, STREAM_BATCH, 4, STREAM_BATCH, ()),
        "balanced": Block(images, (len(x) - images) // 4, 4, 0, ()),
    }
    current = tuple(dict.fromkeys(labels[:STREAM_BATCH].tolist()))
    progress = replace(scene.engine.progress, current=current)
    table = method.losses(net(x), Batch(x, labels.numpy(), np.arange(len(x)), blocks, progress, CLASSES, seed=0))
    losses = {name: value.sum() for name, value in table.items()}
    total(table).backward()  # type: ignore[no-untyped-call]
    ours = {
        "contrast": losses["sc"].item(),
        "cross-entropy": (losses["ce/new"] + losses["ce/balanced"]).item(),
        "distillation": losses["rsd"].item(),
    }
    found: dict[str, Any] = {f"{name}_apart": abs(ours[name] - theirs[name]) / abs(theirs[name]) for name in ours}
    apart = flat(ours_in_order(net, gradient)) - their_gradient
    found["gradient_apart"] = float(apart.norm() / their_gradient.norm())
    return row(
        f"objective apart, width {width}",
        "largest relative difference of contrast, cross-entropy, distillation and the gradient, in double precision",
        "the authors' program with equal weights on equal images",
        max(found.values()),
        1e-6,
        **found,
    )


def one_step(program: Program, agent: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, float], Tensor]:
    """A step of theirs on one batch: the images that it made of it, their labels, its losses, and its gradient."""
    seen: dict[str, Tensor] = {}
    contrast = program.agent.sup_con_loss

    def in_double(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        seen["x"] = inputs[0].double()
        return (seen["x"],)

    def noting_labels(features: Tensor, temperature: float, labels: Tensor) -> Tensor:
        seen["labels"] = labels
        return contrast(features, temperature, labels)  # type: ignore[no-any-return]

    def noting_gradient(*_: Any) -> None:
        seen["gradient"] = flat(theirs_in_order(agent.model, gradient))

    agent.model.conv1.register_forward_pre_hook(in_double)
    agent.optimizer.register_step_pre_hook(noting_gradient)
    with as_on_gpu(), mock.patch.object(program.agent, "sup_con_loss", noting_labels):
        logged = agent.train(TASK, [batch])[0]
    names = {"contrast": "train/ins", "cross-entropy": "train/ce", "distillation": "train/distill"}
    return (
        seen["x"],
        seen["labels"],
        {name: torch.as_tensor(logged[key], dtype=torch.float64).item() for name, key in names.items()},
        seen["gradient"],
    )


def theirs_in_order(net: nn.Module, value: Callable[[nn.Parameter], Tensor]) -> list[Tensor]:
    """The values of their parameters: stem, stages, gates, chains, classifiers, projectors, adaptation."""
    names = (
        "conv1",
        "bn1",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
        "attention_layers",
        "feature_alignment_layer",
        "linear",
        "simclr",
    )
    parts = [*(net.get_submodule(name) for name in names), net.get_submodule("final_addaption_layer")]
    return [value(parameter) for part in parts for parameter in part.parameters()]


def ours_in_order(net: TappedNet, value: Callable[[nn.Parameter], Tensor]) -> list[Tensor]:
    """The values of our parameters in the order and the shapes of theirs; they have a head per expert where we have a stack."""
    trunk = (net.backbone.get_submodule(name) for name in ("stem", "stages", "gates", "chains"))
    heads = [
        part
        for head in (net.classifier, net.projector)
        for weight, bias in zip(value(head.weight), value(head.bias), strict=True)
        for part in (weight.T, bias[0])
    ]
    adaptation = [value(parameter) for parameter in net.extras["adaptation"].parameters()]
    return [*(value(parameter) for part in trunk for parameter in part.parameters()), *heads, *adaptation]


def data(parameter: nn.Parameter) -> Tensor:
    return parameter.data


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """What is meant for a GPU stays on the CPU, in full precision; nothing is printed.

    Where no GPU is available, PyTorch's autocast and gradient scaling do nothing by themselves.
    """

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    with contextlib.ExitStack() as patched:
        for kind in (Tensor, nn.Module):
            patched.enter_context(mock.patch.object(kind, "cuda", stay))
        patched.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=False))
        patched.enter_context(contextlib.redirect_stdout(io.StringIO()))
        patched.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def their_modules(path: Path) -> Iterator[None]:
    """Lets the program's modules be imported, whose names are common ones, and forgets these names afterwards.

    Packages are made here without their `__init__`, which would import every other method of the program and all that those need.
    """
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    for name in ("agent", "models"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path / name)]
    if importlib.util.find_spec("kornia") is None:
        sys.modules |= {name: Unused(name) for name in UNUSED}
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))
        for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, "kornia")]:
            del sys.modules[name]
        sys.modules |= {name: module for name, module in before.items() if name not in sys.modules}


class Unused(ModuleType):
    """Stands for a package that is imported and not used."""

    def __getattr__(self, name: str) -> None:
        return None
