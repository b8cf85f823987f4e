"""EMA against slow loops over the specification's equations, and its invariants: alone, around GRACE and inside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl import Learner
from gracecl.core import NO_TASK, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.methods.ema import EMA
from gracecl.methods.er import ER
from gracecl.nets.class_means import class_means
from gracecl.registry.spec import parse_method
from gracecl.testing import TOY_SHAPE, assert_same, engine_untouched, feed, toy_engine, toy_stream


def state(net: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def test_shadow_of_a_run() -> None:
    """Every entry after every step: 0.9 for the first task and one step more, 0.99 afterwards; counters are copied."""
    engine, stream = toy_engine("ema(derpp(n_recall=5))"), toy_stream()
    expected = state(engine.net)
    first_task = sum(stream.task_of_step == 0)
    for step in range(len(stream)):
        feed(engine, stream, until=step + 1)
        mu = 0.9 if step <= first_task else 0.99
        for name, value in state(engine.net).items():
            floating = value.is_floating_point()
            expected[name] = (mu * expected[name].double() + (1 - mu) * value.double()) if floating else value
        for name, value in engine.method.shadow.state_dict().items():
            torch.testing.assert_close(
                value.double(), expected[name].double(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    moved = [name for name in expected if "running" in name or "tracked" in name]
    assert len(moved) == 3 * 4, "BatchNorm's buffers are part of it"
    assert 0 < first_task < len(stream) - 2


@dataclass(eq=False, repr=False)
class Repeated(ER):
    """Experience replay with three optimizer steps per batch."""

    mem_iters: int = 3


def test_warm_up_counts_optimizer_steps() -> None:
    method = EMA(Repeated())
    engine, stream = toy_engine("er()"), toy_stream()
    engine = Engine(method, engine.net, engine.memories)
    feed(engine, stream, until=6)
    assert method.steps == 18
    assert method.first_task == 18
    second = Progress(task=1)
    assert method.momentum_now(second) == 0.9
    feed(engine, stream, until=7)
    assert method.steps == 21
    assert method.momentum_now(second) == 0.99


@pytest.mark.parametrize(("tasks", "expected"), [(100, 0.98), (4.0, 1 - 1 / (4 * 4)), (0.5, 1 - 1 / (0.5 * 4)), (0.1, 0.0)])
def test_the_shadow_goes_back_a_part_of_the_first_task(tasks: float, expected: float) -> None:
    """The first task has four updates; after it μ is 0.98, or less where that would go back further."""
    method = EMA("er()", momentum=0.98, within_task=tasks)
    method.steps, method.first_task = 4, 4
    progress = Progress(task=1)
    assert method.momentum_now(progress) == 0.9
    method.steps = 5
    assert method.momentum_now(progress) == pytest.approx(expected)


def test_warm_up_without_task_marks() -> None:
    stream = toy_stream()
    unmarked = dataclasses.replace(stream, task_of_step=np.full(len(stream), NO_TASK))
    for method, length in (("ema()", 500), ("ema(warm_up=3)", 3)):
        engine = toy_engine(method)
        feed(engine, unmarked, until=5)
        wrapper, progress = engine.method, Progress(task=NO_TASK)
        assert wrapper.steps == 5
        wrapper.steps = length
        assert wrapper.momentum_now(progress) == 0.9
        wrapper.steps = length + 1
        assert wrapper.momentum_now(progress) == 0.99


def test_momentum_of_0_and_1() -> None:
    stream = toy_stream()
    same, still = toy_engine("ema(momentum=0.0, early_momentum=0.0)"), toy_engine("ema(momentum=1.0, early_momentum=1.0)")
    start = state(still.net)
    for step in range(len(stream)):
        for engine in (same, still):
            feed(engine, stream, until=step + 1)
        assert_same(same.method.shadow.state_dict(), same.net.state_dict(), "a shadow without memory")
    for name, value in still.method.shadow.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, start[name]), name


def test_constant_weights() -> None:
    """From a shadow of zeros and weights w that do not move, the shadow after k steps is (1 - μ^k) w."""
    engine, stream = toy_engine("ema(momentum=0.8, early_momentum=0.8)", optimizer="sgd(lr=0.0)", net="mlp(width=12)"), toy_stream()
    feed(engine, stream, until=1)
    for value in engine.method.shadow.parameters():
        value.zero_()
    for k in range(1, 15):
        feed(engine, stream, until=1 + k)
        for own, trained in zip(engine.method.shadow.parameters(), engine.net.parameters(), strict=True):
            torch.testing.assert_close(own, (1 - 0.8**k) * trained.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", ["derpp()", "rar(iterations=2)", "grace(derpp())", "mose()", "sgd() + lwf()"])
def test_training_is_that_of_the_inner_method(inner: str) -> None:
    plain, wrapped = toy_engine(inner), toy_engine(f"ema({inner})")
    for engine in (plain, wrapped):
        feed(engine, toy_stream())
    assert_same(wrapped.net.state_dict(), plain.net.state_dict(), f"ema({inner})")
    assert_same(wrapped.memories.state_dict(), plain.memories.state_dict(), f"ema({inner})")
    assert_same(wrapped.method.inner.state_dict(), plain.method.state_dict(), f"ema({inner})")


def test_the_shadow_predicts() -> None:
    """Its accuracies are those of an engine that has the shadow's weights; evaluating moves nothing and gives the same again."""
    engine, stream = toy_engine("ema(derpp(), momentum=0.97)"), toy_stream()
    feed(engine, stream)
    images = stream.data.test_x, stream.data.test_y, stream.test_task
    with engine_untouched(engine, "evaluation"):
        first, second = evaluate(engine, *images), evaluate(engine, *images)
    assert first == second
    assert engine.net.training
    assert not engine.method.shadow.training
    plain = toy_engine("derpp()")
    feed(plain, stream)
    of_trained = evaluate(plain, *images)
    plain.net.load_state_dict(engine.method.shadow.state_dict())
    plain.invalidate_predictions()
    assert evaluate(plain, *images) == first
    assert of_trained.nll != first.nll


