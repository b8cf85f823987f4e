"""SCR against loops that follow scr.md, and the invariants that the specification lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from common import longer, noise, run
from torch import Tensor
from torch.nn import functional as F

from gracecl import rng
from gracecl.core import Batch, Block, Planning, Progress, Taps
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate, seen_scores
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods import scr
from gracecl.methods.scr import SCR
from gracecl.nets.tapped import TappedNet
from gracecl.testing import assert_same, feed, flatten, next_batch, toy_data, toy_engine

LAYERS, WIDTH = 3, 6
PLAIN = "mlp(width=12, depth=4)"


def batch_of(labels: list[int]) -> Batch:
    """Both views of images with these labels."""
    n = len(labels)
    blocks = {"raw": Block(0, n, 1, n, (0,)), "augmented": Block(n, n, 1, n, ())}
    return Batch(torch.zeros(2 * n), np.tile(labels, 2), np.arange(2 * n), blocks, Progress(), 9, seed=0)


def value(features: Tensor, labels: list[int], temperature: float = 0.1) -> Tensor:
    method = SCR(temperature=temperature, projector="none")
    return method.losses(Taps(features, features, torch.nn.Identity()), batch_of(labels))["ce/contrast"]


def loop(vectors: list[list[float]], labels: list[int], tau: float) -> float:
    """Section 3.4: mean_i [ -(1/|P(i)|) Σ_{p in P(i)} ( z_i·z_p/τ - log Σ_{a in A(i)} exp(z_i·z_a/τ) ) ], A(i) all but i."""
    z = [[v / math.sqrt(sum(w * w for w in row)) for v in row] for row in vectors]
    labels = labels * 2
    rows, terms = range(len(z)), []
    for i in rows:
        s = {a: sum(x * y for x, y in zip(z[i], z[a], strict=True)) / tau for a in rows if a != i}
        denominator = math.log(sum(math.exp(v) for v in s.values()))
        positives = [p for p in s if labels[p] == labels[i]]
        terms.append(-sum(s[p] - denominator for p in positives) / len(positives))
    return sum(terms) / len(terms)


LABELS = [2, 0, 0, 5, 2, 0]


@pytest.mark.parametrize("labels", [LABELS, [4], [4, 4, 4], [0, 1, 2, 3]], ids=["mixed", "one image", "one class", "distinct"])
@pytest.mark.parametrize("tau", [0.07, 0.1, 0.175])
def test_contrast_is_the_double_loop(labels: list[int], tau: float) -> None:
    features = noise(LAYERS, 2 * len(labels), WIDTH).requires_grad_()
    got = value(features, labels, tau)
    assert got.tolist() == pytest.approx([loop(layer, labels, tau) for layer in features.tolist()], rel=1e-9, abs=1e-12)
    got.sum().backward()
    assert torch.isfinite(features.grad).all()


def test_one_image_has_nothing_to_learn() -> None:
    assert value(noise(LAYERS, 2, WIDTH), [4]).tolist() == [0] * LAYERS


def test_order_and_rotation_do_not_matter() -> None:
    features = noise(LAYERS, 12, WIDTH)
    once = value(features, LABELS)
    order = [3, 5, 0, 1, 4, 2]
    shuffled = features[:, order + [6 + i for i in order]]
    torch.testing.assert_close(value(shuffled, [LABELS[i] for i in order]), once, rtol=1e-9, atol=0)
    rotation = torch.linalg.qr(noise(WIDTH, WIDTH, seed=3)).Q
    torch.testing.assert_close(value(features @ rotation, LABELS), once, rtol=1e-9, atol=0)


def test_distinct_labels_give_the_loss_of_simclr() -> None:
    """NT-Xent: cross-entropy of each view's similarities to all others, the other view being right."""
    n, tau = 5, 0.1
    features = noise(LAYERS, 2 * n, WIDTH)
    expected = []
    for layer in features:
        similarity = F.normalize(layer, dim=-1) @ F.normalize(layer, dim=-1).T / tau
        similarity.fill_diagonal_(-torch.inf)
        expected.append(F.cross_entropy(similarity, torch.arange(2 * n).roll(n)).item())
    assert value(features, list(range(n)), tau).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("per_class", [1, 3])
def test_perfect_clusters_give_the_analytic_value(per_class: int) -> None:
    """log(m - 1 + (2N - m) exp(-1/τ)), m items of each class over both views."""
    labels = [c for c in range(4) for _ in range(per_class)]
    n, m, tau = len(labels), 2 * per_class, 0.5
    features = F.one_hot(torch.tensor(labels * 2), WIDTH).double().expand(LAYERS, -1, -1)
    expected = math.log(m - 1 + (2 * n - m) * math.exp(-1 / tau))
    assert value(features, labels, tau).tolist() == pytest.approx([expected] * LAYERS, rel=1e-9)


