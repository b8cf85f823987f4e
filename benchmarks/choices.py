"""What was tried for speed, against what is the default. Told, not judged; docs/performance.md concludes from it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import Row, compare, row
from benchmarks.scene import CIFAR, Scene
from benchmarks.workers import Setting, seconds_in_turns, workers
from gracecl.lab.runs.jobs import cores
from gracecl.nets import TappedNet
from gracecl.nets.resnet import enlarge

ALL = cores()
"""threads of a run that has the machine to itself"""


def rows(quick: bool) -> Iterator[Row]:
    yield from optimizers(quick)
    yield gather_buffer(quick)
    yield dense_convolution(20, 20, 32, 2, quick)
    yield dense_convolution(40, 80, 8, 1, quick)
    yield enlargement(quick)
    yield from rounding(quick)
    width = 16 if quick else 20
    default = Setting("mose()", f"resnet18(width={width})", ALL)
    tried: dict[str, dict[str, Any]] = {
        "contiguous layout": {"layout": "contiguous"},
        "bf16 autocast": {"precision": "bf16"},
        "torch.compile": {"compile": True},
        "torch.compile, contiguous": {"compile": True, "layout": "contiguous"},
    }
    for name, recipe in list(tried.items())[: 1 if quick else None]:
        yield against_default(name, Setting(default.method, default.net, ALL, recipe), default, quick)
    if not quick:
        huge_pages = Setting(default.method, default.net, ALL, environment={"THP_MEM_ALLOC_ENABLE": "1"})
        yield against_default("transparent huge pages", huge_pages, default, quick)
    for net in (default.net,) if quick else (default.net, "resnet18(width=64)"):
        launched, plain = (Setting(default.method, net, ALL, launcher=launcher) for launcher in (True, False))
        yield against_default("system's malloc", plain, launched, quick)
    yield from threads(quick)


def against_default(name: str, tried: Setting, default: Setting, quick: bool) -> Row:
    """Seconds per step in processes of their own. `steps_to_break_even` is the run length from which a longer start pays."""
    with workers([tried, default]) as (new, old):
        extra_start = new.warmup_seconds - old.warmup_seconds
        steps = 1 if quick else max(1, round(1 / old.warmup_seconds))  # about a second at a time
        (seconds,), (seconds_against,) = seconds_in_turns([[new], [old]], 2 if quick else 9, steps)
    gain = float(np.median(seconds_against) - np.median(seconds))
    return row(
        f"{name}, {default.method}, {default.net}",
        name,
        "the default",
        seconds / seconds_against,
        aim=None,
        seconds=float(np.median(seconds)),
        seconds_against=float(np.median(seconds_against)),
        seconds_of_warmup=new.warmup_seconds,
        steps_to_break_even=round(max(0.0, extra_start) / gain) if gain > 0 else None,
    )


def threads(quick: bool) -> Iterator[Row]:
    """One thread against all, and threads that spin less while they wait."""
    nets = [("er()", "mlp()", {"shape": (1, 8, 8), "classes": 10}), ("mose()", "resnet18(width=8)", {})]
    method, net, scene = nets[0]
    for spins in () if quick else ("10000", "0"):
        tried = Setting(method, net, ALL, scene, environment={"GOMP_SPINCOUNT": spins})
        yield against_default(f"GOMP_SPINCOUNT={spins}", tried, Setting(method, net, ALL, scene), quick)
    for method, net, scene in nets if quick else [*nets, ("mose()", "resnet18(width=20)", {})]:
        one, two = (Setting(method, net, number, scene) for number in (1, ALL))
        yield against_default("one thread", one, two, quick)


def optimizers(quick: bool) -> Iterator[Row]:
    net = Scene("mose()", f"resnet18(width={4 if quick else 20})", memory=10).engine.net
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    fused = torch.optim.Adam(net.parameters(), fused=True)
    for name, foreach in {"foreach": True, "one by one": False}.items():
        other = torch.optim.Adam(net.parameters(), foreach=foreach)
        yield compare(
            f"Adam {name}",
            f"Adam's step, {name}",
            "fused, the default",
            other.step,
            fused.step,
            aim=None,
            repeats=3 if quick else 31,
        )


def dense_convolution(inputs: int, outputs: int, side: int, stride: int, quick: bool) -> Row:
    """A separable block's two convolutions have nothing between them, so that one dense convolution could do for both."""
    x = torch.randn(8 if quick else 384, inputs, side, side, requires_grad=True)
    depthwise = torch.randn(inputs, 1, 3, 3, requires_grad=True)
    pointwise = torch.randn(outputs, inputs, 1, 1, requires_grad=True)

    def separable() -> None:
        between = F.conv2d(x, depthwise, stride=stride, padding=1, groups=inputs)
        F.conv2d(between, pointwise).sum().backward()  # type: ignore[no-untyped-call]

    def dense() -> None:
        kernel = pointwise * depthwise.transpose(0, 1)
        F.conv2d(x, kernel, stride=stride, padding=1).sum().backward()  # type: ignore[no-untyped-call]

    return compare(
        f"one dense convolution, {inputs} to {outputs} channels, {side}×{side}",
        "forward and backward of the dense convolution that a depthwise and a pointwise one amount to",
        "of the two, the default",
        dense,
        separable,
        aim=None,
        repeats=3 if quick else 15,
    )


