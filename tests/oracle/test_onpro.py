"""OnPro against loops that follow its algorithm, and the invariants that follow from it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from turned_loops import contrast, engine_of, mean_cross_entropy, run, stream, turned, unit

from gracecl import rng
from gracecl.core import NO_TASK, Batch, Progress, Selection, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.images import augment
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.ocm import OCM
from gracecl.methods.onpro import Mixes, OnPro, mixed_labels, one_of_each, pair_counts, pair_probabilities
from gracecl.methods.rotation_contrast import RotationContrast
from gracecl.testing import feed, next_batch, toy_data

SMALL = "onpro(n_recall=4, scale=0.5, base_rate=0.5, mix_probability=1.0)"
FIRST, START, LATER = 4, 9, 12
"""steps in the first task, at the start of the second and in its middle: nine steps of two images each"""


def prototypes_by_loops(projected: Tensor, labels: list[int]) -> tuple[dict[int, list[float]], list[list[float]]]:
    """Class means of the unit projections of two views, view after view, one table for each."""
    n, tables = len(labels), []
    z = unit(projected.tolist())
    for view in (z[:n], z[n:]):
        of = {c: [row for row, y in zip(view, labels, strict=True) if y == c] for c in sorted(set(labels))}
        tables.append({c: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for c, rows in of.items()})
    return tables[0], tables[1]


def ope_by_loops(p: dict[int, list[float]], other: dict[int, list[float]], tau: float = 0.5) -> float:
    rows = [unit([vector])[0] for table in (p, other) for vector in table.values()]
    k, value = len(p), 0.0
    for i in range(2 * k):
        e = {j: math.exp(sum(a * b for a, b in zip(rows[i], rows[j], strict=True)) / tau) for j in range(2 * k) if j != i}
        value -= math.log(e[(i + k) % (2 * k)] / sum(e.values()))
    return value / (2 * k)


def two_views(out: Taps, batch: Batch, block: str) -> tuple[Tensor, list[int]]:
    """Projections of a block's images as they are, then of their augmented copies: x and A(x), or u and A(u)."""
    _, projected = turned(out, batch, block)
    where = batch.blocks[block]
    n, second = where.images, 16 if block == "new" else 1
    both = torch.cat([projected[:, :n], projected[:, second * n : (second + 1) * n]], dim=1)
    return both, batch.labels[where.view(0)].tolist()


def check_prototype_rows(table: dict[str, Tensor], out: Taps, batch: Batch, layer: int) -> None:
    for block in ("new", "seen"):
        both, labels = two_views(out, batch, block)
        expected = ope_by_loops(*prototypes_by_loops(both[layer], labels))
        assert table[f"ope/{block}"][layer].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("taps", [1, 4])
def test_a_step_of_the_first_task_is_the_loops(taps: int) -> None:
    engine = run(SMALL, FIRST, taps=taps)
    batch, out = next_batch(engine, stream())
    shapes = {name: (block.images, block.views) for name, block in batch.blocks.items()}
    assert shapes == {"new": (2, 32), "supervised": (2, 1), "seen": (4, 2)}
    table = engine.chain.losses(out, batch)
    assert set(table) == {"ce/new", "sc/new", "ope/new", "ope/seen"}
    (features, projected), rows = turned(out, batch, "new"), batch.rows("supervised")
    labels, start = batch.labels[:2].tolist(), engine.method.starts(batch)[0]
    for layer in range(taps):
        expected = contrast(features[layer], projected[layer], labels, start, 1.0, new=True)
        assert table["sc/new"][layer].item() == pytest.approx(expected, rel=1e-4)
        assert table["ce/new"][layer].item() == pytest.approx(mean_cross_entropy(out.logits[layer, rows], labels), rel=1e-5)
        check_prototype_rows(table, out, batch, layer)


def test_the_first_batch_of_all_has_nothing_to_compare_with() -> None:
    engine = engine_of(SMALL)
    batch, out = next_batch(engine, stream())
    assert set(engine.chain.losses(out, batch)) == {"ce/new", "sc/new", "ope/new"}


def test_the_first_task_looks_at_n_recall_images_or_all() -> None:
    """There the limit per class does not hold."""
    engine = run("onpro(n_recall=20)", 8, memory=30)
    batch, _ = next_batch(engine, stream())
    assert batch.blocks["seen"].images == 16 == len(engine.memories.replay)
    engine.method.n_recall = 15
    batch, _ = next_batch(engine, stream())
    assert batch.blocks["seen"].images == 15


