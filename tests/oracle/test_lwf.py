"""LwF and its teacher against slow loops over the specification's equations, and their invariants."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import NO_TASK, Progress, StreamBatch, Taps
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.functional.losses import distillation
from gracecl.inputs import Images
from gracecl.nets.teacher import Teacher, frozen_copy
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, feed, next_batch, prepared, toy_engine, toy_stream

FIRST_TASK = 6


def slow_divergence(student: Tensor, teacher: Tensor, temperature: float, columns: list[int]) -> float:
    """KL(teacher ‖ student) at a temperature, mean over the rows of one layer, by loops."""
    terms = []
    for z, t in zip(student.tolist(), teacher.tolist(), strict=True):
        q_sum, p_sum = (sum(np.exp(row[c] / temperature) for c in columns) for row in (z, t))
        p, q = ({c: np.exp(row[c] / temperature) / total for c in columns} for row, total in ((t, p_sum), (z, q_sum)))
        terms.append(sum(p[c] * np.log(p[c] / q[c]) for c in columns))
    return float(np.mean(terms))


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(3, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("columns", [None, [1, 2, 5], [3]])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_distillation(columns: list[int] | None, temperature: float) -> None:
    student, teacher = pair()
    classes = None if columns is None else torch.tensor([c in columns for c in range(6)])
    value = distillation(student, teacher, temperature, classes)
    expected = [slow_divergence(student[i], teacher[i], temperature, columns or list(range(6))) for i in range(3)]
    np.testing.assert_allclose(value.numpy(), expected, rtol=1e-10, atol=1e-14)


def test_distillation_from_itself_is_nothing() -> None:
    student, _ = pair()
    student.requires_grad_()
    value = distillation(student, student.detach(), 2.0, torch.tensor([True, True, False, True, False, False]))
    value.sum().backward()
    assert not value.any()
    assert student.grad.abs().max() < 1e-15


def test_high_temperature_is_logit_matching() -> None:
    """T² KL -> the squared distance of centred logits over 2 K, K the classes it spans; gradients alike."""
    student, teacher = pair()
    student.requires_grad_()
    temperature, classes = 1e4, torch.tensor([True, True, True, True, False, False])
    (temperature**2 * distillation(student, teacher, temperature, classes)).sum().backward()
    z, t = student.detach()[..., :4], teacher[..., :4]
    expected = ((z - z.mean(-1, keepdim=True)) - (t - t.mean(-1, keepdim=True))) / (4 * 5)
    torch.testing.assert_close(student.grad[..., :4], expected, rtol=0, atol=1e-4)
    assert not student.grad[..., 4:].any()


# The method.


@pytest.mark.parametrize("taps", [1, 3])
def test_row(taps: int) -> None:
    """In the second task: the teacher as it was at the first one's end, over the classes met by then, on the same pixels."""
    engine, stream = toy_engine("sgd(classes='current') + lwf(strength=0.7, temperature=1.5)", taps=taps), toy_stream()
    feed(engine, stream, until=FIRST_TASK)
    then, old = frozen_copy(engine.net), list(engine.progress.seen)
    feed(engine, stream, until=9)
    batch, out = next_batch(engine, stream)
    table = engine.chain.losses(out, batch)
    teacher = then(batch.x).logits
    assert table.keys() == {"ce/all", "kd/lwf"}
    assert len(old) == 2
    for layer in range(taps):
        expected = 0.7 * 1.5**2 * slow_divergence(out.logits[layer].detach(), teacher[layer], 1.5, old)
        np.testing.assert_allclose(table["kd/lwf"][layer].item(), expected, rtol=1e-4, atol=1e-7)
    assert table["kd/lwf"].min() > 1e-4


@pytest.mark.parametrize("learner", ["sgd()", "sgd(classes='current')", "er(n_recall=4)"])
def test_first_task_is_the_learner_alone(learner: str) -> None:
    plain, added = toy_engine(learner), toy_engine(f"{learner} + lwf()")
    outcomes = [feed(engine, toy_stream(), until=FIRST_TASK) for engine in (plain, added)]
    assert_same(added.net.state_dict(), plain.net.state_dict(), "the first task with lwf")
    assert outcomes[0][-1].table.keys() == outcomes[1][-1].table.keys()
    for engine in (plain, added):
        feed(engine, toy_stream(), until=FIRST_TASK + 2)
    with pytest.raises(AssertionError):
        assert_same(added.net.state_dict(), plain.net.state_dict(), "the second task with lwf")


def test_without_strength_it_is_the_learner_alone() -> None:
    plain, added = toy_engine("sgd()"), toy_engine("sgd() + lwf(strength=0.0)")
    for engine in (plain, added):
        feed(engine, toy_stream())
    assert_same(added.net.state_dict(), plain.net.state_dict(), "lwf of strength 0")


def test_no_pull_where_net_and_teacher_agree() -> None:
    """Right after a task's end, in evaluation mode, the row is 0 and its gradient is too."""
    engine, stream = toy_engine("sgd() + lwf()", taps=2), toy_stream()
    feed(engine, stream, until=FIRST_TASK)
    engine.net.eval()
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    row = engine.chain.losses(out, batch)["kd/lwf"]
    row.sum().backward()
    assert row.abs().max() < 1e-7
    assert max(value.grad.abs().max() for value in engine.net.parameters() if value.grad is not None) < 1e-6


