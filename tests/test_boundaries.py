"""Where tasks begin: by a clock, by new labels, by drift or never, in runs and in a learner of one's own; exact under resume."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gracecl
from gracecl import Learner, UserError
from gracecl.core import StreamBatch
from gracecl.detectors import Detector, build, canonical
from gracecl.engine.boundaries import placed
from gracecl.engine.loop import TrainingState
from gracecl.engine.prequential import Predictions
from gracecl.errors import Caution
from gracecl.lab.runs.run import Interrupted, RunConfig, Work, resume
from gracecl.registry import detectors
from gracecl.registry.options import run_name
from gracecl.testing import toy_stream
from stopping import StopAfter

TOY: dict[str, Any] = {"shape": (1, 8, 8), "memory": 20, "net": "mlp(width=8)", "augment": "none", "device": "cpu"}
MARKED = "split-digits(size=8, tasks=5, per_class=10, batch=4)"
UNMARKED = "split-digits(size=8, tasks=5, per_class=10, batch=4, marked=False)"
RUN: dict[str, Any] = {
    "stream": UNMARKED,
    "memory": 20,
    "net": "mlp(width=8)",
    "augment": "none",
    "device": "cpu",
    "threads": 1,
}


@detectors.register("at_steps")
@dataclass(eq=False, repr=False)
class AtSteps(Detector):
    """Raises an alarm after some batches, by counting them; it remembers the errors it was told."""

    steps: tuple[int, ...] = (7, 16)
    state = ("told",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[float] = []

    def update(self, errors: npt.NDArray[np.bool_]) -> bool:
        self.told.append(float(errors.mean()))
        return len(self.told) in self.steps


class Watch(gracecl.Callback):
    """Notes the task of each step, and the steps after which a task ended."""

    def __init__(self) -> None:
        self.tasks: list[int] = []
        self.ends: list[int] = []

    def on_step(self, state: TrainingState) -> None:
        self.tasks.append(state.task)

    def on_task_end(self, state: TrainingState) -> None:
        self.ends.append(state.step - 1)


def fitted(method: str, boundaries: str, stream: str = UNMARKED) -> tuple[Learner, Watch]:
    watch = Watch()
    return Learner(method, boundaries=boundaries, classes=10, **TOY).fit(stream, callbacks=[watch]), watch


def same_weights(one: Learner, other: Learner) -> bool:
    return all(map(torch.equal, one.net.state_dict().values(), other.net.state_dict().values()))


# What each one does.


def test_a_clock_begins_a_task_every_n_steps() -> None:
    _, watch = fitted("grace(er())", "every(6)")
    assert watch.ends == [5, 11, 17, 23]
    assert watch.tasks == [step // 6 for step in range(25)]


def test_new_labels_begin_a_task() -> None:
    stream = gracecl.stream(UNMARKED)
    met: set[int] = set()
    expected = []
    for step, batch in enumerate(stream):
        if step and not set(batch.labels.tolist()) <= met:
            expected.append(step - 1)
        met |= set(batch.labels.tolist())
    assert fitted("grace(er())", "novelty")[1].ends == expected != []


def test_never_is_one_task() -> None:
    _, watch = fitted("er", "never", MARKED)
    assert watch.ends == []
    assert set(watch.tasks) == {0}


def test_an_alarm_is_of_the_next_batch() -> None:
    """The batch whose errors raised it is still in the old task: what is known is known after it was predicted."""
    _, watch = fitted("grace(er())", "at_steps(steps=(7, 16))")
    assert watch.ends == [6, 15]
    assert watch.tasks == [0] * 7 + [1] * 9 + [2] * 9


def test_errors_are_those_of_predictions_before_the_batch_is_learned() -> None:
    learner, detector = Learner("er", boundaries="at_steps", classes=6, **TOY), None
    expected = []
    for batch in toy_stream():
        guess = learner.predict(batch.x, default=-1)
        expected.append(float((guess != batch.labels).mean()))
        learner.learn(batch.x, batch.labels)
        detector = learner.engine.detector
    assert isinstance(detector, AtSteps)
    assert detector.told == expected
    assert expected[0] == 1
    assert 0 < np.mean(expected) < 1


def test_predictions_that_exist_are_not_made_again() -> None:
    learner = Learner("er", boundaries="at_steps", classes=6, **TOY)
    batch = toy_stream().batch(0)
    learner.learn(batch.x, batch.labels)
    before = learner.net.meter.forward
    guesses = np.where(np.arange(len(batch)) == 0, -1, batch.labels)
    placed(learner.engine, batch, Predictions(batch.labels, guesses))
    assert learner.net.meter.forward == before
    assert learner.engine.detector.told[-1] == 1 / len(batch)  # type: ignore[union-attr]


@pytest.mark.slow
def test_predictions_of_a_detector_count_as_passes_of_learning() -> None:
    """One forward per image of the stream but those of the first batch, before which nothing can be predicted."""
    plain, guessing = (gracecl.run("er", boundaries=given, **RUN).record.timing for given in ("auto", "adwin"))
    shared = gracecl.run("er", boundaries="adwin", prequential=True, **RUN).record.timing
    images = len(gracecl.stream(RUN["stream"]).order)
    assert guessing["forward"] - plain["forward"] == shared["forward"] - plain["forward"] == images - 4
    assert guessing["eval_forward"] == plain["eval_forward"] == shared["eval_forward"]


def test_predictions_move_nothing() -> None:
    """A detector that never raises an alarm leaves the learner as one task without any does, to the bit."""
    one, other = (Learner("er", boundaries=given, **TOY).fit(toy_stream()) for given in ("at_steps(steps=())", "never"))
    assert same_weights(one, other)


# Marks of the stream, and methods that need them.


def test_auto_is_the_stream_s_marks() -> None:
    assert fitted("er", "auto", MARKED)[1].ends == [4, 9, 14, 19, 24]


def test_marks_of_the_stream_are_not_looked_at() -> None:
    (one, of_one), (other, of_other) = (fitted("grace(er())", "every(6)", stream) for stream in (UNMARKED, MARKED))
    assert same_weights(one, other)
    assert of_one.ends == of_other.ends == [5, 11, 17, 23]


@pytest.mark.parametrize("method", ["bic()", "lode()", "gsa()"])
def test_methods_that_need_marks_run_on_guesses_if_asked(method: str) -> None:
    with pytest.raises(UserError, match="needs a stream with task marks, and this one has none; give boundaries="):
        fitted(method, "auto")
    assert fitted(method, "novelty")[1].ends


def test_guesses_are_known_as_such() -> None:
    learner = Learner("er", boundaries="novelty", **TOY)
    batch = toy_stream().batch(0)
    learner.learn(batch.x, batch.labels, task="its name, which is not asked for")
    assert learner.engine.progress.task == 0
    assert not learner.engine.progress.marked


@pytest.mark.parametrize(
    ("boundaries", "acts"), [("novelty", True), ("at_steps(steps=())", True), ("every(100)", False), ("never", False)]
)
def test_intervals_go_on_beside_guesses_and_not_beside_a_clock(boundaries: str, acts: bool) -> None:
    """Labels may stop being new; a clock, or none, is what the user orders in place of a part's own interval."""
    learner = Learner("er() + lwf(every=3)", boundaries=boundaries, **TOY)
    batch = toy_stream().batch(0)
    for _ in range(3):
        learner.learn(batch.x, batch.labels)
    assert bool(learner.engine.chain.parts[1].teacher) is acts  # type: ignore[attr-defined]