def test_later_tasks_draw_at_most_seven_images_per_class_met() -> None:
    engine, whole = engine_of("onpro()", memory=100), stream(batch=4, per_class=30)
    feed(engine, whole, 17)
    batch, _ = next_batch(engine, whole)
    assert batch.progress.task == 1
    m = 7 * len(engine.progress.seen)
    assert len(engine.memories.replay) > m
    assert [batch.blocks[name].images for name in ("replay", "supervised", "seen")] == [m, m, m]


@pytest.mark.parametrize("taps", [1, 4])
def test_a_later_step_is_the_loops(taps: int) -> None:
    engine = run(SMALL, LATER, taps=taps)
    batch, out = next_batch(engine, stream())
    shapes = {name: (block.images, block.views) for name, block in batch.blocks.items()}
    assert shapes == {"new": (2, 32), "replay": (4, 32), "supervised": (4, 1), "seen": (4, 2)}
    method = engine.method
    mixed = batch.blocks["replay"].found
    assert mixed["share"].any()
    table = method.losses(out, batch)
    assert set(table) == {"ce/replay", "sc/new", "sc/replay", "ope/new", "ope/seen"}
    a, b, share = batch.labels[batch.blocks["replay"].view(0)].tolist(), mixed["other"].tolist(), mixed["share"].tolist()
    rows, starts = batch.rows("supervised"), method.starts(batch)
    assert batch.labels[rows].tolist() == a
    blended = [x if x == y or s == 0 else (1 - s) * x + s * y for x, y, s in zip(a, b, share, strict=True)]
    for layer in range(taps):
        for block, start, labels in (("new", starts[0], batch.labels[:2].tolist()), ("replay", starts[1], blended)):
            features, projected = turned(out, batch, block)
            expected = contrast(features[layer], projected[layer], labels, start, 0.5, new=block == "new")
            assert table[f"sc/{block}"][layer].item() == pytest.approx(expected, rel=1e-4)
        logits = out.logits[layer, rows]
        terms = [
            (1 - s) * mean_cross_entropy(z[None], [x]) + s * mean_cross_entropy(z[None], [y])
            for z, x, y, s in zip(logits, a, b, share, strict=True)
        ]
        assert table["ce/replay"][layer].item() == pytest.approx(sum(terms) / 4, rel=1e-5)
        check_prototype_rows(table, out, batch, layer)


def test_the_first_batch_of_a_task_replays_images_as_they_are() -> None:
    engine = run(SMALL, START)
    assert engine.method.proto.any()
    batch, out = next_batch(engine, stream())
    assert batch.progress.first_of_task
    replay, seen = batch.blocks["replay"], batch.blocks["seen"]
    assert torch.equal(batch.x[replay.view(0)], batch.x[seen.view(0)])
    np.testing.assert_array_equal(batch.labels[replay.view(0)], batch.labels[seen.view(0)])
    rows = batch.rows("supervised")
    value = engine.chain.losses(out, batch)["ce/replay"].item()
    assert value == pytest.approx(mean_cross_entropy(out.logits[0, rows], batch.labels[rows].tolist()), rel=1e-5)


# What a step looks at.


def test_mixed_images_lie_between_their_parents_in_every_view() -> None:
    engine = run(SMALL, LATER, augment="none")
    piece = stream().batch(LATER)
    new = engine.meet(piece)
    plan = engine.plan(new)
    batch = engine.assemble(plan, new, 0)
    memory, pixels, mixed = engine.memories.replay, engine.net.inputs, plan["replay"]
    assert all(view[0] is mixed.views[0][0] for view in mixed.views)
    blend = mixed.views[0][0]
    first, second = pixels.normalise(memory[mixed.slots]), pixels.normalise(blend.others)
    np.testing.assert_array_equal(mixed.found["other"], [labels_of_image(memory, image) for image in blend.others])
    share = mixed.found["share"].float().view(-1, 1, 1, 1)
    w = first + share * (second - first)
    block = batch.blocks["replay"]
    for number, view in enumerate(augment.ROTATIONS):
        expected = augment.apply(view, w, np.empty((4, 0)), pixels)
        for half in (0, 16):
            torch.testing.assert_close(batch.x[block.view(half + number)], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch.x[batch.rows("supervised")], w, rtol=0, atol=1e-5)
    assert torch.equal(batch.x[batch.blocks["seen"].view(0)], pixels.normalise(memory[plan["seen"].slots]))
    assert batch.blocks["replay"].raw_views == ()