def enlargement(quick: bool) -> Row:
    maps = torch.randn(8 if quick else 384, 20, 16, 16, requires_grad=True)

    def interpolated() -> None:
        F.interpolate(maps, (32, 32), mode="bilinear").sum().backward()  # type: ignore[no-untyped-call]

    return compare(
        "F.interpolate of contiguous maps",
        "forward and backward of F.interpolate, 20 channels from 16×16 to 32×32",
        "of the same by products, the default",
        interpolated,
        lambda: enlarge(maps, 32, 32).sum().backward(),  # type: ignore[no-untyped-call]
        aim=None,
        repeats=3 if quick else 15,
    )


def rounding(quick: bool) -> Iterator[Row]:
    """How far each mode's gradients are from those in double precision; the ratio is to the contiguous layout's distance."""
    images, seeds = (8, 1) if quick else (96, 3)
    modes = {
        "contiguous": (torch.contiguous_format, False),
        "channels-last": (torch.channels_last, False),
        "bf16": (torch.contiguous_format, True),
    }
    errors: dict[str, list[float]] = {name: [] for name in modes}
    for seed in range(seeds):
        net = Scene("er", "resnet18(width=16)", memory=10, taps=4, seed=seed, device="cpu").engine.net
        x = torch.randn(images, *CIFAR, generator=torch.Generator().manual_seed(seed))
        exact = gradients(deepcopy(net).double(), x.double())
        for name, (layout, half) in modes.items():
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                found = gradients(deepcopy(net).to(memory_format=layout), x)  # type: ignore[call-overload]
            errors[name].append(float((found - exact).norm() / exact.norm()))
    for name in ("channels-last", "bf16"):
        ratio = np.array(errors[name]) / errors["contiguous"]
        mean, against = float(np.mean(errors[name])), float(np.mean(errors["contiguous"]))
        what = f"relative error of the gradients of the tapped net, width 16, {name}"
        yield row(f"rounding, {name}", what, "contiguous, fp32", ratio, None, error=mean, error_against=against)


def gradients(net: TappedNet, x: Tensor) -> Tensor:
    net.zero_grad()
    labels = (torch.arange(len(x)) % net.classes).repeat(net.layers)
    F.cross_entropy(net(x).logits.flatten(0, 1), labels).backward()  # type: ignore[no-untyped-call]
    return torch.cat([value.grad.double().flatten() for value in net.parameters() if value.grad is not None])


def gather_buffer(quick: bool) -> Row:
    """Replayed images into a buffer that is kept, instead of a new one at each step."""
    memory = Scene("er", "mlp()", memory=5000, shape=CIFAR).engine.memories.replay
    slots = np.random.default_rng(0).integers(0, 5000, 96)
    kept = torch.empty(96, *CIFAR, dtype=torch.uint8)
    return compare(
        "gather into a kept buffer",
        "gathering 96 images into a kept buffer",
        "into a new tensor, the default",
        lambda: torch.index_select(memory.images, 0, torch.from_numpy(slots), out=kept),
        lambda: memory[slots],
        aim=None,
        repeats=3 if quick else 31,
        inner=200,
    )
