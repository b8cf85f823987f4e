"""MIR against a slow, literal selection, and its specification's invariants."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Planning, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.methods.mir import BEST_LOSS
from gracecl.streams import Stream
from gracecl.testing import METHOD_LAWS, assert_same, engine_untouched, feed, next_batch, prepared, toy_engine, toy_stream

PLAIN_NET = "mlp(width=12, depth=4)"
SMALL = "mir(n_recall=4, n_candidates=9{})"


def incoming(engine: Engine, stream: Stream) -> StreamBatch:
    return engine.meet(stream.batch(engine.progress.step))


def scores_of(engine: Engine, new: StreamBatch, slots: np.ndarray, **planning) -> Tensor:
    """By how much the method says that the loss of each candidate would grow."""
    before, after = engine.method.losses_around_the_step(new, engine.memories, Planning(engine.rng("plan"), **planning), slots)
    return after - before


def slow_scores(engine: Engine, x: Tensor, y: np.ndarray, slots: np.ndarray, rate: float, mode: str) -> list[float]:
    """Copy the net, take the step, compare the losses of the candidates one by one."""
    now = copy.deepcopy(engine.net).train()
    now.zero_grad(set_to_none=True)
    sum(F.cross_entropy(layer, torch.from_numpy(y)) for layer in now(x).logits).backward()
    then = copy.deepcopy(engine.net)
    with torch.no_grad():
        for mine, other in zip(then.parameters(), now.parameters(), strict=True):
            if other.grad is not None:
                mine -= rate * other.grad
    memory = engine.memories.replay
    candidates = engine.net.inputs.normalise(memory.images[torch.from_numpy(slots)])
    losses = []
    for net in (copy.deepcopy(engine.net), then):
        net.train(mode != "eval")
        logits, labels = net(candidates).logits.detach(), torch.from_numpy(memory.labels[slots])
        losses.append([sum(float(F.cross_entropy(layer[i], labels[i])) for layer in logits) for i in range(len(slots))])
    return [after - before for before, after in zip(*losses, strict=True)]


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("mode", ["frozen", "eval", "train"])
def test_scores(taps: int, mode: str) -> None:
    engine, stream = prepared(SMALL.format(f", virtual_lr=0.3, score_bn='{mode}'"), taps=taps)
    new = incoming(engine, stream)
    slots = np.array([7, 2, 11, 0, 5, 9])
    expected = slow_scores(engine, engine.net.inputs.normalise(new.x), new.labels, slots, 0.3, mode)
    found = scores_of(engine, new, slots)
    np.testing.assert_allclose(found.tolist(), expected, rtol=1e-3, atol=1e-5)


def test_the_look_ahead_uses_the_step_s_own_images_and_the_optimizer_s_rate() -> None:
    engine, stream = prepared(SMALL.format(""), optimizer="sgd(lr=0.2)")
    batch, _ = next_batch(engine, stream)
    new = incoming(engine, stream)
    slots = np.sort(engine.memories.replay.draw(9, engine.rng("plan")))
    views = batch.x[batch.rows("new")]
    assert not torch.equal(views, engine.net.inputs.normalise(new.x)), "the run augments"
    scores = slow_scores(engine, views, new.labels, slots, 0.2, "frozen")
    best = slots[np.argsort(scores)[-4:]]
    assert set(engine.plan(new)["replay"].slots) == set(best)


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd(lr=0.02)", 0.02), ("adam(lr=0.001)", 0.1)])
def test_rate_of_the_look_ahead(optimizer: str, rate: float) -> None:
    seen = []
    engine, stream = prepared(SMALL.format(""), optimizer=optimizer)
    losses = engine.method.losses_around_the_step

    def watched(new: StreamBatch, *rest):
        fixed = toy_engine(SMALL.format(f", virtual_lr={rate}"))
        fixed.net.load_state_dict(engine.net.state_dict())
        seen.append((losses(new, *rest), fixed.method.losses_around_the_step(new, *rest)))
        return seen[-1][0]

    engine.method.losses_around_the_step = watched
    engine.plan(incoming(engine, stream))
    assert torch.equal(seen[0][0][1], seen[0][1][1])


def test_no_step_no_interference() -> None:
    engine, stream = prepared(SMALL.format(", virtual_lr=0"))
    scores = scores_of(engine, incoming(engine, stream), np.arange(9))
    assert torch.equal(scores, torch.zeros(9))


def test_the_largest_scores_are_selected() -> None:
    engine, stream = prepared(SMALL.format(""))
    new = incoming(engine, stream)
    candidates = engine.memories.replay.draw(9, engine.rng("plan"))
    chosen = set(engine.plan(new)["replay"].slots)
    view = engine.assemble(engine.plan(new), new, 0).x[:3]
    scores = scores_of(engine, new, candidates, preview=lambda _: view)
    by_slot = dict(zip(candidates.tolist(), scores.tolist(), strict=True))
    assert chosen <= set(by_slot)
    assert min(by_slot[slot] for slot in chosen) >= max(score for slot, score in by_slot.items() if slot not in chosen)


def test_as_many_candidates_as_replayed_is_experience_replay() -> None:
    one, two = toy_engine("mir(n_recall=4, n_candidates=4)"), toy_engine("er(n_recall=4, reduction='sum_of_means')")
    for engine in (one, two):
        feed(engine, toy_stream())
    assert_same(one.state_dict(), two.state_dict(), "mir that has no choice")


def test_scores_do_not_depend_on_the_order_of_candidates() -> None:
    engine, stream = prepared(SMALL.format(""), net=PLAIN_NET)
    new, slots = incoming(engine, stream), np.arange(9)
    order = np.array([4, 0, 8, 1, 7, 2, 6, 3, 5])
    one = scores_of(engine, new, slots)
    two = scores_of(engine, new, slots[order])
    torch.testing.assert_close(two, one[torch.from_numpy(order)], rtol=1e-4, atol=1e-6)


def test_a_small_step_scores_by_the_alignment_of_gradients() -> None:
    rate = 1e-4
    engine, stream = prepared(SMALL.format(f", virtual_lr={rate}"), net=PLAIN_NET)
    engine.net.double()
    new = incoming(engine, stream)
    x = engine.net.inputs.normalise(new.x).double()
    memory = engine.memories.replay

    def gradient(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(engine.net(images).logits[0], labels)
        found = torch.autograd.grad(loss, list(engine.net.parameters()), allow_unused=True)
        return torch.cat([value.flatten() for value in found if value is not None])

    g = gradient(x, torch.from_numpy(new.labels))
    slots = np.arange(9)
    candidates = engine.net.inputs.normalise(memory.images[:9]).double()
    expected = [-rate * float(g @ gradient(candidates[i : i + 1], torch.tensor([int(memory.labels[i])]))) for i in range(9)]
    normalise = engine.net.inputs.normalise
    engine.net.inputs.normalise = lambda images: normalise(images).double()
    found = scores_of(engine, new, slots)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-2, atol=1e-9)


def test_scoring_moves_nothing_and_the_virtual_weights_are_forgotten() -> None:
    engine, stream = prepared(SMALL.format(""))
    new = incoming(engine, stream)
    with engine_untouched(engine, "scoring"):
        scores_of(engine, new, np.arange(9))


def test_interference_is_found() -> None:
    """Memory holds half images of a class that looks like the stream's and half of one that does not; the first are replayed."""
    engine = toy_engine("mir(n_recall=10, n_candidates=40, virtual_lr=0.5)", memory=40, net=PLAIN_NET, optimizer="sgd(lr=0.1)")
    generator = np.random.default_rng(0)
    shared, other = (generator.integers(0, 256, (1, 8, 8)) for _ in range(2))

    def images(pattern: np.ndarray, n: int) -> Tensor:
        return torch.from_numpy(np.clip(pattern + generator.integers(-10, 11, (n, 1, 8, 8)), 0, 255).astype(np.uint8))

    memory = engine.memories.replay
    labels = np.repeat([0, 1], 20)
    memory.add(generator, torch.cat([images(shared, 20), images(other, 20)]), labels)
    for _ in range(40):  # until it knows both
        engine.learn(StreamBatch(memory.images, memory.labels, fresh=False))
    found = 0
    for step in range(10):
        new = StreamBatch(images(shared, 5), np.full(5, 2), np.arange(5) + 5 * step, progress=engine.progress)
        found += int((memory.labels[engine.method.plan(new, engine.memories, Planning(generator))["replay"].slots] == 0).sum())
    assert found > 65, f"{found} of 100 are of the class that suffers; 50 ± 5 by chance"


