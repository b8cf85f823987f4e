"""iCaRL against slow loops: losses, herding, exemplars over tasks, the nearest mean; through the engine's own hooks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gracecl import rng
from gracecl.core import MEMORY_SOURCE, NO_TASK, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import seen_scores
from gracecl.errors import UserError
from gracecl.functional.losses import binary_cross_entropy
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.memory.herding import herd
from gracecl.methods.icarl import CANDIDATES, ICaRL
from gracecl.nets.teacher import frozen_copy
from gracecl.registry.spec import parse_method
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import METHOD_LAWS, TOY_SHAPE, feed, next_batch, prepared, toy_data, toy_engine, toy_stream


def longer() -> Stream:
    return split(toy_data(6, 30), 0, tasks=3, batch=10)


# Losses.


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def slow_bce(z: float, target: float) -> float:
    g = sigmoid(z)
    return -(target * math.log(g) + (1 - target) * math.log(1 - g))


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("exemplars", ["herding", "reservoir"])
def test_losses_in_the_second_task(taps: int, exemplars: str) -> None:
    """Labels for the task's classes, the teacher's sigmoids for the old ones, nothing for those not met; whatever the image."""
    engine, stream = prepared(f"icarl(n_recall=5, exemplars='{exemplars}')", taps=taps)
    batch, out = next_batch(engine, stream)
    assert len(batch) == 8
    old, new = batch.progress.seen[:2], batch.progress.seen[2:]
    assert len(new) == 2
    assert not set(new) & set(batch.labels[3:].tolist()), "only images of earlier tasks are replayed"
    teacher = frozen_copy(engine.method.teacher.copy)(batch.x).logits  # in evaluation mode, whatever the copy's is
    table = engine.chain.losses(out, batch)
    assert set(table) == {"ce/new", "kd/old"}
    for layer in range(taps):
        z, t = out.logits[layer].tolist(), teacher[layer].tolist()
        ce = sum(slow_bce(z[i][k], float(batch.labels[i] == k)) for i in range(8) for k in new) / 8
        kd = sum(slow_bce(z[i][k], sigmoid(t[i][k])) for i in range(8) for k in old) / 8
        assert table["ce/new"][layer].item() == pytest.approx(ce, rel=1e-4)
        assert table["kd/old"][layer].item() == pytest.approx(kd, rel=1e-4)
    assert not torch.equal(teacher, out.logits)


def test_losses_in_the_first_task() -> None:
    engine, stream = toy_engine("icarl()"), toy_stream()
    feed(engine, stream, until=3)
    batch, out = next_batch(engine, stream)
    assert len(batch) == 3
    table = engine.chain.losses(out, batch)
    assert list(table) == ["ce/new"]
    z = out.logits[0].tolist()
    expected = sum(slow_bce(z[i][k], float(batch.labels[i] == k)) for i in range(3) for k in batch.progress.seen) / 3
    assert table["ce/new"].item() == pytest.approx(expected, rel=1e-4)


def test_the_teacher_is_the_net_at_the_end_of_the_last_task() -> None:
    engine, stream = toy_engine("icarl()"), toy_stream()
    feed(engine, stream, until=6)
    assert stream.ends_task(5)
    weights = {name: value.clone() for name, value in engine.net.named_parameters()}
    feed(engine, stream, until=9)
    for name, value in engine.method.teacher.copy.named_parameters():
        assert torch.equal(value, weights[name])
    assert engine.method.teacher.classes.nonzero().flatten().tolist() == sorted(engine.progress.seen[:2])


def test_targets_of_every_layer_and_of_one_for_all() -> None:
    """Binary cross-entropy is at its least where the sigmoid is the target, and takes `[B, C]` and `[L, B, C]`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=generator)
    classes = torch.tensor([True, False, True, True, False])
    own = binary_cross_entropy(logits, logits.sigmoid(), classes)
    for shift in (-0.1, 0.1):
        assert (binary_cross_entropy(logits + shift, logits.sigmoid(), classes) > own).all()
    labels = F.one_hot(torch.tensor([0, 3, 2, 1]), 5)
    torch.testing.assert_close(
        binary_cross_entropy(logits, labels, classes), binary_cross_entropy(logits, labels.expand(3, 4, 5), classes)
    )
    assert torch.equal(binary_cross_entropy(logits, labels, ~classes & classes), torch.zeros(3))


# Herding.


