"""GSS-Greedy against a slow, literal update of memory, and its specification's invariants."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import StreamBatch
from gracecl.engine.engine import Engine
from gracecl.memory.gss import draw_groups, draw_victims, replacement_chance, similarity, victim_weights
from gracecl.methods.er import ER
from gracecl.methods.gss import SCORE
from gracecl.testing import METHOD_LAWS, assert_same, feed, flatten, prepared, toy_data, toy_engine, toy_stream

SMALL = "gss(n_recall=4, n_groups=3, group_size=2, threshold={})"


def incoming(engine: Engine, rows: slice = slice(30, 33)) -> StreamBatch:
    data = toy_data()
    labels = data.train_y[rows]
    return StreamBatch(data.train_x[rows], labels, np.arange(len(labels)), progress=engine.progress)


def slow_gradient(engine: Engine, images: Tensor, labels: np.ndarray) -> Tensor:
    net = copy.deepcopy(engine.net).eval()
    net.zero_grad()
    x, y = engine.net.inputs.normalise(images), torch.from_numpy(labels)
    sum(F.cross_entropy(layer, y) for layer in net(x).logits).backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in net.parameters()])


def slow_similarity(g: Tensor, others: list[Tensor]) -> float:
    return max(float(g @ other / max(float(g.norm() * other.norm()), 1e-8)) for other in others)


def slow_store(
    engine: Engine, new: StreamBatch, rng: np.random.Generator, threshold: float
) -> dict[int, tuple[Tensor, int, float]]:
    """slot -> (image, label, score) that the update writes, image by image, from the same random numbers."""
    memory = engine.memories.replay
    size = min(2, len(memory))
    shuffled, groups = rng.permutation(len(memory)), []
    for i in range(min(3, len(memory) // size)):
        slots = shuffled[i * size : (i + 1) * size]
        groups.append(slow_gradient(engine, memory.images[torch.from_numpy(slots)], memory.labels[slots]))
    own = [slow_similarity(slow_gradient(engine, new.x[k : k + 1], new.labels[k : k + 1]), groups) for k in range(len(new))]
    free = memory.capacity - len(memory)
    if free:
        return {len(memory) + k: (new.x[k], int(new.labels[k]), own[k]) for k in range(min(free, len(new)))}
    if slow_similarity(slow_gradient(engine, new.x, new.labels), groups) >= threshold:
        return {}
    scores = memory.attributes[SCORE].double().tolist()
    low, high = min(scores), max(scores)
    weights = np.array([(score - low) / (high - low + 0.01) for score in scores])
    victims = rng.choice(memory.capacity, len(new), replace=False, p=weights / weights.sum())
    written = {}
    for k, (victim, u) in enumerate(zip(victims.tolist(), rng.random(len(new)).tolist(), strict=True)):
        if u < (scores[victim] + 1) / ((own[k] + 1) + (scores[victim] + 1)):
            written[victim] = (new.x[k], int(new.labels[k]), own[k])
    return written


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize(("steps", "threshold"), [(1, 0.0), (9, 1.1), (9, -1.0)])
def test_update(taps: int, steps: int, threshold: float) -> None:
    """While there is room, with a full memory that takes images, and with one that does not."""
    engine = toy_engine(SMALL.format(threshold), taps=taps, memory=5 if steps == 1 else 12)
    feed(engine, toy_stream(), until=steps)
    memory, new = engine.memories.replay, incoming(engine)
    before = {name: value.clone() for name, value in (("images", memory.images), ("score", memory.attributes[SCORE]))}
    labels = memory.labels.copy()
    expected = slow_store(engine, new, np.random.default_rng(5), threshold)
    assert len(expected) == (2 if steps == 1 else 0) or threshold == 1.1
    engine.method.after_batch(engine.memories, replace(new, rng=lambda _: np.random.default_rng(5)))
    for slot in range(memory.capacity):
        image, label, score = expected.get(slot, (before["images"][slot], labels[slot], before["score"][slot]))
        assert torch.equal(memory.images[slot], image)
        assert memory.labels[slot] == label
        np.testing.assert_allclose(float(memory.attributes[SCORE][slot]), float(score), rtol=1e-4, atol=1e-5)
    if threshold == 1.1:
        assert expected, "some image is taken"


def test_first_images_have_the_first_score() -> None:
    engine = toy_engine("gss()", memory=2)
    engine.method.after_batch(engine.memories, replace(incoming(engine), rng=lambda _: np.random.default_rng(0)))
    memory = engine.memories.replay
    np.testing.assert_allclose(memory.attributes[SCORE].tolist(), [0.1, 0.1])
    assert len(memory) == 2
    assert memory.offered == 3


def test_memory_stays_within_bounds() -> None:
    """Never above capacity; scores are cosines or the first ones; labels belong to their images; everything offered is counted."""
    engine, stream = toy_engine(SMALL.format(1.1), memory=10), toy_stream()
    feed(engine, stream)
    memory, data = engine.memories.replay, stream.data
    assert len(memory) == 10
    assert memory.offered == len(stream.order)
    assert (memory.attributes[SCORE].abs() <= 1 + 1e-5).all()
    for slot in range(10):
        match = (data.train_x == memory.images[slot]).flatten(1).all(dim=1).numpy()
        assert memory.labels[slot] in data.train_y[match]
    rebuilt = {label: int((memory.labels == label).sum()) for label in set(memory.labels.tolist())}
    assert memory.composition() == rebuilt


def test_update_leaves_the_learner_alone() -> None:
    """Parameters, statistics, the optimizer, gradients, mode and torch's random state; only memory changes."""
    engine, _ = prepared(SMALL.format(1.1))

    def look() -> dict:
        state = engine.state_dict()
        del state["memories"]
        gradients = [p.grad for p in engine.net.parameters() if p.grad is not None]
        return dict(flatten({"state": state, "gradients": gradients, "random": torch.get_rng_state(), "mode": engine.net.training}))

    before = look()
    engine.method.after_batch(engine.memories, replace(incoming(engine), rng=lambda _: np.random.default_rng(0)))
    assert_same(look(), before, "the update of memory")