def test_in_a_learner_new_labels_are_what_auto_guesses_without_names() -> None:
    learners = [Learner("grace(er())", boundaries=given, **TOY) for given in ("auto", "novelty")]
    for batch in toy_stream():
        for learner in learners:
            learner.learn(batch.x, batch.labels)
    one, other = learners
    assert one.engine.progress == other.engine.progress
    assert same_weights(one, other)


# Resume.


@pytest.mark.parametrize("boundaries", ["at_steps(steps=(7, 8))", "adwin(delta=0.9, clock=4, min_window_length=1)"])
@pytest.mark.slow
def test_a_run_goes_on_exactly_at_every_step_around_an_alarm(boundaries: str, tmp_path: Path) -> None:
    config = RunConfig(
        "grace(er())",
        boundaries=boundaries,
        checkpoint_every=1000,
        **{key: value for key, value in RUN.items() if key != "threads"},
    )
    whole = Work.new(config, tmp_path / "whole").run(threads=1)
    found = [event["step"] for event in gracecl.Result.read(whole).record.tasks]
    assert found
    work = Work.new(config, tmp_path / "parts")
    for step in range(found[0] - 1, found[0] + 4):
        with pytest.raises(Interrupted):
            work.run(StopAfter(step), threads=1)
    folder = resume(work.folder)
    for name in ("metrics.jsonl", "accuracy.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_a_saved_learner_goes_on_exactly(tmp_path: Path) -> None:
    def made() -> Learner:
        return Learner("grace(er())", boundaries="at_steps(steps=(3,))", classes=6, **TOY)

    whole, parts = made().fit(toy_stream()), made()
    for batch in toy_stream():
        parts.learn(batch.x, batch.labels)
        parts.save(tmp_path / "learner")
        parts = Learner.load(tmp_path / "learner", device="cpu")
    assert parts.recipe.boundaries == "at_steps(steps=(3,))"
    assert parts.engine.progress == whole.engine.progress
    assert parts.engine.progress.task == 1
    assert same_weights(parts, whole)


# The option.


def test_expressions_are_recorded_in_one_form_and_auto_not_at_all() -> None:
    assert [canonical(text) for text in ("AUTO", "auto()", "Every(50)", "every()", "adwin(delta=0.3)")] == [
        "auto", "auto", "every(n=50)", "every()", "adwin(delta=0.3)",
    ]  # fmt: skip
    settings = {"method": "er()", "seed": 0, "stream": "split-digits()"}
    assert run_name(settings) == run_name(settings | {"boundaries": "auto"}) != run_name(settings | {"boundaries": "never()"})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("adwim", "unknown detector 'adwim'; did you mean 'adwin'.*gracecl list detectors"),
        ("every(0)", "every: n must be at least 1"),
        ("every", None),
        ("adwin(delta=2)", "adwin: delta must be above 0 and below 1"),
        ("auto(3)", "unknown detector 'auto'"),
        (3, "boundaries must be a word in quotes"),
    ],
)
def test_what_it_refuses(given: Any, sentence: str | None) -> None:
    if sentence is None:
        assert repr(build(given)) == "every()"
        return
    with pytest.raises(UserError, match=sentence):
        Learner("er", boundaries=given)