def slow_herding(features: torch.Tensor, count: int) -> list[int]:
    """Algorithm 4 of the paper: the argmin of ‖μ - (φ(x) + Σ chosen) / k‖ over images not chosen yet."""
    phi = [f / f.norm() for f in features.double()]
    mu = sum(phi) / len(phi)
    mu = mu / mu.norm()
    chosen: list[int] = []
    while len(chosen) < min(count, len(phi)):
        k, total = len(chosen) + 1, sum((phi[i] for i in chosen), torch.zeros_like(mu))
        distance = {i: float((mu - (phi[i] + total) / k).norm()) for i in range(len(phi)) if i not in chosen}
        chosen.append(min(distance, key=distance.__getitem__))
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_herding(seed: int) -> None:
    features = torch.randn(30, 6, generator=torch.Generator().manual_seed(seed)).exp()
    for count in (0, 1, 12, 30, 50):
        assert herd(features.double(), count).tolist() == slow_herding(features, count)
    torch.testing.assert_close(herd(7 * features, 9), herd(features, 9))


def test_herded_means_are_nearer_than_random_ones() -> None:
    features = F.normalize(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) + 0.5, dim=1)

    def off(rows: np.ndarray | torch.Tensor) -> float:
        """How far the class's mean of these images points away from that of all."""
        return float((F.normalize(features[rows].mean(dim=0), dim=0) - F.normalize(features.mean(dim=0), dim=0)).norm())

    assert off(herd(features, 10)) < min(off(np.random.default_rng(seed).permutation(200)[:10]) for seed in range(50))


# Exemplars.


def exemplars(engine: Engine) -> dict[int, list[bytes]]:
    """class -> its images in memory, by slot."""
    memory = engine.memories.replay
    found: dict[int, list[bytes]] = {}
    for slot in range(len(memory)):
        found.setdefault(int(memory.labels[slot]), []).append(memory.images[slot].numpy().tobytes())
    return found


def slow_exemplars(engine: Engine, stream: Stream, steps: range, count: int) -> dict[int, list[bytes]]:
    """Of the images of these steps, all of them candidates."""
    batches = [stream.batch(step) for step in steps]
    images, labels = torch.cat([batch.x for batch in batches]), np.concatenate([batch.labels for batch in batches])
    [(_, out)] = engine.net.sweep(images)
    found = {}
    for label in dict.fromkeys(labels.tolist()):
        rows = np.flatnonzero(labels == label)
        chosen = slow_herding(out.features[-1, rows], count)
        found[label] = [images[rows[i]].numpy().tobytes() for i in chosen]
    return found


