"""DVC against slow loops: its three terms, the gradient norm that it scores by, the selection; through the engine's own hooks."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Planning, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.methods.dvc import head_gradients
from gracecl.registry.spec import parse_method
from gracecl.streams import Stream
from gracecl.testing import METHOD_LAWS, feed, next_batch, prepared, toy_engine, toy_stream

PLAIN_NET = "mlp(width=12, depth=4)"
SMALL = "dvc(n_recall=4, n_candidates=9{})"


def slow_q(engine: Engine, layer: int, first: Tensor, second: Tensor, seen: list[int]) -> Tensor:
    """Q of one image: 2C inputs, of which those of classes met count, in the order of the stream."""
    classes = engine.net.classes
    inputs = torch.zeros(2 * classes)
    for place, label in enumerate(seen):
        inputs[place], inputs[classes + place] = first[label], second[label]
    hidden, joint = engine.net.extras["dvc_hidden"], engine.net.extras["dvc_joint"]
    outputs = torch.relu(inputs @ hidden.weight[layer] + hidden.bias[layer, 0]) @ joint.weight[layer] + joint.bias[layer, 0]
    return outputs[: len(seen)].softmax(dim=0)


def slow_terms(engine: Engine, layer: int, z: Tensor, zt: Tensor, y: Tensor, seen: list[int]) -> dict[str, Tensor]:
    """The loss of one layer, image by image, with the weights 1 and 4."""
    n = len(y)
    p = [one[seen].softmax(dim=0) for one in z]
    pt = [one[seen].softmax(dim=0) for one in zt]
    q = [slow_q(engine, layer, a, b, seen) for a, b in zip(z, zt, strict=True)]
    ce = sum(F.cross_entropy(views[i], y[i]) for views in (z, zt) for i in range(n)) / (2 * n)
    spread = sum(-(mean * mean.log()).sum() for mean in (sum(p) / n, sum(pt) / n, sum(q) / n)) / 3
    apart = [abs(q[i][k] - views[i][k]) for views in (p, pt) for i in range(n) for k in range(len(seen))]
    return {"ce": ce, "mi": -spread, "dl": 4 * sum(apart) / (2 * n * engine.net.classes)}


@pytest.mark.parametrize("taps", [1, 3])
def test_losses(taps: int) -> None:
    """Of new and of replayed images, two views each; the classes met are four of six, out of order."""
    engine, stream = prepared("dvc(n_recall=5)", taps=taps)
    batch, out = next_batch(engine, stream)
    seen = list(batch.progress.seen)
    assert len(seen) == 4
    table = engine.chain.losses(out, batch)
    assert set(table) == {f"{role}/{block}" for role in ("ce", "mi", "dl") for block in ("new", "replay")}
    for block, images in (("new", 3), ("replay", 5)):
        first, second = (batch.blocks[block].view(number) for number in (0, 1))
        assert torch.equal(batch.y[first], batch.y[second])
        assert first.stop - first.start == images
        for layer in range(taps):
            expected = slow_terms(engine, layer, out.logits[layer, first], out.logits[layer, second], batch.y[first], seen)
            for role, value in expected.items():
                torch.testing.assert_close(table[f"{role}/{block}"][layer], value, rtol=1e-4, atol=1e-6)


def test_weights_of_the_terms() -> None:
    one, two = (prepared(f"dvc(mi_weight={mi}, dl_weight={dl})") for mi, dl in ((1.0, 4.0), (0.5, 1.0)))
    two[0].net.load_state_dict(one[0].net.state_dict())
    batch, out = next_batch(*one)
    first, second = (engine.chain.losses(out, batch) for engine, _ in (one, two))
    for row, factor in (("ce", 1), ("mi", 0.5), ("dl", 0.25)):
        torch.testing.assert_close(second[f"{row}/new"], factor * first[f"{row}/new"])


def test_extremes_of_the_terms() -> None:
    """Outputs that agree and are spread evenly over K classes: distance 0 and -log K; one class for all images: entropy 0."""
    engine, _ = prepared("dvc(dl_weight=1.0)")
    seen, y = torch.tensor([4, 1, 3]), torch.tensor([4, 1, 3])
    joint = engine.net.extras["dvc_joint"]
    with torch.no_grad():
        joint.weight.zero_()
        joint.bias.zero_()
    terms = engine.method.terms(torch.zeros(1, 6, 6), y, seen)
    torch.testing.assert_close(terms["mi"], torch.tensor([-math.log(3)]))
    torch.testing.assert_close(terms["dl"], torch.zeros(1))
    sure = 50 * F.one_hot(torch.tensor([4] * 6), 6).float()[None]
    terms = engine.method.terms(sure, y, seen)
    torch.testing.assert_close(terms["mi"], torch.tensor([-math.log(3) / 3]))  # of the joint output alone
    torch.testing.assert_close(terms["dl"], torch.tensor([(2 / 3 + 1 / 3 + 1 / 3) / 6]))


def test_views_are_raw_and_augmented_in_a_forward_for_each_block() -> None:
    engine, stream = prepared("dvc(n_recall=4)")
    batch, out = next_batch(engine, stream)
    raw, augmented = (batch.x[batch.blocks["new"].view(number)] for number in (0, 1))
    assert torch.equal(raw, engine.net.inputs.normalise(stream.batch(9).x))
    assert not torch.equal(raw, augmented)
    blocks = [engine.net(batch.x[batch.rows(block)]).logits for block in ("new", "replay")]
    torch.testing.assert_close(out.logits, torch.cat(blocks, dim=1))


# Rows.


@pytest.mark.parametrize("taps", [1, 3])
def test_the_score_is_the_norm_of_the_head_s_gradient(taps: int) -> None:
    """By autograd, image by image: the L1 norm of the gradient of the weights, without the bias's."""
    engine, _ = prepared("dvc()", taps=taps)
    memory = engine.memories.replay
    [(_, out)] = engine.net.sweep(memory.images[: len(memory)])
    y = torch.from_numpy(memory.labels[: len(memory)])
    expected = []
    for i in range(len(y)):
        logits = engine.net.classifier(out.features[:, i : i + 1])
        loss = sum(F.cross_entropy(layer, y[i : i + 1]) for layer in logits)
        [gradient] = torch.autograd.grad(loss, [engine.net.classifier.weight])
        expected.append(gradient.abs().sum())
    torch.testing.assert_close(head_gradients(out, y), torch.stack(expected), rtol=1e-4, atol=1e-5)


