"""GSA against slow loops over its equations, through the hooks that a step calls, and its invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gracecl.core import Batch, StreamBatch, Taps, total
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy
from gracecl.images import augment
from gracecl.images.augment import AUGMENTATIONS, Flip, Mirror
from gracecl.inputs import Images
from gracecl.methods.gsa import GSA
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, feed, next_batch, prepared, toy_engine, toy_stream

STEPS_PER_TASK = 6


class Slow:
    """The running sums and the loss of one layer by the text of the algorithm, in Python's own numbers."""

    def __init__(self, layer: int, warm_up: int) -> None:
        self.layer, self.warm_up = layer, warm_up
        self.count, self.probability, self.push = (dict.fromkeys(range(6), 0.0) for _ in range(3))

    def step(self, out: Taps, batch: Batch, batch_of_task: int) -> dict[str, float]:
        logits, labels = out.logits[self.layer].detach().double().tolist(), batch.labels.tolist()
        new = batch.rows("new")
        table = {
            "ce/new": np.mean(
                [-math.log(softmax(logits[i], batch.progress.current)[labels[i]]) for i in range(new.start, new.stop)]
            )
        }
        if "balanced" in batch.blocks:
            rows = batch.rows("balanced")
            q = {i: softmax(logits[i], batch.progress.seen) for i in range(rows.start, rows.stop)}
            for i, chances in q.items():
                self.count[labels[i]] += 1
                self.probability[labels[i]] += chances[labels[i]]
                for c in set(chances) - {labels[i]}:
                    self.push[c] += chances[c]
            terms = [-self.weight(labels[i], batch_of_task) * math.log(q[i][labels[i]]) for i in q]
            table["ce/balanced"] = 2 * sum(terms) / len(terms)
        return table

    def weight(self, c: int, batch_of_task: int) -> float:
        if batch_of_task < self.warm_up or self.push[c] == 0:
            return 1.0
        return 2 / (1 + math.exp(1 - (self.count[c] - self.probability[c]) / self.push[c]))


def softmax(row: list[float], allowed: tuple[int, ...]) -> dict[int, float]:
    chances = {c: math.exp(row[c]) for c in allowed}
    return {c: value / sum(chances.values()) for c, value in chances.items()}


@pytest.mark.parametrize(("taps", "expression"), [(1, "{}"), (3, "{}"), (2, "grace({}, beta=0, adaptive=False)")])
def test_every_step_of_a_stream(taps: int, expression: str) -> None:
    """Losses before each step and sums after it, in every layer; weights leave 1 behind in each task."""
    engine = toy_engine(expression.format("gsa(warm_up=2, n_recall=9, n_current=3)"), taps=taps, memory=20)
    stream, slow, moved = toy_stream(), [Slow(layer, 2) for layer in range(taps)], 0.0
    method = engine.method.inner if expression != "{}" else engine.method
    for step in range(len(stream)):
        batch, out = next_batch(engine, stream)
        table = {row: value.tolist() for row, value in engine.chain.losses(out, batch).items() if not row.startswith("log/")}
        expected = [one.step(out, batch, step % STEPS_PER_TASK) for one in slow]
        assert table.keys() == expected[0].keys() == ({"ce/new"} if step == 0 else {"ce/new", "ce/balanced"})
        for row, values in table.items():
            assert values == pytest.approx([found[row] for found in expected], rel=1e-5), (step, row)
        feed(engine, stream, until=step + 1)
        for layer, one in enumerate(slow):
            for sums, kept in zip((one.count, one.probability, one.push), method.sums, strict=True):
                assert kept[layer].tolist() == pytest.approx(list(sums.values()), rel=1e-5)
            moved = max(moved, *(abs(one.weight(c, step % STEPS_PER_TASK) - 1) for c in range(6)))
    assert moved > 0.1


# The blocks.


