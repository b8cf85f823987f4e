"""ER-AML against loops that follow er_aml.md, and the invariants that the specification lists."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from common import longer, noise, run
from torch import Tensor

from gracecl import rng
from gracecl.core import MEMORY_SOURCE, Batch, Block, Planning, Progress, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy, entropy
from gracecl.inputs import Images
from gracecl.memory import Memory
from gracecl.methods.er_aml import ERAML, draw_pairs
from gracecl.nets.heads import CosineHead
from gracecl.testing import feed, next_batch, toy_data, toy_engine, toy_stream

LAYERS, WIDTH = 3, 5


# Who is paired with whom.


def filled(labels: list[int], capacity: int | None = None) -> Memory:
    memory = Memory(len(labels) if capacity is None else capacity, Images((1, 1, 1)))
    memory.add(rng.generator("fill"), torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), np.array(labels, np.int64))
    return memory


def candidates(batch: list[int], held: list[int], capacity: int) -> tuple[list[set[int]], list[set[int]]]:
    """Section 3, AML 1, word by word: pool entries that may be the positive and the negative of each image of the batch."""
    pool = dict(enumerate(held)) | {capacity + row: label for row, label in enumerate(batch)}
    positives, negatives = [], []
    for k, label in enumerate(batch):
        positives.append({entry for entry, other in pool.items() if other == label and entry != capacity + k})
        negatives.append({entry for entry, other in pool.items() if other != label and other in batch})
    return positives, negatives


CASES = {
    "mixed": ([3, 1, 3, 0, 7], [3, 3, 5, 1, 0, 0, 5, 5, 9], 9),
    "a memory with free slots": ([3, 1, 3], [1, 5, 3], 20),
    "an image without positive": ([2, 4, 4], [4, 4, 8], 3),
    "one class": ([2, 2, 2], [2, 4, 4], 3),
    "strangers": ([2, 6], [1, 1, 3], 3),
    "one image": ([2], [2, 3], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_pairs_are_uniform_over_the_candidates(case: str) -> None:
    """Every candidate is met, nothing else is, each about equally often: χ² of each anchor's counts."""
    batch, held, capacity = CASES[case]
    positives, negatives = candidates(batch, held, capacity)
    valid = [k for k in range(len(batch)) if positives[k] and negatives[k]]
    memory, draws = filled(held, capacity), 1500
    counts: dict[tuple[str, int], Counter[int]] = {}
    generator = rng.generator("pairs")
    for _ in range(draws):
        anchors, partners = draw_pairs(np.array(batch), memory, generator)
        assert anchors.tolist() == valid
        for kind, drawn in zip(("positive", "negative"), np.split(partners, 2), strict=True):
            for k, entry in zip(anchors.tolist(), drawn.tolist(), strict=True):
                counts.setdefault((kind, k), Counter())[entry] += 1
    for kind, allowed in (("positive", positives), ("negative", negatives)):
        for k in valid:
            count, expected = counts[kind, k], draws / len(allowed[k])
            assert set(count) == allowed[k]
            surplus = sum((count[entry] - expected) ** 2 / expected for entry in allowed[k])
            freedom = len(allowed[k]) - 1
            assert surplus <= freedom + 4.5 * math.sqrt(2 * freedom) + 1e-9, (kind, k, count)


def test_pairs_do_not_depend_on_the_numbers_of_classes() -> None:
    batch, held = [3, 1, 3, 0, 7], [3, 3, 5, 1, 0, 0, 5, 5, 9]
    number = np.array([8, 2, 9, 1, 4, 0, 3, 5, 7, 6])
    one = draw_pairs(np.array(batch), filled(held), rng.generator("pairs"))
    two = draw_pairs(number[batch], filled(number[held].tolist()), rng.generator("pairs"))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("metric", ["supcon", "triplet"])
def test_the_plan_holds_every_pair_where_it_says(metric: str) -> None:
    """Rows of the block of pairs, put in the anchors' order, are the images that were drawn for them."""
    engine = run(f"er_aml(metric='{metric}')")
    piece = longer().batch(9)
    new = StreamBatch(piece.x, piece.labels, piece.sources, progress=engine.progress)
    plan = engine.method.plan(new, engine.memories, Planning(rng.generator("plan")))
    again = rng.generator("plan")
    memory = engine.memories.replay
    assert np.array_equal(plan["replay"].slots, memory.draw(64, again))
    anchors, partners = draw_pairs(piece.labels, memory, again)
    batch = engine.assemble(plan, new, 0)
    assert np.array_equal(batch.sources[batch.rows("anchors")], piece.sources[anchors])
    ordered = batch.sources[batch.rows("pairs")][plan["pairs"].found["place"].numpy()]
    from_stream = partners >= memory.capacity
    assert 0 < from_stream.sum() < len(partners), "the case should mix both"
    assert np.array_equal(ordered[from_stream], piece.sources[partners[from_stream] - memory.capacity])
    assert np.array_equal(ordered[~from_stream], MEMORY_SOURCE + partners[~from_stream])
    labels = batch.labels[batch.rows("pairs")][plan["pairs"].found["place"].numpy()]
    positives, negatives = np.split(labels, 2)
    assert np.array_equal(positives, piece.labels[anchors])
    assert (negatives != piece.labels[anchors]).all()
    assert set(negatives) <= set(piece.labels)


