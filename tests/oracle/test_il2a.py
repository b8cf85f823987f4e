"""IL2A against slow loops over its equations, through the hooks that a step calls, and its invariants."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gracecl import checkpoint
from gracecl.core import Batch, StreamBatch, Taps, total
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.methods.il2a import IL2A, factor
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import frozen_copy
from gracecl.registry.spec import parse_method
from gracecl.streams.split import split
from gracecl.testing import TOY_SHAPE, assert_same, feed, next_batch, prepared, toy_data, toy_engine, toy_stream

STEPS_PER_TASK = 6
OPTIONS = "mixed_classes=4, temperature=0.5, spread=1.5, semantic_weight=3.0, kd_weight=0.7, n_prototypes=10, n_recall=5"


def il2a(engine: Engine) -> IL2A:
    method = engine.method
    return method if isinstance(method, IL2A) else method.inner


def before_mixing(engine: Engine, stream) -> Batch:
    """The next step's batch as it is before `prepare`."""
    piece = stream.batch(engine.progress.step)
    new = engine.meet(piece)
    return engine.assemble(engine.plan(new), new, 0)


def log_softmax(row: list[float], allowed: list[int]) -> dict[int, float]:
    log_sum = math.log(sum(math.exp(row[c]) for c in allowed))
    return {c: row[c] - log_sum for c in allowed}


def features_of(net: TappedNet, images: torch.Tensor) -> np.ndarray:
    """`[L, n, D]` of raw images, in evaluation mode."""
    [(_, taps)] = net.sweep(images)
    return taps.features.double().numpy()


class SlowStatistics:
    """Means and full covariances by class number, of what memory held when the class's task ended."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def end_task(self, engine: Engine) -> None:
        memory = engine.memories.replay
        for label in engine.progress.current:
            images = memory.images[torch.from_numpy(np.flatnonzero(memory.labels == label))]
            assert len(images) > 1, "the toy memory holds several images of each class"
            layers = features_of(engine.net, images)
            self.of[label] = [(layer.mean(axis=0), np.cov(layer.T)) for layer in layers]


def slow_table(engine: Engine, out: Taps, batch: Batch, layer: int, statistics: SlowStatistics, teacher) -> dict[str, float]:
    method, progress = il2a(engine), batch.progress
    w, b = (value[layer].detach().double().numpy() for value in (engine.net.classifier.weight, engine.net.classifier.bias))
    w_pair, b_pair = (value[layer].detach().double().numpy() for value in method.pairs.parameters())
    features = out.features[layer].detach().double().numpy()
    met = list(progress.current)[:4]
    pairs = [6 + pair for pair, (i, j) in enumerate(all_pairs(4)) if i < len(met) and j < len(met)]
    terms = []
    for row, label in zip(features, batch.labels.tolist(), strict=True):
        logits = [*(row @ w + b[0]), *(row @ w_pair + b_pair[0])]
        chances = log_softmax([value / 0.5 for value in logits], [*progress.seen, *pairs])
        terms.append(-chances[label])
    table = {"ce/all": float(np.mean(terms))}
    if teacher is not None:
        then = teacher(batch.x).features[layer].double().numpy()
        table["kd/features"] = 0.7 * math.sqrt(sum((x - y) ** 2 for x, y in zip(features.flat, then.flat, strict=True)))
        drawn = batch.rng("prototypes").integers(0, len(statistics.of), 10)
        old = [label for label in progress.seen if label in statistics.of]
        terms = []
        for place in drawn:
            c = old[place]
            mean, covariance = statistics.of[c][layer]
            logits = {
                k: mean @ w[:, k] + b[0, k] + 1.5 / 2 * (w[:, k] - w[:, c]) @ covariance @ (w[:, k] - w[:, c])
                for k in progress.seen
            }
            chances = log_softmax({k: value / 0.5 for k, value in logits.items()}, list(progress.seen))
            terms.append(-chances[c])
        table["ce/semantic"] = 3.0 * float(np.mean(terms))
    return table


def all_pairs(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(i + 1, n)]


@pytest.mark.parametrize(("taps", "expression"), [(1, "{}"), (3, "{}"), (2, "grace({}, beta=0, adaptive=False)")])
def test_every_step_of_a_stream(taps: int, expression: str) -> None:
    engine = toy_engine(expression.format(f"il2a({OPTIONS})"), taps=taps, memory=40)
    stream, statistics, teacher = toy_stream(), SlowStatistics(), None
    for step in range(len(stream)):
        batch, out = next_batch(engine, stream)
        table = {row: value.tolist() for row, value in engine.chain.losses(out, batch).items() if not row.startswith("log/")}
        assert table.keys() == ({"ce/all"} if teacher is None else {"ce/all", "ce/semantic", "kd/features"})
        for layer in range(taps):
            expected = slow_table(engine, out, batch, layer, statistics, teacher)
            for row, values in table.items():
                assert values[layer] == pytest.approx(expected[row], rel=1e-4, abs=1e-6), (step, row)
        feed(engine, stream, until=step + 1)
        if stream.ends_task(step):
            statistics.end_task(engine)
            teacher = frozen_copy(engine.net)
    assert len(statistics.of) == 6


# Class augmentation.


def test_mixes() -> None:
    """Pixels, labels and bookkeeping of the step's batch against a loop over permutations and rows."""
    engine, stream = prepared("il2a(mixed_classes=4)")
    plain = before_mixing(engine, stream)
    batch, _ = next_batch(engine, stream)
    rows, labels = plain.rows("new"), plain.labels
    generator, met = batch.rng("class augmentation"), list(batch.progress.current)
    orders = [generator.permutation(rows.stop) for _ in range(4)]
    pairs = [(i, int(order[i])) for order in orders for i in range(rows.stop) if labels[i] != labels[order[i]]]
    assert pairs
    shares = [share if 0.4 <= share <= 0.6 else 0.5 for share in generator.beta(20, 20, len(pairs))]
    assert len(batch) == len(plain) + len(pairs)
    assert torch.equal(batch.x[: len(plain)], plain.x)
    for k, ((i, j), share) in enumerate(zip(pairs, shares, strict=True)):
        torch.testing.assert_close(batch.x[len(plain) + k], share * plain.x[i] + (1 - share) * plain.x[j])
        both = tuple(sorted((met.index(labels[i]), met.index(labels[j]))))
        assert batch.labels[len(plain) + k] == 6 + all_pairs(4).index(both)
    assert batch.rows("mixed") == slice(len(plain), len(batch))
    assert batch.supervised == slice(0, len(plain)), "others do not know the extra classes"
    assert np.array_equal(batch.y.numpy(), batch.labels)
    assert len(batch.sources) == len(batch)


