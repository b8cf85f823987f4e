"""Where tasks begin: as the stream says, or as the learner's own detector finds (`boundaries=` of a learner and of a run)."""

from __future__ import annotations

import warnings
from dataclasses import replace

from gracecl.core import NO_TASK, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.prequential import Predictions, predict
from gracecl.errors import Caution, UserError
from gracecl.streams import Stream


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
    """A method that works with tasks cannot learn from a stream without them; one that goes by the steps there needs enough."""
    learner, detector = engine.chain, engine.detector
    if detector is not None:
        if detector.by_errors and learner.traits.trains == "evaluation":
            raise UserError(
                f"boundaries='{detector!r}' predicts every batch, and {learner!r} trains anew before each prediction; "
                "use boundaries='auto'"
            )
        return
    if stream.has_tasks:
        return
    if learner.traits.boundaries == "required":
        raise UserError(
            f"{learner!r} needs a stream with task marks, and this one has none; give boundaries= (--boundaries), such as novelty, "
            "adwin or 'every(100)', to let it guess them"
        )
    for part in learner.parts:
        interval = part.traits.interval
        if interval is not None and (every := getattr(part, interval)) > len(stream):
            warnings.warn(
                f"this stream has no task marks, so {part.name} acts every {every} steps, which its {len(stream)} steps never "
                f"reach; give {part.name}({interval}=…) a smaller number",
                Caution,
                stacklevel=2,
            )
