"""CCIL against loops over its equations, through the engine's own steps, and its invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from unequal_tasks import DECAYING, FIRST, SECOND, assembled, images, second_task, teach

from gracecl.core import Batch, Progress, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional.losses import distillation
from gracecl.methods.ccil import CCIL
from gracecl.nets.teacher import frozen_copy
from gracecl.streams.split import split
from gracecl.testing import assert_same, feed, resumes_exactly, toy_data, toy_engine


def softmax(row: list[float], classes: list[int], temperature: float = 1.0) -> dict[int, float]:
    weights = {c: math.exp(row[c] / temperature) for c in classes}
    return {c: weight / sum(weights.values()) for c, weight in weights.items()}


def slow_ce(logits: Tensor, labels: list[int], classes: list[int]) -> float:
    return sum(-math.log(softmax(row, classes)[y]) for row, y in zip(logits.tolist(), labels, strict=True)) / len(labels)


def slow_kd(logits: Tensor, taught: Tensor, classes: list[int]) -> float:
    """T² times the mean over rows and classes of p* log(p* / p), T = 2."""
    terms = []
    for row, row_star in zip(logits.tolist(), taught.tolist(), strict=True):
        p, p_star = softmax(row, classes, 2.0), softmax(row_star, classes, 2.0)
        terms += [p_star[c] * math.log(p_star[c] / p[c]) for c in classes]
    assert len(terms) == len(logits) * len(classes)
    return 4 * sum(terms) / len(terms)


@pytest.mark.parametrize("taps", [1, 3])
def test_table(taps: int) -> None:
    """Two old and three new classes, one not met: each term over its own columns, equal weights whatever the blocks' sizes."""
    engine = toy_engine("ccil()", memory=100, taps=taps, optimizer=DECAYING)
    teach(engine, FIRST, 0)
    engine.end_task()
    then = frozen_copy(engine.net)
    teach(engine, SECOND, 1)
    with torch.no_grad():
        engine.net.classifier.scale += torch.arange(taps).view(-1, 1, 1) + 1.5
    batch, out = assembled(engine, [3, 0, 4, 4])
    taught = then(batch.x).logits.double()
    table = engine.chain.losses(out, batch)
    assert list(table) == ["ce/new", "kd/new", "ce/replay", "kd/replay"]
    factor = 5 * (5 / 3) ** 0.66
    for layer in range(taps):
        logits = out.logits[layer].detach().double()
        expected = {
            "ce/new": slow_ce(logits[:4], batch.labels[:4].tolist(), list(SECOND)),
            "kd/new": factor * slow_kd(logits[:4], taught[layer, :4], list(FIRST)),
            "ce/replay": slow_ce(logits[4:], batch.labels[4:].tolist(), [*FIRST, *SECOND]),
            "kd/replay": factor * slow_kd(logits[4:], taught[layer, 4:], list(FIRST)),
        }
        assert {row: value[layer].item() for row, value in table.items()} == pytest.approx(expected, rel=1e-3)
        assert all(value > 1e-4 for value in expected.values())


def test_stream_and_memory_have_a_forward_each() -> None:
    engine = second_task("ccil()")
    batch, out = assembled(engine, [3, 0, 4, 4])
    assert [(name, block.from_stream, block.images, block.views) for name, block in batch.blocks.items()] == [
        ("new", 4, 4, 1),
        ("replay", 0, 64, 1),
    ]
    apart = torch.cat([engine.net(batch.x[:4]).logits, engine.net(batch.x[4:]).logits], dim=1)
    torch.testing.assert_close(out.logits, apart)
    assert not torch.allclose(engine.net(batch.x).logits, apart)  # batch norm would tell


def test_first_task() -> None:
    """Softmax over its classes for both, no distillation; all classes are new, so the new images' term is that over all met."""
    engine = toy_engine("ccil()", memory=100)
    [first, *_] = teach(engine, FIRST, 0)
    assert {row for row in first.table if not row.startswith("log/")} == {"ce/new"}  # nothing is in memory yet
    batch, out = assembled(engine, [5, 1, 1], task=0)
    table = engine.chain.losses(out, batch)
    assert table.keys() == {"ce/new", "ce/replay"}
    y = torch.tensor([FIRST.index(label) for label in batch.labels])
    for block in ("new", "replay"):
        rows = batch.rows(block)
        expected = F.cross_entropy(out.logits[0, rows][:, list(FIRST)], y[rows])
        assert table[f"ce/{block}"].item() == pytest.approx(expected.item(), rel=1e-5)


def gradient_of_rows(engine: Engine, row: Tensor) -> Tensor:
    """`[C]`: which rows of the head a term moves."""
    [gradient] = torch.autograd.grad(row.sum(), engine.net.classifier.weight, retain_graph=True)
    return gradient[0].abs().amax(dim=0) > 1e-9