def learn(engine: Engine, labels: list[int], task: int, seed: int = 0):
    x = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (len(labels), *TOY_SHAPE), dtype=np.uint8))
    return engine.learn(StreamBatch(x, np.array(labels), task=task))


def test_images_of_one_class_are_not_mixed() -> None:
    engine = toy_engine("il2a()")
    assert learn(engine, [3] * 10, 0).images == 10
    assert 10 < learn(engine, [3] * 5 + [1] * 5, 0).images <= 50
    assert learn(toy_engine("il2a(mix_times=0)"), [3] * 5 + [1] * 5, 0).images == 10


@pytest.mark.parametrize(
    ("mixed_classes", "mixed"),
    [(0, set()), (1, set()), (2, {frozenset({5, 0})}), (3, {frozenset({5, 0}), frozenset({5, 2}), frozenset({0, 2})})],
)
def test_only_the_first_classes_of_a_task_are_mixed(mixed_classes: int, mixed: set[frozenset[int]]) -> None:
    engine = toy_engine(f"il2a(mixed_classes={mixed_classes})")
    learn(engine, [5, 0, 2, 4], 0)
    new = StreamBatch(
        torch.zeros(8, *TOY_SHAPE, dtype=torch.uint8), np.array([5, 0, 2, 4] * 2), np.arange(8), progress=engine.progress
    )
    found = set()
    for repeat in range(5):
        batch = engine.assemble(engine.plan(new), new, repeat)
        engine.update.prepare(batch)
        found |= {frozenset({[5, 0, 2, 4][place] for place in all_pairs(mixed_classes)[label - 6]}) for label in batch.labels[8:]}
    assert found == mixed
    assert il2a(engine).pairs.weight.shape[-1] == mixed_classes * (mixed_classes - 1) // 2


