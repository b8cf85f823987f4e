"""The training loop: learn a batch, log it, end the task where one ends, evaluate at marks, call callbacks.

`Learner.fit` and the runs of the laboratory both use it. Callbacks are any objects with some of the methods of `Callback`; they are
called between steps, and `raise StopTraining("…")` in one ends the training there::

    class Enough(gracecl.Callback):
        def on_evaluation(self, state):
            if state.accuracy > 90:
                raise gracecl.StopTraining("90 % are enough")

What a step began is completed before the loop stops, its evaluation too, so that whoever continues later misses nothing. Any other
exception of a callback leaves the loop at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from gracecl.core import LossTable, StreamBatch
from gracecl.engine.boundaries import name_unfound, needs_predictions, placed
from gracecl.engine.engine import Engine, StepResult
from gracecl.engine.evaluate import Evaluation, evaluate
from gracecl.engine.finite import check_losses
from gracecl.engine.fit import Fit
from gracecl.engine.prequential import Predictions, check_predicts, predict
from gracecl.errors import UserError
from gracecl.methods.base import TaskValues
from gracecl.nets.tapped import TappedNet
from gracecl.streams import Stream

FLUSH_EVERY = 50
"""steps whose tables are fetched from the device together"""
EVENTS = ("on_step", "on_task_end", "on_evaluation")


class StopTraining(Exception):
    """Raised in a callback: the training ends after this step, and can be continued. Its text is the reason."""


@dataclass(frozen=True)
class TrainingState:
    """Where the training stands when a callback is called."""

    engine: Engine
    step: int
    """steps made so far, of this stream"""
    steps: int | None
    """steps of the stream; None where nobody knows"""
    task: int
    """number of the task of the last batch; -1 on a stream without task marks"""
    result: StepResult | None = None
    """what the last batch led to; None where the method only stored it"""
    predictions: Predictions | None = None
    """`on_step`: what was predicted for the last batch before it was learned; None unless asked for"""
    task_values: TaskValues = field(default_factory=dict)
    """`on_task_end`: what the method says of the task, per layer"""
    evaluation: Evaluation | None = None
    """`on_evaluation`: percent right per rule and task"""

    @property
    def net(self) -> TappedNet:
        return self.engine.net

    @property
    def losses(self) -> dict[str, list[float]]:
        """The loss of each term and tapped layer in the last update; reading it waits for the device."""
        return {} if self.result is None else fetch([self.result.table])[0]

    @property
    def accuracy(self) -> float:
        """`on_evaluation`: the mean over the tasks met so far, in percent, under the method's own rule; NaN without one."""
        rows = {} if self.evaluation is None else self.evaluation.accuracy
        known = [value for value in rows.get(self.engine.chain.rule, []) if value is not None]
        return float(np.mean(known)) if known else float("nan")


class Callback:
    """Does nothing; extend it, or give any object that has some of these methods."""

    def on_step(self, state: TrainingState) -> None:
        """After each batch of the stream."""

    def on_task_end(self, state: TrainingState) -> None:
        """After the last batch of a task, and what the method does at its end."""

    def on_evaluation(self, state: TrainingState) -> None:
        """After each evaluation."""


