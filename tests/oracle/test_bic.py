"""BiC against slow loops over its equations, through the engine's own steps, and its invariants."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl import checkpoint
from gracecl.core import MEMORY_SOURCE, Batch, Planning, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import rule_scores
from gracecl.errors import UserError
from gracecl.methods.bic import BiC
from gracecl.nets.teacher import frozen_copy
from gracecl.registry.spec import parse_method
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import assert_same, engine_untouched, feed, next_batch, toy_data, toy_engine

PER_TASK = 8
"""steps of a task"""
MEMORY = 120
"""of which 12 slots hold validation images: two of each class at the end"""


def stream(epochs: int = 1) -> Stream:
    """Three tasks of two classes, 40 images of each class in batches of 10."""
    return split(toy_data(6, 40), 0, tasks=3, batch=10, epochs=epochs)


def learner(until: int, method: str = "bic(n_recall=20)", **options: object) -> Engine:
    engine = toy_engine(method, **{"memory": MEMORY} | options)
    feed(engine, stream(), until=until)
    return engine


def bic(engine: Engine) -> BiC:
    method = engine.method
    return method if isinstance(method, BiC) else method.inner


def log_softmax(row: list[float], columns: list[int], temperature: float = 1.0) -> dict[int, float]:
    highest = max(row[c] / temperature for c in columns)
    log_sum = highest + math.log(sum(math.exp(row[c] / temperature - highest) for c in columns))
    return {c: row[c] / temperature - log_sum for c in columns}


def slow_cross_entropy(logits: Tensor, labels: list[int], columns: list[int]) -> float:
    return -float(np.mean([log_softmax(z, columns)[y] for z, y in zip(logits.tolist(), labels, strict=True)]))


def slow_distillation(logits: Tensor, teacher: Tensor, columns: list[int], temperature: float) -> float:
    """- mean over rows of Σ_{k old} softmax(z^* / T)_k log softmax(z / T)_k."""
    terms = []
    for z, t in zip(logits.tolist(), teacher.tolist(), strict=True):
        log_q, log_p = log_softmax(z, columns, temperature), log_softmax(t, columns, temperature)
        terms.append(-sum(math.exp(log_p[k]) * log_q[k] for k in columns))
    return float(np.mean(terms))


# Stage 1.


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("temperature", [2.0, 1.3])
def test_rows_in_the_third_task(taps: int, temperature: float) -> None:
    """The teacher is the net at the end of the second task, its second task's classes corrected by what was fitted then."""
    engine = toy_engine(f"bic(n_recall=20, temperature={temperature})", memory=MEMORY, taps=taps)
    feed(engine, stream(), until=2 * PER_TASK)
    then, found, old = frozen_copy(engine.net), bic(engine).correction, list(engine.progress.seen)
    newest = list(engine.progress.current)
    assert len(old) == 4
    assert (found.scale != 1).all()
    feed(engine, stream(), until=2 * PER_TASK + 3)
    batch, out = next_batch(engine, stream())
    table = engine.chain.losses(out, batch)
    assert table.keys() == {"ce/all", "kd/old"}
    teacher, weight = then(batch.x).logits, 4 / 6
    assert len(batch.progress.seen) == 6
    for layer in range(taps):
        corrected = teacher[layer].double()
        for c in newest:
            corrected[:, c] = found.scale[layer] * corrected[:, c] + found.shift[layer]
        logits = out.logits[layer].detach()
        expected = weight * slow_distillation(logits, corrected, old, temperature)
        assert table["kd/old"][layer].item() == pytest.approx(expected, rel=1e-5)
        expected = (1 - weight) * slow_cross_entropy(logits, batch.labels.tolist(), list(range(6)))
        assert table["ce/all"][layer].item() == pytest.approx(expected, rel=1e-5)
        plain = weight * slow_distillation(logits, teacher[layer], old, temperature)
        assert abs(table["kd/old"][layer].item() - plain) > 1e-4, "the correction makes no difference here"


def test_rows_in_the_second_task_have_a_plain_teacher() -> None:
    engine = learner(PER_TASK)
    then = frozen_copy(engine.net)
    feed(engine, stream(), until=PER_TASK + 3)
    batch, out = next_batch(engine, stream())
    row = engine.chain.losses(out, batch)["kd/old"]
    expected = 0.5 * slow_distillation(out.logits[0].detach(), then(batch.x).logits[0], [0, 1], 2.0)
    assert row.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(batch.targets["bic"], then(batch.x).logits)


