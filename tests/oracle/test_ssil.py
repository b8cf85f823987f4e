"""SS-IL against slow loops over its equations, through the engine's own steps, and its invariants."""

from __future__ import annotations

import math
from functools import partial

import common
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl import nets, rng
from gracecl.core import Batch, Block, Planning, Progress, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional.losses import distillation
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.ssil import SSIL
from gracecl.nets.teacher import frozen_copy
from gracecl.registry.spec import parse_method
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import assert_same, feed, next_batch, toy_data, toy_engine

LAYERS, CLASSES = 3, 10
TASKS = [(3, 0, 7), (5,), (1, 8)]
"""unequal, and their classes are not in the order of their numbers; 2 and 9 never come, (4, 6) is the current task"""
CURRENT = (4, 6)
OLD = [c for task in TASKS for c in task]
NEW, REPLAY = [4, 6, 6, 4], [0, 5, 8, 3, 3, 1, 7]
SHAPE = (1, 1, 4)
PER_TASK = 8
"""steps of a task of the stream"""
noise = partial(common.noise, scale=2.0)


def stream(epochs: int = 1) -> Stream:
    """Three tasks of two classes, 40 images of each class in batches of 10."""
    return split(toy_data(6, 40), 0, tasks=3, batch=10, epochs=epochs)


def after(tasks: list[tuple[int, ...]], **options: object) -> SSIL:
    """The method at the end of these tasks."""
    method = SSIL(**options)
    method.attach(
        nets.build("mlp(width=3, depth=3)", Images(SHAPE, (0.0,), (1.0,)), CLASSES, taps=LAYERS), Memories(0, Images(SHAPE))
    )
    for number, current in enumerate(tasks):
        seen = tuple(c for task in tasks[: number + 1] for c in task)
        method.end_task(Memories(0, Images(SHAPE)), Progress(5, number, seen=seen, current=current))
    return method


def step(new: list[int] = NEW, replay: list[int] = REPLAY, old: list[int] = OLD, teacher: Tensor | None = None) -> Batch:
    labels = np.array(new + replay)
    blocks = {"new": Block(0, len(new), 1, len(new), ())}
    if replay:
        blocks["replay"] = Block(len(new), len(replay), 1, 0, ())
    progress = Progress(6, 3, seen=(*old, *CURRENT), current=CURRENT)
    batch = Batch(torch.zeros(len(labels)), labels, np.arange(len(labels)), blocks, progress, CLASSES, seed=0)
    batch.targets = {} if teacher is None else {"ssil": teacher}
    return batch


