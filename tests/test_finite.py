"""Numbers that are not finite stop a run before they are kept, with the step, the term and the layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from commands import gracecl, only_run, records
from gracecl import Learner, UserError
from gracecl.core import Batch, LossTable, Taps
from gracecl.engine.finite import LOOK_EVERY, Norms
from gracecl.lab.runs.run import RunConfig, learner_and_stream
from gracecl.methods.er import ER
from gracecl.registry import methods
from test_run import NET, SMALL, STREAM

BAD_STEP = 7


@pytest.fixture(autouse=True)
def steep() -> Iterator[None]:
    """A method whose loss is finite at every step and whose gradient is not at one: √ has no slope at zero."""

    @methods.register("steep")
    @dataclass(eq=False, repr=False)
    class Steep(ER):
        """Replay with an accident."""

        step: int = BAD_STEP
        every: bool = False

        def losses(self, out: Taps, batch: Batch) -> LossTable:
            nothing = (out.logits - out.logits.detach()).abs()
            accident = nothing.sqrt() if self.every or batch.progress.step == self.step else nothing
            return super().losses(out, batch) | {"ce/accident": accident.mean(dim=(1, 2))}

    yield
    del methods.loaded["steep"], methods._name_of[Steep]


def test_a_gradient_that_is_not_finite_stops_the_run_before_its_step_and_the_checkpoint_stays(tmp_path: Path) -> None:
    command = ["run", "steep", *SMALL, "--out", tmp_path]
    said = gracecl(*command)
    assert said.code == 2
    assert "became nan at step 7, from the term 'ce/accident' of layer 1;" in said.sentence
    assert "the gradient of 'backbone" in said.sentence
    folder = only_run(tmp_path)
    saved = (folder / "checkpoint.safetensors").read_bytes()
    assert [line["step"] for line in records(folder)] == list(range(BAD_STEP))
    for again in (command, ["resume", folder]):
        assert gracecl(*again).sentence == said.sentence, "the same command fails in the same way"
        assert (folder / "checkpoint.safetensors").read_bytes() == saved


def test_half_precision_does_not_leave_out_every_step_without_a_word(tmp_path: Path) -> None:
    """Its scale of the loss is halved at each step that is left out; a run that learns nothing does not come to its end."""
    said = gracecl("run", "steep(every=True)", "--precision", "fp16", *SMALL, "--out", tmp_path)
    assert said.code == 2
    assert "half precision scales the loss by less than 1 at step 16;" in said.sentence
    assert not list(tmp_path.rglob("summary.json"))


def test_half_precision_leaves_out_a_step_as_ever(tmp_path: Path) -> None:
    assert gracecl("run", "steep", "--precision", "fp16", "--steps", "12", *SMALL, "--out", tmp_path).code == 0


def test_a_layer_is_counted_as_it_is_tapped(tmp_path: Path) -> None:
    said = gracecl("run", "steep(step=0)", "--taps", "3", *SMALL, "--out", tmp_path)
    assert "from the term 'ce/accident' of layer 1;" in said.sentence


def test_a_penalty_s_gradient_counts_too(tmp_path: Path) -> None:
    said = gracecl("run", "steep(step=3) + ewc_pp()", *SMALL, "--out", tmp_path)
    assert "at step 3, from the term 'ce/accident' of layer 1;" in said.sentence


@pytest.mark.parametrize("rate", ["1e400", "1e38", "1e30"])
@pytest.mark.parametrize(("method", "steps"), [("sgd", 1), ("er", 1), ("mose", 2)])  # MOSE only stores its first batch
def test_a_step_too_far_is_not_evaluated(rate: str, method: str, steps: int, tmp_path: Path) -> None:
    """One update at such a rate, and none after it that could notice."""
    said = gracecl("run", method, "--optimizer", f"sgd(lr={rate})", "--steps", str(steps), *SMALL, "--out", tmp_path)
    assert said.code == 2
    assert "finite" in said.sentence or "not numbers" in said.sentence
    assert not list(tmp_path.rglob("summary.json"))
    assert not list(tmp_path.rglob("checkpoint.safetensors"))


def test_a_fit_that_fails_is_a_sentence(tmp_path: Path) -> None:
    said = gracecl("run", "gdumb(lr=1e30)", "--steps", "3", *SMALL, "--out", tmp_path)
    assert said.code == 2
    assert "the gradient of the fit before an evaluation became" in said.sentence or "not numbers" in said.sentence


# The learner in somebody's own loop.

X, Y = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), dtype=np.uint8), np.arange(10) % 4


def learner(method: str = "er", **options: object) -> Learner:
    return Learner(method, classes=4, shape=(1, 8, 8), memory=20, net=NET, device="cpu", **options)  # type: ignore[arg-type]


def test_a_learner_s_weights_are_as_before_when_a_gradient_is_refused() -> None:
    ours = learner("steep(step=2)")
    for _ in range(2):
        ours.learn(X, Y)
    before = {name: value.clone() for name, value in ours.net.state_dict().items()}
    predictions = ours.predict(X)
    with pytest.raises(UserError, match="became nan at step 2, from the term 'ce/accident' of layer 1"):
        ours.learn(X, Y)
    assert all(torch.equal(value, before[name]) for name, value in ours.net.state_dict().items())
    assert np.array_equal(ours.predict(X), predictions)


def test_a_learner_that_lost_its_weights_neither_predicts_nor_saves(tmp_path: Path) -> None:
    ours = learner()
    ours.learn(X, Y)
    ours.save(tmp_path / "learner")
    saved = (tmp_path / "learner").read_bytes()
    with torch.no_grad():
        next(ours.net.backbone.parameters())[0] = math.nan
    ours.engine.invalidate_predictions()
    for act in (lambda: ours.predict(X), lambda: ours.predict_proba(X), lambda: ours.save(tmp_path / "learner")):
        with pytest.raises(UserError, match=r"'backbone\..*' of the net is not finite after step 0"):
            act()
    assert (tmp_path / "learner").read_bytes() == saved


def test_scores_that_are_not_numbers_name_no_class() -> None:
    ours = learner(optimizer="sgd(lr=1e30)")
    ours.learn(X, Y)
    with pytest.raises(UserError, match=r"finite|not numbers"):
        ours.predict(X)


@pytest.mark.parametrize("values", [{"std": [0.0]}, {"std": [-1.0]}, {"std": [math.nan]}, {"mean": [math.inf]}], ids=str)
def test_pixels_that_cannot_be_normalised_are_refused(values: dict[str, list[float]]) -> None:
    with pytest.raises(UserError, match="mean and std of the pixels must be finite and std above 0"):
        learner(**values)


# What a step costs and when it waits.


def test_a_device_is_not_waited_for_at_each_step() -> None:
    """Norms are looked at when enough are there, or when somebody asks; the step is still the right one."""

    def refuse(step: int, position: int, norm: float) -> UserError:
        return UserError(f"{step} {position} {norm}")

    norms = Norms(torch.device("meta"), refuse)
    for step in range(LOOK_EVERY - 1):
        norms.note(step, torch.tensor([1.0, math.inf if step == 3 else 2.0]))
    with pytest.raises(UserError, match=r"^3 1 inf$"):
        norms.check()
    norms.check()
    for step in range(LOOK_EVERY - 1):
        norms.note(step, torch.tensor([math.nan]))
    with pytest.raises(UserError, match=r"^0 0 nan$"):
        norms.note(LOOK_EVERY, torch.tensor([1.0]))


def test_a_gradient_whose_norm_alone_overflows_is_taken_as_before() -> None:
    """Its numbers are finite, and the step is the method's own affair."""
    engine, stream = learner_and_stream(RunConfig("er", NET, 20, stream=STREAM, device="cpu", optimizer="sgd(lr=0.0)"))
    losses = engine.method.losses
    engine.method.losses = lambda out, batch: {row: 1e22 * value for row, value in losses(out, batch).items()}  # type: ignore[method-assign]
    engine.learn(stream.batch(0))
    largest = max(float(parameter.grad.abs().max()) for parameter in engine.update.params if parameter.grad is not None)
    assert 1e19 < largest < math.inf


def test_a_step_takes_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stream = learner_and_stream(RunConfig("er", NET, 20, stream=STREAM, device="cpu"))
    calls: list[int] = []
    norm = torch._foreach_norm

    def counted(tensors: list[Tensor], order: float) -> tuple[Tensor, ...]:
        calls.append(len(tensors))
        return norm(tensors, order)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    for step in range(3):
        engine.learn(stream.batch(step))
    assert len(calls) == 3
