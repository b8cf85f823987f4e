"""Sharpness: exact on bowls, free of slope and of the scale before a BatchNorm, and it leaves the weights as they were."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gracecl.lab.runs.run import RunConfig, Work
from gracecl.lab.theory.sharpness import mean_cross_entropy, of_run, sharpness
from gracecl.testing import feed, toy_engine, toy_stream


def test_on_a_round_bowl_it_is_exact() -> None:
    """L = c/2 |w|² with two tensors: ½ c radius² (|u|² + |v|²), whatever the directions."""
    u, v = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.float64)

    def loss() -> float:
        return float(0.5 * 7 * (u.square().sum() + v.square().sum()))

    for directions in (1, 3):
        assert sharpness(loss, [u, v], radius=0.1, directions=directions) == pytest.approx(0.5 * 7 * 0.01 * (25 + 9), rel=1e-9)
    assert u.tolist() == [3.0, 4.0]


def test_on_any_bowl_it_tends_to_the_trace() -> None:
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    curvature = torch.diag(torch.tensor([8.0, 1.0, 0.0, 3.0], dtype=torch.float64))
    expected = 0.5 * 0.2**2 * float(w.square().sum()) * 12 / 4
    found = sharpness(lambda: float(0.5 * w @ curvature @ w), [w], radius=0.2, directions=4000)
    assert found == pytest.approx(expected, rel=0.05)


def test_a_slope_is_not_sharpness() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert sharpness(lambda: float(5 * w[0] - w[1]), [w]) == pytest.approx(0, abs=1e-12)


def test_the_scale_before_a_batch_norm_does_not_matter() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6, affine=False, eps=1e-12), nn.Linear(6, 3)).double().train()
    x, y = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 3

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(net(x), y))

    values = []
    for factor in (1.0, 30.0):
        with torch.no_grad():
            net[0].weight.mul_(factor)
        values.append(sharpness(loss, [net[0].weight]))
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] != 0


def test_the_loss_is_the_mean_over_images_and_heads() -> None:
    engine = toy_engine("er()", taps=4)
    feed(engine, toy_stream(), until=6)
    net, memory = engine.net, engine.memories.replay
    net.eval()
    with torch.no_grad():
        logits = net(net.inputs.normalise(memory.images[: len(memory)])).logits.double()
    terms = [
        math.log(sum(math.exp(value) for value in row)) - row[label]
        for layer in logits.tolist()
        for row, label in zip(layer, memory.labels[: len(memory)].tolist(), strict=True)
    ]
    found = mean_cross_entropy(net, memory.images[: len(memory)], memory.labels[: len(memory)])
    assert found == pytest.approx(np.mean(terms), rel=1e-5)


def test_of_a_run_that_kept_its_weights(tmp_path: Path) -> None:
    config = RunConfig(method="er", net="mlp(width=8, depth=2)", memory=20, stream="split-digits(size=8)", steps=10, device="cpu")
    folder = Work.new(config, tmp_path).run()
    assert of_run(folder) == of_run(folder)
    assert np.isfinite(of_run(folder))