def labels_of_image(memory: object, image: Tensor) -> int:
    [slot, *_] = (memory.images[: len(memory)] == image).flatten(1).all(dim=1).nonzero().flatten().tolist()
    return int(memory.labels[slot])


def test_mixed_images_are_augmented_after_they_are_mixed() -> None:
    """Grey and crop of the mix are those of one draw; mixed the other way round, each parent would have its own window."""
    engine = run(SMALL, LATER)
    batch, _ = next_batch(engine, stream())
    block = batch.blocks["replay"]
    view = augment.augmentation("tau")
    place, number = 1, 16  # the block's place in the plan, the first augmented view
    stem = rng.key(0, "augment", batch.progress.step, 0, place, number)
    draws = rng.uniform(stem, batch.sources[block.view(0)], augment.draws(view))
    assert block.found["share"].any()
    expected = augment.apply(view, batch.x[block.view(0)], draws, engine.net.inputs)
    torch.testing.assert_close(batch.x[block.view(16)], expected, rtol=0, atol=1e-5)


def test_forwards() -> None:
    engine = run(SMALL, LATER)
    batch, out = next_batch(engine, stream())
    end = batch.rows("replay").stop
    for rows in (slice(0, end), batch.rows("supervised"), batch.rows("seen")):
        torch.testing.assert_close(out.features[:, rows], engine.net(batch.x[rows]).features)
    assert batch.supervised == batch.rows("supervised")


def test_cost_is_that_of_the_algorithm() -> None:
    """With 10 new and 64 replayed images: 458 images in the first task, then 2,560."""
    engine = engine_of("onpro(recall_per_class=None)", memory=100)
    outcomes = feed(engine, stream(batch=10, per_class=60), until=14)
    assert engine.progress.task == 1
    assert (outcomes[9].forward, outcomes[9].backward) == (458, 458)
    assert (outcomes[13].forward, outcomes[13].backward) == (2560, 2560)


# Prototypes.


def test_proto_is_the_mean_of_both_views_of_the_last_replayed_images() -> None:
    engine = run(SMALL, LATER, taps=4)
    batch, out = next_batch(engine, stream())
    before = engine.method.proto.clone()
    both, labels = two_views(out, batch, "seen")
    p, other = prototypes_by_loops(both[-1], labels)
    engine.chain.losses(out, batch)
    assert torch.equal(engine.method.proto, before)
    with torch.no_grad():
        engine.method.after_step(out, batch)
    for c in range(6):
        expected = [(x + y) / 2 for x, y in zip(p[c], other[c], strict=True)] if c in p else [0.0] * 3
        assert engine.method.proto[c].tolist() == pytest.approx(expected, abs=1e-6)
    assert not engine.method.proto.requires_grad
    assert len(p) < 6


def test_a_step_keeps_the_projections_that_it_was_made_with() -> None:
    engine = run(SMALL, LATER)
    batch, out = next_batch(engine, stream())
    both, labels = two_views(out, batch, "seen")
    p, other = prototypes_by_loops(both[0], labels)
    feed(engine, stream(), LATER + 1)
    for c in p:
        expected = [(x + y) / 2 for x, y in zip(p[c], other[c], strict=True)]
        assert engine.method.proto[c].tolist() == pytest.approx(expected, abs=1e-5)


# APF.


def generators(n: int) -> list[np.random.Generator]:
    return [rng.generator("apf", number) for number in range(n)]


def test_probabilities_are_the_loop() -> None:
    proto = np.random.default_rng(0).normal(size=(5, 3))
    weights = []
    for i in range(5):
        for j in range(i + 1, 5):
            weights.append(math.exp(1 / math.sqrt(sum((x - y) ** 2 for x, y in zip(proto[i], proto[j], strict=True)))))
    np.testing.assert_allclose(pair_probabilities(proto), np.array(weights) / sum(weights), rtol=1e-12)


def test_equal_prototypes_take_all() -> None:
    proto = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(pair_probabilities(proto), [0, 0.5, 0, 0, 0.5, 0], atol=1e-12)