def test_the_first_task_has_neither_teacher_nor_correction() -> None:
    engine = learner(PER_TASK - 1)
    batch, out = next_batch(engine, stream())
    assert not batch.targets
    table = engine.chain.losses(out, batch)
    assert table.keys() == {"ce/all"}
    expected = slow_cross_entropy(out.logits[0].detach(), batch.labels.tolist(), [0, 1])
    assert table["ce/all"].item() == pytest.approx(expected, rel=1e-5)
    assert not bic(learner(PER_TASK)).correction.classes.any()


def test_weights_of_equal_tasks() -> None:
    """λ = t / (t + 1), and the two weights add up to 1; while a task's classes come in, λ follows those met."""
    for task in (1, 2):
        engine = learner(task * PER_TASK + 3)
        method = bic(engine)
        batch, out = next_batch(engine, stream())
        table = method.losses(out, batch)
        seen = [c for c in range(6) if batch.seen[c]]
        ce = slow_cross_entropy(out.logits[0].detach(), batch.labels.tolist(), seen)
        kd = slow_distillation(out.logits[0].detach(), batch.targets["bic"][0], list(range(2 * task)), 2.0)
        assert table["ce/all"].item() / ce == pytest.approx(1 / (task + 1), rel=1e-4)
        assert table["kd/old"].item() / kd == pytest.approx(task / (task + 1), rel=1e-4)
        batch.progress = dataclasses.replace(batch.progress, seen=tuple(range(2 * task + 1)))
        assert method.losses(out, batch)["kd/old"].item() / kd == pytest.approx(2 * task / (2 * task + 1), rel=1e-4)


def test_replay_draws_current_images_too_and_costs_what_it_should() -> None:
    """74 forward and backward, 74 teacher forward, once the validation store has what it wants."""
    engine = toy_engine("bic()", memory=300)
    feed(engine, stream(), until=2 * PER_TASK - 1)
    [outcome] = feed(engine, stream(), until=2 * PER_TASK)
    assert (outcome.images, outcome.forward, outcome.backward) == (74, 148, 74)
    batch, _ = next_batch(learner(2 * PER_TASK - 1), stream())
    assert set(batch.labels[10:].tolist()) & set(batch.progress.current)


# Stage 2.