def test_what_memory_has_already_is_not_taken() -> None:
    """A full memory of one image sees that image again: the batch's cosine is 1."""
    engine, _ = prepared("gss(n_groups=3, group_size=2)")
    memory, new = engine.memories.replay, incoming(engine, slice(30, 31))
    memory.images[:], memory.labels[:] = new.x[0], new.labels[0]
    groups = engine.method.gradients(*engine.method.stored(memory, np.arange(6).reshape(3, 2)))
    np.testing.assert_allclose(engine.method.scores(new, groups).tolist(), [1.0], atol=1e-5)
    before = memory.attributes[SCORE].clone()
    engine.method.after_batch(engine.memories, replace(new, rng=lambda _: np.random.default_rng(0)))
    assert torch.equal(memory.attributes[SCORE], before)


def test_an_absent_class_is_taken() -> None:
    """A linear model, memory of one class, stream of another: gradients are opposite."""
    engine = toy_engine("gss(n_groups=3, group_size=2, scope='heads')", net="mlp(width=4, depth=1)")
    memory, data = engine.memories.replay, toy_data()
    memory.attributes[SCORE] = torch.linspace(-0.5, 0.5, 12)
    image = data.train_x[:1]
    memory.put(
        np.arange(12), image.expand(12, -1, -1, -1), np.arange(12), np.zeros(12, np.int64), 0, {SCORE: memory.attributes[SCORE]}
    )
    taken = 0
    for seed in range(10):
        new = StreamBatch(image.expand(3, -1, -1, -1), np.ones(3, np.int64), np.arange(3), progress=engine.progress)
        groups = engine.method.gradients(*engine.method.stored(memory, np.arange(6).reshape(3, 2)))
        assert seed or (engine.method.scores(new, groups) < 0).all()
        engine.method.after_batch(engine.memories, replace(new, rng=lambda _, seed=seed: np.random.default_rng(seed)))
        taken = memory.count(label=1)
    assert taken > 0


def test_groups_are_disjoint_and_complete() -> None:
    rng = np.random.default_rng(0)
    for filled, shape in ((100, (10, 10)), (35, (3, 10)), (7, (1, 7)), (1, (1, 1))):
        groups = draw_groups(filled, 10, 10, rng)
        assert groups.shape == shape
        assert len(set(groups.ravel().tolist())) == groups.size
        assert groups.max() < filled


def test_similarity_is_the_largest_cosine() -> None:
    generator = torch.Generator().manual_seed(0)
    g, others = torch.randn(4, 9, generator=generator), torch.randn(3, 9, generator=generator)
    expected = [slow_similarity(row, list(others)) for row in g]
    np.testing.assert_allclose(similarity(g, others).tolist(), expected, rtol=1e-5)
    torch.testing.assert_close(similarity(5 * g, 7 * others), similarity(g, others))
    assert similarity(torch.zeros(1, 9), others).tolist() == [0.0]


def test_victims_are_distinct_and_likely_by_weight() -> None:
    scores = np.array([-0.5, 0.0, 0.25, 0.5])
    weights = victim_weights(scores)
    assert weights[0] == 0
    rng = np.random.default_rng(0)
    drawn = np.array([draw_victims(weights, 2, rng) for _ in range(4000)])
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = np.bincount(drawn[:, 0], minlength=4) / 4000
    chance = weights / weights.sum()
    np.testing.assert_allclose(first, chance, atol=4 * np.sqrt(0.25 / 4000))


def test_victims_where_weights_do_not_say() -> None:
    """Equal scores, or fewer with a weight than images: uniform; fewer slots than images: all of them."""
    rng = np.random.default_rng(0)
    equal = np.array([draw_victims(victim_weights(np.full(5, 0.1)), 2, rng) for _ in range(2000)])
    np.testing.assert_allclose(np.bincount(equal.ravel()) / 4000, 0.2, atol=0.04)
    assert set(draw_victims(np.array([0.0, 0.0, 1.0]), 3, rng)) == {0, 1, 2}
    assert set(draw_victims(np.array([0.5, 1.0]), 9, rng)) == {0, 1}


@pytest.mark.parametrize(("item", "slot"), [(0.3, -0.2), (-0.9, 0.8), (0.1, 0.1), (0.5, -1.0), (-1.0, 0.5), (-1.0, -1.0)])
def test_frequency_of_replacements(item: float, slot: float) -> None:
    chance = replacement_chance(np.array([item]), np.array([slot]))
    found = (np.random.default_rng(0).random(10_000) < chance).mean()
    total = (item + 1) + (slot + 1)
    expected = (slot + 1) / total if total else 0.0
    assert abs(found - expected) <= 4 * np.sqrt(0.25 / 10_000) * (0 < expected < 1)


def test_training_is_experience_replay_s() -> None:
    """With the same slots written, every step is that of ER."""
    one, two = toy_engine("gss(n_recall=4)"), toy_engine("er(n_recall=4)")
    one.method.after_batch = lambda *args: ER.after_batch(one.method, *args)
    for engine in (one, two):
        feed(engine, toy_stream())
    assert_same(one.net.state_dict(), two.net.state_dict(), "gss with a reservoir")


@pytest.mark.parametrize("law", METHOD_LAWS)
def test_laws_where_images_are_replaced(law: str) -> None:
    METHOD_LAWS[law]("gss(n_recall=4, n_groups=3, group_size=2, threshold=1.1, victims='proportional', scope='heads')")