def test_each_term_moves_its_own_rows_of_the_head() -> None:
    engine = second_task("ccil()")
    batch, out = assembled(engine, [3, 0, 4, 4])
    table = engine.chain.losses(out, batch)
    moved = {row: set(torch.nonzero(gradient_of_rows(engine, value)).flatten().tolist()) for row, value in table.items()}
    assert moved == {
        "ce/new": set(SECOND),
        "kd/new": set(FIRST),
        "ce/replay": {*FIRST, *SECOND},
        "kd/replay": set(FIRST),
    }


def test_nothing_to_distil_where_net_and_teacher_agree() -> None:
    engine = toy_engine("ccil()", memory=100, taps=2)
    teach(engine, FIRST, 0)
    engine.end_task()
    engine.net.eval()
    batch, out = assembled(engine, [3, 0])
    table = engine.chain.losses(out, batch)
    assert max(table[row].abs().max() for row in ("kd/new", "kd/replay")) < 1e-6


def test_it_is_the_usual_distillation_over_the_number_of_old_classes() -> None:
    engine = second_task("ccil()")
    batch, out = assembled(engine, [3, 0, 4, 4])
    usual = distillation(out.logits[:, :4], batch.targets["ccil"][:, :4], 2.0, batch.old)
    factor = engine.method.weight("new", batch.progress)
    torch.testing.assert_close(engine.chain.losses(out, batch)["kd/new"], factor * 4 * usual / len(FIRST))


def test_factor() -> None:
    """λ where all is new, growing with the classes met: 7.9 at the second and 22.9 at the tenth of ten equal tasks."""
    method = CCIL()
    values = [
        method.weight("new", Progress(0, t, seen=tuple(range(10 * t + 10)), current=tuple(range(10 * t, 10 * t + 10))))
        for t in range(1, 10)
    ]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (pytest.approx(7.9, abs=0.01), pytest.approx(22.9, abs=0.06))
    nearly = Progress(0, 1, seen=tuple(range(1001)), current=tuple(range(1, 1001)))
    assert method.weight("new", nearly) == pytest.approx(5, rel=1e-2)
    assert method.weight("new", Progress(0, 1, seen=(0, 1), current=(0, 1))) == 0  # all came back, nothing is old


def test_without_memory_and_distillation_new_classes_are_learned_alone() -> None:
    engine = toy_engine("ccil(n_recall=0, strength=0)", memory=100, optimizer=DECAYING)
    teach(engine, FIRST, 0)
    outcomes = teach(engine, SECOND, 1)
    assert {row for row in outcomes[-1].table if not row.startswith("log/")} == {"ce/new"}


def test_a_class_that_comes_back_is_new_again() -> None:
    engine = toy_engine("ccil()", memory=100)
    teach(engine, FIRST, 0)
    outcomes = teach(engine, FIRST, 1)
    assert {row for row in outcomes[-1].table if not row.startswith("log/")} == {"ce/new", "ce/replay"}
    outcomes = teach(engine, (5, 3), 2)
    assert engine.progress.old == (1,)
    assert outcomes[-1].table["kd/new"].item() == 0  # a softmax over one class
    assert all(value.isfinite().all() for value in outcomes[-1].table.values())


# Memory.


def test_replayed_classes_are_drawn_evenly_current_ones_included() -> None:
    engine = toy_engine("ccil(n_recall=6000)", memory=1000, optimizer="sgd(lr=0.001)")
    for _ in range(12):
        engine.learn(StreamBatch(*images([5] * 9 + [1], seed=0), task=0))
    engine.end_task()
    engine.method.n_recall = 0
    engine.learn(StreamBatch(*images([3], seed=0), task=1))
    engine.method.n_recall = 6000
    assert engine.memories.replay.composition() == {1: 12, 3: 1, 5: 108}
    x, y = images([3, 0], seed=5)
    plan = engine.plan(engine.meet(StreamBatch(x, y, task=1)))
    counts = np.bincount(engine.memories.replay.labels[plan["replay"].slots], minlength=6)
    np.testing.assert_allclose(counts / 6000, [0, 1 / 3, 0, 1 / 3, 0, 1 / 3], atol=0.02)


# The head.


@pytest.mark.parametrize("optimizer", [DECAYING, "adam(lr=0.01, weight_decay=0.01)"])
def test_rows_stay_as_they_began_until_their_class_is_met(optimizer: str) -> None:
    engine = toy_engine("ccil()", memory=100, taps=2, optimizer=optimizer)
    weight = engine.net.classifier.weight
    start = weight.detach().clone()
    teach(engine, FIRST, 0)
    assert torch.equal(weight[..., [0, 2, 3, 4]], start[..., [0, 2, 3, 4]])
    assert not (weight[..., FIRST] == start[..., FIRST]).any()
    then = weight.detach().clone()
    teach(engine, SECOND, 1)
    assert torch.equal(weight[..., 2], start[..., 2])
    assert not (weight[..., [*FIRST, *SECOND]] == then[..., [*FIRST, *SECOND]]).any()  # old ones learn too


def test_head_and_features() -> None:
    engine = toy_engine("ccil(scale=10)", taps=2)
    assert engine.net.classifier.scale.tolist() == [[[10.0]], [[10.0]]]
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (engine.net(x).features < 0).flatten(1).any(dim=1).all()
    assert (toy_engine("ccil(last_relu=True)").net(x).features >= 0).all()


