"""What was tried for speed, against what is the default. Told, not judged; docs/performance.md concludes from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gracecl.bench.measure import Row, compare, row
from gracecl.bench.scene import CIFAR, Scene
from gracecl.bench.workers import Setting, seconds_in_turns, workers

ALL = 2
"""threads of a run that has the machine to itself"""


def rows(quick: bool) -> Iterator[Row]:
    yield from optimisers(quick)
    yield gather_buffer(quick)
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
    for net in (default.net,) if quick else (default.net, "resnet18(width=64)"):
        launched, plain = (Setting(default.method, net, ALL, launcher=launcher) for launcher in (True, False))
        yield against_default("system's malloc", plain, launched, quick)
    yield from threads(quick)


def against_default(name: str, tried: Setting, default: Setting, quick: bool) -> Row:
    """Seconds per step in processes of their own. `steps_to_break_even` is the run length from which a longer start pays."""
    with workers([tried, default]) as (new, old):
        extra_start = new.warmup_seconds - old.warmup_seconds
        (seconds,), (seconds_against,) = seconds_in_turns([[new], [old]], 2 if quick else 9, 1)
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
    """One thread against two."""
    nets = [("er()", "mlp()", {"shape": (1, 8, 8), "classes": 10}), ("mose()", "resnet18(width=8)", {})]
    for method, net, scene in nets if quick else [*nets, ("mose()", "resnet18(width=20)", {})]:
        one, two = (Setting(method, net, number, scene) for number in (1, ALL))
        yield against_default("one thread", one, two, quick)


def optimisers(quick: bool) -> Iterator[Row]:
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
