"""What a run gets under `budget`, `bytes` and `pace`, measured in dry runs, and what it took in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gracecl.engine.allotment import Allotment, allot
from gracecl.engine.cost import StepCost, dry_run, flops
from gracecl.engine.engine import Engine
from gracecl.engine.footprint import bytes_in
from gracecl.engine.live import Live
from gracecl.engine.loop import Loop
from gracecl.registry.options import LIMITS
from gracecl.streams import Stream

ALLOTTED = "allotted"
"""the entry of config.json and of a checkpoint with what the run gets under its budgets"""


def measured(config: Any, live: Live, build: Callable[[Any, Live], tuple[Engine, Stream]]) -> Allotment | None:
    """Return what a run gets under its budgets; None where it has none. `build` makes engine and stream without budgets."""
    options = {name: getattr(config, name) for name in LIMITS}
    if not any(options.values()):
        return None

    def cost_of(method: str | None) -> StepCost:
        if method is None:
            return dry_run(*build(config, live.copied()))
        return dry_run(*build(replace(config, method=method), replace(live.copied(), method=None)))

    engine, stream = build(config, live.copied())
    every = config.eval_every
    evaluated = {*stream.marks.tolist(), *(range(every - 1, len(stream), every) if every else ())}
    return allot(
        options,
        cost_of,
        method=config.method,
        trains=engine.chain.traits.trains,
        memory=config.memory,
        steps=len(stream),
        evaluations=len(evaluated),
    )


def costs(loop: Loop, per_image: float) -> dict[str, float]:
    """Return what was computed in FLOPs, in fits too, and what the learner keeps in bytes, in all and by part."""
    timing = loop.timing
    computed = flops(per_image, timing.forward + timing.fit_images, timing.backward + timing.fit_images)
    return {"flops": computed, **bytes_in(loop.engine.state_dict())}
