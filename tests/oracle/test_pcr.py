"""PCR against loops that follow pcr.md, and the invariants that the specification lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from common import longer, noise
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Progress
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import seen_scores
from gracecl.errors import UserError
from gracecl.functional.losses import contrast, cross_entropy, proxy_contrast, unit
from gracecl.methods.pcr import PCR
from gracecl.nets.heads import CosineHead
from gracecl.nets.tapped import StackedLinear
from gracecl.testing import assert_same, feed, flatten, next_batch, toy_data, toy_engine

LAYERS, WIDTH, CLASSES, TEMPERATURE = 3, 5, 8, 0.09
LABELS = {
    "repeated classes": [3, 1, 3, 0, 3, 1, 6],
    "each class once": [3, 1, 0, 6],
    "one class": [4, 4, 4],
    "equal counts": [3, 1, 0, 3, 1, 0],
}


def case(labels: list[int]) -> tuple[Tensor, CosineHead, Tensor]:
    """Features, proxies and labels of a step."""
    head = CosineHead(StackedLinear(LAYERS, WIDTH, CLASSES).double(), 1 / TEMPERATURE, 1e-6)
    with torch.no_grad():
        head.weight.copy_(noise(LAYERS, WIDTH, CLASSES, seed=1))
    return noise(LAYERS, len(labels), WIDTH).requires_grad_(), head, torch.tensor(labels)


def loop(features: list[list[float]], proxies: list[list[float]], labels: list[int]) -> float:
    """Section 3.3-3.4: mean_i [ -s_{i,l_i} + log Σ_c n_c exp(s_ic) ] over classes with n_c > 0, s = cos / τ, norms + 1e-6."""

    def cosine(a: list[float], b: list[float]) -> float:
        norms = [math.sqrt(sum(v * v for v in vector)) + 1e-6 for vector in (a, b)]
        return sum(x * y for x, y in zip(a, b, strict=True)) / (norms[0] * norms[1])

    terms = []
    for row, label in zip(features, labels, strict=True):
        s = {c: cosine(row, proxies[c]) / TEMPERATURE for c in set(labels)}
        terms.append(-s[label] + math.log(sum(labels.count(c) * math.exp(s[c]) for c in s)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("name", LABELS)
def test_closed_form_is_the_loop(name: str) -> None:
    features, head, y = case(LABELS[name])
    expected = [loop(features[i].tolist(), head.weight[i].T.tolist(), LABELS[name]) for i in range(LAYERS)]
    assert proxy_contrast(head(features), y).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", LABELS)
def test_closed_form_is_pairwise_contrast_with_proxies(name: str) -> None:
    """Anchors are the images, the others the proxies of all their classes with repeats, the own pair kept: value and gradients."""
    features, head, y = case(LABELS[name])
    closed = proxy_contrast(head(features), y)
    proxies = unit(head.weight, 1e-6, dim=1).transpose(1, 2)[:, y]
    pairwise = contrast(unit(features, 1e-6), y, proxies, y, TEMPERATURE)
    torch.testing.assert_close(closed, pairwise, rtol=1e-6, atol=1e-9)
    for one, two in zip(
        torch.autograd.grad(closed.sum(), (features, head.weight)),
        torch.autograd.grad(pairwise.sum(), (features, head.weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


def test_equal_counts_give_cross_entropy_over_present_classes_and_a_constant() -> None:
    features, head, y = case(LABELS["equal counts"])
    present = torch.zeros(CLASSES, dtype=torch.bool)
    present[y] = True
    expected = cross_entropy(head(features), y, present) + math.log(2)
    torch.testing.assert_close(proxy_contrast(head(features), y), expected, rtol=1e-9, atol=0)


def test_proxies_of_absent_classes_do_not_move_and_others_turn_only() -> None:
    features, head, y = case(LABELS["repeated classes"])
    proxy_contrast(head(features), y).sum().backward()
    absent = [c for c in range(CLASSES) if c not in LABELS["repeated classes"]]
    assert (head.weight.grad[:, :, absent] == 0).all()
    assert (head.weight.grad[:, :, [0, 1, 3, 6]] != 0).any(dim=1).all()
    along = (head.weight.grad * head.weight).sum(dim=1) / head.weight.norm(dim=1)
    assert along.abs().max() < 1e-5  # not exactly 0: norms are not quite norms


def test_a_single_class_gives_log_of_its_count_and_no_gradient() -> None:
    features, head, y = case(LABELS["one class"])
    value = proxy_contrast(head(features), y)
    assert value.tolist() == pytest.approx([math.log(3)] * LAYERS, rel=1e-12)
    value.sum().backward()
    assert features.grad.abs().max() < 1e-12
    assert head.weight.grad.abs().max() < 1e-12


def test_lengths_do_not_matter_and_doubling_adds_log_two() -> None:
    features, head, y = case(LABELS["repeated classes"])
    once = proxy_contrast(head(features), y)
    torch.testing.assert_close(proxy_contrast(head(1e3 * features), y), once, rtol=1e-5, atol=0)
    gradient = torch.autograd.grad(once.sum(), head.weight)[0]
    twice = proxy_contrast(head(features.repeat(1, 2, 1)), y.repeat(2))
    torch.testing.assert_close(twice, once + math.log(2), rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.autograd.grad(twice.sum(), head.weight)[0], gradient, rtol=1e-9, atol=1e-12)


def test_gradient_at_the_similarities() -> None:
    """dL/ds_ic = (n_c exp(s_ic) / Z_i - 1[l_i = c]) / N; each row sums to 0."""
    labels = LABELS["repeated classes"]
    similarity = noise(LAYERS, len(labels), CLASSES, seed=4).requires_grad_()
    proxy_contrast(similarity, torch.tensor(labels)).sum().backward()
    for layer in range(LAYERS):
        for i, label in enumerate(labels):
            weights = [labels.count(c) * math.exp(similarity[layer, i, c].item()) for c in range(CLASSES)]
            expected = [(w / sum(weights) - (c == label)) / len(labels) for c, w in enumerate(weights)]
            assert similarity.grad[layer, i].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert similarity.grad.sum(dim=-1).abs().max() < 1e-15


# Steps.


def run(method: str, until: int = 9) -> Engine:
    engine = toy_engine(method, memory=100, optimizer="sgd(lr=0.1)")
    feed(engine, longer(), until=until)
    return engine


def test_a_step_is_two_views_of_memory_and_of_the_stream() -> None:
    """Section 3.1-3.3: raw and augmented, memory and stream in separate forwards; 2 (10 + 64) = 148 images, section 10."""
    engine = run("pcr()")
    batch, out = next_batch(engine, longer())
    assert list(batch.blocks) == ["replay", "new"]
    piece = longer().batch(9)
    new = batch.blocks["new"]
    raw = engine.net.inputs.normalise(piece.x)
    assert torch.equal(batch.x[new.view(0)], raw)
    assert not torch.equal(batch.x[new.view(1)], raw)
    assert np.array_equal(batch.labels[new.rows], np.tile(piece.labels, 2))
    features = torch.cat([engine.net(batch.x[batch.rows(block)]).features for block in batch.blocks], dim=1)
    torch.testing.assert_close(out.features, features)
    expected = loop(features[0].double().tolist(), engine.net.classifier.weight[0].double().T.tolist(), batch.labels.tolist())
    assert engine.chain.losses(out, batch)["ce/proxy"].item() == pytest.approx(expected, rel=1e-4)
    [outcome] = feed(engine, longer(), until=10)
    assert (outcome.images, outcome.forward, outcome.backward) == (148, 148, 148)
    assert batch.plan.forwards == [["replay"], ["new"]]
    assert next_batch(run("pcr(joint_forward=True)"), longer())[0].plan.forwards is None


def test_with_an_empty_memory_nothing_moves() -> None:
    engine = toy_engine("pcr()", optimizer="sgd(lr=0.1)")
    before = {part: dict(flatten(engine.state_dict()[part])) for part in ("net", "optimizer")}
    assert feed(engine, longer(), until=1) == [None]
    for part, state in before.items():
        assert_same(dict(flatten(engine.state_dict()[part])), state, part)
    assert len(engine.memories.replay) == 10


def test_without_replay_the_stream_s_views_are_trained_on() -> None:
    engine = run("pcr(n_recall=0)")
    [outcome] = feed(engine, longer(), until=10)
    assert outcome.images == 20


def test_iterations_draw_anew_and_store_once() -> None:
    engine = run("pcr(mem_iters=2, n_recall=20)")
    [outcome] = feed(engine, longer(), until=10)
    assert outcome.forward == 2 * 2 * (10 + 20)
    assert engine.memories.replay.offered == 100


# Inference.


def test_predictions_are_the_nearest_proxy_among_seen_classes() -> None:
    engine = run("pcr()")
    progress: Progress = engine.progress
    seen = list(progress.seen)
    unseen = [c for c in range(6) if c not in seen]
    assert unseen
    net = engine.ready_to_predict()

    def predicted() -> list[int]:
        [(_, out)] = net.sweep(toy_data().test_x)
        scores, columns = seen_scores(engine.chain, out, progress, engine.chain.rule)
        return columns[scores.argmax(dim=1)].tolist()

    [(_, out)] = net.sweep(toy_data().test_x)
    proxies = F.normalize(net.classifier.weight[0].T[seen], dim=-1)
    by_cosine = (F.normalize(out.features[0], dim=-1) @ proxies.T).argmax(dim=1)
    alive = (out.features[0].norm(dim=-1) > 0).tolist()
    before = predicted()
    assert [p for p, on in zip(before, alive, strict=True) if on] == [
        seen[i] for i, on in zip(by_cosine.tolist(), alive, strict=True) if on
    ]
    with torch.no_grad():
        net.classifier.weight[:, :, unseen] *= 1000
        net.classifier.weight[:, :, unseen] += 5
    assert predicted() == before
    assert set(before) <= set(seen)


def test_nearest_mean_is_an_option() -> None:
    engine = run("pcr(inference='ncm')")
    assert engine.chain.rule == "ncm_last"
    [(_, out)] = engine.ready_to_predict().sweep(toy_data().test_x)
    assert set(engine.chain.rules(out)) == {"linear", "ncm"}


@pytest.mark.parametrize("bad", [{"mem_iters": 0}, {"temperature": 0.0}])
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        PCR(**bad)