def test_best_loss_is_kept_per_slot() -> None:
    """The note of a slot is its loss at entry, and falls to the loss now wherever that is smaller; it never rises."""
    engine, stream = prepared(SMALL.format(", criterion='over_best'"))
    notes = engine.memories.replay.attributes[BEST_LOSS]
    assert notes.shape == (12,)
    assert (notes > 0).all()
    notes.fill_(1e9)
    new = incoming(engine, stream)
    drawn = engine.memories.replay.draw(9, engine.rng("plan"))
    plan = engine.plan(new)
    assert (notes == 1e9).all(), "planning writes nothing"
    batch = engine.assemble(plan, new, 0)
    engine.update(batch)
    assert (notes[torch.from_numpy(drawn)] < 1e3).all()
    assert (notes == 1e9).sum() == 3
    held = notes.clone()
    engine.update(engine.assemble(engine.plan(new), new, 0))
    assert (notes <= held).all()


@pytest.mark.parametrize("law", METHOD_LAWS)
def test_laws_where_there_is_a_choice(law: str) -> None:
    METHOD_LAWS[law](SMALL.format(", criterion='over_best', mem_iters=2"))


@pytest.mark.parametrize("options", ["", ", reduction='concat', score_bn='eval'"])
def test_planning_moves_nothing(options: str) -> None:
    METHOD_LAWS["scoring_leaves_everything_untouched"](SMALL.format(options))