class Callbacks:
    """Several callbacks as one, which remembers that one of them asked to stop."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        try:
            members = list(given)
        except TypeError:
            raise UserError(f"callbacks is a list of objects, not a {type(given).__name__}; write callbacks=[…]") from None
        for member in members:
            if isinstance(member, type) or not any(callable(getattr(member, event, None)) for event in EVENTS):
                what = f"the class {member.__name__}" if isinstance(member, type) else f"a {type(member).__name__}"
                raise UserError(f"a callback is an object with {', '.join(EVENTS[:2])} or {EVENTS[2]}, not {what}")
        self.of = {event: [getattr(member, event) for member in members if _has(member, event)] for event in EVENTS}
        self.stop: StopTraining | None = None
        """the first wish to stop"""

    def call(self, event: str, state: Callable[[], TrainingState]) -> None:
        for function in self.of[event]:
            try:
                function(state())
            except StopTraining as stop:
                self.stop = self.stop or stop


def _has(member: Any, event: str) -> bool:
    """Return whether a callback has something to do at an event."""
    own = getattr(member, event, None)
    return callable(own) and getattr(own, "__func__", own) is not getattr(Callback, event)


def fetch(tables: Sequence[LossTable]) -> list[dict[str, list[float]]]:
    """The values of several tables, in one transfer from the device."""
    if not tables:
        return []
    stacked = iter(torch.cat([value.float().flatten() for table in tables for value in table.values()]).tolist())
    return [{row: list(islice(stacked, value.numel())) for row, value in table.items()} for table in tables]


class Log:
    """Checks that losses are finite, many steps at once so that no step waits for the device. Recorders extend it."""

    def __init__(self) -> None:
        self._pending: list[tuple[dict[str, Any], LossTable | None]] = []
        self.latest: dict[str, list[float]] = {}
        """the last step's rows, for the progress line"""

    def step(self, step: int, task: int, outcome: StepResult, kind: Literal["step", "fit"] = "step") -> None:
        """A step, or the end of the fit before its evaluation."""
        self._add({"kind": kind, "step": step, "task": task, "images": outcome.images}, outcome.table)

    def predicted(self, kind: Literal["prequential", "near_future"], step: int, made: Predictions, **more: int) -> None:
        """What was predicted at a step, for its batch or for a later one."""
        self._add({"kind": kind, "step": step, **more, **made.to_lists()})

    def _add(self, line: dict[str, Any], table: LossTable | None = None) -> None:
        self._pending.append((line, table))
        if len(self._pending) >= FLUSH_EVERY:
            self.flush()

    def event(self, kind: str, step: int, **values: Any) -> None:
        """An evaluation or the end of a task, after the steps before it."""
        self.flush()
        self.write([{"kind": kind, "step": step, **values}])

    def flush(self) -> None:
        """Fetch the pending tables in one transfer."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        lines: list[dict[str, Any]] = []
        try:
            fetched = iter(fetch([table for _, table in pending if table is not None]))
            for line, table in pending:
                if table is not None:
                    line["rows"] = next(fetched)
                    check_losses(line["rows"], line["step"])
                    self.latest |= line["rows"]
                lines.append(line)
        finally:
            self.write(lines)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Keep what was logged; nowhere, here."""


class PredictionLog(Log):
    """Keeps what was predicted for batches before they were learned."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def write(self, lines: list[dict[str, Any]]) -> None:
        self.lines += [line for line in lines if line["kind"] == "prequential"]


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
    eval_forward: int = 0
    """images that went through the net for evaluations and predictions, those that class means are taken of too"""
    fit_seconds: float = 0.0
    """of fits before evaluation, apart from the steps and from the evaluation itself"""
    fit_images: int = 0
    """trained on in such fits, each forward and backward once"""
    peak_bytes: int = 0
    """the most memory that the run's process held, or its tensors on a GPU"""