def test_blocks() -> None:
    """Sizes, tasks and rows of both blocks at every step, against the memory that they were drawn from."""
    engine, stream = toy_engine("gsa(n_recall=8, n_current=2)", memory=30), toy_stream(batch=3)
    shared = 0
    for step in range(len(stream)):
        piece, tasks = stream.batch(step), engine.memories.replay.tasks.copy()
        batch, _ = next_batch(engine, stream)
        held, new = np.count_nonzero(tasks == piece.task), batch.blocks["new"]
        assert (new.images, new.from_stream, new.views) == (3 + min(2, held), 3, 2)
        if step == 0:
            assert list(batch.blocks) == ["new"]
        else:
            met, seen = len(engine.progress.current), len(engine.progress.seen)
            block, rate = batch.blocks["balanced"], met / seen
            of_task, past = int(8 * rate), int(8 * (1 - rate))
            slots = batch.sources[block.view(0)] - (1 << 40)
            from_memory = tasks[slots[slots >= 0]]
            assert np.count_nonzero(from_memory != piece.task) == min(past, np.count_nonzero((tasks != piece.task) & (tasks >= 0)))
            n_new = min(of_task, new.images)
            assert block.images - np.count_nonzero(from_memory != piece.task) == n_new
            # The task's part is the beginning of the first block, stream first.
            mine = batch.sources[block.view(0)][: block.from_stream + np.count_nonzero(from_memory == piece.task)]
            assert np.array_equal(mine, batch.sources[new.view(0)][:n_new])
            shared += 0 < n_new < new.images
            assert np.array_equal(batch.sources[block.view(0)], batch.sources[block.view(1)])
        feed(engine, stream, until=step + 1)
    assert shared > 3


def test_images_are_shown_twice_and_the_second_time_mirrored() -> None:
    """`new` is augmented before and after the mirror, `balanced` before it alone."""
    tau, method = AUGMENTATIONS["tau"], GSA()
    for twice, times in ((True, 2), (False, 1)):
        one, two = method.views(tau, twice)
        assert augment.draws(one) == augment.draws(two) == times * augment.draws(tau)
        assert [type(operation) for operation in two] == [type(op) for op in (*tau, Mirror(), *tau)][: len(two)]
        assert len(GSA(mirrored=False).views(tau, twice)) == 1
    for one, two in (method.views((Flip(1.0),), twice=True), method.views((), twice=False)):
        x = torch.rand(2, 1, 3, 3)
        plain, other = (augment.apply(view, x, np.zeros((2, augment.draws(view))), Images((1, 3, 3))) for view in (one, two))
        assert torch.equal(other, x.flip(-1))
        assert torch.equal(plain, x)


def test_each_block_has_a_forward_of_its_own() -> None:
    batch, _ = next_batch(toy_engine("gsa()"), toy_stream())
    assert batch.plan.forwards == [["new"]]
    engine, stream = prepared("gsa()")
    assert next_batch(engine, stream)[0].plan.forwards == [["new"], ["balanced"]]


def test_cost_of_a_step() -> None:
    """2 · (10 + 22) + 2 · 64 images forward and backward; in the first task the second block is the first."""
    engine, generator, costs = toy_engine("gsa()", memory=200), np.random.default_rng(0), []
    for task, label in ((0, 0), (0, 1), (1, 2), (1, 3)):
        for count in (90, 10):
            x = torch.from_numpy(generator.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8))
            outcome = engine.learn(StreamBatch(x, np.full(count, label), task=task))
        costs.append((outcome.forward, outcome.backward))
    # 64 · 1/3 = 21 images of the task and 42 of the past, then 32 and 32.
    assert costs == [(128, 128), (128, 128), (2 * 32 + 2 * 63,) * 2, (192, 192)]


# The weights.


def weights_with(engine: Engine, stream, sums: torch.Tensor) -> torch.Tensor:
    batch, out = next_batch(engine, stream)
    engine.method.sums = sums.double().view(3, 1, 6)
    return engine.method.weights(out, batch)[0]