def test_counts_are_rounded_and_made_up_by_single_steps() -> None:
    for n, shares in (
        (7, [0.3, 0.3, 0.3, 0.1]),
        (4, [0.25] * 4),
        (3, [0.19] * 5 + [0.05]),
        (10, [0.15, 0.25, 0.35, 0.25]),
        (1, [0.1] * 10),
    ):
        probabilities = np.array(shares)
        rounded = np.rint(probabilities * n)
        changed: Counter[int] = Counter()
        for generator in generators(200):
            counts = pair_counts(probabilities, n, generator)
            assert counts.sum() == n
            assert (counts >= 0).all()
            steps = counts - rounded
            assert np.abs(steps).max() <= 1
            assert np.abs(steps).sum() == abs(n - rounded.sum())
            changed.update(np.flatnonzero(steps).tolist())
        # Where something was missing any pair may get it, where there was too much any that had some.
        allowed = range(len(shares)) if rounded.sum() < n else np.flatnonzero(rounded)
        assert set(changed) == (set(allowed) if rounded.sum() != n else set())


def filled(labels: list[int]) -> Memories:
    memories = Memories(len(labels), Images((1, 8, 8)))
    rows = np.arange(len(labels))
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    memories.replay.put(rows, images, rows, np.array(labels), 0, {})
    return memories


def attached(memories: Memories, **options: float) -> OnPro:
    engine = engine_of("onpro()")
    method = OnPro(**options)
    method.attach(engine.net, memories)
    return method


def feedback(method: OnPro, memories: Memories, slots: np.ndarray, generator: np.random.Generator) -> Mixes:
    new = StreamBatch(torch.zeros(0), np.empty(0, np.int64), np.empty(0, np.int64), progress=Progress(task=1, seen=(3, 0, 5, 1)))
    return method.prototype_feedback(slots, new, memories.replay, generator)


LABELS = [0, 1, 3, 3, 1, 0, 5, 5, 0, 1, 3, 0]


def test_mixes_within_the_replayed_images() -> None:
    """Of ρm images, none twice, each with a partner among them, by a permutation; gated by p for all, then p for each."""
    memories = filled(LABELS)
    method = attached(memories, base_rate=0.75, mix_probability=0.6)
    slots, shares, any_mixed, own = np.array([2, 9, 4, 11, 7, 0, 5, 8]), [], [], []
    for generator in generators(1500):
        mixes = feedback(method, memories, slots, generator)  # no prototypes yet: all are of this kind
        assert sorted(mixes.first) == sorted(mixes.second) == sorted(slots)
        assert np.all((mixes.share >= 0) & (mixes.share <= 0.6))
        any_mixed.append(bool(mixes.share.any()))
        if any_mixed[-1]:
            shares += mixes.share.tolist()
        own.append(float(np.mean(mixes.first == mixes.second)))
    assert np.mean(any_mixed) == pytest.approx(0.6 * (1 - 0.4**8), abs=0.04)
    positive = np.array([share for share in shares if share > 0])
    assert len(positive) / len(shares) == pytest.approx(0.6, abs=0.03)
    assert stats.kstest(positive, "uniform", (0, 0.6)).pvalue > 1e-3
    assert np.mean(own) == pytest.approx(1 / 8, abs=0.02)


def test_mixes_of_pairs_of_classes() -> None:
    memories = filled(LABELS)
    method = attached(memories, base_rate=0.5, mix_probability=0.7)
    generator = torch.Generator().manual_seed(0)
    method.proto[[0, 1, 3]] = torch.randn(3, 3, generator=generator)
    met = [3, 0, 1]  # in the order they were met in; 5 has no prototype
    probabilities = pair_probabilities(method.proto[met].double().numpy())
    slots, memory = np.array([2, 9, 4, 11, 7, 0, 5, 8, 6]), memories.replay
    used: list[tuple[int, int]] = []
    shares: list[float] = []
    gates = []
    for number in generators(600):
        mixes = feedback(method, memories, slots, number)
        assert len(mixes.first) == len(mixes.second) == len(mixes.share) == 9
        # int(0.5 · 9) = 4 first, among themselves; then 5 of pairs.
        assert set(mixes.second[:4]) == set(mixes.first[:4]) <= set(slots)
        pairs = list(zip(memory.labels[mixes.first[4:]].tolist(), memory.labels[mixes.second[4:]].tolist(), strict=True))
        counts = [pairs.count(pair) for pair in ((3, 0), (3, 1), (0, 1))]
        assert sum(counts) == 5
        assert np.abs(np.array(counts) - probabilities * 5).max() <= 1.5
        for pair in set(pairs):
            of_pair = [share for share, found in zip(mixes.share[4:], pairs, strict=True) if found == pair]
            assert all(share == 0 for share in of_pair) or all(share > 0 for share in of_pair)
            gates.append(of_pair[0] > 0)
        shares += mixes.share[4:][mixes.share[4:] > 0].tolist()
        used += [(int(slot), side) for side, chosen in enumerate((mixes.first, mixes.second)) for slot in chosen[4:]]
    assert np.mean(gates) == pytest.approx(0.7, abs=0.05)
    assert stats.kstest(shares, "beta", (0.4, 0.4)).pvalue > 1e-3
    for side, classes in ((0, (3, 0)), (1, (0, 1))):
        taken = Counter(slot for slot, which in used if which == side)
        assert set(taken) == {slot for slot, label in enumerate(LABELS) if label in classes}