# Steps.


def test_a_step_is_raw_and_augmented_in_a_forward_each() -> None:
    """Section 3.2-3.3: the same images, first as they are; 2 (10 + 64) = 148 forward and backward, section 10."""
    engine = run("scr()")
    batch, out = next_batch(engine, longer())
    raw, augmented = batch.blocks["raw"], batch.blocks["augmented"]
    piece = longer().batch(9)
    assert np.array_equal(batch.sources[raw.rows], batch.sources[augmented.rows])
    assert torch.equal(batch.x[raw.rows][:10], engine.net.inputs.normalise(piece.x))
    assert not torch.equal(batch.x[augmented.rows], batch.x[raw.rows])
    halves = torch.cat([engine.net(batch.x[block.rows]).features for block in (raw, augmented)], dim=1)
    torch.testing.assert_close(out.features, halves)
    [outcome] = feed(engine, longer(), until=10)
    assert (outcome.images, outcome.forward, outcome.backward) == (148, 148, 148)
    assert batch.plan.forwards == [["raw"], ["augmented"]]
    assert next_batch(run("scr(joint_forward=True)"), longer())[0].plan.forwards is None


def test_memory_and_draws_are_those_of_experience_replay() -> None:
    one, two = run("scr()"), run("er()")
    assert torch.equal(one.memories.replay.images, two.memories.replay.images)
    mine, theirs = (next_batch(engine, longer())[0] for engine in (one, two))
    assert np.array_equal(mine.sources[mine.rows("raw")], theirs.sources)


@pytest.mark.parametrize("projector", ["mlp", "linear", "none"])
def test_projector(projector: str) -> None:
    """g = Linear(D, D), ReLU, Linear(D, 128), one for each layer; the linear one alone; or nothing."""
    engine = toy_engine(f"scr(projector='{projector}')", taps=4)
    features = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    got = engine.method.projected(Taps(features, features, engine.net.projector))
    for layer in range(4):
        expected = features[layer]
        if projector == "mlp":
            hidden = engine.net.extras["projector_hidden"]
            expected = torch.relu(expected @ hidden.weight[layer] + hidden.bias[layer])
        if projector != "none":
            expected = expected @ engine.net.projector.weight[layer] + engine.net.projector.bias[layer]
        torch.testing.assert_close(got[layer], expected)
    assert got.shape[-1] == (12 if projector == "none" else 128)


def test_with_an_empty_memory_nothing_moves() -> None:
    engine = toy_engine("scr()")
    before = {part: dict(flatten(engine.state_dict()[part])) for part in ("net", "optimizer")}
    assert feed(engine, longer(), until=1) == [None]
    for part, state in before.items():
        assert_same(dict(flatten(engine.state_dict()[part])), state, part)
    assert len(engine.memories.replay) == 10


def test_no_gradient_reaches_the_heads() -> None:
    engine = run("scr()")
    start = toy_engine("scr()")
    for name, parameter in engine.net.classifier.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, start.net.classifier.get_parameter(name))
    assert engine.net.projector.weight.grad.any()
    assert engine.method.hidden.weight.grad.any()


def test_trained_heads_move_nothing_but_themselves() -> None:
    plain, headed = run("scr()"), run("scr(train_head=True)")
    for name, parameter in plain.net.named_parameters():
        same = torch.equal(parameter, headed.net.get_parameter(name))
        assert same != name.startswith("classifier."), name
    batch, out = next_batch(headed, longer())
    table = headed.chain.losses(out, batch)
    terms = -F.log_softmax(out.logits[0], dim=-1)[torch.arange(len(batch)), batch.y]
    torch.testing.assert_close(table["ce/head"][0], terms.mean())
    reached = torch.autograd.grad(table["ce/head"].sum(), list(headed.net.parameters()), allow_unused=True)
    moved = {name for (name, _), gradient in zip(headed.net.named_parameters(), reached, strict=True) if gradient is not None}
    assert moved == {"classifier.weight", "classifier.bias"}


def test_iterations_draw_anew_and_store_once() -> None:
    engine = run("scr(mem_iters=2, n_recall=20)")
    [outcome] = feed(engine, longer(), until=10)
    assert outcome.forward == 2 * 2 * (10 + 20)
    assert engine.memories.replay.offered == 100


# The review.


