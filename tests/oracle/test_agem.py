"""A-GEM against a slow, literal step, and the invariants of its projection."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch
from gracecl.engine.engine import Engine
from gracecl.methods.agem import project
from gracecl.testing import METHOD_LAWS, assert_same, feed, next_batch, prepared, toy_engine, toy_stream

PLAIN_NET = "mlp(width=12, depth=4)"


def vectors(n: int = 200, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(30, generator=generator), torch.randn(30, generator=generator)) for _ in range(n)]


def slow_project(g: list[float], reference: list[float]) -> list[float]:
    product = sum(a * b for a, b in zip(g, reference, strict=True))
    if product >= 0:
        return g
    factor = product / sum(b * b for b in reference)
    return [a - factor * b for a, b in zip(g, reference, strict=True)]


def test_projection_is_the_equation() -> None:
    for g, reference in vectors():
        np.testing.assert_allclose(project(g, reference).tolist(), slow_project(g.tolist(), reference.tolist()), atol=1e-5)


def test_invariants_of_the_projection() -> None:
    cases = vectors()
    against = [(g, r) for g, r in cases if g @ r < 0]
    assert 50 < len(against) < 150
    for g, reference in cases:
        allowed = project(g, reference)
        size = g.norm() * reference.norm()
        assert allowed @ reference >= -1e-6 * size
        assert allowed.norm() <= g.norm() * (1 + 1e-6)
        assert torch.equal(allowed, g) == bool(g @ reference >= 0)
        torch.testing.assert_close(project(allowed, reference), allowed, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(project(g, 1000 * reference), allowed, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(project(8 * g, 8 * reference), 8 * allowed, rtol=1e-4, atol=1e-5)
    for g, reference in against:
        removed = g - project(g, reference)
        assert abs(project(g, reference) @ reference) <= 1e-5 * g.norm() * reference.norm()
        assert abs(F.cosine_similarity(removed, reference, dim=0)) > 1 - 1e-5
        assert project(g, -3 * g).norm() < 1e-5
        assert torch.equal(project(g, g), g)
        assert torch.equal(project(g, torch.zeros_like(g)), g)
        assert torch.equal(project(g, 1e-8 * reference), g)  # shorter than the guard


def slow_step(engine: Engine, x: Tensor, y: Tensor, x_reference: Tensor, y_reference: Tensor, rate: float) -> dict[str, Tensor]:
    """The weights after one step of A-GEM by SGD, parameter by parameter, on a copy of the net."""
    net = copy.deepcopy(engine.net).train()
    gradients = []
    for images, labels in ((x, y), (x_reference, y_reference)):
        net.zero_grad(set_to_none=True)
        logits = net(images).logits
        sum(F.cross_entropy(layer, labels) for layer in logits).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None})
    g, reference = gradients
    product = sum(float((g[name] * reference[name]).sum()) for name in g)
    square = sum(float((reference[name] ** 2).sum()) for name in g)
    factor = min(0.0, product) / square
    return {
        name: parameter.detach() - rate * (g[name] - factor * reference[name]) if name in g else parameter.detach()
        for name, parameter in engine.net.named_parameters()
    }


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("against", [True, False])
def test_step(taps: int, against: bool) -> None:
    """A memory whose labels contradict the stream's makes the projection necessary; one that agrees does not."""
    engine, stream = prepared("agem(n_reference=5)", taps=taps, optimizer="sgd(lr=0.1)")
    piece = stream.batch(engine.progress.step)
    memory = engine.memories.replay
    memory.images[:] = piece.x[torch.arange(12) % 3]
    memory.labels[:] = (piece.labels[np.arange(12) % 3] + against) % 6
    batch, out = next_batch(engine, stream)
    images, labels = batch.targets["agem/images"], batch.targets["agem/labels"]
    assert (len(batch), len(images)) == (3, 5)
    assert set(engine.chain.losses(out, batch)) == {"ce/new"}
    expected = slow_step(engine, batch.x, batch.y, images, labels, 0.1)
    plain = {name: value.clone() for name, value in engine.net.named_parameters()}
    engine.update(batch)
    for name, parameter in engine.net.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(plain[name], value) for name, value in engine.net.named_parameters())


def contradicted(method: str, **options) -> tuple[Engine, Batch]:
    """A learner whose memory contradicts its stream, and the batch of its next step."""
    engine, stream = prepared(method, **options)
    memory = engine.memories.replay
    piece = stream.batch(engine.progress.step)
    memory.images[:] = piece.x[torch.arange(12) % 3]
    memory.labels[:] = (piece.labels[np.arange(12) % 3] + 1) % 6
    return engine, next_batch(engine, stream)[0]