@pytest.mark.parametrize(("balance", "expected"), [("ratio", (1.0, 2 / (1 + math.e**-1), 2 / (1 + math.e))), ("inverse", None)])
def test_balance_and_its_inverse(balance: str, expected: tuple[float, ...] | None) -> None:
    """Sums so large that a step does not show: g = 1, g = 2, g = 0 in three classes that are seen."""
    engine, stream = prepared(f"gsa(warm_up=0, balance='{balance}')", taps=1)
    push = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) * 1e9
    pull = push * torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 1.0])
    found = weights_with(engine, stream, torch.stack([pull + 5e8, torch.full((6,), 5e8), push]))
    if expected is None:
        expected = (1.0, 2 / (1 + math.exp(0.5)), 2.0)  # 1/g is 1, 1/2 and without bound
    assert found[:3].tolist() == pytest.approx(list(expected), rel=1e-6)


def test_classes_without_push_weigh_one() -> None:
    engine, stream = prepared("gsa(warm_up=0)", taps=1)
    unseen = [c for c in range(6) if c not in engine.progress.seen]
    assert unseen
    assert weights_with(engine, stream, torch.zeros(3, 6))[unseen].tolist() == [1.0] * len(unseen)


def test_weights_are_bounded_and_balanced_sums_change_nothing() -> None:
    engine, stream = prepared("gsa(warm_up=0)", taps=1)
    for seed in range(20):
        sums = 100 * torch.rand(3, 6, generator=torch.Generator().manual_seed(seed)) ** 4
        sums[0] += sums[1]
        found = weights_with(engine, stream, sums)
        assert found.min() > 2 / (1 + math.e) - 1e-12
        assert found.max() <= 2
    batch, out = next_batch(engine, stream)
    engine.method.sums = 1e9 * torch.tensor([1.5, 0.5, 1.0], dtype=torch.float64).view(3, 1, 1).expand(3, 1, 6)
    rows = batch.rows("balanced")
    plain = 2 * cross_entropy(out.logits[:, rows], batch.y[rows], batch.seen)
    torch.testing.assert_close(engine.chain.losses(out, batch)["ce/balanced"], plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("taps", [1, 4])
def test_sums_of_one_block_are_in_balance(taps: int) -> None:
    engine, stream = prepared("gsa()", taps=taps)
    batch, out = next_batch(engine, stream)
    count, probability, push = engine.method.sums_with(out, batch) - engine.method.sums
    rows = 2 * batch.blocks["balanced"].images
    assert count.sum(dim=1).tolist() == [rows] * taps
    torch.testing.assert_close((probability + push).sum(dim=1), torch.full((taps,), float(rows), dtype=torch.float64))
    torch.testing.assert_close((count - probability).sum(dim=1), push.sum(dim=1))


def test_sums_are_for_training_on_memory_alone() -> None:
    engine, stream = toy_engine("gsa()"), toy_stream()
    feed(engine, stream, until=1)
    assert not engine.method.sums.any(), "memory was empty"
    feed(engine, stream, until=9)
    before = engine.method.sums.clone()
    assert before.any()
    evaluate(engine, stream.data.test_x, stream.data.test_y, stream.test_task)
    assert torch.equal(engine.method.sums, before)
    without = toy_engine("gsa()", memory=0)
    outcomes = feed(without, stream)
    assert not without.method.sums.any()
    assert all("ce/balanced" not in outcome.table for outcome in outcomes)


# The losses.


def test_new_images_leave_old_classes_alone() -> None:
    engine, stream = prepared("gsa()", taps=4)
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    engine.chain.losses(out, batch)["ce/new"].sum().backward()
    current = list(batch.progress.current)
    others = [c for c in range(6) if c not in current]
    assert not engine.net.classifier.weight.grad[..., others].any()
    assert not engine.net.classifier.bias.grad[..., others].any()
    assert engine.net.classifier.weight.grad[..., current].any()


@pytest.mark.parametrize("expression", ["gsa()", "grace(gsa(), classes='seen')"])
def test_outputs_of_unmet_classes_are_left_alone(expression: str) -> None:
    engine, stream = prepared(expression, taps=2)
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    total(engine.chain.losses(out, batch)).backward()
    moved = engine.net.classifier.weight.grad.abs().sum(dim=(0, 1)) > 0
    assert moved.tolist() == batch.seen.tolist()
    assert not moved.all()


def test_plain_replay_is_a_special_case() -> None:
    engine, stream = prepared("gsa(n_current=0, warm_up=1000, mirrored=False, replay_weight=3.0)", taps=2)
    batch, out = next_batch(engine, stream)
    table, new, balanced = engine.chain.losses(out, batch), batch.rows("new"), batch.rows("balanced")
    assert new == slice(0, 3)
    assert balanced.stop == len(batch)
    torch.testing.assert_close(table["ce/new"], cross_entropy(out.logits[:, new], batch.y[new], batch.current))
    expected = 3 * cross_entropy(out.logits[:, balanced], batch.y[balanced], batch.seen)
    torch.testing.assert_close(table["ce/balanced"], expected)


def test_as_the_program_does_the_head_stays_from_the_second_task_on() -> None:
    engine, stream = toy_engine("gsa(reference=True)", taps=2), toy_stream()
    plain = toy_engine("gsa()", taps=2)
    for one in (engine, plain):
        feed(one, stream, until=STEPS_PER_TASK)
    assert_same(engine.net.state_dict(), plain.net.state_dict(), "the first task")
    head = {name: value.clone() for name, value in engine.net.classifier.state_dict().items()}
    body = [value.clone() for value in engine.net.backbone.parameters()]
    for one in (engine, plain):
        feed(one, stream, until=STEPS_PER_TASK + 4)
    assert_same(engine.net.classifier.state_dict(), head, "the head")
    assert not torch.equal(plain.net.classifier.weight, head["weight"])
    assert any(not torch.equal(one, two) for one, two in zip(engine.net.backbone.parameters(), body, strict=True))


def test_as_the_program_does_outputs_of_new_classes_are_those_just_drawn() -> None:
    """Weight decay, which moves unmet outputs before their task, has not touched them when it begins; resuming keeps them."""
    engine, stream = toy_engine("gsa(reference=True)", taps=2, optimizer="adam(lr=0.01, weight_decay=0.01)"), toy_stream()
    drawn = engine.net.classifier.weight.detach().clone()
    feed(engine, stream, until=STEPS_PER_TASK)
    first = list(engine.progress.seen)
    rest = [c for c in range(6) if c not in first]
    trained = engine.net.classifier.weight.detach().clone()
    assert not torch.isclose(trained[..., rest], drawn[..., rest], rtol=1e-2).any()
    state, other = engine.state_dict(), toy_engine("gsa(reference=True)", taps=2, optimizer="adam(lr=0.01, weight_decay=0.01)")
    other.method.fresh = {name: torch.zeros_like(value) for name, value in other.method.fresh.items()}
    other.load_state_dict(state)
    for one in (engine, other):
        feed(one, stream, until=2 * STEPS_PER_TASK + 1)
        assert one.progress.task == 2
        assert torch.equal(one.net.classifier.weight[..., rest], drawn[..., rest])
        assert torch.equal(one.net.classifier.weight[..., first], trained[..., first])


def test_several_epochs_and_wrappers() -> None:
    """Later epochs over a task train on it again and store nothing; repeated steps warm up by batches of the stream."""
    engine, stream = toy_engine("rar(gsa(warm_up=1), iterations=2, augmentation='run')"), toy_stream()
    for task in range(2):
        for epoch in range(2):
            for step in range(STEPS_PER_TASK * task, STEPS_PER_TASK * (task + 1)):
                piece, offered = stream.batch(step), engine.memories.replay.offered
                outcome = engine.learn(StreamBatch(piece.x, piece.labels, task=piece.task, sources=piece.sources, fresh=epoch == 0))
                assert engine.memories.replay.offered - offered == (len(piece.labels) if epoch == 0 else 0)
                assert all(value.isfinite().all() for value in outcome.table.values())
        engine.end_task()
    assert engine.method.inner.task_start == 2 * STEPS_PER_TASK


@pytest.mark.parametrize("option", ["n_recall=-1", "n_current=-1", "warm_up=-1", "replay_weight=-0.5"])
def test_negative_numbers_are_told(option: str) -> None:
    with pytest.raises(UserError, match=f"gsa: {option.split('=')[0]} must be at least 0, not -"):
        parse_method(f"gsa({option})")