def losses(method: SSIL, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    return method.losses(Taps(logits, logits, torch.nn.Identity()), batch)


def log_softmax(row: list[float], columns: list[int], temperature: float = 1.0) -> dict[int, float]:
    log_sum = math.log(sum(math.exp(row[c] / temperature) for c in columns))
    return {c: row[c] / temperature - log_sum for c in columns}


def slow(
    logits: Tensor,
    teacher: Tensor,
    new: list[int],
    replay: list[int],
    tasks: list[tuple[int, ...]],
    t: float,
    current: tuple[int, ...] = CURRENT,
) -> list[float]:
    """L_new / (n + m), L_old / (n + m) and L_tkd of one layer, step by step."""
    old, rows, n = [c for task in tasks for c in task], logits.tolist(), len(new)
    of_new = -sum(log_softmax(z, list(current))[y] for z, y in zip(rows[:n], new, strict=True))
    of_old = -sum(log_softmax(z, old)[y] for z, y in zip(rows[n:], replay, strict=True))
    of_tasks = 0.0
    for task in tasks:
        terms = []
        for z, z_teacher in zip(rows, teacher.tolist(), strict=True):
            log_q, log_p = log_softmax(z, list(task), t), log_softmax(z_teacher, list(task), t)
            terms.append(sum(math.exp(log_p[c]) * (log_p[c] - log_q[c]) for c in task))
        of_tasks += t**2 * sum(terms) / len(terms)
    return [of_new / len(rows), of_old / len(rows), of_tasks]


@pytest.mark.parametrize("temperature", [2.0, 1.5])
def test_rows_are_the_loops(temperature: float) -> None:
    logits, teacher = noise(LAYERS, 11, CLASSES), noise(LAYERS, 11, CLASSES, seed=1)
    table = losses(after(TASKS, temperature=temperature), logits, step(teacher=teacher))
    assert list(table) == ["ce/new", "ce/replay", "kd/tasks"]
    for layer in range(LAYERS):
        expected = slow(logits[layer], teacher[layer], NEW, REPLAY, TASKS, temperature)
        assert [row[layer].item() for row in table.values()] == pytest.approx(expected, rel=1e-9)


def test_options_of_the_distillation() -> None:
    logits, teacher = noise(LAYERS, 11, CLASSES), noise(LAYERS, 11, CLASSES, seed=1)
    plain, weighted, mean = (
        losses(after(TASKS, **options), logits, step(teacher=teacher))
        for options in ({}, {"strength": 0.3}, {"mean_over_tasks": True})
    )
    torch.testing.assert_close(weighted["kd/tasks"], 0.3 * plain["kd/tasks"])
    torch.testing.assert_close(mean["kd/tasks"], plain["kd/tasks"] / 3)
    for row in ("ce/new", "ce/replay"):
        assert torch.equal(weighted[row], plain[row])
        assert torch.equal(mean[row], plain[row])


@pytest.mark.parametrize("taps", [1, 3])
def test_rows_of_the_engine_s_step(taps: int) -> None:
    """In the third task: the teacher as it was at the second one's end, on the pixels of new and replayed images alike."""
    engine = toy_engine("ssil(n_recall=8)", memory=60, taps=taps)
    feed(engine, stream(), until=2 * PER_TASK)
    then = frozen_copy(engine.net)
    feed(engine, stream(), until=2 * PER_TASK + 4)
    batch, out = next_batch(engine, stream())
    table = engine.chain.losses(out, batch)
    teacher, tasks = then(batch.x).logits, [(0, 1), (2, 3)]
    new, replay = batch.labels[:10].tolist(), batch.labels[10:].tolist()
    assert set(new) == {4, 5}
    assert len(replay) == 8
    for layer in range(taps):
        expected = slow(out.logits[layer].detach(), teacher[layer], new, replay, tasks, 2.0, current=(4, 5))
        assert [table[row][layer].item() for row in ("ce/new", "ce/replay", "kd/tasks")] == pytest.approx(expected, rel=1e-4)


def test_the_first_task_is_plain_cross_entropy_over_its_classes() -> None:
    """One softmax over the task's classes for new and replayed images, one mean over all of them, no distillation."""
    logits = noise(LAYERS, 11, CLASSES)
    labels = [4, 6, 6, 4, 4, 6, 6, 6, 4, 4, 6]
    table = losses(after([]), logits, step(labels[:4], labels[4:], old=[]))
    assert list(table) == ["ce/new", "ce/replay"]
    target = torch.tensor([CURRENT.index(label) for label in labels])
    expected = [F.cross_entropy(layer[:, list(CURRENT)], target).item() for layer in logits]
    assert (table["ce/new"] + table["ce/replay"]).tolist() == pytest.approx(expected, rel=1e-9)
    alone = losses(after([]), logits[:, :4], step(labels[:4], [], old=[]))
    assert list(alone) == ["ce/new"]


# Invariants.


def test_new_images_leave_old_heads_alone_and_old_images_new_ones() -> None:
    for row, own, others in (("ce/new", list(CURRENT), OLD), ("ce/replay", OLD, list(CURRENT))):
        logits = noise(LAYERS, 11, CLASSES).requires_grad_()
        losses(after(TASKS), logits, step())[row].sum().backward()
        assert not logits.grad[..., [*others, 2, 9]].any()
        assert (logits.grad[..., own] != 0).any(dim=1).all()


def test_no_row_touches_a_class_that_never_came() -> None:
    logits = noise(LAYERS, 11, CLASSES).requires_grad_()
    sum(losses(after(TASKS), logits, step(teacher=noise(LAYERS, 11, CLASSES, seed=1))).values()).sum().backward()
    assert not logits.grad[..., [2, 9]].any()


def test_levels_of_blocks() -> None:
    """All new columns or all old ones may be lifted together; lifting one old task's moves the replayed images' row alone."""
    logits, teacher, method = noise(LAYERS, 11, CLASSES), noise(LAYERS, 11, CLASSES, seed=1), after(TASKS)
    before = losses(method, logits, step(teacher=teacher))
    for columns in (list(CURRENT), OLD):
        lifted = logits.clone()
        lifted[..., columns] += 3.7
        for row, value in losses(method, lifted, step(teacher=teacher)).items():
            torch.testing.assert_close(value, before[row])
    lifted = logits.clone()
    lifted[..., list(TASKS[0])] += 3.7
    table = losses(method, lifted, step(teacher=teacher))
    torch.testing.assert_close(table["kd/tasks"], before["kd/tasks"])
    torch.testing.assert_close(table["ce/new"], before["ce/new"])
    assert ((table["ce/replay"] - before["ce/replay"]).abs() > 1e-3).all()


def test_one_old_task_is_ordinary_distillation() -> None:
    logits, teacher = noise(LAYERS, 11, CLASSES), noise(LAYERS, 11, CLASSES, seed=1)
    got = losses(after([(0, 5, 8)]), logits, step(replay=[0, 5, 8, 0, 5, 8, 8], old=[0, 5, 8], teacher=teacher))["kd/tasks"]
    old = torch.zeros(CLASSES, dtype=torch.bool)
    old[[0, 5, 8]] = True
    torch.testing.assert_close(got, 4 * distillation(logits, teacher, 2.0, old))


def test_no_distillation_where_net_and_teacher_agree() -> None:
    engine = toy_engine("ssil(n_recall=8)", memory=60)
    feed(engine, stream(), until=2 * PER_TASK)
    engine.net.eval()
    batch, out = next_batch(engine, stream())
    assert engine.chain.losses(out, batch)["kd/tasks"].abs().max() < 1e-6


def test_repeated_images_change_nothing() -> None:
    logits, teacher = noise(LAYERS, 11, CLASSES), noise(LAYERS, 11, CLASSES, seed=1)
    rows = [*range(4), *range(4), *range(4, 11), *range(4, 11)]
    once = losses(after(TASKS), logits, step(teacher=teacher))
    twice = losses(after(TASKS), logits[:, rows], step(NEW * 2, REPLAY * 2, teacher=teacher[:, rows]))
    for row, value in once.items():
        torch.testing.assert_close(twice[row], value)


def test_without_replay_and_distillation_it_is_fine_tuning_of_the_task_s_own_head() -> None:
    kind = stream()
    one, two = (toy_engine(method, memory=60) for method in ("ssil(n_recall=0, strength=0.0)", "sgd(classes='current')"))
    for engine in (one, two):
        feed(engine, kind)
    for name, value in one.net.state_dict().items():
        torch.testing.assert_close(value, two.net.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_an_image_of_an_old_class_competes_among_the_old() -> None:
    """Where a class comes back, wherever its image comes from."""
    logits = noise(LAYERS, 5, CLASSES)
    value = losses(after(TASKS), logits, step([4, 5], [0, 1, 8]))["ce/new"]
    for layer in range(LAYERS):
        rows = logits[layer].tolist()
        expected = -(log_softmax(rows[0], list(CURRENT))[4] + log_softmax(rows[1], OLD)[5]) / 5
        assert value[layer].item() == pytest.approx(expected, rel=1e-9)


def test_a_task_without_new_classes_adds_no_block() -> None:
    engine = toy_engine("ssil(n_recall=8)", memory=60)
    feed(engine, stream(), until=2 * PER_TASK)
    piece = stream().batch(0)
    for _ in range(2):
        outcome = engine.learn(StreamBatch(piece.x, piece.labels, task=7))
        assert all(value.isfinite().all() for value in outcome.table.values())
    engine.end_task()
    assert [set(classes) for classes in engine.method.tasks] == [{0, 1}, {2, 3}]


# The step.


def learner(method: str, until: int, memory: int = 200) -> Engine:
    engine = toy_engine(method, memory=memory)
    feed(engine, stream(), until=until)
    return engine


def test_replay_is_of_earlier_tasks_alone() -> None:
    for task in (1, 2):
        engine = learner("ssil()", task * PER_TASK + 5)
        batch, _ = next_batch(engine, stream())
        assert set(batch.labels[10:].tolist()) == set(range(2 * task))
        assert engine.memories.replay.count(task=task) > 0
        assert len(batch) == 74


def test_all_old_images_are_drawn_where_there_are_fewer() -> None:
    engine = learner("ssil()", PER_TASK + 5, memory=40)
    batch, _ = next_batch(engine, stream())
    old = engine.memories.replay.count(task=0)
    assert old < 40
    assert len(batch) == 10 + old


@pytest.mark.parametrize(("option", "images"), [("", 30), (", replay_in_first_task=False", 10)])
def test_replay_in_the_first_task(option: str, images: int) -> None:
    batch, _ = next_batch(learner(f"ssil(n_recall=20{option})", 5), stream())
    assert len(batch) == images
    assert set(batch.blocks) == ({"new", "replay"} if images == 30 else {"new"})
    later, _ = next_batch(learner(f"ssil(n_recall=20{option})", PER_TASK + 2), stream())
    assert len(later) == 30


@pytest.mark.parametrize(("ratio", "replayed"), [(4, 2), (2.5, 4), (0.5, 20), (100, 1)])
def test_ratio_of_new_to_replayed_images(ratio: float, replayed: int) -> None:
    batch, _ = next_batch(learner(f"ssil(ratio={ratio})", PER_TASK + 2), stream())
    assert len(batch) == 10 + replayed


def test_draws_are_anew_for_each_step() -> None:
    engine = learner("ssil(n_recall=8)", PER_TASK + 2)
    piece = stream().batch(PER_TASK + 2)
    new = StreamBatch(piece.x, piece.labels, piece.sources, progress=engine.progress)
    draws = [engine.method.plan(new, engine.memories, Planning(rng.generator("plan", i)))["replay"].slots for i in range(2)]
    assert not np.array_equal(*draws)


def test_cost_of_a_step() -> None:
    """74 forward and backward in one pass, and 74 for the teacher."""
    engine = learner("ssil()", 2 * PER_TASK + 2)
    [outcome] = feed(engine, stream(), until=2 * PER_TASK + 3)
    assert (outcome.images, outcome.forward, outcome.backward) == (74, 148, 74)
    assert next_batch(engine, stream())[0].plan.forwards is None


def test_teacher_and_tasks_are_those_of_the_last_task_s_end() -> None:
    engine, kind = toy_engine("ssil(n_recall=8)", memory=60), stream()
    for task in range(3):
        feed(engine, kind, until=(task + 1) * PER_TASK)
        assert_same(engine.method.teacher.copy.state_dict(), engine.net.state_dict(), "a teacher just renewed")
        assert [set(classes) for classes in engine.method.tasks] == [{2 * t, 2 * t + 1} for t in range(task + 1)]
        assert engine.method.old.nonzero().flatten().tolist() == list(range(2 * task + 2))


def test_several_epochs_store_once() -> None:
    engine, kind = toy_engine("ssil(n_recall=8)", memory=60), stream(epochs=2)
    outcomes = feed(engine, kind)
    assert len(outcomes) == 6 * PER_TASK
    assert all(value.isfinite().all() for outcome in outcomes for value in outcome.table.values())
    assert engine.memories.replay.offered == 240
    assert len(engine.method.tasks) == 3


def test_decay_is_a_lower_rate() -> None:
    """In task t the rate divided by t + 1, through the engine; in the first task nothing changes."""
    engines = [toy_engine(f"ssil(n_recall=8{option})", memory=60, optimizer="sgd(lr=0.06)") for option in ("", ", decay_rate=True")]
    for task in range(3):
        for engine in engines:
            feed(engine, stream(), until=task * PER_TASK + 2)
        assert [engine.optimizer.param_groups[0]["lr"] for engine in engines] == pytest.approx([0.06, 0.06 / (task + 1)])
        same = torch.equal(engines[0].net.classifier.weight, engines[1].net.classifier.weight)
        assert same == (task == 0)


def test_predictions_are_plain_logits() -> None:
    engine = learner("ssil(n_recall=8)", 2 * PER_TASK)
    [(_, out)] = engine.ready_to_predict().sweep(toy_data().test_x)
    assert engine.chain.rule == "linear_last"
    assert torch.equal(engine.chain.rules(out)["linear"], out.logits)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("ssil(temperature=0)", "ssil: temperature must be above 0, not 0"),
        ("ssil(strength=-1)", "ssil: strength must be at least 0, not -1"),
        ("ssil(ratio=0)", "ssil: ratio must be above 0 or None, not 0"),
    ],
)
def test_bad_options_are_told(expression: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(expression)
