"""LODE against slow loops over the specification's equations, and its invariants step by step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import NO_TASK, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy
from gracecl.lab.runs.recorder import Recorder
from gracecl.lab.runs.trainer import Trainer
from gracecl.methods.lode import LODE, decoupled
from gracecl.registry.spec import parse_method
from gracecl.testing import TOY_NET, assert_same, feed, next_batch, toy_engine, toy_stream

LAYERS, IMAGES, CLASSES = 3, 7, 8


def random_logits(seed: int = 0) -> Tensor:
    return 3 * torch.randn(LAYERS, IMAGES, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask(classes: list[int]) -> Tensor:
    return torch.tensor([c in classes for c in range(CLASSES)])


def slow_parts(rows: Tensor, labels: list[int], old: list[int], columns: list[int]) -> tuple[float, float]:
    """The two parts of one layer's loss, by loops: a softmax between two groups, and one within the second."""
    inter, intra = [], []
    for row, label in zip(rows.tolist(), labels, strict=True):
        among_rest = sum(np.exp(row[c]) for c in columns if c not in old)
        among_all = sum(np.exp(row[c]) for c in columns)
        inter.append(-np.log(among_rest / among_all))
        intra.append(-np.log(np.exp(row[label]) / among_rest))
    return float(np.mean(inter)), float(np.mean(intra))


@pytest.mark.parametrize("columns", [None, [0, 1, 2, 4, 5]])
@pytest.mark.parametrize("old", [[0], [0, 1, 2], [2, 5], []])
def test_parts(old: list[int], columns: list[int] | None) -> None:
    logits, y = random_logits(), torch.tensor([4, 4, 1 if 1 not in old else 4, 4, 4, 4, 4])
    inter, intra = decoupled(logits, y, mask(old), None if columns is None else mask(columns))
    for layer in range(LAYERS):
        expected = slow_parts(logits[layer], y.tolist(), old, columns or list(range(CLASSES)))
        np.testing.assert_allclose((float(inter[layer]), float(intra[layer])), expected, rtol=1e-10, atol=1e-12)
    whole = cross_entropy(logits, y, None if columns is None else mask(columns))
    torch.testing.assert_close(inter + intra, whole, rtol=1e-12, atol=1e-12)
    assert inter.min() >= 0
    assert intra.min() >= 0


