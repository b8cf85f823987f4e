"""What learning costs: FLOPs from counted images, and a dry run that tells what a step of a method takes and keeps.

FLOPs = f (F + 2 B): f is one forward pass of one image, F and B are the images that pass forward and backward, those of scoring,
teachers and fits too. Counts, and no seconds: the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from gracecl.engine.engine import Engine
from gracecl.engine.footprint import bytes_by_part
from gracecl.nets.mode import in_mode
from gracecl.nets.sharing import alone
from gracecl.streams import Stream

BEFORE, MEASURED, STORED = 8, 20, 3
"""steps of a dry run: of the first task; counted, of the second, where every method has a past to deal with; stored alone"""
MOST_STORED = 500
"""batches that a dry run stores at most to fill the memory"""


def forward_flops(engine: Engine) -> float:
    """Count the FLOPs of one image's forward pass: PyTorch's counter overstates gradients of depthwise kernels."""
    from torch.utils.flop_counter import FlopCounterMode

    images, eager = engine.net.inputs.seen(2, torch.zeros).to(engine.device), torch.compiler.set_stance("force_eager")
    with torch.no_grad(), alone(), eager, in_mode(engine.net, training=False), FlopCounterMode(display=False) as counter:
        engine.net(images)
    return float(counter.get_total_flops()) / len(images)


def flops(per_image: Any, forward: Any, backward: Any) -> Any:
    """Return f (F + 2 B): a backward pass counts as two forward passes."""
    return per_image * (forward + 2 * backward)


def bytes_kept(engine: Engine) -> dict[str, int]:
    """Count what the learner keeps now, in bytes by part."""
    return bytes_by_part(engine.state_dict())


@dataclass(frozen=True)
class StepCost:
    """What a step of a method takes, and what the method keeps, from a dry run."""

    per_image: Fraction
    """FLOPs of one image's forward pass"""
    step: Fraction
    """FLOPs of a step"""
    beside: Fraction
    """of them, those that a step without updates takes: storing images with scores, sums of features"""
    updates: Fraction
    """optimizer steps per step"""
    fixed: int
    """bytes kept whatever the memory's size"""
    slot: int
    """bytes that each image in the memory takes with all that stands beside it; 0 where none is ever kept"""

    @property
    def update(self) -> Fraction:
        """FLOPs of an update."""
        return (self.step - self.beside) / self.updates


def dry_run(engine: Engine, stream: Stream) -> StepCost:
    """Measure some steps of the first task and of the second, with the memory filled; the engine is of no use afterwards."""
    second = int(stream.marks[0]) + 1 if len(stream.marks) > 1 else BEFORE
    second = min(second, max(0, len(stream) - MEASURED))
    for step in range(min(BEFORE, second)):
        engine.learn(stream.batch(step))
    memory, meter = engine.memories.replay, engine.net.meter
    for step in range(BEFORE, min(second, MOST_STORED)):  # what drawing and scoring cost depends on how many images there are
        if len(memory) < memory.capacity:
            _store(engine, stream, step)
    engine.end_task()
    steps = range(second, min(second + MEASURED, len(stream)))
    forward, backward, updates = meter.forward, meter.backward, 0
    for step in steps:
        outcome = engine.learn(stream.batch(step))
        updates += 0 if outcome is None else outcome.updates
    per_image = Fraction(forward_flops(engine))
    whole = flops(per_image, meter.forward - forward, meter.backward - backward) / len(steps)
    kept, filled = bytes_kept(engine), sum(map(len, engine.memories.stores.values()))
    forward, backward, again = meter.forward, meter.backward, steps[-STORED:]
    for step in again:
        _store(engine, stream, step)
    beside = flops(per_image, meter.forward - forward, meter.backward - backward) / len(again)
    of_images = kept["images"] + kept["labels"] + kept["values"]
    slot = of_images // filled if filled else 0
    fixed = sum(kept.values()) - of_images + engine.memories.beyond_budget * slot
    return StepCost(per_image, whole, beside, Fraction(updates, len(steps)), fixed, slot)


def _store(engine: Engine, stream: Stream, step: int) -> None:
    """Store a batch without learning from it; not where values stand beside images, which only an update gives."""
    if not engine.memories.replay.attributes:
        engine.chain.after_batch(engine.memories, engine.meet(stream.batch(step)))
