"""The loop that fits and runs share: batches of any kind, callbacks, and stops that can be continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gracecl
from gracecl import Callback, Learner, StopTraining, UserError
from gracecl.engine.loop import TrainingState
from gracecl.lab import report
from gracecl.lab.runs.run import resume
from gracecl.testing import toy_stream

TOY: dict[str, Any] = {"classes": 6, "shape": (1, 8, 8), "memory": 20, "net": "mlp(width=8)", "augment": "none", "device": "cpu"}
RUN: dict[str, Any] = {
    "stream": "split-digits(size=8, tasks=5, per_class=10, batch=4)",
    "memory": 20,
    "net": "mlp(width=8)",
    "augment": "none",
    "device": "cpu",
    "threads": 1,
    "eval_every": 4,
}


def same_weights(one: Learner, two: Learner) -> bool:
    return all(map(torch.equal, one.net.state_dict().values(), two.net.state_dict().values()))


def by_hand(task: bool = False) -> Learner:
    """A learner that learned the toy stream batch by batch."""
    learner = Learner("mose", **TOY)
    for batch in toy_stream():
        learner.learn(batch.x, batch.labels, task=batch.task if task else None)
    return learner


# Batches of any kind.


def loader() -> DataLoader[Any]:
    stream = toy_stream()
    x, y = (torch.cat([torch.as_tensor(part) for part in parts]) for parts in zip(*((b.x, b.labels) for b in stream), strict=True))
    sizes = {len(batch) for batch in stream}
    assert len(sizes) == 1
    return DataLoader(TensorDataset(x, y), batch_size=sizes.pop())


PLAIN: dict[str, Callable[[], Any]] = {
    "DataLoader": loader,
    "generator": lambda: ((batch.x, batch.labels) for batch in toy_stream()),
    "lists": lambda: [[batch.x.numpy(), batch.labels.tolist()] for batch in toy_stream()],
    "dicts": lambda: [{"image": batch.x, "labels": torch.as_tensor(batch.labels)} for batch in toy_stream()],
}


@pytest.mark.parametrize("kind", PLAIN)
def test_whatever_yields_batches_is_learned_batch_by_batch(kind: str) -> None:
    fitted = Learner("mose", **TOY).fit(PLAIN[kind]())
    assert same_weights(fitted, hand := by_hand())
    assert fitted.engine.progress == hand.engine.progress


WITH_TASKS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: ((batch.x, batch.labels, batch.task) for batch in toy_stream()),
    "one per example": lambda: ((batch.x, batch.labels, torch.full((len(batch),), batch.task)) for batch in toy_stream()),
    "in a dict": lambda: ({"x": batch.x, "y": batch.labels, "task": batch.task} for batch in toy_stream()),
}


@pytest.mark.parametrize("kind", WITH_TASKS)
def test_batches_may_name_their_task(kind: str) -> None:
    assert same_weights(Learner("mose", **TOY).fit(WITH_TASKS[kind]()), by_hand(task=True))


def test_a_task_is_over_when_a_batch_of_another_comes() -> None:
    ended: list[tuple[int, int]] = []

    class Note(Callback):
        def on_task_end(self, state: TrainingState) -> None:
            ended.append((state.task, state.step))

    stream = toy_stream()
    last = [step + 1 for step in range(len(stream)) if stream.ends_task(step)]
    learner = Learner("er", **TOY).fit(WITH_TASKS["numbers"](), callbacks=[Note()])
    assert ended == list(enumerate(last))[:-1]
    assert learner.engine.task_open
    ended.clear()
    Learner("er", **TOY).fit(stream, callbacks=[Note()])
    assert ended == list(enumerate(last)), "an indexed stream says where its last task ends"


def good() -> tuple[torch.Tensor, npt.NDArray[Any]]:
    return toy_stream().batch(0).x, toy_stream().batch(0).labels


BAD: dict[str, tuple[Any, str]] = {
    "four parts": ((1, 2, 3, 4), r"batch 2 is a tuple of 4; a batch is \(x, y\), \(x, y, task\) or a dict"),
    "None": (None, "batch 2 is a NoneType"),
    "no labels": ({"x": 1}, "batch 2 is a dict of x; give the labels under one of y, labels"),
    "two kinds of labels": ({"x": 1, "y": 1, "label": 2}, "give the labels under one of"),
    "labels alone": ({"y": [1]}, "batch 2 is a dict without an input"),
    "an empty batch": ((good()[0][:0], good()[1][:0]), "batch 2: the batch is empty"),
    "fewer labels": ((good()[0], good()[1][:1]), "batch 2: .* images came with 1 labels"),
    "two tasks": ((*good(), [0, 1]), r"batch 2 holds examples of the tasks \[0, 1\]"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_batch_is_a_sentence_with_its_number_and_those_before_it_were_learned(kind: str) -> None:
    bad, sentence = BAD[kind]
    learner = Learner("er", **TOY)
    with pytest.raises(UserError, match=sentence):
        learner.fit([good(), bad])
    assert learner.engine.progress.step == 1


def test_losses_of_a_loader_are_checked_too() -> None:
    learner = Learner("er", **TOY, optimizer="sgd(lr=1e30)")
    with pytest.raises(UserError, match="at step"):
        learner.fit(PLAIN["generator"]())


def test_what_a_plain_iterable_cannot_promise_is_said() -> None:
    learner = Learner("er", **TOY).fit([good()])
    with pytest.raises(UserError, match="a list has no batches by number, so it cannot be continued at 1; leave out"):
        learner.fit([good()], start=1)
    with pytest.raises(UserError, match=r"only a gracecl\.stream brings test images"):
        learner.fit([good()], eval_every=2)


# Callbacks.


class StopAt(Callback):
    def __init__(self, step: int, event: str = "on_step") -> None:
        self.step, self.seen = step, []
        setattr(self, event, self.look)

    def look(self, state: TrainingState) -> None:
        self.seen.append(state)
        if state.step == self.step:
            raise StopTraining("it is enough")


@pytest.mark.parametrize("method", ["mose", "gdumb(epochs=1)", "joint"])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_fit_that_was_stopped_continues_to_the_same_bits(method: str, at: int, tmp_path: Path) -> None:
    stream, whole = toy_stream(), Learner(method, **TOY).fit(toy_stream())
    stopped = Learner(method, **TOY).fit(stream, callbacks=[StopAt(at)])
    assert stopped.engine.progress.step == at < len(stream)
    stopped.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner").fit(stream, start=at)
    assert again.engine.progress == whole.engine.progress
    assert same_weights(again, whole)
    assert again.evaluate(stream).per_task.tolist() == whole.evaluate(stream).per_task.tolist()


@pytest.mark.parametrize("start", [-1, 3, True, "1", 1000])
def test_a_start_that_was_not_reached_is_a_sentence(start: Any) -> None:
    learner = Learner("er", **TOY).fit([good()])
    with pytest.raises(UserError, match="start is the number of the stream's batches that were learned already"):
        learner.fit(toy_stream(), start=start)


def test_callbacks_see_what_happened() -> None:
    class Watch:
        """No child of Callback."""

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.accuracies: list[float] = []

        def on_step(self, state: TrainingState) -> None:
            assert (state.steps, len(self.losses) + 1) == (len(toy_stream()), state.step)
            self.losses.append(state.losses["ce/all"][0])
            assert state.net.classes == 6

        def on_evaluation(self, state: TrainingState) -> None:
            self.accuracies.append(state.accuracy)

    watch, stream = Watch(), toy_stream()
    learner = Learner("er", **TOY).fit(stream, callbacks=[watch], eval_every=3)
    assert len(watch.losses) == len(stream)
    assert len(watch.accuracies) == len({*stream.marks.tolist(), *range(2, len(stream), 3)})
    assert watch.accuracies[-1] == pytest.approx(learner.evaluate(stream).average)
    assert same_weights(learner, Learner("er", **TOY).fit(stream)), "looking changes nothing"


def test_a_step_is_completed_before_a_callback_stops() -> None:
    stop, seen = StopAt(int(toy_stream().marks[0]) + 1), StopAt(-1, "on_evaluation")
    Learner("er", **TOY).fit(toy_stream(), callbacks=[stop, seen])
    assert [state.step for state in seen.seen] == [stop.step], "the evaluation after the step that stopped"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "callbacks is a list of objects, not a int"),
        ([print], "a callback is an object with on_step, on_task_end or on_evaluation, not a builtin"),
        ([Callback], "not the class Callback"),
        (StopAt(1), "callbacks is a list of objects, not a StopAt"),
    ],
)
def test_what_is_no_callback_is_a_sentence(given: Any, sentence: str) -> None:
    for call in (
        lambda: Learner("er", **TOY).fit(toy_stream(), callbacks=given),
        lambda: gracecl.run("er", callbacks=given, **RUN),
    ):
        with pytest.raises(UserError, match=sentence):
            call()


# Runs.


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "accuracy.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = gracecl.run("er", out=tmp_path_factory.mktemp("whole"), **RUN).folder
    assert folder is not None
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("at", "event", "how"), [(2, "on_step", "run"), (5, "on_task_end", "resume"), (8, "on_evaluation", "run")])
def test_a_run_that_a_callback_stopped_says_so_and_continues(at: int, event: str, how: str, whole: Path, tmp_path: Path) -> None:
    found = gracecl.run("er", out=tmp_path, callbacks=[StopAt(at, event)], **RUN)
    assert found.folder is not None
    assert found.stopped == f"after step {at} of 25: it is enough"
    assert found.stopped in repr(found)
    assert not report.read_run(found.folder).finished
    assert (found.folder / "stopped").read_text().strip() == found.stopped
    if how == "resume":
        resume(found.folder)
    else:
        again = gracecl.run("er", out=tmp_path, **RUN)
        assert again.stopped is None
    assert not (found.folder / "stopped").exists()
    assert files(found.folder) == files(whole)


def test_a_stop_in_the_last_step_is_the_end(tmp_path: Path) -> None:
    found = gracecl.run("er", out=tmp_path, callbacks=[StopAt(25)], **RUN)
    assert found.stopped is None
    assert found.record.finished


def test_a_stopped_run_without_a_folder_has_its_result() -> None:
    found = gracecl.run("er", callbacks=[StopAt(2)], **RUN)
    assert (found.folder, found.accuracy.shape, len(found.steps) > 0) == (None, (0, 0), True)
    assert "no acc" in repr(found)


def test_an_exception_in_a_callback_leaves_the_last_checkpoint_and_the_record(whole: Path, tmp_path: Path) -> None:
    class Break(Callback):
        def on_step(self, state: TrainingState) -> None:
            if state.step == 12:
                raise ZeroDivisionError("of the callback")

    with pytest.raises(ZeroDivisionError, match="of the callback"):
        gracecl.run("er", out=tmp_path, callbacks=[Break()], checkpoint_every=5, **RUN)
    [folder] = [file.parent for file in tmp_path.rglob("checkpoint.safetensors")]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 11
    resume(folder)
    assert files(folder) == files(whole)


def test_callbacks_change_no_bits(whole: Path, tmp_path: Path) -> None:
    found = gracecl.run("er", out=tmp_path, callbacks=[StopAt(-1, event) for event in ("on_step", "on_evaluation")], **RUN)
    assert found.folder is not None
    assert files(found.folder) == files(whole)