def test_teacher_stays_what_it_was() -> None:
    """Weights and BatchNorm buffers, over a hundred steps of a task."""
    engine, stream = toy_engine("sgd() + lwf()"), toy_stream()
    feed(engine, stream, until=FIRST_TASK)
    then = {name: value.clone() for name, value in engine.net.state_dict().items()}
    piece = stream.batch(FIRST_TASK)
    for _ in range(100):
        engine.learn(StreamBatch(piece.x, piece.labels, task=piece.task))
    teacher = engine.method.right.teacher.copy
    assert_same(teacher.state_dict(), then, "the teacher after 100 steps")
    assert not teacher.training
    assert not torch.equal(engine.net.backbone.norms[0].running_mean, then["backbone.norms.0.running_mean"])


def test_teacher_is_renewed_at_each_task_s_end() -> None:
    engine, stream = toy_engine("sgd() + lwf()"), toy_stream()
    for until, known in ((FIRST_TASK, 2), (2 * FIRST_TASK, 4), (3 * FIRST_TASK, 6)):
        feed(engine, stream, until=until)
        lwf = engine.method.right
        assert_same(lwf.teacher.copy.state_dict(), engine.net.state_dict(), "a teacher just renewed")
        assert int(lwf.teacher.classes.sum()) == known


def test_renewed_by_steps_on_a_stream_without_marks() -> None:
    stream = toy_stream()
    unmarked = dataclasses.replace(stream, task_of_step=np.full(len(stream), NO_TASK))
    never, every = toy_engine("sgd() + lwf()"), toy_engine("sgd() + lwf(every=4)")
    for step in range(10):
        feed(never, unmarked, until=step + 1)
        [outcome] = feed(every, unmarked, until=step + 1)
        assert not never.method.right.teacher
        assert ("kd/lwf" in outcome.table) == (step >= 4)
        if step in (3, 7):
            assert_same(every.method.right.teacher.copy.state_dict(), every.net.state_dict(), "a teacher just renewed")
            assert set(torch.nonzero(every.method.right.teacher.classes).flatten().tolist()) == set(every.progress.seen)


def test_cross_entropy_over_the_task_s_classes_leaves_old_heads_alone() -> None:
    engine, stream = prepared("sgd(classes='current')")
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    engine.chain.losses(out, batch)["ce/all"].sum().backward()
    current = list(batch.progress.current)
    others = [c for c in range(6) if c not in current]
    assert not engine.net.classifier.weight.grad[..., others].any()
    assert engine.net.classifier.weight.grad[..., current].any()


def test_cost_of_a_step() -> None:
    """The teacher's pass counts: 10 images forward and back in the first task, 20 and 10 from then on."""
    engine, generator, costs = toy_engine("lwf()"), np.random.default_rng(0), []
    for task in (0, 0, 1, 1):
        x = torch.from_numpy(generator.integers(0, 256, (10, 1, 8, 8), dtype=np.uint8))
        outcome = engine.learn(StreamBatch(x, generator.integers(2 * task, 2 * task + 2, 10), task=task))
        costs.append((outcome.forward, outcome.backward))
    assert costs == [(10, 10), (10, 10), (20, 10), (20, 10)]


def test_alone_it_is_added_to_fine_tuning() -> None:
    assert repr(parse_method("lwf(strength=0.5)")) == "sgd() + lwf(strength=0.5)"


def test_a_temperature_out_of_range_is_told() -> None:
    with pytest.raises(UserError, match="lwf: temperature must be above 0, not 0"):
        parse_method("lwf(temperature=0)")


# The teacher.


def test_frozen_copy_shares_nothing_and_keeps_the_layout() -> None:
    recipe = Recipe("er()", "resnet18(width=16)", memory=0, device="cpu", layout="channels_last")
    net = recipe.build(Images((3, 8, 8)), 4).net
    twin = frozen_copy(net)
    for (name, own), value in zip(twin.named_parameters(), net.parameters(), strict=True):
        assert own.data_ptr() != value.data_ptr(), name
        assert own.stride() == value.stride(), name
        assert not own.requires_grad
    assert net.training
    assert all(value.requires_grad for value in net.parameters())


def test_teacher_comes_back_from_its_state() -> None:
    engine, stream = prepared("sgd()", taps=2)
    one, two = Teacher(engine.net), Teacher(engine.net)
    two.renew()
    two.load_state_dict(one.state_dict())
    assert not two
    one.renew([1, 3])
    state = copy.deepcopy(one.state_dict())
    feed(engine, stream)
    two.load_state_dict(state)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    mine, theirs = one(x), two(x)
    assert isinstance(mine, Taps)
    assert torch.equal(mine.logits, theirs.logits)
    assert torch.equal(two.classes, torch.tensor([False, True, False, True, False, False]))
    assert not mine.logits.requires_grad
    assert not torch.equal(mine.logits, frozen_copy(engine.net)(x).logits)


def test_ticks_of_streams_without_task_marks() -> None:
    ticks = {every: [step for step in range(9) if Progress(step=step).tick(every)] for every in (0, 1, 4)}
    assert ticks == {0: [], 1: list(range(9)), 4: [3, 7]}
    assert not any(Progress(step=step, task=0).tick(4) for step in range(9))
    assert any(Progress(step=step, task=0, marked=False).tick(4) for step in range(9))
