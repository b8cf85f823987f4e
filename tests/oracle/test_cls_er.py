"""CLS-ER against slow loops over the paper's equations, through the engine's own hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl import rng
from gracecl.core import StreamBatch
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.methods.cls_er import replayed
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, engine_untouched, feed, next_batch, prepared, toy_engine, toy_stream


def state(net: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def moved_apart(method: str, taps: int):
    """An engine whose two models are far from the net and from each other, so that each is the surer one somewhere."""
    engine, stream = prepared(method, taps=taps)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for model in (engine.method.plastic.copy, engine.method.stable.copy):
            for value in model.parameters():
                value.add_(0.3 * torch.randn(value.shape, generator=generator))
    return engine, stream


@pytest.mark.parametrize("taps", [1, 4])
def test_losses(taps: int) -> None:
    """CE over new and replayed images; λ times the mean square over replayed images and all outputs, towards the surer model."""
    engine, stream = moved_apart("cls_er(n_recall=9, strength=0.7)", taps)
    batch, out = next_batch(engine, stream)
    table = engine.chain.losses(out, batch)
    assert set(table) == {"ce/all", "kd/surer"}
    recalled = range(3, 12)
    assert replayed(batch) == slice(3, 12)
    models = [model.copy.eval()(batch.x).logits for model in (engine.method.stable, engine.method.plastic)]
    surer = set()
    for layer in range(taps):
        terms = [F.cross_entropy(out.logits[layer, i], batch.y[i]) for i in range(12)]
        torch.testing.assert_close(table["ce/all"][layer], torch.stack(terms).mean())
        squares = []
        for i in recalled:
            stable, plastic = (logits[layer, i] for logits in models)
            sure = stable.softmax(dim=0)[batch.y[i]] > plastic.softmax(dim=0)[batch.y[i]]
            surer.add(bool(sure))
            squares += [(a - b) ** 2 for a, b in zip(out.logits[layer, i], stable if sure else plastic, strict=True)]
        torch.testing.assert_close(table["kd/surer"][layer], 0.7 * torch.stack(squares).mean())
    assert surer == {True, False}


def test_no_gradient_reaches_the_models() -> None:
    engine, stream = moved_apart("cls_er(n_recall=9)", 1)
    batch, out = next_batch(engine, stream)
    assert not batch.targets["cls_er"].requires_grad
    engine.chain.losses(out, batch)["kd/surer"].sum().backward()
    assert all(value.grad is None for model in (engine.method.plastic, engine.method.stable) for value in model.copy.parameters())


def test_both_models_of_a_run() -> None:
    """Every entry after every step, with the draws of the step's own generator."""
    options = {"plastic": (0.8, 0.7), "stable": (0.4, 0.9)}
    engine = toy_engine("cls_er(n_recall=5, plastic_rate=0.8, plastic_momentum=0.7, stable_rate=0.4, stable_momentum=0.9)")
    stream = toy_stream()
    expected = {name: state(engine.net) for name in options}
    updates = dict.fromkeys(options, 0)
    for step in range(len(stream)):
        feed(engine, stream, until=step + 1)
        draws = rng.generator(0, "cls_er", step, 0).random(2)
        for (name, (rate, momentum)), draw in zip(options.items(), draws, strict=True):
            if draw < rate:
                updates[name] += 1
                a = min(1 - 1 / (step + 2), momentum)
                for entry, value in state(engine.net).items():
                    old = expected[name][entry]
                    expected[name][entry] = a * old + (1 - a) * value if value.is_floating_point() else value
            for entry, value in getattr(engine.method, name).copy.state_dict().items():
                torch.testing.assert_close(
                    value, expected[name][entry], rtol=1e-4, atol=1e-5, msg=lambda m, n=entry, s=step: f"step {s}, {n}: {m}"
                )
    assert 0 < updates["stable"] < updates["plastic"] < len(stream)
    assert engine.method.steps == len(stream)


def test_rates_of_0_and_1() -> None:
    engine, stream = toy_engine("cls_er(stable_rate=0.0, plastic_rate=1.0, plastic_momentum=0.0)"), toy_stream()
    start = state(engine.net)
    feed(engine, stream)
    assert_same(engine.method.stable.copy.state_dict(), start, "a model that is never updated")
    assert_same(engine.method.plastic.copy.state_dict(), engine.net.state_dict(), "a model that keeps nothing of itself")


def test_the_stable_model_predicts() -> None:
    engine, stream = toy_engine("cls_er(stable_momentum=0.9)"), toy_stream()
    feed(engine, stream)
    images = stream.data.test_x, stream.data.test_y, stream.test_task
    with engine_untouched(engine, "evaluation"):
        found = evaluate(engine, *images)
    plain = toy_engine("er()")
    feed(plain, stream)
    for weights, same in ((engine.method.stable.copy, True), (engine.net, False), (engine.method.plastic.copy, False)):
        plain.net.load_state_dict(weights.state_dict())
        plain.invalidate_predictions()
        assert (evaluate(plain, *images).nll == found.nll) == same


def test_without_the_distance_it_trains_as_experience_replay() -> None:
    one, two = toy_engine("cls_er(strength=0.0)"), toy_engine("er()")
    for engine in (one, two):
        feed(engine, toy_stream())
    assert_same(one.net.state_dict(), two.net.state_dict(), "cls_er without consistency")
    assert_same(one.memories.state_dict(), two.memories.state_dict(), "the memory of cls_er")


def test_weights_given_after_the_start_are_the_models_too() -> None:
    engine = toy_engine("cls_er(stable_rate=0.0)")
    with torch.no_grad():
        engine.net.classifier.weight.fill_(0.25)
    feed(engine, toy_stream(), until=3)
    assert (engine.method.stable.copy.classifier.weight == 0.25).all()


def test_cost() -> None:
    """10 + 64 images forward and backward, and 64 forward through each of the two models."""
    engine, generator = toy_engine("cls_er()", memory=80), np.random.default_rng(0)
    for _ in range(9):
        x = torch.from_numpy(generator.integers(0, 256, (10, 1, 8, 8), dtype=np.uint8))
        outcome = engine.learn(StreamBatch(x, generator.integers(0, 6, 10)))
    assert (outcome.images, outcome.forward, outcome.backward) == (74, 74 + 2 * 64, 74)


def test_alpha_follows_the_stable_model() -> None:
    engine = toy_engine("grace(cls_er(stable_rate=0.0))", taps=4)
    start = state(engine.net)
    feed(engine, toy_stream(), until=9)
    assert engine.chain.eval_net(engine.net) is engine.method.inner.stable.copy
    memory, right = engine.memories.replay, toy_engine("er()", taps=4)
    right.net.load_state_dict(start)
    engine.method.look_back(engine.memories, engine.progress)
    [(_, out)] = right.net.sweep(memory.images[: len(memory)])
    hits = (out.logits.argmax(dim=-1) == torch.from_numpy(memory.labels[: len(memory)])).double().mean(dim=1)
    torch.testing.assert_close(engine.method.feedback.accuracy, hits)


@pytest.mark.parametrize("bad", ["strength=-1.0", "plastic_rate=1.5", "stable_momentum=-0.1"])
def test_bad_options_are_told(bad: str) -> None:
    with pytest.raises(UserError, match=bad.split("=")[0]):
        parse_method(f"cls_er({bad})")