@pytest.mark.parametrize("taps", [1, 4])
def test_exemplars_over_tasks(taps: int) -> None:
    """10 each of two classes, then 5 each of four: the old ones keep the first 5 of theirs, the new ones are herded."""
    engine, stream = toy_engine("icarl()", memory=21, taps=taps), longer()
    feed(engine, stream, until=6)
    first = exemplars(engine)
    assert first == slow_exemplars(engine, stream, range(6), 10)
    feed(engine, stream, until=11)
    assert exemplars(engine) == first, "they stay within a task"
    assert len(engine.memories[CANDIDATES]) == 50
    feed(engine, stream, until=12)
    expected = {label: images[:5] for label, images in first.items()} | slow_exemplars(engine, stream, range(6, 12), 5)
    assert exemplars(engine) == expected
    assert len(engine.memories[CANDIDATES]) == 0
    memory = engine.memories.replay
    tasks = {int(label): set(memory.tasks[: len(memory)][memory.labels[: len(memory)] == label]) for label in expected}
    assert tasks == {label: {int(label not in first)} for label in expected}
    feed(engine, stream)
    assert {len(images) for images in exemplars(engine).values()} == {21 // 6}
    for label, images in expected.items():
        assert exemplars(engine)[label] == images[:3]


def test_candidates_are_a_bounded_sample_of_the_task_and_are_noted() -> None:
    engine, stream = toy_engine("icarl(candidates=8)", memory=20), longer()
    assert engine.memories.beyond_budget == 8
    feed(engine, stream, until=5)
    assert len(engine.memories[CANDIDATES]) == 8
    feed(engine, stream, until=6)
    assert sum(map(len, exemplars(engine).values())) == 8
    assert toy_engine("icarl(exemplars='reservoir')").memories.beyond_budget == 0


def test_a_class_that_comes_again_is_herded_anew() -> None:
    engine, data = toy_engine("icarl()", memory=6), toy_data(6, 30)
    for task, rows in enumerate((np.arange(0, 20), np.arange(20, 30))):
        engine.learn(StreamBatch(data.train_x[rows], data.train_y[rows], task=task))
        before = exemplars(engine).get(0, [])
        engine.end_task()
    assert len(before) == 6
    stored = [torch.from_numpy(np.frombuffer(image, np.uint8).reshape(TOY_SHAPE).copy()) for image in before]
    pool = torch.cat([torch.stack(stored), data.train_x[20:30]])
    [(_, out)] = engine.net.sweep(pool)
    assert exemplars(engine)[0] == [pool[i].numpy().tobytes() for i in slow_herding(out.features[-1], 6)]


def test_without_task_marks_a_task_ends_every_so_many_steps() -> None:
    stream = longer()
    unmarked = dataclasses.replace(stream, task_of_step=np.full(len(stream), NO_TASK))
    engine = toy_engine("icarl(every=4)", memory=12)
    feed(engine, unmarked, until=3)
    assert not engine.method.teacher
    assert len(engine.memories.replay) == 0
    feed(engine, unmarked, until=4)
    assert engine.method.teacher
    assert len(engine.memories.replay) == 12
    never = toy_engine("icarl(every=0)")
    feed(never, unmarked)
    assert not never.method.teacher


def test_the_reservoir_is_that_of_experience_replay_and_replays_the_past() -> None:
    engine, er, stream = toy_engine("icarl(exemplars='reservoir')", memory=30), toy_engine("er()", memory=30), longer()
    for each in (engine, er):
        feed(each, stream, until=9)
    assert torch.equal(engine.memories.replay.images, er.memories.replay.images)
    batch, _ = next_batch(engine, stream)
    slots = batch.sources[10:] - MEMORY_SOURCE
    assert 0 < len(slots) < 30
    assert set(engine.memories.replay.tasks[slots]) == {0}


# Predictions.


@pytest.mark.parametrize("until", [12, 15], ids=["end of a task", "within a task"])
def test_nearest_mean_of_exemplars(until: int) -> None:
    """Unit features, unit means; within a task its candidates stand for the exemplars of its classes."""
    engine, stream = toy_engine("icarl()", memory=21), longer()
    feed(engine, stream, until=until)
    net, seen = engine.ready_to_predict(), engine.progress.seen
    stores = [engine.memories.replay, engine.memories[CANDIDATES]]
    means = []
    for label in seen:
        images = torch.cat([store[np.sort(store.slots_of(label))] for store in stores])
        [(_, out)] = net.sweep(images)
        means.append(F.normalize(F.normalize(out.features[0], dim=1).mean(dim=0), dim=0))
    [(_, out)] = net.sweep(stream.data.test_x)
    expected = [seen[int(torch.stack([(F.normalize(f, dim=0) - mean).norm() for mean in means]).argmin())] for f in out.features[0]]
    scores, columns = seen_scores(engine.chain, out, engine.progress, engine.chain.rule)
    assert engine.chain.rule == "ncm_last"
    assert columns[scores.argmax(dim=1)].tolist() == expected


def test_outputs_may_predict() -> None:
    engine, stream = prepared("icarl(inference='linear')")
    engine.ready_to_predict()
    [(_, out)] = engine.net.sweep(stream.data.test_x)
    assert engine.chain.rule == "linear_last"
    assert torch.equal(engine.chain.rules(out)["linear"], out.logits)


def test_no_exemplars_for_a_class_without_room() -> None:
    """A memory of five for six classes keeps none; predictions are then among the classes met all the same."""
    engine, stream = toy_engine("icarl()", memory=5), toy_stream()
    feed(engine, stream)
    assert len(engine.memories.replay) == 0
    engine.ready_to_predict()
    [(_, out)] = engine.net.sweep(stream.data.test_x)
    assert engine.chain.rules(out)["ncm"].isfinite().all()


def test_cost() -> None:
    """A step: new and replayed images through net and teacher; the end of a task: memory and candidates once."""
    engine, stream = toy_engine("icarl(n_recall=6)", memory=21), longer()
    feed(engine, stream, until=9)
    [outcome] = feed(engine, stream, until=10)
    assert (outcome.images, outcome.forward, outcome.backward) == (16, 32, 16)
    before = engine.net.meter.forward
    engine.end_task()
    assert engine.net.meter.forward - before == 20 + 40


def test_laws_with_the_reservoir() -> None:
    for law in METHOD_LAWS.values():
        law("icarl(exemplars='reservoir')")


def test_choosing_needs_no_image() -> None:
    method, memories = ICaRL(), Memories(4, Images(TOY_SHAPE))
    engine = toy_engine("icarl()")
    method.attach(engine.net, memories)
    memories.replay.add(rng.generator("fill"), toy_data().train_x[:4], np.array([0, 0, 1, 1]))
    method.end_task(memories, Progress(seen=(0, 1)))
    assert memories.replay.composition() == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("bad", "told"), [("candidates=0", "candidates must be at least 1"), ("every=-1", "every must be at least 0")]
)
def test_bad_options_are_told(bad: str, told: str) -> None:
    with pytest.raises(UserError, match=f"icarl: {told}"):
        parse_method(f"icarl({bad})")