def test_review_is_a_pass_over_memory_in_whole_batches() -> None:
    engine = run("scr(review=True, n_recall=30)", until=8)
    plans = list(engine.chain.closing(engine.progress, engine.memories, Planning(rng.generator("review"))))
    assert [len(plan["review"]) for plan in plans] == [30, 30]
    for plan in plans:
        assert list(plan.blocks) == ["review", "review_augmented"]
        assert np.array_equal(plan["review"].slots, plan["review_augmented"].slots)
        assert all(len(rows.stream) == 0 for rows in plan.blocks.values())
    slots = np.concatenate([plan["review"].slots for plan in plans])
    assert len(set(slots)) == 60
    assert not np.array_equal(np.sort(slots), slots)
    for without in (SCR(), SCR(review=True, n_recall=0)):
        assert list(without.closing(engine.progress, engine.memories, Planning(rng.generator("review")))) == []
    assert (SCR(review=True).traits.boundaries, SCR().traits.boundaries) == ("used", "unused")


def reviewed(monkeypatch: pytest.MonkeyPatch, scale: float, review: bool) -> TappedNet:
    monkeypatch.setattr(scr, "REVIEW_SCALE", scale)
    engine = toy_engine(f"scr(review={review}, n_recall=30)", memory=60, optimizer="sgd(lr=0.1)", net=PLAIN)
    feed(engine, longer(), until=8)
    engine.end_task()
    return engine.net


def test_review_with_gradients_of_nothing_is_no_review(monkeypatch: pytest.MonkeyPatch) -> None:
    without = dict(flatten(reviewed(monkeypatch, 0.1, review=False).state_dict()))
    assert_same(dict(flatten(reviewed(monkeypatch, 0.0, review=True).state_dict())), without, "review at scale 0")
    moved = reviewed(monkeypatch, 0.1, review=True).state_dict()
    assert not torch.equal(moved["backbone.hidden.0.weight"], without["/backbone.hidden.0.weight"])