def test_extra_classes_are_those_of_the_task() -> None:
    """Outputs of pairs start afresh in each task and end with it; those of the classes stay as they are."""
    engine, stream = toy_engine("il2a()"), toy_stream()
    method = il2a(engine)
    at_first = [value.detach().clone() for value in method.pairs.parameters()]
    feed(engine, stream, until=STEPS_PER_TASK - 1)
    piece = stream.batch(STEPS_PER_TASK - 1)
    engine.learn(StreamBatch(piece.x, piece.labels, task=piece.task))
    used = torch.nonzero((method.pairs.weight != at_first[0]).any(dim=1)[0]).flatten().tolist()
    assert 0 in used
    before = features_and_logits(engine)
    engine.end_task()
    for one, two in zip(features_and_logits(engine), before, strict=True):
        assert torch.equal(one, two)
    assert before[1].shape[-1] == 6
    engine.meet(StreamBatch(torch.zeros(1, *TOY_SHAPE, dtype=torch.uint8), np.array([5]), task=1))
    for value, fresh in zip(method.pairs.parameters(), at_first, strict=True):
        assert torch.equal(value, fresh)


def features_and_logits(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    [(_, out)] = engine.net.sweep(toy_data().test_x)
    return out.features, out.logits


# Statistics and semantic augmentation.


@pytest.mark.parametrize("n", [1, 2, 5, 8, 30])
def test_factor_of_a_covariance(n: int) -> None:
    features = torch.randn(2, n, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root = factor(features)
    assert root.shape[1] == min(n if n > 1 else 0, 7)
    for layer in range(2):
        expected = np.cov(features[layer].numpy().T) if n > 1 else np.zeros((7, 7))
        np.testing.assert_allclose((root[layer].T @ root[layer]).numpy(), expected, atol=1e-12)


def test_statistics_stay_with_their_class() -> None:
    """After three tasks, each class has those of its own task's end, though the net and the memory went on."""
    engine, stream, slow = toy_engine("il2a()", taps=2, memory=40), toy_stream(), SlowStatistics()
    for task in range(3):
        feed(engine, stream, until=STEPS_PER_TASK * (task + 1))
        slow.end_task(engine)
        assert il2a(engine).old == list(slow.of)
    method = il2a(engine)
    for label, layers in slow.of.items():
        for layer, (mean, covariance) in enumerate(layers):
            root = method.factors[layer, label].double()
            np.testing.assert_allclose(method.means[layer, label].numpy(), mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose((root.T @ root).numpy(), covariance, rtol=1e-3, atol=1e-5)
            assert np.abs(covariance).max() > 1e-3


@pytest.mark.parametrize("resumed", [False, True])
def test_as_the_program_does_covariances_are_looked_up_by_place(resumed: bool) -> None:
    """After each task, the c-th class met takes the c-th covariance of a store with the newest task's first; means are its own."""
    (engine, plain), stream = (toy_engine(f"il2a(reference={on})", memory=40) for on in (True, False)), toy_stream()
    store: list[int] = []
    for task in range(3):
        for one in (engine, plain):
            feed(one, stream, until=STEPS_PER_TASK * (task + 1))
        if resumed:
            state, engine = engine.state_dict(), toy_engine("il2a(reference=True)", memory=40)
            engine.load_state_dict(state)
        method = il2a(engine)
        store = [*engine.progress.current, *store]
        classes = torch.tensor(method.old)
        w = engine.net.classifier.weight[0].detach()
        for row, c, taken_of in zip(method.semantic_logits(classes)[0], method.old, store, strict=True):
            root = method.factors[0, taken_of]
            bonus = 2.5 / 2 * (root @ (w - w[:, [c]])).square().sum(dim=0)
            torch.testing.assert_close(row, engine.net.classifier(method.means[:, [c]])[0, 0] + bonus)
        assert il2a(plain).covariance_of.tolist() == list(range(6))
        assert (store == method.old) == (task == 0)
        if task < 2:  # steps of the second task still have every class's own
            assert_same(engine.net.state_dict(), plain.net.state_dict(), "before the third task")


def test_a_class_that_comes_again_moves_to_the_front_of_the_programs_store() -> None:
    method = il2a(toy_engine("il2a(reference=True)"))
    for newest in ((3, 1), (0, 3), (5,)):
        method.put_first(newest)
        for label in newest:
            method.remember(label, torch.zeros(1, 12), torch.zeros(1, 0, 12))
    assert method.old == [3, 1, 0, 5]
    assert method.covariance_of[method.old].tolist() == [5, 0, 3, 1]


def test_a_class_without_images_in_memory_keeps_the_mean_it_had_in_training() -> None:
    engine, stream, rows = toy_engine("il2a()", taps=2, memory=0), toy_stream(), {}
    for _ in range(STEPS_PER_TASK):
        batch, out = next_batch(engine, stream)
        new = batch.rows("new")
        for i in range(new.start, new.stop):
            rows.setdefault(int(batch.labels[i]), []).append(out.features[:, i].detach())
        feed(engine, stream, until=engine.progress.step + 1)
    method = il2a(engine)
    assert set(method.old) == set(rows)
    for label, vectors in rows.items():
        torch.testing.assert_close(method.means[:, label], torch.stack(vectors).mean(dim=0), rtol=1e-4, atol=1e-6)
    assert not method.factors.any()
    feed(engine, stream, until=STEPS_PER_TASK + 1)
    learned = [int(label) for label in engine.progress.current]
    assert set(torch.nonzero(method.counts).flatten().tolist()) == set(learned), "the next task counts anew"


def test_a_single_image_has_no_covariance() -> None:
    engine = toy_engine("il2a()", memory=3)
    learn(engine, [0, 1, 1], 0)
    engine.end_task()
    roots = il2a(engine).factors[0]
    assert not roots[0].any()
    assert roots[1].any()


def test_images_kept_for_the_statistics_alone() -> None:
    """Without replay and memory, as in the paper: all images of the task give its Gaussians, and are then forgotten."""
    engine, stream = toy_engine("il2a(n_recall=0, n_statistics=50)", memory=0), toy_stream()
    feed(engine, stream, until=STEPS_PER_TASK - 1)
    piece = stream.batch(STEPS_PER_TASK - 1)
    engine.learn(StreamBatch(piece.x, piece.labels, task=piece.task))
    assert engine.memories.beyond_budget == 50
    assert len(engine.memories["il2a"]) == 18
    [layer] = features_of(engine.net, stream.data.train_x)
    engine.end_task()
    assert len(engine.memories["il2a"]) == 0
    for label in engine.progress.current:
        own = layer[stream.data.train_y == label]
        root = il2a(engine).factors[0, label].double()
        np.testing.assert_allclose(il2a(engine).means[0, label].numpy(), own.mean(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose((root.T @ root).numpy(), np.cov(own.T), rtol=1e-3, atol=1e-5)
    outcomes = feed(engine, stream)
    assert all(value.isfinite().all() for outcome in outcomes for value in outcome.table.values())


def with_gaussian(method: IL2A, scale: float) -> torch.Tensor:
    """Class 1 gets a mean and a covariance of its own in double precision; returns a factor of the covariance."""
    method.net.double()
    generator = torch.Generator().manual_seed(1)
    root = scale * torch.randn(1, 5, method.net.width, generator=generator, dtype=torch.float64)
    method.means, method.factors = method.means.double(), method.factors.double()
    method.remember(1, torch.randn(1, method.net.width, generator=generator, dtype=torch.float64), root)
    return root[0]


def test_without_covariance_it_is_the_head_on_the_mean() -> None:
    method = il2a(toy_engine("il2a()"))
    one = torch.tensor([1])
    with_gaussian(method, 0.0)
    plain = method.net.classifier(method.means[:, one])
    torch.testing.assert_close(method.semantic_logits(one), plain, rtol=0, atol=0)
    with_gaussian(method, 0.3)
    bonus = (method.semantic_logits(one) - plain)[0, 0]
    assert bonus[1] == 0
    assert bonus[[0, 2, 3, 4, 5]].min() > 0
    loss = [-torch.log_softmax(logits[0, 0] / 0.1, dim=0)[1] for logits in (plain, method.semantic_logits(one))]
    assert loss[1] > loss[0]


def test_at_temperature_1_it_bounds_the_expected_cross_entropy() -> None:
    method = il2a(toy_engine("il2a()"))
    root = with_gaussian(method, 0.8)
    noise = torch.randn(100_000, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z = method.means[:, 1:2] + 2.5**0.5 * noise @ root
    with torch.no_grad():
        sampled = -torch.log_softmax(method.net.classifier(z), dim=-1)[..., 1].mean()
        bound = -torch.log_softmax(method.semantic_logits(torch.tensor([1])), dim=-1)[0, 0, 1]
        plain = -torch.log_softmax(method.net.classifier(method.means[:, 1:2]), dim=-1)[0, 0, 1]
    assert plain < sampled < bound


def test_it_moves_the_head_alone() -> None:
    engine, stream = prepared("il2a()", taps=3)
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    engine.chain.losses(out, batch)["ce/semantic"].sum().backward()
    moved = {name for name, value in engine.net.named_parameters() if value.grad is not None and value.grad.any()}
    assert moved == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("expression", ["il2a()", "grace(il2a(), classes='seen')"])
def test_outputs_of_unmet_classes_are_left_alone(expression: str) -> None:
    engine, stream = prepared(expression, taps=2)
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    total(engine.chain.losses(out, batch)).backward()
    moved = engine.net.classifier.weight.grad.abs().sum(dim=(0, 1)) > 0
    assert moved.tolist() == batch.seen.tolist()
    assert not moved.all()


# Distillation, replay, cost.


def test_no_pull_right_after_the_teacher_was_made() -> None:
    engine, stream = toy_engine("il2a()", taps=2), toy_stream()
    feed(engine, stream, until=STEPS_PER_TASK)
    batch = before_mixing(engine, stream)
    engine.update.prepare(batch)
    engine.net.eval()
    row = engine.chain.losses(engine.net(batch.x), batch)["kd/features"]
    assert row.tolist() == [0.0, 0.0]
    row.sum().backward()
    assert all(value.grad is None or value.grad.isfinite().all() for value in engine.net.parameters())


def test_nothing_is_replayed_in_the_first_task() -> None:
    engine, stream = toy_engine("il2a(n_recall=4)"), toy_stream()
    for step in range(2 * STEPS_PER_TASK):
        blocks = before_mixing(engine, stream).blocks
        assert ("replay" in blocks) == (step >= STEPS_PER_TASK)
        assert "replay" not in blocks or blocks["replay"].images == 4
        feed(engine, stream, until=step + 1)


def test_cost_of_a_step() -> None:
    """The stream's images, the replayed and the mixed go forward and back; the teacher looks at all of them."""
    engine = toy_engine("il2a()", memory=200)
    for seed in range(10):
        first = learn(engine, [0, 1] * 5, 0, seed)
        assert 10 <= first.forward == first.backward <= 50
    for seed in range(3):
        later = learn(engine, [2, 3] * 5, 1, seed)
        assert later.forward == 2 * later.backward
        assert 74 < later.backward <= 114


def test_several_epochs(tmp_path: Path) -> None:
    """Later epochs mix and distil, store nothing, and can be resumed in."""
    stream = split(toy_data(), 0, tasks=3, batch=3, epochs=2)
    whole, first, second = (toy_engine("il2a()") for _ in range(3))
    outcomes = feed(whole, stream)
    assert whole.memories.replay.offered == 54
    feed(first, stream, until=22)
    assert not stream.batch(22).fresh
    checkpoint.save(tmp_path / "state", first.state_dict())
    second.load_state_dict(checkpoint.load(tmp_path / "state"))
    for outcome, expected in zip(feed(second, stream), outcomes[22:], strict=True):
        assert_same(outcome.table, expected.table, "a step after resuming")
    assert_same(second.state_dict(), whole.state_dict(), "the end after resuming")
    assert {"ce/semantic", "kd/features"} <= outcomes[-1].table.keys()


def test_defaults_are_the_programs() -> None:
    method = IL2A()
    assert (method.mix_times, method.concentration, method.temperature, method.spread) == (4, 20.0, 0.1, 2.5)
    assert (method.semantic_weight, method.kd_weight, method.n_prototypes, method.n_recall) == (10.0, 10.0, 64, 64)
    assert method.mixed_classes == 20, "as many as the largest task of the benchmarks has"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("temperature=0", "temperature must be above 0, not 0"),
        ("n_prototypes=0", "n_prototypes must be between 1 and 100000, not 0"),
        ("kd_weight=-1", "kd_weight must be at least 0, not -1"),
        ("mixed_classes=-1", "mixed_classes must be at least 0, not -1"),
    ],
)
def test_options_out_of_range_are_told(option: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"il2a: {sentence}"):
        parse_method(f"il2a({option})")