def test_images_of_a_class_are_drawn_evenly_and_may_come_again() -> None:
    memory = filled(LABELS).replay
    labels = np.array([3, 0, 3, 3, 3, 3])
    taken: Counter[int] = Counter()
    for generator in generators(500):
        slots = one_of_each(labels, memory, generator)
        np.testing.assert_array_equal(memory.labels[slots], labels)
        taken.update(slots[[0, 2, 3, 4, 5]].tolist())
    assert set(taken) == {2, 3, 10}
    assert stats.chisquare(list(taken.values())).pvalue > 1e-3


def test_another_class_stands_for_one_that_left_the_memory() -> None:
    memories = filled([0, 0, 3, 3, 0, 3])
    method = attached(memories, base_rate=0.0)
    method.proto[[0, 1, 3, 5]] = torch.eye(4, 3) + 0.1  # 1 and 5 are not stored
    pairs: Counter[tuple[int, int]] = Counter()
    for generator in generators(200):
        mixes = feedback(method, memories, np.arange(6), generator)
        assert len(mixes.first) == 6
        pairs.update(zip(*(memories.replay.labels[side].tolist() for side in (mixes.first, mixes.second)), strict=True))
    assert set(pairs) == {(0, 0), (0, 3), (3, 0), (3, 3)}, "possibly its own partner"


@pytest.mark.parametrize("stored", [[4, 4, 4, 4], [0, 0, 0, 0]])
def test_without_pairs_all_images_are_mixed_among_themselves(stored: list[int]) -> None:
    """No class of the prototypes is in memory; or there is one prototype alone."""
    memories = filled(stored)
    method = attached(memories, base_rate=0.25, mix_probability=1.0)
    method.proto[[0, 1] if stored[0] == 4 else [0]] = 1.0
    mixes = feedback(method, memories, np.arange(4), rng.generator("one"))
    assert sorted(mixes.first) == sorted(mixes.second) == [0, 1, 2, 3]


def test_a_base_rate_of_one_leaves_no_pairs_and_of_nought_nothing_else() -> None:
    memories = filled(LABELS)
    for rate in (0.0, 1.0):
        method = attached(memories, base_rate=rate)
        method.proto[[0, 1]] = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
        mixes = feedback(method, memories, np.array([6, 7]), rng.generator("rate"))
        classes = {int(label) for label in memories.replay.labels[np.concatenate([mixes.first, mixes.second])]}
        assert classes == ({5} if rate == 1 else {0, 1})


def test_without_mixing_the_step_is_that_of_ocm() -> None:
    """p = 0 and ρ = 1: no share anywhere, plain cross-entropy, and the contrasts that OCM takes of the same images."""
    engine = run("onpro(n_recall=4, scale=0.5, base_rate=1.0, mix_probability=0.0)", LATER)
    batch, out = next_batch(engine, stream())
    method = engine.method
    assert not batch.blocks["replay"].found["share"].any()
    table = method.losses(out, batch)
    rows = batch.rows("supervised")
    expected = mean_cross_entropy(out.logits[0, rows], batch.labels[rows].tolist())
    assert table["ce/replay"].item() == pytest.approx(expected, rel=1e-5)
    ocm = OCM(n_recall=4, scale=0.5)
    ocm.attach(engine.net, engine.memories)
    for row, value in RotationContrast.contrasts(ocm, out, batch).items():
        torch.testing.assert_close(table[row], value)
    np.testing.assert_array_equal(
        np.sort(batch.sources[batch.blocks["replay"].view(0)]), np.sort(batch.sources[batch.blocks["seen"].view(0)])
    )


