"""Scoring passes against slow loops; they leave the learner untouched; what a step costs is counted."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gracecl.core import StreamBatch
from gracecl.nets.mode import in_mode
from gracecl.nets.scoring import (
    Normalisation,
    features_of,
    gradient,
    gradients_of_groups,
    loss_of_each,
    scoring,
    step_ahead,
)
from gracecl.nets.tapped import TappedNet
from gracecl.testing import TOY_NET, TOY_SHAPE, engine_untouched, feed, prepared, toy_engine, toy_stream

NETS = [TOY_NET, "resnet18(width=2)"]


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *TOY_SHAPE, generator=generator), torch.randint(6, (n,), generator=generator)


def slow_loss(net: TappedNet, x: Tensor, y: Tensor) -> Tensor:
    """The losses of a batch, one by one, summed over the layers, in whatever mode the net is."""
    logits = net(x).logits
    losses = []
    for image, label in enumerate(y.tolist()):
        losses.append(sum(torch.logsumexp(layer[image], 0) - layer[image, label] for layer in logits))
    return torch.stack(losses)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("normalisation", ["frozen", "eval", "train"])
def test_loss_of_each(net: str, normalisation: Normalisation) -> None:
    engine, _ = prepared("er()", taps=2, net=net)
    x, y = images(7)
    slow = copy.deepcopy(engine.net).train(normalisation != "eval")
    found = loss_of_each(engine.net, x, y, normalisation=normalisation)
    torch.testing.assert_close(found, slow_loss(slow, x, y).detach())
    assert not found.requires_grad


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("normalisation", ["frozen", "eval"])
def test_gradient_and_the_step_ahead(net: str, normalisation: Normalisation) -> None:
    engine, _ = prepared("er()", taps=2, net=net)
    x, y = images(7)
    slow = copy.deepcopy(engine.net).train(normalisation != "eval")
    for parameter in slow.parameters():
        parameter.grad = None
    slow_loss(slow, x, y).mean().backward()
    found = gradient(engine.net, x, y, normalisation)
    assert set(found) == {name for name, parameter in slow.named_parameters() if parameter.grad is not None}
    ahead = step_ahead(engine.net, found, 0.3)
    for name, parameter in slow.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ahead[name], parameter - 0.3 * parameter.grad, rtol=1e-4, atol=1e-5)
    after = copy.deepcopy(engine.net).eval()
    with torch.no_grad():
        for name, parameter in after.named_parameters():
            parameter.copy_(ahead.get(name, parameter))
    expected = slow_loss(after, x, y).detach()
    torch.testing.assert_close(loss_of_each(engine.net, x, y, ahead), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("scope", ["all", "heads"])
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_groups(net: str, scope: str, size: int) -> None:
    engine, _ = prepared("er()", taps=2, net=net)
    x, y = images(4 * size)
    found = gradients_of_groups(engine.net, x.unflatten(0, (4, size)), y.view(4, size), scope)
    slow = copy.deepcopy(engine.net).eval()
    for group in range(4):
        rows = slice(group * size, (group + 1) * size)
        slow.zero_grad()
        slow_loss(slow, x[rows], y[rows]).mean().backward()
        parts = [
            torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
            for name, parameter in slow.named_parameters()
            if scope == "all" or name.startswith("classifier")
        ]
        torch.testing.assert_close(found[group], torch.cat(parts), rtol=1e-4, atol=1e-5)


def test_features_are_those_of_the_deepest_layer_in_evaluation_mode() -> None:
    engine, stream = prepared("er()", taps=3)
    raw = stream.data.train_x[:5]
    expected = copy.deepcopy(engine.net).eval()(engine.net.inputs.normalise(raw)).features[-1]
    torch.testing.assert_close(features_of(engine.net, raw), expected)
    assert features_of(engine.net, raw[:0]).shape == (0, 12)


class WithDropout(nn.Module):
    """A backbone whose features are dropped at random in training mode."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.drop = inside, nn.Dropout(0.5)
        self.layers, self.width = inside.layers, inside.width

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inside(x))


@pytest.mark.parametrize("normalisation", ["frozen", "eval", "train"])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_moves(normalisation: Normalisation, training: bool) -> None:
    """Parameters, gradients, statistics, mode and torch's random state; under `train`, exactly what a training forward moves."""
    engine, _ = prepared("er()", taps=2)
    net = engine.net
    net.backbone = WithDropout(net.backbone)
    net.train(training)
    x, y = images(6)
    moved = copy.deepcopy(net).train()
    moved(x)
    with engine_untouched(engine, "scoring"):
        if normalisation == "train":
            held = [(buffer, buffer.clone()) for buffer in net.buffers()]
        loss_of_each(net, x, y, step_ahead(net, gradient(net, x, y, "frozen"), 0.1), "frozen")
        gradients_of_groups(net, x[:, None], y[:, None])
        loss_of_each(net, x, y, normalisation=normalisation)
        if normalisation == "train":
            for (buffer, before), expected in zip(held, moved.buffers(), strict=True):
                assert torch.equal(buffer, expected)
                buffer.copy_(before)