def test_a_method_that_trains_before_predictions_has_no_errors_to_go_by() -> None:
    with pytest.raises(UserError, match=r"predicts every batch, and gdumb.* trains anew before each prediction"):
        fitted("gdumb(epochs=1)", "adwin")


def test_a_batch_of_the_stream_is_left_alone_without_a_detector() -> None:
    learner = Learner("er", **TOY)
    batch = toy_stream().batch(0)
    learner.learn(batch.x, batch.labels)
    assert placed(learner.engine, batch) is batch
    assert isinstance(batch, StreamBatch)
    assert "detector" not in json.dumps(list(learner.engine.state_dict()))


# What would never act.


def cautions(method: str, boundaries: str = "auto", stream: str = UNMARKED, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Learner(method, boundaries=boundaries, **{**TOY, "classes": 10, **options}).fit(stream)
    return [str(warning.message) for warning in caught if issubclass(warning.category, Caution)]


BY_TASK = {"scheduler": "drop(at=[1], factor=0.5)", "scheduler_step": "task"}
IDLE: list[tuple[str, str, dict[str, Any], str]] = [
    ("er() + ewc()", "auto", {}, "ewc acts every 500 steps, which its 25 steps never reach"),
    ("scr(review=True)", "auto", {}, "scr never does what it does at the end of tasks; give boundaries="),
    (
        "er",
        "auto",
        BY_TASK,
        "the learning rate never changes; use scheduler_step='step', or give boundaries=",
    ),
    ("er", "never", BY_TASK, "'never()' begins no second task in the 25 steps of this stream, so with scheduler_step='task'"),
    ("grace(er())", "never", {}, "so to grace all of it is one task; use boundaries='auto'"),
    ("grace(mose())", "every(25)", {}, "so to mose and grace all of it is one task"),
    ("bic", "adwin", {}, "found no second task in 25 steps, so to bic all of it is one task; use boundaries='every(100)'"),
]


@pytest.mark.parametrize(("method", "boundaries", "options", "sentence"), IDLE)
def test_what_never_acts_is_named_once(method: str, boundaries: str, options: dict[str, Any], sentence: str) -> None:
    [said] = cautions(method, boundaries, **options)
    assert sentence in said


@pytest.mark.parametrize(
    ("method", "boundaries", "stream", "options"),
    [
        ("er() + ewc(every=10)", "auto", UNMARKED, {}),
        ("er() + ewc()", "auto", MARKED, BY_TASK),
        ("er() + ewc()", "every(24)", UNMARKED, BY_TASK),
        ("mose", "auto", UNMARKED, {}),
        ("ema(er())", "auto", UNMARKED, {}),
        ("scr", "auto", UNMARKED, {}),
        ("er", "never", UNMARKED, {}),
        ("er", "adwin", UNMARKED, {}),
        ("scr(review=True)", "novelty", UNMARKED, BY_TASK),
    ],
)
def test_what_acts_is_not_named(method: str, boundaries: str, stream: str, options: dict[str, Any]) -> None:
    assert cautions(method, boundaries, stream, **options) == []


def test_a_schedule_by_tasks_advances_at_guesses() -> None:
    learner = Learner("er", boundaries="every(10)", classes=10, **TOY, **BY_TASK, optimizer="sgd(lr=1.0)").fit(UNMARKED)
    assert learner.engine.full_rates == [0.5]
