"""Predict, then learn: what is recorded, that nothing else changes by it, and that a stop changes nothing of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracecl import Learner, UserError
from gracecl.engine import loop as loop_module
from gracecl.engine.engine import Engine
from gracecl.engine.loop import Callbacks, Loop, TrainingState
from gracecl.engine.prequential import predict
from gracecl.engine.recipe import Recipe
from gracecl.errors import Caution
from gracecl.files import write_json
from gracecl.functional.metrics import NO_PREDICTION
from gracecl.lab import report
from gracecl.lab.runs.run import Interrupted, RunConfig, Work, resume
from gracecl.streams import Stream
from gracecl.testing import toy_engine, toy_stream
from noted_log import Noted
from stopping import StopAfter

RUN: dict[str, Any] = {
    "stream": "split-digits(size=8, tasks=5, per_class=10, batch=4)",
    "memory": 20,
    "net": "mlp(width=8)",
    "augment": "none",
    "device": "cpu",
    "threads": 1,
}


def trained(method: str, engine: Engine | None = None, **asked: Any) -> tuple[Loop, Noted]:
    """A toy learner at the end of its stream, and what was logged."""
    engine, log = engine or toy_engine(method), Noted()
    stream = engine.as_seen(toy_stream())
    loop = Loop(engine, stream.batch, steps=len(stream), log=log, test=stream, **asked)
    loop.run()
    return loop, log


OTHERS = ["er", "grace(mose())", "scr", "cls_er", "ema(er())", "mirrored(er())", "er() + lwf()", "fecam", "bic"]


@pytest.mark.parametrize("method", ["er(inference='ncm')", "slda", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_predictions_move_nothing_of_the_learner(method: str) -> None:
    (alone, plain), (watched, noted) = trained(method), trained(method, prequential=True, near_future=2)
    weights = [loop.engine.net.state_dict().values() for loop in (alone, watched)]
    assert all(map(torch.equal, *weights))
    assert torch.equal(alone.engine.memories.replay.images, watched.engine.memories.replay.images)
    assert noted.of("prequential")
    for kind in ("step", "eval", "task"):
        assert plain.of(kind) == noted.of(kind), "losses, evaluations and memory are those of a learner that is not asked"
    counted = [(loop.timing.images, loop.timing.forward, loop.timing.backward) for loop in (alone, watched)]
    assert counted[0] == counted[1]
    assert watched.timing.eval_forward > alone.timing.eval_forward > 0


def test_each_batch_is_predicted_by_the_learner_that_has_all_before_it_and_later_ones_too() -> None:
    """Against a literal loop with `Learner`, which predicts by itself."""
    stream, shift = toy_stream(), 2
    options: dict[str, Any] = {"memory": 20, "net": "mlp(width=8)", "augment": "none", "device": "cpu"}
    learner = Learner("er", classes=6, shape=(1, 8, 8), **options)
    assert learner.inputs is not None
    loop, log = trained("er", Recipe("er", **options).build(learner.inputs, 6), prequential=True, near_future=shift)
    prequential, ahead = log.of("prequential"), log.of("near_future")
    assert (len(prequential), len(ahead)) == (len(stream), len(stream) - shift)
    images = 0
    for step, batch in enumerate(stream):
        for records, of in ((prequential, step), (ahead, step + shift)):
            if of < len(stream):
                later = stream.batch(of)
                images += len(later) if step else 0
                expected = learner.predict(later.x).tolist() if step else [NO_PREDICTION] * len(later)
                assert records[step]["step"] == step
                assert records[step]["labels"] == later.labels.tolist()
                assert records[step]["predictions"] == expected
        learner.learn(batch.x, batch.labels, task=batch.task)
    assert {record["shift"] for record in ahead} == {shift}
    evaluated = sum(len(stream.test_images(seen_by(stream, mark), mark)[1]) for mark in stream.marks)
    assert loop.timing.eval_forward == images + evaluated


def seen_by(stream: Stream, step: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(label for at in range(step + 1) for label in stream.batch(at).labels.tolist()))


def test_probabilities_are_those_of_the_classes_met() -> None:
    stream, engine = toy_stream(), toy_engine("er")
    first, later = stream.batch(len(stream) - 1), stream.batch(0)  # backwards, so that classes are not met by number
    before = predict(engine, first, probabilities=True)
    assert before.predictions.tolist() == [NO_PREDICTION] * len(first)
    assert before.probability is not None
    assert not before.probability.any()
    for step in range(1, 4):
        engine.learn(stream.batch(len(stream) - step))
    made = predict(engine, first, probabilities=True)
    met = list(engine.progress.seen)
    with torch.no_grad():
        engine.net.eval()
        chances = engine.net(engine.net.inputs.normalise(first.x)).logits[-1][:, met].softmax(dim=1).double().numpy()
        engine.net.train()
    assert made.confidence is not None
    assert made.probability is not None
    np.testing.assert_allclose(made.confidence, chances.max(axis=1), atol=1e-6)
    np.testing.assert_allclose(
        made.probability, [row[met.index(y)] for row, y in zip(chances, first.labels, strict=True)], atol=1e-6
    )
    np.testing.assert_array_equal(made.predictions, np.array(met)[chances.argmax(axis=1)])
    assert not set(later.labels.tolist()) & set(met)
    unmet = predict(engine, later, probabilities=True)
    assert unmet.probability is not None
    assert not unmet.probability.any(), "a class never met has no probability"
    assert not unmet.right.any()


def test_what_cannot_be_predicted_is_said_before_anything_is_learned() -> None:
    with pytest.raises(UserError, match=r"trains its net only before an evaluation.*eval_every"):
        trained("gdumb", prequential=True)
    with pytest.raises(UserError, match="near_future is 500 steps, and a stream of"):
        trained("er", near_future=500)
    with pytest.raises(UserError, match="unknown length"):
        Loop(toy_engine("er"), lambda step: None, near_future=1)
    with pytest.warns(Caution, match="scores of ncm_last.*no probabilities"):
        _, log = trained("scr", prequential=True, probabilities=True)
    assert "confidence" not in log.of("prequential")[-1]


def test_a_learner_that_goes_on_from_a_checkpoint_predicts_the_same() -> None:
    method = "er(inference='ncm')"
    _, whole = trained(method, prequential=True, near_future=2)
    engine, log = toy_engine(method), Noted()
    stream = engine.as_seen(toy_stream())
    for step in range(len(stream)):
        loop = Loop(engine, stream.batch, steps=len(stream), log=log, test=stream, prequential=True, near_future=2)
        assert loop.at == step
        loop.step()
        log.flush()
        state, engine = engine.state_dict(), toy_engine(method)
        engine.load_state_dict(state)
        engine.as_seen(stream)
    assert log.lines == whole.lines


def test_callbacks_see_the_predictions() -> None:
    class Watching:
        def __init__(self) -> None:
            self.right: list[int] = []

        def on_step(self, state: TrainingState) -> None:
            assert state.predictions is not None
            self.right.append(int(state.predictions.right.sum()))

    watching = Watching()
    _, log = trained("er", prequential=True, callbacks=Callbacks([watching]))
    right = [sum(map(int.__eq__, one["labels"], one["predictions"])) for one in log.of("prequential")]
    assert watching.right == right
    assert (right[0], sum(right) > 0) == (0, True)


# Stops.


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "accuracy.json", "summary.json")}


ASKED: dict[str, Any] = {
    "method": "er(inference='ncm')",
    "prequential": True,
    "near_future": 3,
    "eval_every_images": 30,
    "eval_after_marks": 2,
    "eval_images": 40,
    "checkpoint_every": 4,
    **{name: value for name, value in RUN.items() if name != "threads"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Work.new(RunConfig(**ASKED), tmp_path_factory.mktemp("whole")).run(threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 12])
def test_a_run_that_was_stopped_predicts_the_same(step: int, whole: Path, tmp_path: Path) -> None:
    work = Work.new(RunConfig(**ASKED), tmp_path)
    with pytest.raises(Interrupted):
        work.run(StopAfter(step), threads=1)
    resume(work.folder)
    assert files(work.folder) == files(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "call"), [("evaluate", 1), ("evaluate", 5), ("predict", 7), ("predict", 24)])
def test_a_run_that_broke_off_while_it_looked_records_the_same(
    what: str, call: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, function = iter(range(1, 1000)), getattr(loop_module, what)

    def breaks(*arguments: Any) -> Any:
        if next(calls) == call:
            raise ZeroDivisionError("in the middle")
        return function(*arguments)

    work = Work.new(RunConfig(**ASKED), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, what, breaks)
        with pytest.raises(ZeroDivisionError):
            work.run(threads=1)
    resume(work.folder)
    assert files(work.folder) == files(whole)


@pytest.mark.slow
def test_a_run_that_was_killed_records_the_same(whole: Path, tmp_path: Path) -> None:
    work = Work.new(RunConfig(**ASKED), tmp_path)
    program = (
        "import signal, sys; from pathlib import Path; from gracecl.lab.runs.run import RunConfig, Work; "
        f"sys.path.insert(0, {str(Path(__file__).parent)!r}); from stopping import StopAfter; "
        f"Work.new(RunConfig(**{ASKED!r}), Path({str(tmp_path)!r})).run(StopAfter(12, signal.SIGKILL), threads=1)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    record = work.folder / "metrics.jsonl"
    assert record.read_bytes() != (whole / "metrics.jsonl").read_bytes()
    resume(work.folder)
    assert files(work.folder) == files(whole)


@pytest.mark.slow
def test_a_run_knows_what_was_predicted(whole: Path) -> None:
    found = report.read_run(whole)
    assert [record["step"] for record in found.prequential] == list(range(found.length))
    assert [record["step"] for record in found.near_future] == list(range(found.length - 3))


@pytest.mark.parametrize("asked", [{"prequential": True}, {"near_future": 1}, {"probabilities": True}])
def test_runs_that_are_not_asked_for_predictions_stay_where_they_were(asked: dict[str, Any]) -> None:
    assert RunConfig("er").folder(Path()) != RunConfig("er", **asked).folder(Path())


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "prequential", "step": 0, "labels": [0, 1]},
        {"kind": "prequential", "step": 0, "labels": [0, 1], "predictions": [0]},
        {"kind": "prequential", "step": 0, "labels": [0, 1], "predictions": [0, 0.5]},
        {"kind": "prequential", "step": 0, "labels": [0], "predictions": [0], "confidence": ["high"]},
        {"kind": "near_future", "step": 0, "labels": [0, 1], "predictions": [0, 1]},
    ],
)
def test_a_line_that_is_damaged_is_refused(line: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"method": "er", "stream": "split-digits", "seed": 0, "rule": "linear_last"})
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=f"is no {line['kind']} record"):
        report.read_run(tmp_path)