def test_an_error_inside_leaves_the_net_as_it_was() -> None:
    engine, _ = prepared("er()")

    def fail() -> None:
        with scoring(engine.net, "frozen"):
            engine.net(images(5)[0])
            raise ZeroDivisionError

    with engine_untouched(engine, "scoring"), pytest.raises(ZeroDivisionError):
        fail()


def test_passes_are_counted() -> None:
    net = toy_engine("er()").net
    x, y = images(6)

    def cost(act) -> tuple[int, int]:
        before = net.meter.forward, net.meter.backward
        act()
        return net.meter.forward - before[0], net.meter.backward - before[1]

    assert cost(lambda: loss_of_each(net, x, y)) == (6, 0)
    assert cost(lambda: gradient(net, x, y)) == (6, 6)
    assert cost(lambda: gradients_of_groups(net, x.unflatten(0, (2, 3)), y.view(2, 3))) == (6, 6)
    assert cost(lambda: gradients_of_groups(net, x[:, None], y[:, None])) == (6, 6)
    assert cost(lambda: features_of(net, torch.zeros(300, *TOY_SHAPE, dtype=torch.uint8))) == (300, 0)
    assert cost(lambda: net.meter.count(forward=2, backward=5)) == (2, 5)


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("sgd()", 3, 3),
        ("er(n_recall=4)", 7, 7),
        ("er(n_recall=4, reduction='sum_of_means')", 7, 7),
        ("er(n_recall=4, mem_iters=3)", 21, 21),
        ("grace(er(n_recall=4))", 7, 7),
        ("agem(n_reference=4)", 7, 7),
        # The specification's 3 + 2C + R and 3 + R; the stream's batch passes once more (see mir.py).
        ("mir(n_recall=4, n_candidates=9)", 3 + 2 * 9 + 4 + 3, 3 + 4 + 3),
        ("mir(n_recall=4, n_candidates=4)", 7, 7),
        ("gss(n_recall=4, n_groups=3, group_size=2, threshold=-1)", 7 + 6 + 3, 7 + 6 + 3),
        ("gss(n_recall=4, n_groups=3, group_size=2, threshold=1.1)", 7 + 6 + 3 + 3, 7 + 6 + 3 + 3),
    ],
)
def test_cost_of_a_step(method: str, forward: int, backward: int) -> None:
    """As each specification's section on cost has it, for a batch of 3 and a full memory of 12."""
    engine = toy_engine(method)
    outcome = feed(engine, toy_stream(), until=9)[-1]
    assert len(engine.memories.replay) == (0 if method == "sgd()" else 12)
    assert (outcome.forward, outcome.backward) == (forward, backward)
    on_stream_alone = method.startswith(("sgd", "agem"))
    assert outcome.images == (forward if "mem_iters" in method else 3 if on_stream_alone else 7)


def test_cost_of_a_step_of_aser() -> None:
    """Retrieval sees the batch and two draws of memory, the update a draw, its candidates and the batch."""
    engine = toy_engine("aser(n_recall=2, per_class=1, known_classes=False)")
    stream = toy_stream()
    feed(engine, stream, until=9)
    memory = engine.memories.replay
    counts = np.bincount(memory.labels)
    seen = len(engine.progress.seen)
    first, both = int((counts >= 1).sum()), int((counts >= 1).sum() + (counts >= 2).sum())
    assert first > 2
    batch = stream.batch(9)
    outcome = engine.learn(StreamBatch(batch.x, batch.labels, task=batch.task))
    met = len(engine.progress.seen)
    assert met >= seen
    update = first + min(12 - first, met) + 3
    assert (outcome.forward, outcome.backward) == (both + 3 + 5 + update, 5)


@pytest.mark.parametrize("training", [True, False])
def test_every_part_returns_to_the_mode_it_was_in(training: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    net[1][0].eval()
    before = [part.training for part in net.modules()]
    with in_mode(net, training):
        assert all(part.training == training for part in net.modules())
    assert [part.training for part in net.modules()] == before
    with pytest.raises(RuntimeError, match="halfway"), in_mode(net, training):
        raise RuntimeError("halfway")
    assert [part.training for part in net.modules()] == before


def test_a_sweep_that_is_left_early_gives_the_mode_back() -> None:
    net = toy_engine("er()").net
    assert net.training
    sweep = net.sweep(toy_stream().data.test_x, batch=2)
    next(sweep)
    assert not net.training
    assert torch.is_grad_enabled()
    sweep.close()
    assert net.training