def test_a_review_step_is_a_tenth_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one batch of review: weights move by lr · 0.1 · the gradient of the contrast on that batch."""
    engine = toy_engine("scr(review=True, n_recall=60)", memory=60, optimizer="sgd(lr=0.1)", net=PLAIN)
    feed(engine, longer(), until=8)
    before = {name: value.detach().clone() for name, value in engine.net.named_parameters()}
    seen: list[Batch] = []
    losses = engine.method.losses

    def spy(out: Taps, batch: Batch) -> dict[str, Tensor]:
        seen.append(batch)
        return losses(out, batch)

    monkeypatch.setattr(engine.method, "losses", spy)
    engine.end_task()
    [batch] = seen
    assert len(batch) == 120
    start = toy_engine("scr(review=True, n_recall=60)", memory=60, net=PLAIN)
    start.net.load_state_dict(before, strict=False)
    start.chain.losses(start.net(batch.x), batch)["ce/contrast"].sum().backward()
    for name, parameter in engine.net.named_parameters():
        gradient = start.net.get_parameter(name).grad
        expected = before[name] if gradient is None else before[name] - 0.1 * 0.1 * gradient
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


def test_predictions_after_a_review_are_not_those_before() -> None:
    """What was made for predictions is made anew, although no step of the stream came between."""
    engine = run("scr(review=True, n_recall=30)", until=8)
    engine.ready_to_predict()
    means = engine.method.means
    engine.end_task()
    engine.ready_to_predict()
    assert not torch.equal(engine.method.means, means)


# Inference.


def predictions(engine: Engine) -> list[int]:
    [(_, out)] = engine.ready_to_predict().sweep(toy_data().test_x)
    scores, columns = seen_scores(engine.chain, out, engine.progress, engine.chain.rule)
    return columns[scores.argmax(dim=1)].tolist()


def test_nearest_mean_is_the_loop() -> None:
    """Section 4: mu_c = normalise(mean of normalise(f)) over buffer images, argmin of the distance over seen classes."""
    engine = run("scr()", until=20)
    net, memory = engine.ready_to_predict(), engine.memories.replay
    [(_, held)] = net.sweep(memory.images[: len(memory)])
    [(_, out)] = net.sweep(toy_data().test_x)
    seen = engine.progress.seen
    means = []
    for label in seen:
        mean = F.normalize(held.features[0, memory.labels[: len(memory)] == label], dim=-1).mean(dim=0)
        means.append(F.normalize(mean, dim=0))
    expected = [seen[int(torch.stack([(F.normalize(f, dim=0) - mu).norm() for mu in means]).argmin())] for f in out.features[0]]
    assert predictions(engine) == expected


def test_the_projector_has_no_part_in_predictions() -> None:
    engine = run("scr()")
    before = predictions(engine)
    with torch.no_grad():
        for part in (engine.net.projector, engine.method.hidden):
            part.weight.mul_(-3).add_(1)
    engine.invalidate_predictions()
    assert predictions(engine) == before


def scores_of(method: SCR, net: TappedNet, memories: Memories, seen: tuple[int, ...]) -> Tensor:
    method.before_eval(net, memories, Progress(seen=seen))
    [(_, out)] = net.sweep(toy_data().test_x)
    return method.rules(out)["ncm"][0]


def test_copies_in_memory_change_nothing_and_a_single_image_is_its_own_mean() -> None:
    engine, data = run("scr()"), toy_data()
    method, net, seen = engine.method, engine.net, (0, 1, 2)

    def memory_of(rows: list[int]) -> Memories:
        memories = Memories(len(rows), Images((1, 8, 8)))
        memories.replay.add(rng.generator("fill"), data.train_x[rows], data.train_y[rows])
        return memories

    rows = [0, 1, 2, 9, 10, 18]  # three images of class 0, two of class 1, one of class 2
    once = scores_of(method, net, memory_of(rows), seen)
    twice = scores_of(method, net, memory_of(rows * 2), seen)
    torch.testing.assert_close(once, twice)
    [(_, single)] = net.sweep(data.train_x[18:19])
    torch.testing.assert_close(method.means[0, 2], F.normalize(single.features[0, 0], dim=0))


def test_longer_features_change_nothing() -> None:
    engine = run("scr()")
    engine.ready_to_predict()
    [(_, out)] = engine.net.sweep(toy_data().test_x)
    scaled = Taps(7 * out.features, out.logits, engine.net.projector)
    torch.testing.assert_close(engine.chain.rules(scaled)["ncm"], engine.chain.rules(out)["ncm"])


def without_class(method: str) -> tuple[Engine, int]:
    """After the end of a task, a class of it loses its images in memory."""
    engine = run(method, until=12, memory=40)
    engine.end_task()
    lost = engine.progress.seen[0]
    kept = next(c for c in engine.progress.seen if c != lost)
    memory = engine.memories.replay
    slots = memory.slots_of(lost)
    assert len(slots)
    donor = memory[memory.slots_of(kept)[:1].repeat(len(slots))]
    memory.put(slots, donor, np.arange(len(slots)), np.full(len(slots), kept), 0, {})
    assert memory.count(label=lost) == 0
    return engine, lost


def test_a_class_without_images_is_not_predicted() -> None:
    engine, lost = without_class("scr()")
    assert lost not in predictions(engine)
    [(_, out)] = engine.net.sweep(toy_data().test_x)
    assert (engine.chain.rules(out)["ncm"][..., lost] == -torch.inf).all()


def test_a_class_without_images_may_keep_its_last_mean_or_get_a_direction() -> None:
    engine, lost = without_class("scr(without_images='last_mean')")
    last = engine.method.last_means[:, lost].clone()
    engine.ready_to_predict()
    assert torch.equal(engine.method.means[:, lost], last)
    other = engine.progress.seen[-1]
    assert engine.method.predictable[lost]
    assert not torch.equal(engine.method.means[:, other], torch.zeros_like(last))
    [(_, out)] = engine.net.sweep(toy_data().test_x)
    assert engine.chain.rules(out)["ncm"][..., lost].isfinite().all()
    engine, lost = without_class("scr(without_images='random')")
    engine.ready_to_predict()
    assert engine.method.predictable.all()
    assert not torch.equal(engine.method.means[:, lost], last)


def test_without_any_memory_scores_are_finite_and_predictions_among_the_classes_met() -> None:
    engine = run("scr()", memory=0)
    assert set(predictions(engine)) <= set(engine.progress.seen)
    [(_, out)] = engine.net.sweep(toy_data().test_x)
    assert engine.chain.rules(out)["ncm"].isfinite().all()


def test_heads_are_judged_only_where_they_are_trained() -> None:
    data = toy_data()
    tasks = np.zeros(len(data.test_y), np.int64)
    rules = evaluate(run("scr()"), data.test_x, data.test_y, tasks).accuracy
    assert set(rules) == {"ncm_last", "ncm_mean"}
    engine = run("scr(train_head=True, inference='linear')")
    assert engine.chain.rule in evaluate(engine, data.test_x, data.test_y, tasks).accuracy
    with pytest.raises(UserError, match="train_head=True"):
        SCR(inference="linear")


@pytest.mark.parametrize("bad", [{"mem_iters": 0}, {"temperature": -1.0}])
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        SCR(**bad)


# Under GRACE.


def test_grace_weighs_the_contrast_of_each_layer() -> None:
    """α is on both rows; entropies are those of the heads."""
    engine = toy_engine("grace(scr(train_head=True))", memory=60, taps=4)
    feed(engine, longer(), until=14)
    assert engine.progress.task == 1
    batch, out = next_batch(engine, longer())
    inner, table = engine.method.inner.chain.losses(out, batch), engine.chain.losses(out, batch)
    alpha = table["log/alpha"]
    assert (alpha != 1).any()
    for row in ("ce/contrast", "ce/head"):
        torch.testing.assert_close(table[row], alpha * inner[row])
