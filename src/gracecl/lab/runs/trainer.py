"""The loop of a run: a stream with its test images, a recorder, and a state that a checkpoint holds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from gracecl.engine.engine import Engine
from gracecl.engine.loop import Callbacks, Loop, Timing, check_marks
from gracecl.errors import Caution
from gracecl.lab.runs.recorder import Recorder
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
        self, engine: Engine, stream: Stream, recorder: Recorder, eval_every: int = 0, callbacks: Callbacks | None = None
    ) -> None:
        """`eval_every` evaluates also every so many steps; 0 is only at the marks."""
        check_marks(engine.chain, stream)
        name_untested(stream)
        self.stream, self.recorder = stream, recorder
        super().__init__(
            engine, stream.batch, steps=len(stream), log=recorder, test=stream, eval_every=eval_every, callbacks=callbacks
        )

    def state_dict(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict(), "timing": vars(self.timing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        self.timing = Timing(**{name: value + 0 for name, value in state["timing"].items()})  # what is no number fails here