def test_views_and_forwards() -> None:
    """Everything augmented; the triplet's pairs and the first step are not. A forward each, or one for all."""
    raw, augmented = ((),), None
    engine = toy_engine("er_aml()")
    assert engine.plan(engine.meet(toy_stream().batch(0)))["first"].views == raw
    for options, of_pairs, forwards in (
        ("", augmented, [["anchors"], ["pairs"], ["replay"]]),
        ("metric='triplet'", raw, [["anchors"], ["pairs"], ["replay"]]),
        ("joint_forward=True", augmented, None),
    ):
        plan = next_batch(run(f"er_aml({options})"), longer())[0].plan
        shown = {block: rows.views for block, rows in plan.blocks.items()}
        assert shown == {"anchors": augmented, "pairs": of_pairs, "replay": augmented}
        assert plan.forwards == forwards


# The loss.


def step(anchors: list[int], pairs: list[int], seed: int = 0) -> tuple[Tensor, Batch]:
    labels = np.array(anchors + pairs)
    n = len(anchors)
    blocks = {"anchors": Block(0, n, 1, n, ()), "pairs": Block(n, len(pairs), 1, 0, ())}
    batch = Batch(torch.zeros(len(labels)), labels, np.arange(len(labels)), blocks, Progress(), 9, seed=0)
    return noise(LAYERS, len(labels), WIDTH, seed=seed).requires_grad_(), batch


def value(method: ERAML, features: Tensor, batch: Batch) -> Tensor:
    return method.losses(Taps(features, features, torch.nn.Identity()), batch)["sc"]


def unit(vector: list[float]) -> list[float]:
    norm = math.sqrt(sum(v * v for v in vector)) + 1e-5
    return [v / norm for v in vector]


def loop(features: list[list[float]], anchors: list[int], pairs: list[int], tau: float) -> float:
    """Section 3, AML 3: l_k = -(τ/0.07) mean_{j: v_j = y_k} [ h_k·V_j/τ - log Σ_j' exp(h_k·V_j'/τ) ], mean over k."""
    n = len(anchors)
    h, others = [unit(row) for row in features[:n]], [unit(row) for row in features[n:]]
    terms = []
    for k, label in enumerate(anchors):
        similarity = [sum(a * b for a, b in zip(h[k], other, strict=True)) / tau for other in others]
        denominator = math.log(sum(math.exp(s) for s in similarity))
        positives = [j for j, v in enumerate(pairs) if v == label]
        terms.append(-(tau / 0.07) * sum(similarity[j] - denominator for j in positives) / len(positives))
    return sum(terms) / n


ANCHORS, PAIRS = [3, 1, 3, 0], [3, 1, 3, 0, 1, 3, 0, 3]


@pytest.mark.parametrize("tau", [0.1, 0.2])
@pytest.mark.parametrize("gamma", [1.0, 0.3])
def test_contrast_is_the_loop(tau: float, gamma: float) -> None:
    features, batch = step(ANCHORS, PAIRS)
    expected = [gamma * loop(layer, ANCHORS, PAIRS, tau) for layer in features.tolist()]
    assert value(ERAML(temperature=tau, gamma=gamma), features, batch).tolist() == pytest.approx(expected, rel=1e-9)


def test_one_pair_by_hand() -> None:
    """-(τ/0.07) log of the softmax of two similarities, at the positive."""
    features, batch = step([3], [3, 1])
    got = value(ERAML(temperature=0.1), features, batch)
    for layer in range(LAYERS):
        h, positive, negative = (torch.tensor(unit(row)) for row in features[layer].tolist())
        a, b = (torch.dot(h, other).item() / 0.1 for other in (positive, negative))
        assert got[layer].item() == pytest.approx(-(0.1 / 0.07) * math.log(math.exp(a) / (math.exp(a) + math.exp(b))), rel=1e-6)