def incoming(engine: Engine, stream: Stream) -> StreamBatch:
    return engine.meet(stream.batch(engine.progress.step))


def slow_scores(engine: Engine, views: Tensor, new: StreamBatch, slots: np.ndarray, rate: float) -> Tensor:
    """Copy the net, take a step on the whole loss of the new images, compare the gradients' norms."""
    scout = copy.deepcopy(engine)
    scout.net.zero_grad(set_to_none=True)
    logits, y = scout.net(views).logits, torch.from_numpy(new.labels)
    for layer in range(len(logits)):
        parts = slow_terms(scout, layer, *logits[layer].split(len(y)), y, list(new.progress.seen))
        sum(parts.values()).backward(retain_graph=True)
    then = copy.deepcopy(engine.net)
    with torch.no_grad():
        for mine, other in zip(then.parameters(), scout.net.parameters(), strict=True):
            if other.grad is not None:
                mine -= rate * other.grad
    memory = engine.memories.replay
    candidates, labels = engine.net.inputs.normalise(memory[slots]), memory.labels[slots]
    norms = []
    for net in (copy.deepcopy(engine.net), then):
        out = net.train()(candidates)
        error = out.logits.softmax(dim=-1)
        error[:, np.arange(len(slots)), labels] -= 1
        norms.append((error.abs().sum(dim=-1) * out.features.abs().sum(dim=-1)).sum(dim=0).detach())
    return norms[1] - norms[0]


@pytest.mark.parametrize("taps", [1, 3])
def test_scores(taps: int) -> None:
    engine, stream = prepared(SMALL.format(", virtual_lr=0.3"), taps=taps)
    batch, _ = next_batch(engine, stream)
    views = batch.x[batch.rows("new")]
    new, slots = incoming(engine, stream), np.array([7, 2, 11, 0, 5, 9])
    expected = slow_scores(engine, views, new, slots, 0.3)
    assert expected.abs().max() > 1e-3
    planning = Planning(engine.rng("plan"), preview=lambda _: views)
    found = engine.method.interference(new, engine.memories, planning, slots)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