def test_labels_of_mixes() -> None:
    """Equal where nothing is mixed in, whatever the share of an image of the same class."""
    a, b, share = np.array([2, 5, 5, 1, 4, 4]), np.array([4, 5, 1, 5, 3, 4]), np.array([0.5, 0.3, 0.0, 1.0, 0.25, 0.77])
    got = mixed_labels(a, b, share)
    assert got.tolist() == [3.0, 5.0, 5.0, 5.0, 3.75, 4.0]
    np.testing.assert_allclose(got, (1 - share) * a + share * b, rtol=1e-12)


def test_a_mixed_image_stands_alone_with_its_views() -> None:
    engine = run(SMALL, LATER)
    batch, _ = next_batch(engine, stream())
    labels = engine.method.labels_of("replay", batch)
    assert labels.dtype == torch.float64
    block = batch.blocks["replay"]
    mixed = (block.found["share"] > 0) & (block.found["other"] != batch.y[block.view(0)])
    assert mixed.any()
    for i in np.flatnonzero(mixed):
        assert (labels == labels[i]).sum() == 1


# Where it runs.


def test_plans_read_prototypes_of_the_last_step_alone() -> None:
    engine = run(SMALL, LATER)
    piece = stream().batch(LATER)
    new = engine.meet(piece)

    def slots(plan: dict[str, Selection]) -> list[int]:
        return plan["replay"].slots.tolist()

    once = slots(engine.plan(new))
    assert slots(engine.plan(new)) == once
    engine.method.proto.zero_()
    assert sorted(slots(engine.plan(new))) == sorted(engine.plan(new)["seen"].slots.tolist())


def test_streams_without_task_marks_replay_from_the_second_batch_on() -> None:
    data, engine = toy_data(), engine_of(SMALL)
    tables = [engine.learn(StreamBatch(data.train_x[i : i + 2], data.train_y[i : i + 2], task=NO_TASK)).table for i in (0, 8, 16)]
    assert "ce/new" in tables[0]
    for table in tables[1:]:
        assert {"ce/replay", "sc/replay", "ope/seen"} <= set(table)


def test_without_memory_every_step_is_one_of_the_first_task() -> None:
    engine = run(SMALL, LATER, memory=0)
    batch, out = next_batch(engine, stream())
    assert set(engine.chain.losses(out, batch)) == {"ce/new", "sc/new", "ope/new"}


def test_several_epochs_mix_in_later_batches_and_store_once() -> None:
    engine: Engine = engine_of(SMALL, memory=100)
    twice = stream(epochs=2)
    feed(engine, twice, 20)
    assert engine.progress.task == 1
    batch, _ = next_batch(engine, twice)
    assert not batch.progress.first_of_task
    feed(engine, twice)
    assert engine.memories.replay.offered == 54


def test_grace_weighs_the_cross_entropy_of_each_layer() -> None:
    engine = run(f"grace({SMALL})", LATER, taps=4)
    batch, out = next_batch(engine, stream())
    inner, table = engine.method.inner.chain.losses(out, batch), engine.chain.losses(out, batch)
    alpha = table["log/alpha"]
    assert (alpha != 1).any()
    torch.testing.assert_close(table["ce/replay"], alpha * inner["ce/replay"])
    for row in ("sc/new", "sc/replay", "ope/new", "ope/seen"):
        assert torch.equal(table[row], inner[row])


def test_defaults_are_the_programs_for_cifar100() -> None:
    method = OnPro()
    assert (method.n_recall, method.recall_per_class, method.scale, method.temperature) == (64, 7, 1.0, 0.07)
    assert (method.base_rate, method.mix_probability, method.prototype_temperature) == (0.9, 0.2, 0.5)
    assert (method.base_share, method.concentration) == (0.6, 0.4)


@pytest.mark.parametrize(
    "bad",
    [{"base_rate": 1.5}, {"mix_probability": -0.1}, {"prototype_temperature": 0.0}, {"concentration": 0.0}, {"temperature": 0.0}],
)
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        OnPro(**bad)