def gradient_after(engine: Engine, batch: Batch) -> Tensor:
    """What the step goes along."""
    engine.update(batch)
    return engine.method.weights.gradient()


def test_the_reference_is_no_part_of_the_objective() -> None:
    engine, batch = contradicted("agem()")
    [row] = [row for row in engine.update(batch) if not row.startswith("log/")]
    assert row == "ce/new"
    assert set(batch.blocks) == {"new"}


def test_plus_plus_adds_the_reference() -> None:
    engine, batch = contradicted("agem()")
    projected = gradient_after(engine, batch)
    other, same = contradicted("agem()")
    other.method.add_reference = True
    reference = other.method.reference(same.targets["agem/images"], same.targets["agem/labels"])
    torch.testing.assert_close(gradient_after(other, same), projected + reference, rtol=1e-4, atol=1e-6)


def test_empty_memory_is_fine_tuning() -> None:
    one, two = toy_engine("agem()", memory=0), toy_engine("sgd()", memory=0)
    for engine in (one, two):
        feed(engine, toy_stream())
    assert_same(one.net.state_dict(), two.net.state_dict(), "agem without memory")


def test_parameters_without_a_gradient_stay_without() -> None:
    engine, stream = prepared("agem()", optimizer="adam(lr=0.01, weight_decay=0.1)")
    before = engine.net.projector.weight.clone()
    feed(engine, stream, until=11)
    assert engine.net.projector.weight.grad is None
    assert torch.equal(engine.net.projector.weight, before)


def test_a_small_step_does_not_raise_the_memory_s_loss() -> None:
    """To first order: the rise falls with the square of the rate."""
    rises = []
    for rate in (1e-2, 1e-3):
        engine, stream = prepared("agem(n_reference=12)", net=PLAIN_NET, optimizer=f"sgd(lr={rate})")
        memory, piece = engine.memories.replay, stream.batch(engine.progress.step)
        memory.images[:] = piece.x[torch.arange(12) % 3]
        memory.labels[:] = (piece.labels[np.arange(12) % 3] + 1) % 6
        engine.net.double()
        normalise = engine.net.inputs.normalise
        engine.net.inputs.normalise = lambda images, normalise=normalise: normalise(images).double()
        batch, _ = next_batch(engine, stream)
        images, labels = batch.targets["agem/images"], batch.targets["agem/labels"]

        def loss(engine=engine, images=images, labels=labels) -> float:
            return float(F.cross_entropy(engine.net(images).logits[0].detach(), labels))

        before = loss()
        engine.update(batch)
        rises.append(loss() - before)
    assert rises[1] <= max(0.0, rises[0]) / 30


def test_the_current_task_can_be_left_out() -> None:
    engine, stream = prepared("agem(exclude_current_task=True, n_reference=20)")
    assert engine.chain.traits.boundaries == "required"
    batch, _ = next_batch(engine, stream)
    memory = engine.memories.replay
    assert len(batch.targets["agem/images"]) == memory.count(task=0) < len(memory)
    first = toy_engine("agem(exclude_current_task=True)")
    assert all(outcome.forward == outcome.images == 3 for outcome in feed(first, stream, until=4))


def test_grace_weighs_the_stream_and_not_the_reference() -> None:
    engine, stream = prepared("grace(agem())", taps=4)
    batch, out = next_batch(engine, stream)
    assert batch.supervised == batch.rows("new")
    weighted, inner = engine.chain.losses(out, batch), engine.method.inner.chain.losses(out, batch)
    alpha = weighted["log/alpha"]
    assert len(set(alpha.tolist())) > 1, "the layers weigh differently"
    torch.testing.assert_close(weighted["ce/new"], alpha * inner["ce/new"])
    images, labels = batch.targets["agem/images"], batch.targets["agem/labels"]
    plain = torch.autograd.grad(
        F.cross_entropy(engine.net(images).logits.flatten(0, 1), labels.repeat(4)), engine.net.classifier.weight
    )
    found = engine.method.inner.weights.scatter(engine.method.inner.reference(images, labels))[engine.net.classifier.weight]
    torch.testing.assert_close(found, 4 * plain[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["rar(agem(), iterations=2)", "lode(agem())"])
def test_wrappers_leave_the_reference_alone(method: str) -> None:
    """Also where one makes a single forward of all blocks, or makes the loss anew from the logits."""
    outcomes = feed(toy_engine(method), toy_stream(), until=9)
    assert all(value.isfinite().all() for outcome in outcomes for value in outcome.table.values())
    assert outcomes[-1].forward > outcomes[-1].images


@pytest.mark.parametrize("law", METHOD_LAWS)
def test_laws_with_every_option(law: str) -> None:
    METHOD_LAWS[law]("agem(n_reference=4, exclude_current_task=True, add_reference=True)")