class Loop:
    """An engine and the batches that it learns from; `step()` until `done`, or `run()`."""

    def __init__(
        self,
        engine: Engine,
        batch: Callable[[int], StreamBatch | None],
        *,
        begin: int = 0,
        steps: int | None = None,
        log: Log | None = None,
        test: Stream | None = None,
        eval_every: int = 0,
        eval_every_images: int = 0,
        eval_after_marks: int = 0,
        prequential: bool = False,
        near_future: int = 0,
        probabilities: bool = False,
        callbacks: Callbacks | None = None,
    ) -> None:
        """`batch` gives the batch of a step of the stream, None after the last; `begin` is the learner's step at step 0.

        `steps` is the length of the stream where it is known. `test` is the stream whose test images are evaluated at its marks,
        every `eval_every` steps, every `eval_every_images` images, and after each of the `eval_after_marks` steps that follow a
        mark; without one nothing is evaluated. With `prequential` each batch is predicted before it is
        learned; with `near_future` the batch so many steps later is predicted too, which needs `steps`. `probabilities` are noted
        beside the predictions.
        """
        self.engine, self.batch, self.begin, self.steps = engine, batch, begin, steps
        self.log, self.test = log or Log(), test
        self.eval_every, self.eval_every_images, self.eval_after_marks = eval_every, eval_every_images, eval_after_marks
        self.prequential, self.near_future, self.probabilities = prequential, near_future, probabilities
        if prequential or near_future:
            check_predicts(engine.chain, probabilities)
        if near_future and (steps is None or near_future >= steps):
            length = "a stream of unknown length" if steps is None else f"a stream of {steps} steps"
            raise UserError(f"near_future is {near_future} steps, and {length} has no batch so far ahead; give it fewer")
        self.callbacks = callbacks or Callbacks()
        self.timing = Timing()
        self.evaluation: Evaluation | None = None
        """the last one"""
        self.predictions: Predictions | None = None
        """of the last batch, made before it was learned"""
        self.late = test is not None and test.arriving is not None
        """whether batches are learned some time after they arrived"""
        self._ended = False

    @property
    def at(self) -> int:
        """The next step of the stream."""
        return self.engine.progress.step - self.begin

    @property
    def done(self) -> bool:
        """Whether the stream is at its end, and no evaluation waits for a fit."""
        over = self._ended if self.steps is None else self.at >= self.steps
        return over and (self.engine.unfinished_fit is None or self.test is None)

    @property
    def stopped(self) -> StopTraining | None:
        """The wish of a callback to stop."""
        return self.callbacks.stop

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Step to the end of the stream, or to where a callback stops; call `after_step` when all of a step is done."""
        while not self.done and not self.stopped:
            self.step()
            after_step()
        self.log.flush()

    def step(self) -> None:
        """A batch of the stream and the evaluation due after it, or one step of the fit that this evaluation waits for."""
        if self.test is not None and (fit := self.engine.unfinished_fit):
            self._step_fit(fit)
        else:
            self._learn()

    def _learn(self) -> None:
        step, started = self.at, time.perf_counter()
        if (batch := self.batch(step)) is None:
            self._ended = True
            return
        self.timing.train_seconds += time.perf_counter() - started
        self._predict(step, batch)
        started, meter = time.perf_counter(), self.engine.net.meter
        forward, backward = meter.forward, meter.backward
        batch = placed(self.engine, batch, None if self.late else self.predictions)
        if self.engine.task_open and batch.task != self.engine.progress.task:
            self._end_task(step - 1)  # of which nobody could know that its last batch was the last
        outcome = self.engine.learn(batch)
        if outcome is not None:
            self.log.step(self.engine.progress.step - 1, batch.task, outcome)
            self.timing.images += outcome.images
        self.timing.train_seconds += time.perf_counter() - started
        self.timing.forward += meter.forward - forward
        self.timing.backward += meter.backward - backward
        self.callbacks.call("on_step", lambda: self._state(result=outcome, predictions=self.predictions))
        if batch.last_of_task:
            self._end_task(step)
        if step + 1 == self.steps:
            name_unfound(self.engine, self.steps)
        if self._is_due(step):
            with self._evaluating():
                self.engine.get_ready()
            if self.engine.unfinished_fit is None:
                self._evaluate(step)

    def _is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        if self.test is None:
            return False
        marks = self.test.marks
        passed = marks[marks < step]
        shortly_after = len(passed) > 0 and step - int(passed[-1]) <= self.eval_after_marks
        return bool(step in marks or shortly_after or self._is_regular(step))

    def _is_regular(self, step: int) -> bool:
        """Whether a step ends one of the equal distances at which is evaluated."""
        assert self.test is not None
        if self.eval_every and (step + 1) % self.eval_every == 0:
            return True
        reached = [int(self.test.ends[at]) if at >= 0 else 0 for at in (step - 1, step)]
        return self.eval_every_images > 0 and reached[1] // self.eval_every_images > reached[0] // self.eval_every_images

    def _predict(self, step: int, batch: StreamBatch) -> None:
        """Predict what arrived before the batch of a step is learned, and the batch that comes `near_future` steps later."""
        arrived = self.test.arrivals(step) if self.late and self.test is not None else batch
        if self.prequential and len(arrived):
            with self._evaluating(learning=needs_predictions(self.engine) and not self.late):
                self.predictions = predict(self.engine, arrived, self.probabilities)
            self.log.predicted("prequential", step + self.begin, self.predictions)
        if self.near_future and self.steps is not None and step + self.near_future < self.steps:
            later = self.batch(step + self.near_future)
            assert later is not None
            with self._evaluating():
                made = predict(self.engine, later, self.probabilities)
            self.log.predicted("near_future", step + self.begin, made, shift=self.near_future)

    @contextmanager
    def _evaluating(self, learning: bool = False) -> Iterator[None]:
        """Count time and images of the block as evaluation, or as `learning` where that could not do without them."""
        started, fit = time.perf_counter(), self.engine.fit
        meter = self.engine.net.meter if fit is None else fit.net.meter
        forward = meter.forward
        yield
        seconds, images = time.perf_counter() - started, meter.forward - forward
        if learning:
            self.timing.train_seconds += seconds
            self.timing.forward += images
        else:
            self.timing.eval_seconds += seconds
            self.timing.eval_forward += images

    def _end_task(self, step: int) -> None:
        self.engine.end_task()
        values = self.engine.task_values
        composition = {str(label): n for label, n in self.engine.memories.replay.composition().items()}
        self.log.event("task", step + self.begin, task=self.engine.progress.task, values=values, memory=composition)
        self.callbacks.call("on_task_end", lambda: self._state(task_values=values))

    def _step_fit(self, fit: Fit) -> None:
        """The evaluation follows the last step at once, so that one is due as long as a fit is unfinished, and no longer."""
        step, started = self.at - 1, time.perf_counter()
        outcome = self.engine.step_fit(fit)
        self.timing.fit_images += outcome.images
        self.timing.fit_seconds += time.perf_counter() - started
        if fit.done:
            self.log.step(step + self.begin, self.engine.progress.task, replace(outcome, images=fit.trained_on), kind="fit")
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        """All tasks met so far, all rules, logged."""
        assert self.test is not None
        masks = self.test.classes_of_task if self.test.masked else None
        with self._evaluating():
            images = self.test.test_images(self.engine.progress.seen, step)
            self.evaluation = found = evaluate(self.engine, *images, masks)
        marks, at = self.test.marks, step + self.begin
        mark, at_mark = int(np.searchsorted(marks, step)), step in marks
        line: dict[str, Any] = {"task": mark, "task_end": at_mark, "accuracy": found.accuracy, "ece": found.ece, "nll": found.nll}
        line |= {"brier": found.brier, "task_images": found.images, "regular": self._is_regular(step)}
        if found.task_found:
            line["task_found"] = found.task_found
        if at_mark and found.calibration is not None:
            line["calibration"] = vars(found.calibration)
        if at_mark and (ahead := self._before_training(mark + 1)):
            line["next_task"] = ahead
        self.log.event("eval", at, **line)
        if step == marks[-1]:
            self.log.event("confusion", at, rule=self.engine.chain.rule, counts=found.confusion)
        self.callbacks.call("on_evaluation", lambda: self._state(evaluation=found))

    def _before_training(self, task: int) -> dict[str, float] | None:
        """Percent right on a task that has not begun, and by a guess; None where its classes are not those of the tasks before."""
        assert self.test is not None
        chosen, seen = self.test.test_task == task, self.engine.progress.seen
        if self.test.rule != "tasks so far" or not chosen.any() or not np.isin(self.test.data.test_y[chosen], seen).all():
            return None
        with self._evaluating():
            batch = StreamBatch(self.test.data.test_x[np.flatnonzero(chosen)], self.test.data.test_y[chosen])
            right = predict(self.engine, batch).right
        return {"accuracy": 100 * float(right.mean()), "chance": 100 / len(seen)}

    def _state(self, **found: Any) -> TrainingState:
        return TrainingState(self.engine, self.at, self.steps, self.engine.progress.task, **found)