# The learning rate.


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.05)", "adam(lr=0.001)"])
def test_the_rate_falls_after_the_first_task(optimizer: str) -> None:
    engine = toy_engine("ccil()", memory=100, optimizer=optimizer)
    full = engine.optimizer.param_groups[0]["lr"]
    teach(engine, FIRST, 0)
    assert engine.optimizer.param_groups[0]["lr"] == full
    engine.end_task()
    teach(engine, SECOND, 1, steps=1)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(full / 10)
    teach(engine, (2,), 2, steps=1)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(full / 10)
    same = second_task("ccil(later_rate=1)", optimizer)
    assert same.optimizer.param_groups[0]["lr"] == full


def test_under_grace_the_rate_falls_too() -> None:
    engine = second_task("grace(ccil())", "sgd(lr=0.05)")
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


# Self-distillation.


def test_self_distillation_is_so_many_passes_over_memory_at_the_end_of_the_first_task() -> None:
    engine = toy_engine("ccil(self_distillation=3, n_recall=16)", memory=100, taps=2, optimizer=DECAYING)
    teach(engine, FIRST, 0)
    then, steps = frozen_copy(engine.net), []
    inner = engine.method.losses

    def noted(out: Taps, batch: Batch) -> dict[str, Tensor]:
        table = inner(out, batch)
        steps.append((batch, out, table))
        return table

    engine.method.losses = noted
    engine.end_task()
    assert [len(batch) for batch, _, _ in steps] == [16, 16, 8] * 3
    slots = [batch.sources.tolist() for batch, _, _ in steps]
    for first in (0, 3, 6):
        assert len(set(slots[first] + slots[first + 1] + slots[first + 2])) == 40, "each image once in a pass"
    assert slots[0] != slots[3]
    batch, out, table = steps[-1]
    assert table.keys() == {"ce/again", "kd/again"}
    taught = then(batch.x).logits.double()  # the net as the closing steps found it, not as they made it
    for layer in range(2):
        logits = out.logits[layer].detach().double()
        assert table["ce/again"][layer].item() == pytest.approx(slow_ce(logits, batch.labels.tolist(), list(FIRST)), rel=1e-4)
        assert table["kd/again"][layer].item() == pytest.approx(10 * slow_kd(logits, taught[layer], list(FIRST)), rel=1e-3)
    assert_same(engine.method.teacher.copy.state_dict(), engine.net.state_dict(), "the next task's teacher")
    assert not torch.equal(then.classifier.weight, engine.net.classifier.weight)
    steps.clear()
    teach(engine, SECOND, 1)
    steps.clear()
    engine.end_task()
    assert steps == []


def test_self_distillation_of_nothing() -> None:
    for method, memory in (("ccil(self_distillation=2)", 0), ("ccil(self_distillation=2, n_recall=0)", 100), ("ccil()", 100)):
        engine = toy_engine(method, memory=memory)
        teach(engine, FIRST, 0)
        then = frozen_copy(engine.net)
        engine.end_task()
        assert_same(engine.net.state_dict(), then.state_dict(), method)


# Steps.


def test_cost_of_a_step() -> None:
    """10 + 64 forward and back, and as many by the teacher."""
    engine = toy_engine("ccil()", memory=100)
    first = teach(engine, FIRST, 0)[-1]
    second = teach(engine, SECOND, 1)[-1]
    assert (first.images, first.forward, first.backward) == (74, 74, 74)
    assert (second.images, second.forward, second.backward) == (74, 148, 74)


def test_teacher_is_renewed_at_each_task_s_end_and_stays_between() -> None:
    engine = toy_engine("ccil()", memory=100)
    teach(engine, FIRST, 0)
    assert not engine.method.teacher
    engine.end_task()
    then = {name: value.clone() for name, value in engine.net.state_dict().items()}
    teach(engine, SECOND, 1)
    assert_same(engine.method.teacher.copy.state_dict(), then, "the teacher in the middle of the second task")
    engine.end_task()
    assert_same(engine.method.teacher.copy.state_dict(), engine.net.state_dict(), "the teacher after the second task")


def test_several_epochs_store_once() -> None:
    engine, stream = toy_engine("ccil()", memory=200), split(toy_data(), 0, tasks=3, batch=6, epochs=3)
    outcomes = feed(engine, stream)
    assert len(outcomes) == 3 * 9
    assert engine.memories.replay.offered == len(toy_data().train_y)
    assert outcomes[-1].table.keys() >= {"ce/new", "kd/new", "ce/replay", "kd/replay"}


@pytest.mark.parametrize(
    "expression", ["ccil(self_distillation=2, n_recall=5)", "grace(ccil(self_distillation=1))", "ema(ccil(mem_iters=2))"]
)
def test_resumes_exactly(expression: str) -> None:
    resumes_exactly(expression, stops=[5, 6, 7, 13])


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"later_rate": 0.0}, {"strength": -1.0}, {"self_weight": -1.0}, {"self_distillation": -1}]
)
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        CCIL(**bad)