def test_duplicated_anchors_and_rescaled_features_change_nothing() -> None:
    features, batch = step(ANCHORS, PAIRS)
    once = value(ERAML(), features, batch)
    _, doubled = step(ANCHORS * 2, PAIRS)
    twice = value(ERAML(), torch.cat([features[:, :4], features], dim=1), doubled)
    torch.testing.assert_close(twice, once, rtol=1e-9, atol=0)
    torch.testing.assert_close(value(ERAML(), 1e4 * features, batch), value(ERAML(), 2e7 * features, batch), rtol=1e-7, atol=0)


def test_gradients_reach_anchors_positives_and_negatives() -> None:
    features, batch = step(ANCHORS, PAIRS)
    value(ERAML(), features, batch).sum().backward()
    assert (features.grad.abs().sum(dim=-1) > 0).all()


def test_triplet_is_the_loop() -> None:
    """2 · mean max(0, |h - p| - |h - n| + 0.2) on unit features, distances with the framework's 1e-6."""
    method = ERAML(metric="triplet")
    features, batch = step(ANCHORS, PAIRS)
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    batch.blocks["pairs"].found["place"] = torch.tensor(order)
    expected = []
    for layer in features.tolist():
        h, others = [unit(row) for row in layer[:4]], [unit(row) for row in layer[4:]]
        terms = []
        for k in range(4):
            near, far = (math.dist([a + 1e-6 for a in h[k]], others[order[place]]) for place in (k, 4 + k))
            terms.append(max(0.0, near - far + 0.2))
        expected.append(2 * sum(terms) / 4)
    assert value(method, features, batch).tolist() == pytest.approx(expected, rel=1e-9)
    assert min(expected) > 0


def test_only_the_replay_term_trains_the_head() -> None:
    engine = run("er_aml()")
    batch, out = next_batch(engine, longer())
    table = engine.chain.losses(out, batch)
    assert {row for row in table if not row.startswith("log/")} == {"sc", "ce/replay"}
    weight = engine.net.classifier.weight
    assert torch.autograd.grad(table["sc"].sum(), weight, retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(table["ce/replay"].sum(), weight)[0].any()
    replay = batch.rows("replay")
    torch.testing.assert_close(table["ce/replay"], cross_entropy(out.logits[:, replay], batch.y[replay]))
    assert isinstance(engine.net.classifier, CosineHead)


# Steps.


def test_cost_is_anchors_pairs_and_replay() -> None:
    """er_aml.md 10: 10 + 20 + 64 forward and backward."""
    engine = run("er_aml()")
    [outcome] = feed(engine, longer(), until=10)
    assert (outcome.images, outcome.forward, outcome.backward) == (94, 94, 94)


def test_the_first_step_is_plain_cross_entropy_on_images_as_they_are() -> None:
    engine, stream = toy_engine("er_aml()"), longer()
    batch, out = next_batch(engine, stream)
    piece = stream.batch(0)
    assert torch.equal(batch.x, engine.net.inputs.normalise(piece.x))
    table = engine.chain.losses(out, batch)
    assert set(table) == {"ce/first"}
    torch.testing.assert_close(table["ce/first"], cross_entropy(out.logits, batch.y))


def test_a_batch_of_one_class_is_a_step_on_replay_alone() -> None:
    engine = run("er_aml()")
    data = toy_data(6, 60)
    rows = np.flatnonzero(data.train_y == 1)[:10]
    outcome = engine.learn(StreamBatch(data.train_x[torch.from_numpy(rows)], data.train_y[rows], task=engine.progress.task))
    assert {row for row in outcome.table if not row.startswith("log/")} == {"ce/replay"}
    assert outcome.images == 64


def test_grace_takes_the_entropy_of_replayed_images() -> None:
    engine = run("grace(er_aml())")
    batch, out = next_batch(engine, longer())
    replay = batch.rows("replay")
    torch.testing.assert_close(engine.chain.losses(out, batch)["log/H"], entropy(out.logits[:, replay]))


def test_iterations_draw_anew_and_store_once() -> None:
    engine = run("er_aml(mem_iters=2, n_recall=20)")
    [outcome] = feed(engine, longer(), until=10)
    assert outcome.forward == 2 * (10 + 20 + 20)
    assert engine.memories.replay.offered == 100


def test_inference_is_the_head_or_the_nearest_mean() -> None:
    assert run("er_aml()").method.rule == "linear_last"
    engine = run("er_aml(inference='ncm')")
    assert engine.chain.rule == "ncm_last"
    [(_, out)] = engine.ready_to_predict().sweep(toy_data().test_x)
    assert set(engine.chain.rules(out)) == {"linear", "ncm"}


@pytest.mark.parametrize("bad", [{"mem_iters": 0}, {"temperature": 0.0}])
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        ERAML(**bad)
