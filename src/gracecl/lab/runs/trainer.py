"""The loop of a run: a stream with its test images, a recorder, and a state that a checkpoint holds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from gracecl.engine.boundaries import check_marks
from gracecl.engine.engine import Engine
from gracecl.engine.loop import Callbacks, Loop, Timing
from gracecl.engine.read_ahead import read_ahead
from gracecl.errors import Caution
from gracecl.lab.runs.recorder import NoRecord, Recorder
from gracecl.registry.options import RunOptions
from gracecl.streams import Stream


def name_untested(stream: Stream) -> None:
    """Say beforehand which metrics a stream has no test images for."""
    marks, tested = len(stream.marks), len(np.unique(stream.test_task[stream.test_task < len(stream.marks)]))
    if tested < marks:
        warnings.warn(
            f"this stream has {marks} evaluation marks and test images of {tested} task{'s' if tested > 1 else ''}, so acc, aia "
            "and aaa are averages over what there is, and forgetting, bwt and the other metrics of single tasks cannot be computed",
            Caution,
            stacklevel=2,
        )


class Trainer(Loop):
    """An engine, a stream and a recorder; `step()` until `done`."""

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        recorder: Recorder | NoRecord,
        asked: RunOptions | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        """`asked` says what is evaluated and predicted beside the marks; None is nothing."""
        check_marks(engine, stream)
        name_untested(stream)
        self.stream, self.recorder = stream, recorder
        options = asked or RunOptions()
        super().__init__(
            engine,
            read_ahead(stream),
            steps=len(stream),
            log=recorder,
            test=stream,
            eval_every=options.eval_every,
            eval_every_images=options.eval_every_images,
            eval_after_marks=options.eval_after_marks,
            prequential=options.prequential,
            near_future=options.near_future,
            probabilities=options.probabilities,
            callbacks=callbacks,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict(), "timing": vars(self.timing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        self.timing = Timing(**{name: value + 0 for name, value in state["timing"].items()})  # what is no number fails here