def test_class_means_are_the_shadow_s() -> None:
    engine, stream = toy_engine("ema(mose())"), toy_stream()
    feed(engine, stream)
    net, memory = engine.ready_to_predict(), engine.memories.replay
    assert net is engine.method.shadow
    means = class_means(net, memory.images[: len(memory)], memory.labels[: len(memory)], engine.progress.seen)
    assert torch.equal(engine.method.inner.means, means)


def test_inside_and_around_grace() -> None:
    inside, around = toy_engine("grace(ema(derpp()))"), toy_engine("ema(grace(derpp()))")
    for engine in (inside, around):
        feed(engine, toy_stream())
    assert inside.chain.eval_net(inside.net) is inside.method.inner.shadow
    assert around.chain.eval_net(around.net) is around.method.shadow
    assert inside.method.inner.shadow.layers == around.method.shadow.layers == 4


def test_weights_given_after_the_start_are_the_shadow_s_too() -> None:
    engine = toy_engine("ema(momentum=1.0, early_momentum=1.0)")
    with torch.no_grad():
        engine.net.classifier.weight.fill_(0.25)
    feed(engine, toy_stream(), until=3)
    assert (engine.method.shadow.classifier.weight == 0.25).all()


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_layout_is_the_net_s(layout: str) -> None:
    recipe = Recipe("ema(er())", "resnet18(width=16)", memory=4, device="cpu", layout=layout)
    engine = recipe.build(Images((3, 8, 8)), 4)
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    engine.learn(StreamBatch(x, np.array([0, 1])))
    other = recipe.build(Images((3, 8, 8)), 4)
    other.load_state_dict(engine.state_dict())
    for shadow in (engine.method.shadow, other.method.shadow):
        for (name, own), trained in zip(shadow.named_parameters(), engine.net.parameters(), strict=True):
            assert own.stride() == trained.stride(), name


def test_learner_goes_on_from_a_file(tmp_path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (12, *TOY_SHAPE), dtype=np.uint8), np.arange(12) % 4
    one = Learner("ema(derpp())", classes=4, shape=TOY_SHAPE, net="mlp(width=8, norm=True)", memory=6)
    for start in range(0, 8, 4):
        one.learn(x[start : start + 4], y[start : start + 4])
    one.save(tmp_path / "learner")
    two = Learner.load(tmp_path / "learner")
    for learner in (one, two):
        learner.learn(x[8:], y[8:])
    np.testing.assert_array_equal(one.predict_proba(x), two.predict_proba(x))
    assert_same(one.engine.state_dict(), two.engine.state_dict(), "a learner that was saved and loaded")


def test_the_shadow_is_not_trained() -> None:
    engine = toy_engine("ema(derpp())")
    feed(engine, toy_stream(), until=4)
    optimised = {id(value) for group in engine.optimizer.param_groups for value in group["params"]}
    assert not any(value.requires_grad or id(value) in optimised for value in engine.method.shadow.parameters())


@pytest.mark.parametrize(
    ("inner", "images"), [("derpp()", 138), ("rar(er(), iterations=3, augmentation='run')", 222), ("lode()", 138)]
)
def test_cost_is_the_inner_method_s(inner: str, images: int) -> None:
    engine, generator = toy_engine(f"ema({inner})", memory=80), np.random.default_rng(0)
    for _ in range(9):
        x = torch.from_numpy(generator.integers(0, 256, (10, 1, 8, 8), dtype=np.uint8))
        outcome = engine.learn(StreamBatch(x, generator.integers(0, 6, 10), task=0))
    assert (outcome.forward, outcome.backward) == (images, images)


@pytest.mark.parametrize("option", ["momentum=1.5", "early_momentum=-0.1"])
def test_a_momentum_out_of_range_is_told(option: str) -> None:
    with pytest.raises(UserError, match="momentum must be between 0 and 1, not"):
        parse_method(f"ema({option})")