def test_the_largest_scores_under_the_step_s_own_views_and_rate_are_replayed() -> None:
    engine, stream = prepared(SMALL.format(""), optimizer="sgd(lr=0.2)")
    batch, _ = next_batch(engine, stream)
    new = incoming(engine, stream)
    candidates = engine.memories.replay.draw(9, engine.rng("plan"))
    scores = slow_scores(engine, batch.x[batch.rows("new")], new, candidates, 0.2)
    best = candidates[scores.topk(4).indices.numpy()]
    assert set(engine.plan(new)["replay"].slots) == set(best)


def test_no_step_no_interference() -> None:
    engine, stream = prepared(SMALL.format(", virtual_lr=0"))
    scores = engine.method.interference(incoming(engine, stream), engine.memories, Planning(engine.rng("plan")), np.arange(9))
    assert torch.equal(scores, torch.zeros(9))


def test_as_many_candidates_as_replayed_are_not_scored() -> None:
    engine, er = toy_engine("dvc(n_recall=4, n_candidates=4)"), toy_engine("er(n_recall=4)")
    for each in (engine, er):
        feed(each, toy_stream(), until=9)
    new = incoming(engine, toy_stream())
    slots = er.memories.replay.draw(4, er.rng("plan"))
    assert np.array_equal(engine.plan(new)["replay"].slots, slots)
    [outcome] = feed(engine, toy_stream(), until=10)
    assert (outcome.forward, outcome.backward) == (2 * (3 + 4), 2 * (3 + 4))


def test_cost() -> None:
    """Two views of 10 new images twice, of 64 replayed ones once, and 100 candidates forward twice."""
    engine, generator = toy_engine("dvc(n_candidates=100)", memory=120), np.random.default_rng(0)
    for _ in range(14):
        x = torch.from_numpy(generator.integers(0, 256, (10, 1, 8, 8), dtype=np.uint8))
        outcome = engine.learn(StreamBatch(x, generator.integers(0, 6, 10)))
    assert (outcome.forward, outcome.backward) == (2 * 20 + 128 + 2 * 100, 2 * 20 + 128)


def test_outputs_of_classes_not_met_have_no_part() -> None:
    """Neither in Q nor in the second and third term."""
    engine, stream = prepared("dvc()")
    batch, out = next_batch(engine, stream)
    logits, seen = out.logits[:, batch.rows("new")], torch.tensor(batch.progress.seen)
    y = batch.y[batch.blocks["new"].view(0)]
    unseen = torch.tensor([label for label in range(6) if label not in batch.progress.seen])
    changed = logits.index_fill(2, unseen, 9.0)
    one, two = engine.method.terms(logits, y, seen), engine.method.terms(changed, y, seen)
    for role in ("mi", "dl"):
        assert torch.equal(one[role], two[role])
    assert not torch.equal(one["ce"], two["ce"])


def test_q_is_trained_and_has_no_part_in_predictions() -> None:
    engine, start = toy_engine("dvc()"), toy_engine("dvc()")
    feed(engine, toy_stream())
    assert not torch.equal(engine.net.extras["dvc_hidden"].weight, start.net.extras["dvc_hidden"].weight)
    [(_, before)] = engine.net.sweep(toy_stream().data.test_x)
    with torch.no_grad():
        engine.net.extras["dvc_joint"].weight.fill_(3)
    [(_, after)] = engine.net.sweep(toy_stream().data.test_x)
    assert torch.equal(engine.chain.rules(before)["linear"], engine.chain.rules(after)["linear"])


def test_laws_with_few_candidates() -> None:
    for law in ("scoring_leaves_everything_untouched", "resumes_exactly", "class_numbers_do_not_matter"):
        METHOD_LAWS[law](SMALL.format(""))


def test_grace_weighs_the_cross_entropies_alone() -> None:
    engine = toy_engine("grace(dvc())", taps=4)
    stream = dataclasses.replace(toy_stream())
    feed(engine, stream, until=9)
    engine.method.feedback.accuracy = torch.tensor([0.9, 0.5, 0.3, 0.1])
    batch, out = next_batch(engine, stream)
    inner, table = engine.method.inner.chain.losses(out, batch), engine.chain.losses(out, batch)
    for row, value in inner.items():
        factor = table["log/alpha"] if row.startswith("ce/") else 1
        torch.testing.assert_close(table[row], factor * value)
    assert (table["log/alpha"] != 1).any()


@pytest.mark.parametrize("bad", ["mi_weight=-1.0", "dl_weight=-0.1"])
def test_bad_options_are_told(bad: str) -> None:
    with pytest.raises(UserError, match=f"dvc: {bad[:9]} must be at least 0"):
        parse_method(f"dvc({bad})")
