"""The loop over a stream: learn a batch, record it, and where a mark says so end the task and evaluate."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from gracecl.core import Ints
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import Evaluation, evaluate
from gracecl.engine.fit import Fit
from gracecl.errors import Caution, UserError
from gracecl.lab.runs.recorder import Recorder
from gracecl.methods.base import Chain
from gracecl.streams import Stream


@dataclass
class Timing:
    """Seconds spent and images looked at, kept through resumes."""

    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    images: int = 0
    """trained on"""
    forward: int = 0
    """images that went through the net, those of scoring, teachers and the ends of tasks too"""
    backward: int = 0
    """images that a gradient was taken of"""
    fit_seconds: float = 0.0
    """of fits before evaluation, apart from the steps and from the evaluation itself"""
    fit_images: int = 0
    """trained on in such fits, each forward and backward once"""
    peak_bytes: int = 0
    """the most memory that the run's process held, or its tensors on a GPU"""


def check_marks(learner: Chain, stream: Stream) -> None:
    """A method that works with tasks cannot learn from a stream without them; one that goes by the steps there needs enough."""
    if stream.has_tasks:
        return
    if learner.traits.boundaries == "required":
        raise UserError(f"{learner!r} needs a stream with task marks, and this one has none")
    for part in learner.parts:
        interval = part.traits.interval
        if interval is not None and (every := getattr(part, interval)) > len(stream):
            warnings.warn(
                f"this stream has no task marks, so {part.name} acts every {every} steps, which its {len(stream)} steps never "
                f"reach; give {part.name}({interval}=…) a smaller number",
                Caution,
                stacklevel=2,
            )


def name_untested(stream: Stream) -> None:
    """Says beforehand which metrics a stream has no test images for."""
    marks, tested = len(stream.marks), len(np.unique(stream.test_task[stream.test_task < len(stream.marks)]))
    if tested < marks:
        warnings.warn(
            f"this stream has {marks} evaluation marks and test images of {tested} task{'s' if tested > 1 else ''}, so acc, aia "
            "and aaa are averages over what there is, and forgetting, bwt and the other metrics of single tasks cannot be computed",
            Caution,
            stacklevel=2,
        )


@dataclass
class Trainer:
    """An engine, a stream and a recorder; `step()` until `done`."""

    engine: Engine
    stream: Stream
    recorder: Recorder
    eval_every: int = 0
    """evaluate also every so many steps; 0 is only at the marks"""
    timing: Timing = field(default_factory=Timing)
    evaluation: Evaluation | None = None
    """the last one"""

    def __post_init__(self) -> None:
        check_marks(self.engine.chain, self.stream)
        name_untested(self.stream)

    @property
    def at(self) -> int:
        """The next step."""
        return self.engine.progress.step

    @property
    def done(self) -> bool:
        return self.at >= len(self.stream) and self.engine.unfinished_fit is None

    def step(self) -> None:
        """A batch of the stream and the evaluation due after it, or one step of the fit that this evaluation waits for."""
        if fit := self.engine.unfinished_fit:
            self._step_fit(fit)
        else:
            self._learn()

    def _learn(self) -> None:
        step, started, meter = self.at, time.perf_counter(), self.engine.net.meter
        forward, backward = meter.forward, meter.backward
        batch = self.stream.batch(step)
        outcome = self.engine.learn(batch)
        if outcome is not None:
            self.recorder.step(step, batch.task, outcome)
            self.timing.images += outcome.images
        if batch.last_of_task:
            composition = {str(label): n for label, n in self.engine.memories.replay.composition().items()}
            self.recorder.event("task", step, task=batch.task, values=self.engine.task_values, memory=composition)
        self.timing.train_seconds += time.perf_counter() - started
        self.timing.forward += meter.forward - forward
        self.timing.backward += meter.backward - backward
        if step in self.stream.marks or (self.eval_every and (step + 1) % self.eval_every == 0):
            started = time.perf_counter()
            self.engine.get_ready()
            self.timing.eval_seconds += time.perf_counter() - started
            if self.engine.unfinished_fit is None:
                self.evaluate(step)

    def _step_fit(self, fit: Fit) -> None:
        """The evaluation follows the last step at once, so that one is due as long as a fit is unfinished, and no longer."""
        step, started = self.at - 1, time.perf_counter()
        outcome = self.engine.step_fit(fit)
        self.timing.fit_images += outcome.images
        self.timing.fit_seconds += time.perf_counter() - started
        if fit.done:
            task = int(self.stream.task_of_step[step])
            self.recorder.step(step, task, replace(outcome, images=fit.trained_on), kind="fit")
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """All tasks met so far, all rules, recorded."""
        started, at_mark = time.perf_counter(), step in self.stream.marks
        self.evaluation = result = evaluate(self.engine, *self.test_images())
        mark = int(np.searchsorted(self.stream.marks, step))
        self.recorder.event("eval", step, task=mark, task_end=at_mark, accuracy=result.accuracy, ece=result.ece, nll=result.nll)
        self.timing.eval_seconds += time.perf_counter() - started

    def test_images(self) -> tuple[Tensor, Ints, Ints]:
        """Test images, labels and tasks of the tasks of which a class was met."""
        return self.stream.test_images(self.engine.progress.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict(), "timing": vars(self.timing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        self.timing = Timing(**{name: value + 0 for name, value in state["timing"].items()})  # what is no number fails here