def objective(logits: Tensor, labels: list[int], new: list[int], seen: list[int], a: float, b: float, penalty: float) -> float:
    corrected = logits.double().clone()
    corrected[:, new] = a * corrected[:, new] + b
    return slow_cross_entropy(corrected, labels, seen) + penalty * b * b


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize(("penalty", "memory_size"), [(0.05, MEMORY), (0.5, MEMORY), (0.05, 130)])
def test_the_fit_is_the_minimum_over_the_validation_images(taps: int, penalty: float, memory_size: int) -> None:
    """At each later task's end, for each tap, on clean images in evaluation mode: every small move away makes it worse.

    As many images of one class as of another, also where the store has a slot or two more.
    """
    engine = toy_engine(f"bic(n_recall=20, shift_penalty={penalty})", memory=memory_size, taps=taps)
    for task in (1, 2):
        feed(engine, stream(), until=(task + 1) * PER_TASK)
        method = bic(engine)
        slots = method.validation.balanced(2 * task + 2)
        memory = engine.memories["validation"]
        labels = memory.labels[slots].tolist()
        assert Counter(labels) == dict.fromkeys(range(2 * task + 2), 12 // (2 * task + 2))
        assert (len(labels) < len(memory)) == (memory_size == 130)
        twin = frozen_copy(engine.net)
        logits = twin(engine.net.inputs.normalise(memory[slots])).logits
        new, seen = [2 * task, 2 * task + 1], list(range(2 * task + 2))
        assert method.correction.classes.nonzero().flatten().tolist() == new
        for layer in range(taps):
            a, b = method.correction.scale[layer].item(), method.correction.shift[layer].item()
            assert max(abs(a - 1), abs(b)) < 4.99, "choose a problem whose minimum lies inside"
            least = objective(logits[layer], labels, new, seen, a, b, penalty)
            assert least < objective(logits[layer], labels, new, seen, 1.0, 0.0, penalty)
            for da, db in ((1e-2, 0), (-1e-2, 0), (0, 1e-2), (0, -1e-2)):
                assert objective(logits[layer], labels, new, seen, a + da, b + db, penalty) > least


def test_the_end_of_a_task_leaves_the_net_alone() -> None:
    engine = learner(2 * PER_TASK - 1)
    piece = stream().batch(2 * PER_TASK - 1)
    engine.learn(StreamBatch(piece.x, piece.labels, task=piece.task, sources=piece.sources))
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    optimizer = {str(i): dict(state) for i, state in enumerate(engine.optimizer.state.values())}
    looked_at = engine.net.meter.forward
    engine.end_task()
    assert (bic(engine).correction.scale != 1).all()
    assert_same(engine.net.state_dict(), before, "the net after the fit")
    assert_same({str(i): dict(state) for i, state in enumerate(engine.optimizer.state.values())}, optimizer, "the optimizer")
    assert engine.net.training
    assert engine.net.meter.forward - looked_at == 12, "the pass over the validation images is counted"


def test_only_the_newest_classes_are_corrected_and_only_between_tasks() -> None:
    engine = learner(2 * PER_TASK)
    images = toy_data().test_x
    [(_, out)] = engine.net.sweep(images)
    found = bic(engine).correction
    scores = rule_scores(engine.chain, out, torch.arange(6))["linear_last"]
    assert torch.equal(scores[:, [0, 1, 4, 5]], out.logits[-1][:, [0, 1, 4, 5]])
    expected = found.scale.float() * out.logits[-1][:, [2, 3]] + found.shift.float()
    torch.testing.assert_close(scores[:, [2, 3]], expected)
    assert not torch.equal(scores, out.logits[-1])
    feed(engine, stream(), until=2 * PER_TASK + 1)
    [(_, out)] = engine.net.sweep(images)
    assert torch.equal(engine.chain.rules(out)["linear"], out.logits), "within a task there is no correction"
    assert torch.equal(bic(engine).of_teacher.scale, found.scale), "the teacher keeps its own"
    feed(engine, stream())
    last = bic(engine).correction
    assert last.classes.nonzero().flatten().tolist() == [4, 5]
    assert not torch.equal(last.scale, found.scale)


def test_each_task_s_values_are_told() -> None:
    engine = toy_engine("grace(bic(n_recall=20))", memory=MEMORY, taps=2)
    feed(engine, stream(), until=2 * PER_TASK)
    values = engine.task_values
    assert values["bias_scale"] == bic(engine).correction.scale.tolist()
    assert values["bias_shift"] == bic(engine).correction.shift.tolist()
    assert len(values["bias_scale"]) == 2


@pytest.mark.parametrize("memory", [0, 10, 20])
def test_too_few_slots_are_told_and_a_fit_needs_new_and_old_images(memory: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = learner(3 * PER_TASK, memory=memory)
    assert "use a larger memory" in caplog.text
    held = set(engine.memories["validation"].labels[: len(engine.memories["validation"])].tolist())
    assert held <= {0, 1}
    assert not bic(engine).correction.classes.any()


def test_without_held_out_images_it_is_distillation_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = learner(3 * PER_TASK, "bic(n_recall=20, held_out=0)")
    assert engine.memories.replay.capacity == MEMORY
    assert not bic(engine).correction.classes.any()
    assert not caplog.text


def test_a_task_without_new_classes_changes_no_prediction() -> None:
    engine = learner(2 * PER_TASK)
    piece = stream().batch(0)
    outcome = engine.learn(StreamBatch(piece.x, piece.labels, task=7))
    assert all(value.isfinite().all() for value in outcome.table.values())
    engine.end_task()
    assert not bic(engine).correction.classes.any()


# What is held out.


def trained_on(engine: Engine, kind: Stream, until: int | None = None) -> list[Batch]:
    """Feeds the stream and returns every batch that a step was made on."""
    batches: list[Batch] = []
    assemble = engine.assemble

    def spy(*args: object, **kwargs: object) -> Batch:
        batches.append(assemble(*args, **kwargs))
        return batches[-1]

    engine.assemble = spy
    feed(engine, kind, until)
    engine.assemble = assemble
    return batches


def pixels(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_the_budget_is_shared() -> None:
    engine = toy_engine("bic()", memory=MEMORY)
    assert engine.memories["validation"].capacity == 12
    assert engine.memories.replay.capacity == MEMORY - 12
    assert toy_engine("bic(held_out=0.25)", memory=30).memories["validation"].capacity == round(7.5)


@pytest.mark.parametrize(
    "method", ["bic(n_recall=20)", "grace(bic(n_recall=20), val_source='heldout')", "rar(bic(n_recall=20), 2)"]
)
def test_no_validation_image_is_trained_on(method: str) -> None:
    """None of the stream's images that was ever kept aside, and none that memory replays."""
    engine, kind = toy_engine(method, memory=MEMORY), stream()
    held: set[int] = set()
    validation = engine.memories["validation"]
    put = validation.put

    def note(slots, x, rows, labels, task, notes) -> None:
        put(slots, x, rows, labels, task, notes)
        held.update(i for i, image in enumerate(everything) if image.numpy().tobytes() in pixels(x))

    everything = kind.data.train_x[torch.from_numpy(kind.order)]
    validation.put = note
    batches = trained_on(engine, kind)
    assert len(held) >= 12
    from_stream = {int(source) for batch in batches for source in batch.sources if source < MEMORY_SOURCE}
    assert not held & from_stream
    assert not pixels(everything[sorted(held)]) & pixels(engine.memories.replay.images[: len(engine.memories.replay)])
    if not method.startswith("grace"):
        assert held | from_stream == set(range(len(kind.order))), "an image is lost"


def test_the_first_images_of_a_class_are_held_out_and_others_give_way() -> None:
    engine, kind = toy_engine("bic(n_recall=20)", memory=MEMORY), stream()
    for task, share in ((0, 6), (1, 3), (2, 2)):
        feed(engine, kind, until=(task + 1) * PER_TASK)
        counts = Counter(engine.memories["validation"].labels.tolist())
        assert counts == dict.fromkeys(range(2 * task + 2), share)
    assert engine.memories.replay.offered + engine.memories["validation"].offered == len(kind.order)


def test_a_batch_that_is_held_out_entirely_makes_no_step() -> None:
    engine, kind = toy_engine("bic(n_recall=20)", memory=MEMORY), split(toy_data(6, 40), 0, tasks=3, batch=5)
    assert feed(engine, kind, until=1) == [None]
    assert len(engine.memories.replay) == 0
    assert len(engine.memories["validation"]) == 5


def test_several_epochs_never_train_on_a_validation_image() -> None:
    """In later epochs an image has another place in the stream, so it is known by its pixels."""
    engine, kind = toy_engine("bic(n_recall=20)", memory=MEMORY), stream(epochs=3)
    images = kind.data.train_x[torch.from_numpy(kind.order)]
    steps = len(kind) // 3
    for task in range(3):
        batches = trained_on(engine, kind, until=(task + 1) * steps)
        sources = [int(source) for batch in batches for source in batch.sources if source < MEMORY_SOURCE]
        held = pixels(engine.memories["validation"].images)
        assert len(held) == 12
        trained = [image.numpy().tobytes() for image in images[sources]]
        assert not held & set(trained)
        counts = Counter(trained)
        assert set(counts.values()) <= {2, 3}, "an image that gave way in the first epoch is trained on in the others"
        assert Counter(counts.values())[3] >= 80 - 12
    assert engine.memories.replay.offered + engine.memories["validation"].offered == 240
    assert (bic(engine).correction.scale != 1).all()


# Checkpoints.


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, PER_TASK, 2 * PER_TASK - 1, 2 * PER_TASK, 2 * PER_TASK + 1, 3 * PER_TASK])
@pytest.mark.parametrize("method", ["bic(n_recall=20)", "grace(bic(n_recall=20))"])
def test_resumes_exactly_with_corrections(at: int, method: str, tmp_path: Path) -> None:
    whole, first, second = (toy_engine(method, memory=MEMORY) for _ in range(3))
    feed(whole, stream())
    feed(first, stream(), until=at)
    checkpoint.save(tmp_path / "state", first.state_dict())
    second.load_state_dict(checkpoint.load(tmp_path / "state"))
    assert_same(second.state_dict(), first.state_dict(), "the state that came back")
    feed(second, stream())
    assert_same(second.state_dict(), whole.state_dict(), f"resumed at {at}")
    assert (bic(second).correction.scale != 1).all()


def test_planning_moves_nothing() -> None:
    engine = learner(PER_TASK)
    piece = stream().batch(PER_TASK)
    progress = Progress(PER_TASK, 1, True, (0, 1, 2, 3), (2, 3))
    new = StreamBatch(piece.x, piece.labels, piece.sources, progress=progress)
    with engine_untouched(engine, "planning"):
        engine.method.plan(new, engine.memories, Planning(np.random.default_rng(0)))


def test_nearest_mean_is_an_option() -> None:
    engine = learner(2 * PER_TASK, "bic(n_recall=20, inference='ncm')")
    [(_, out)] = engine.ready_to_predict().sweep(toy_data().test_x)
    assert set(engine.chain.rules(out)) == {"linear", "ncm"}
    assert engine.chain.rule == "ncm_last"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("bic(temperature=0)", "bic: temperature must be above 0, not 0"),
        ("bic(shift_penalty=-1)", "bic: shift_penalty must be at least 0, not -1"),
        ("bic(held_out=1)", "bic: held_out must be at least 0 and below 1, not 1"),
    ],
)
def test_bad_options_are_told(expression: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(expression)
