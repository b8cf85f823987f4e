"""Where tasks begin: as the stream says, or as the learner's own detector finds (`boundaries=` of a learner and of a run)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

from gracecl.core import NO_TASK, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.prequential import Predictions, predict
from gracecl.errors import Caution, UserError
from gracecl.methods.base import part_unmarked
from gracecl.streams import Stream

GUESS = "give boundaries= (--boundaries), such as novelty, adwin or 'every(100)',"
"""the remedy where a learner counts on marks that are not there"""


def needs_predictions(engine: Engine) -> bool:
    """Return whether the learner predicts every batch before it learns it, for a detector that goes by errors."""
    return engine.detector is not None and engine.detector.by_errors


def placed(engine: Engine, batch: StreamBatch, predicted: Predictions | None = None) -> StreamBatch:
    """Return a batch that is about to be learned, in the task that the learner's detector gives it; as it came without a detector.

    A detector that goes by errors is told those of the batch: of what was `predicted` for it or, without, of a prediction made
    here. Its passes are part of what learning costs, and counted there. The task ends when the next one begins.
    """
    detector, progress = engine.detector, engine.progress
    if detector is None:
        return batch
    begins = progress.task == NO_TASK or engine.alarm or detector.begins(batch, progress)
    if detector.by_errors:
        engine.alarm = bool(detector.update(~(predicted or predict(engine, batch)).right))
    return replace(batch, task=progress.task + begins, last_of_task=False, marked=False)


def check_marks(engine: Engine, stream: Stream) -> None:
    """Refuse a method that needs tasks where there are none, and say what would never act on this stream."""
    learner, detector = engine.chain, engine.detector
    if detector is not None and detector.by_errors and learner.traits.trains == "evaluation":
        raise UserError(
            f"boundaries='{detector!r}' predicts every batch, and {learner!r} trains anew before each prediction; "
            "use boundaries='auto'"
        )
    if detector is None and not stream.has_tasks and learner.traits.boundaries == "required":
        raise UserError(f"{learner!r} needs a stream with task marks, and this one has none; {GUESS} to guess them")
    for sentence in idle(engine, stream):
        warnings.warn(sentence, Caution, stacklevel=3)


def idle(engine: Engine, stream: Stream) -> Iterator[str]:
    """Yield a sentence for each part of the learner, and for its scheduler, that will not act on the stream."""
    detector, steps = engine.detector, len(stream)
    if detector is not None:
        if detector.is_idle(steps):
            yield from of_one_task(engine, f"boundaries='{detector!r}' begins no second task in the {steps} steps of this stream")
        return
    if stream.has_tasks:
        return
    for part in engine.chain.parts:
        interval = part.traits.interval
        if interval is not None and (every := getattr(part, interval)) > steps:
            yield (
                f"this stream has no task marks, so {part.name} acts every {every} steps, which its {steps} steps never reach; "
                f"give {part.name}({interval}=…) a smaller number"
            )
        elif part_unmarked(part) == "never":
            what = f"{part.name} never does what it does at the end of tasks"
            yield f"this stream has no task marks, so {what}; {GUESS} to guess them"
    if is_per_task(engine):
        yield (
            "this stream has no task marks, so with scheduler_step='task' the learning rate never changes; use "
            "scheduler_step='step', or " + GUESS.removesuffix(",")
        )


def is_per_task(engine: Engine) -> bool:
    """Return whether the learning rate follows a schedule that advances at the end of tasks."""
    return engine.schedule is not None and engine.schedule.per == "task"


def of_one_task(engine: Engine, why: str) -> Iterator[str]:
    """Yield what a single task means for a learner that works with several."""
    needed = engine.chain.traits.boundaries == "required"
    remedy = "use boundaries='every(100)', or others" if needed else "use boundaries='auto', or others"
    if names := [part.name for part in engine.chain.parts if part.traits.boundaries != "unused"]:
        yield f"{why}, so to {' and '.join(names)} all of it is one task; {remedy}"
    if is_per_task(engine):
        yield f"{why}, so with scheduler_step='task' the learning rate never changes; {remedy}"


def name_unfound(engine: Engine, steps: int) -> None:
    """Say at the end of a stream that a detector found nothing in it, where the learner counts on tasks."""
    if engine.detector is not None and engine.progress.task == 0 and not engine.detector.is_idle(steps):
        for sentence in of_one_task(engine, f"boundaries='{engine.detector!r}' found no second task in {steps} steps"):
            warnings.warn(sentence, Caution, stacklevel=3)