def test_gradients_of_the_parts() -> None:
    logits, y = random_logits().requires_grad_(), torch.tensor([4, 5, 6, 7, 4, 5, 6])
    inter, intra = decoupled(logits, y, mask([0, 1, 2]))
    of_inter, of_intra = torch.autograd.grad(inter.sum(), logits, retain_graph=True)[0], torch.autograd.grad(intra.sum(), logits)[0]
    assert not of_intra[..., :3].any()
    assert of_intra[..., 3:].abs().max() > 0
    torch.testing.assert_close(of_inter.sum(dim=-1), torch.zeros(LAYERS, IMAGES, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (of_inter[..., :3] > 0).all()
    assert (of_inter[..., 3:] < 0).all()


def test_nothing_is_left_between_separated_groups() -> None:
    logits = random_logits()
    logits[..., :3] -= 60
    inter, intra = decoupled(logits, torch.full((IMAGES,), 4), mask([0, 1, 2]))
    assert inter.max() < 1e-20
    assert intra.min() > 0.1


# In a step.


@pytest.mark.parametrize("inner", ["derpp(n_recall=5)", "er(n_recall=5, reduction='sum_of_means')"])
@pytest.mark.parametrize(("share", "weight"), [("tasks", 0.6 / 2), ("classes", 0.6 * 2 / 4)])
def test_table(inner: str, share: str, weight: float) -> None:
    """In the third task, two old tasks: every other row is the replay method's own."""
    engine, stream = toy_engine(f"lode({inner}, rho=0.6, intra_weight=0.8, share='{share}')", taps=2), toy_stream()
    feed(engine, stream, until=14)
    batch, out = next_batch(engine, stream)
    assert batch.progress.task == 2
    assert len(batch.progress.current) == 2
    table, plain = engine.chain.losses(out, batch), engine.method.inner.chain.losses(out, batch)
    new = batch.rows("new")
    old = [c for c in batch.progress.seen if c not in batch.progress.current]
    assert len(old) == 4
    for layer in range(2):
        inter, intra = slow_parts(out.logits[layer, new].detach(), batch.labels[new].tolist(), old, list(range(6)))
        np.testing.assert_allclose(table["ce/new"][layer].item(), weight * inter + 0.8 * intra, rtol=1e-5)
        np.testing.assert_allclose(table["log/inter"][layer].item(), inter, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(table["log/intra"][layer].item(), intra, rtol=1e-5)
    for row in plain.keys() - {"ce/new"}:
        torch.testing.assert_close(table[row], plain[row], rtol=0, atol=0)


def test_shares_agree_where_tasks_are_equal() -> None:
    progress = Progress(task=3, seen=tuple(range(8)), current=(6, 7))
    assert LODE(rho=0.3, share="classes").inter_weight(progress) == pytest.approx(LODE(rho=0.3).inter_weight(progress))


def test_seen_only_leaves_out_future_classes() -> None:
    engine, stream = toy_engine("lode(seen_only=True, rho=0.6)"), toy_stream()
    feed(engine, stream, until=9)
    batch, out = next_batch(engine, stream)
    seen, current = batch.progress.seen, batch.progress.current
    new = batch.rows("new")
    expected = slow_parts(out.logits[0, new].detach(), batch.labels[new].tolist(), list(set(seen) - set(current)), list(seen))
    table = engine.chain.losses(out, batch)
    np.testing.assert_allclose((table["log/inter"].item(), table["log/intra"].item()), expected, rtol=1e-5)
    assert len(seen) < 6


def trained(method: str, until: int, memory: int = 12, net: str = TOY_NET) -> Engine:
    engine = toy_engine(method, memory=memory, optimizer="sgd(lr=0.05)", net=net)
    feed(engine, toy_stream(), until)
    return engine


@pytest.mark.parametrize("rho", [0.0, 0.1, 5.0])
def test_first_task_is_the_replay_method(rho: float) -> None:
    one, two = trained(f"lode(rho={rho})", 6), trained("derpp()", 6)
    assert one.progress.task == 0
    assert_same(one.net.state_dict(), two.net.state_dict(), "the first task of lode")
    assert_same(one.memories.state_dict(), two.memories.state_dict(), "the first task of lode")
    with pytest.raises(AssertionError):
        assert_same(trained(f"lode(rho={rho})", 7).net.state_dict(), trained("derpp()", 7).net.state_dict(), "the second task")


def test_with_weights_of_one_it_is_the_replay_method() -> None:
    """ρ / t = 1 in the second task: the same weights, up to the rounding of a sum taken in two parts."""
    net = "mlp(width=12, depth=4)"  # BatchNorm would magnify that rounding
    one, two, other = (trained(method, 12, net=net) for method in ("lode(rho=1.0)", "derpp()", "lode(rho=0.5)"))
    assert one.progress.task == 1
    theirs = two.net.state_dict()
    for name, value in one.net.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)
    assert (other.net.classifier.weight - two.net.classifier.weight).abs().max() > 1e-3


def test_without_inter_and_replay_old_heads_get_no_gradient() -> None:
    engine = trained("lode(derpp(alpha=0, beta=0), rho=0.0)", 8)
    old = [c for c in engine.progress.seen if c not in engine.progress.current]
    gradient = engine.net.classifier.weight.grad
    assert len(old) == 2
    assert not gradient[..., old].any()
    assert gradient[..., list(engine.progress.current)].abs().max() > 0


def test_an_empty_memory_leaves_the_loss_alone() -> None:
    one, two = trained("lode(rho=0.0)", 9, memory=0), trained("derpp()", 9, memory=0)
    assert one.progress.task == 1
    assert_same(one.net.state_dict(), two.net.state_dict(), "lode without memory")


def test_a_class_that_comes_back_counts_as_new() -> None:
    engine = toy_engine("lode()")
    x = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for task, labels in enumerate(([0, 1, 0, 1], [1, 2, 2, 1], [0, 1, 2, 3])):
        outcome = engine.learn(StreamBatch(x, np.array(labels), task=task))
        assert all(value.isfinite().all() for value in outcome.table.values())
    assert outcome.table["log/inter"].item() == pytest.approx(0, abs=1e-6)


def test_cost_of_a_step() -> None:
    engine, generator = toy_engine("lode()", memory=80), np.random.default_rng(0)
    for step in range(9):
        x = torch.from_numpy(generator.integers(0, 256, (10, 1, 8, 8), dtype=np.uint8))
        outcome = engine.learn(StreamBatch(x, np.full(10, step // 5), task=step // 5))
    assert (outcome.forward, outcome.backward) == (138, 138)


def test_what_it_cannot_decouple_is_told() -> None:
    for inner in ("er()", "icarl()"):  # iCaRL has such a row, of one block for all images
        with pytest.raises(UserError, match="no loss row 'ce/new' of a block of its own"):
            feed(toy_engine(f"lode({inner})"), toy_stream(), 1)
    with pytest.raises(UserError, match=r"use lode\(derpp\(\)\) alone"):
        toy_engine("lode(lode())")


@pytest.mark.parametrize("outer", ["grace", "rar"])
def test_what_weighs_the_cross_entropy_goes_around_it(outer: str) -> None:
    weighing = "rar(derpp(), stream_weight=0.5)" if outer == "rar" else "grace(derpp())"
    for method in (f"lode({weighing})", f"lode(ema({weighing}))"):
        with pytest.raises(UserError, match=rf"write {outer}\(lode"):
            parse_method(method)


def test_a_stream_without_marks_is_refused(tmp_path) -> None:
    stream = toy_stream()
    unmarked = dataclasses.replace(stream, task_of_step=np.full(len(stream), NO_TASK))
    recorder = Recorder(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="needs a stream with task marks"):
        Trainer(toy_engine("lode()"), unmarked, recorder)
    recorder.close()
