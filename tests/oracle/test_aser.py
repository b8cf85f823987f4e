"""ASER against brute force over all coalitions and slow, literal retrieval and update, and its specification's invariants."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import Planning, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.memory.knn_shapley import adversarial_values, balanced_draws, exchanges, shapley_values
from gracecl.methods.aser import is_minority
from gracecl.testing import METHOD_LAWS, engine_untouched, feed, prepared, toy_data, toy_engine, toy_stream

# The kernel.


def points(n: int, labels: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.randint(labels, (n,), generator=generator)


def utility(coalition: tuple[int, ...], distance: Tensor, match: list[int], k: int) -> float:
    """Matches among the K nearest of the coalition, over K."""
    nearest = sorted(coalition, key=lambda i: float(distance[i]))[:k]
    return sum(match[i] for i in nearest) / k


def brute_force(x: Tensor, y: Tensor, candidates: Tensor, labels: Tensor, k: int) -> list[list[float]]:
    n, rows = len(candidates), []
    for point, label in zip(x, y, strict=True):
        distance = ((candidates - point) ** 2).sum(dim=1)
        match = (labels == label).int().tolist()
        row = []
        for player in range(n):
            others = [i for i in range(n) if i != player]
            value = 0.0
            for size in range(n):
                share = math.factorial(size) * math.factorial(n - 1 - size) / math.factorial(n)
                for coalition in itertools.combinations(others, size):
                    gain = utility((*coalition, player), distance, match, k) - utility(coalition, distance, match, k)
                    value += share * gain
            row.append(value)
        rows.append(row)
    return rows


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 9])
def test_values_are_shapley_values(k: int) -> None:
    (x, y), (candidates, labels) = points(4, seed=1), points(6)
    np.testing.assert_allclose(
        shapley_values(x, y, candidates, labels, k).numpy(), brute_force(x, y, candidates, labels, k), atol=1e-12
    )


def slow_values(x: Tensor, y: Tensor, candidates: Tensor, labels: Tensor, k: int) -> np.ndarray:
    """The recursion as it is written, one point and one candidate at a time."""
    n = len(candidates)
    values = np.zeros((len(x), n))
    for e in range(len(x)):
        order = sorted(range(n), key=lambda i: float(((candidates[i] - x[e]) ** 2).sum()))
        a = [float(labels[i] == y[e]) for i in order]
        s = [0.0] * n
        s[n - 1] = a[n - 1] * min(k, n) / (k * n)
        for i in range(n - 2, -1, -1):
            s[i] = s[i + 1] + (a[i] - a[i + 1]) / k * min(k, i + 1) / (i + 1)
        for i, candidate in enumerate(order):
            values[e, candidate] = s[i]
    return values


@pytest.mark.parametrize("k", [1, 3, 7])
def test_values_are_the_recursion(k: int) -> None:
    (x, y), (candidates, labels) = points(9, seed=1), points(30)
    values = shapley_values(x, y, candidates, labels, k)
    np.testing.assert_allclose(values.numpy(), slow_values(x, y, candidates, labels, k), atol=1e-12)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(shapley_values(x, y, candidates[order], labels[order], k), values[:, order])
    nearest = torch.cdist(x, candidates).topk(k, largest=False).indices
    torch.testing.assert_close(values.sum(dim=1), (labels[nearest] == y[:, None]).double().mean(dim=1))
    assert (values.abs() <= 1 / k + 1e-12).all()


def test_values_of_extreme_candidates() -> None:
    (x, _), (candidates, _) = points(3, seed=1), points(8)
    ones, zeros = torch.ones(3, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    torch.testing.assert_close(shapley_values(x, ones, candidates, zeros + 1, 3), torch.full((3, 8), 1 / 8, dtype=torch.float64))
    assert not shapley_values(x, ones, candidates, zeros, 3).any()
    assert shapley_values(x[:0], ones[:0], candidates, zeros, 3).shape == (0, 8)
    assert shapley_values(x, ones, candidates[:0], zeros[:0], 3).shape == (3, 0)


def test_variants() -> None:
    generator = torch.Generator().manual_seed(0)
    help_, hurt = torch.randn(5, 7, generator=generator), torch.randn(3, 7, generator=generator)
    for i in range(7):
        column, other = help_[:, i].tolist(), hurt[:, i].tolist()
        assert math.isclose(adversarial_values(help_, hurt, "asvm")[i], sum(column) / 5 - sum(other) / 3, abs_tol=1e-6)
        assert math.isclose(adversarial_values(help_, hurt, "asv")[i], max(column) - min(other), abs_tol=1e-6)
        assert math.isclose(adversarial_values(help_, hurt, "neg_sv")[i], -sum(other), abs_tol=1e-6)
    torch.testing.assert_close(adversarial_values(help_[:0], hurt, "asvm"), -hurt.mean(dim=0))
    torch.testing.assert_close(adversarial_values(help_[:0], hurt, "asv"), -hurt.amin(dim=0))


def test_classes_that_are_absent_from_the_batch_score_at_least_nothing() -> None:
    (x, y), (candidates, labels) = points(5, labels=2, seed=1), points(12, labels=4)
    scores = adversarial_values(x[:0], shapley_values(x, y, candidates, labels, 3), "neg_sv")
    assert (scores[labels >= 2] >= 0).all()


# Draws and exchanges.


def test_balanced_draws() -> None:
    labels = np.array([0] * 9 + [1] * 3 + [2] * 1 + [7] * 5)
    rng = np.random.default_rng(0)
    counts = np.zeros(len(labels))
    for _ in range(3000):
        first, second = balanced_draws(labels, 2, rng, times=2)
        assert not set(first) & set(second)
        assert len(set(first)) == len(first)
        assert np.bincount(labels[first], minlength=8)[[0, 1, 2, 7]].tolist() == [2, 2, 1, 2]
        assert np.bincount(labels[second], minlength=8)[[0, 1, 2, 7]].tolist() == [2, 1, 0, 2]
        counts[first] += 1
    np.testing.assert_allclose(counts[:9] / 3000, 2 / 9, atol=0.035)
    assert len(balanced_draws(labels[:0], 2, rng)[0]) == 0


def test_exchanges() -> None:
    values = torch.tensor([0.5, -0.2, 0.1, 0.9, 0.05, 0.3])
    incoming, leaving = exchanges(values, stored=4)  # kept: 3, 0, 5, 2; dropped: 4, 1
    assert (incoming.tolist(), leaving.tolist()) == ([1], [1])
    incoming, leaving = exchanges(torch.tensor([0.0, 0.1, 0.9, 0.8, -1.0]), stored=2)
    assert (incoming.tolist(), leaving.tolist()) == ([0, 1], [1, 0])
    assert exchanges(torch.tensor([1.0, 2.0]), stored=0)[0].tolist() == []


def test_minority() -> None:
    stored = np.array([0] * 6 + [1] * 3 + [2])
    assert is_minority(np.array([2, 0, 3, 1, 2]), stored, 0.2).tolist() == [0, 2, 4]
    assert is_minority(np.array([2, 0, 3]), stored, 0.0).tolist() == []


# The method.


def incoming(engine: Engine, rows: slice = slice(30, 33)) -> StreamBatch:
    data = toy_data()
    return StreamBatch(data.train_x[rows], data.train_y[rows], np.arange(3), progress=engine.progress)


def features(engine: Engine, images: Tensor) -> Tensor:
    return copy.deepcopy(engine.net).eval()(engine.net.inputs.normalise(images)).features[-1].detach()


@pytest.mark.parametrize("variant", ["asvm", "asv", "neg_sv"])
def test_retrieval(variant: str) -> None:
    engine, _ = prepared(f"aser(n_recall=2, per_class=1, retrieval='{variant}')", memory=16, taps=2)
    memory, new = engine.memories.replay, incoming(engine)
    assert memory.offered > memory.capacity
    candidates, helped = balanced_draws(memory.labels, 1, np.random.default_rng(3), times=2)
    x = features(engine, memory.images[torch.from_numpy(candidates)])
    y = torch.from_numpy(memory.labels[candidates])
    coop = slow_values(features(engine, memory.images[torch.from_numpy(helped)]), torch.from_numpy(memory.labels[helped]), x, y, 3)
    adv = slow_values(features(engine, new.x), torch.from_numpy(new.labels), x, y, 3)
    score = {"asvm": lambda: coop.mean(0) - adv.mean(0), "asv": lambda: coop.max(0) - adv.min(0), "neg_sv": lambda: -adv.sum(0)}
    values = score[variant]()
    slots = engine.method.recall(new, engine.memories, Planning(np.random.default_rng(3))).slots
    assert len(slots) == 2 < len(candidates)
    by_slot = dict(zip(candidates.tolist(), values.tolist(), strict=True))
    assert min(by_slot[s] for s in slots) >= max(v for s, v in by_slot.items() if s not in slots) - 1e-6


def test_retrieval_moves_nothing_and_is_balanced() -> None:
    engine, _ = prepared("aser(n_recall=64, per_class=2)")
    memory = engine.memories.replay
    with engine_untouched(engine, "retrieval"):
        slots = engine.method.recall(incoming(engine), engine.memories, Planning(np.random.default_rng(0))).slots
    assert len(set(slots)) == len(slots)
    assert np.bincount(memory.labels[slots]).max() <= 2


def test_images_per_class_grow_where_classes_are_few() -> None:
    method = toy_engine("aser(n_recall=64)").method
    assert [method.sample_size(classes) for classes in (1, 10, 32, 64, 100)] == [128, 13, 4, 2, 2]
    assert [method.sample_size(10, capacity) for capacity in (1000, 200, 100, 10)] == [13, 13, 7, 1]
    assert toy_engine("aser(per_class=1.5)").method.sample_size(100, 100) == 1.5


def test_until_memory_is_full_it_is_experience_replay() -> None:
    one, two = toy_engine("aser(n_recall=4)", memory=40), toy_engine("er(n_recall=4)", memory=40)
    for engine in (one, two):
        feed(engine, toy_stream(), until=13)
    for name, value in one.net.state_dict().items():
        assert torch.equal(value, two.net.state_dict()[name])
    assert torch.equal(one.memories.replay.images, two.memories.replay.images)


@pytest.mark.parametrize("known", [True, False])
def test_update(known: bool) -> None:
    """Which image goes where, from the same draws, by the recursion; where values are equal, either may stay."""
    exchanged = 0
    for seed in range(6):
        engine, _ = prepared(f"aser(n_recall=2, per_class=1, known_classes={known})", taps=2)
        memory, new = engine.memories.replay, incoming(engine, slice(9 * seed, 9 * seed + 3))
        images, labels = memory.images.clone(), memory.labels.copy()
        rng = np.random.default_rng(seed)
        classes = 6 if known else len(engine.progress.seen)
        [judges] = balanced_draws(labels, 1, rng)
        candidates = rng.permutation([slot for slot in range(12) if slot not in judges])[:classes]
        u = rng.uniform(0, 1 / classes)
        minority = [k for k in range(3) if (labels == new.labels[k]).sum() / 12 < u]
        x = torch.cat([images[torch.from_numpy(judges)], new.x[minority]])
        y = np.concatenate([labels[judges], new.labels[minority]])
        pool = torch.cat([images[torch.from_numpy(candidates)], new.x])
        pool_y = torch.from_numpy(np.concatenate([labels[candidates], new.labels]))
        values = slow_values(features(engine, x), torch.from_numpy(y), features(engine, pool), pool_y, 3).sum(axis=0)
        engine.method.after_batch(engine.memories, replace(new, rng=lambda _, seed=seed: np.random.default_rng(seed)))

        changed = np.flatnonzero((memory.images != images).flatten(1).any(dim=1).numpy())
        stored = [k for k in range(3) if any(torch.equal(memory.images[slot], new.x[k]) for slot in changed)]
        assert len(stored) == len(changed)
        assert set(changed) <= set(candidates)
        n = len(candidates)
        kept = [i for i in range(n) if candidates[i] not in changed] + [n + k for k in stored]
        dropped = [i for i in range(n + 3) if i not in kept]
        assert min(values[kept]) >= max(values[dropped]) - 1e-6
        exchanged += len(stored)
    assert exchanged > 0


def test_memory_keeps_its_size_and_its_index() -> None:
    engine, stream = toy_engine("aser(n_recall=4)", memory=10), toy_stream()
    feed(engine, stream)
    memory = engine.memories.replay
    assert len(memory) == 10
    assert memory.offered == len(stream.order)
    assert memory.composition() == {label: int((memory.labels == label).sum()) for label in sorted(set(memory.labels.tolist()))}
    for slot in range(10):
        match = (stream.data.train_x == memory.images[slot]).flatten(1).all(dim=1).numpy()
        assert memory.labels[slot] in stream.data.train_y[match]


@pytest.mark.parametrize("method", ["aser(n_recall=4)", "aser()"])
def test_a_new_class_gets_slots_soon(method: str) -> None:
    """Also where n_c, made for retrieval, would put all of a small memory into the evaluation set and leave nothing to replace."""
    engine, data = toy_engine(method), toy_data()
    for step in range(12):
        rows = torch.arange(3 * step, 3 * step + 3) % 18
        engine.learn(StreamBatch(data.train_x[rows], data.train_y[rows.numpy()]))
    assert engine.memories.replay.count(label=5) == 0
    for step in range(5):
        rows = torch.arange(45 + step, 48 + step)
        engine.learn(StreamBatch(data.train_x[rows], data.train_y[rows.numpy()]))
    assert engine.memories.replay.count(label=5) > 0


def test_the_reservoir_is_an_option() -> None:
    one, two = toy_engine("aser(n_recall=4, update='reservoir', retrieval='random')"), toy_engine("er(n_recall=4)")
    for engine in (one, two):
        feed(engine, toy_stream())
    for name, value in one.net.state_dict().items():
        assert torch.equal(value, two.net.state_dict()[name])


@pytest.mark.parametrize("law", METHOD_LAWS)
def test_laws_where_there_is_a_choice(law: str) -> None:
    METHOD_LAWS[law]("aser(n_recall=2, per_class=1, known_classes=False)")
