"""Memory layouts: which one a learner gets, that the mathematics is the same, and that a checkpoint made in one goes on exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gracecl import Learner, checkpoint
from gracecl.bench.scene import Scene
from gracecl.engine import Engine
from gracecl.errors import UserError


def is_channels_last(engine: Engine) -> bool:
    weight = engine.net.get_parameter("backbone.stages.0.0.conv1.weight")
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@pytest.mark.parametrize(
    ("width", "layout", "expected"),
    [(16, "auto", True), (15, "auto", False), (16, "contiguous", False), (16, "channels_last", True)],
)
def test_which_layout(width: int, layout: str, expected: bool) -> None:
    assert is_channels_last(Scene("er", f"resnet18(width={width})", memory=10, layout=layout, device="cpu").engine) is expected


def test_narrow_nets_are_refused_where_they_would_be_unsafe() -> None:
    with pytest.raises(UserError, match="fewer than 16 channels; use a wider net or --layout auto"):
        Scene("er", "resnet18(width=8)", memory=10, layout="channels_last", device="cpu")


def test_nets_without_convolutions_take_any() -> None:
    Scene("er", "mlp", memory=10, layout="channels_last", device="cpu").step()


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(UserError, match="--cuda-graphs needs a GPU"):
        Scene("er", "mlp", memory=10, cuda_graphs=True, device="cpu")


def test_both_layouts_compute_the_same() -> None:
    """In double precision, where rounding cannot hide a difference: taps, and gradients of all weights."""
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    found = []
    for layout in ("contiguous", "channels_last"):
        net = Scene("mose()", "resnet18(width=16)", memory=10, layout=layout, device="cpu").engine.net.double()
        out = net(x)
        (out.logits.square().sum() + out.embedding.square().sum()).backward()
        gradients = [value.grad for value in net.parameters() if value.grad is not None]
        found.append([out.features.detach(), out.logits.detach(), *gradients])
    for contiguous, channels_last in zip(*found, strict=True):
        torch.testing.assert_close(channels_last, contiguous, rtol=1e-8, atol=1e-8)


def test_a_checkpoint_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """The optimiser's moments come back in the layout of their weights, or a fused step would mix them up."""
    one, two = (Scene("mose()", "resnet18(width=16)", memory=60, shape=(3, 8, 8), device="cpu") for _ in range(2))
    assert is_channels_last(one.engine)
    for _ in range(2):
        one.step()
    checkpoint.save(tmp_path / "saved", one.engine.state_dict())
    two.engine.load_state_dict(checkpoint.load(tmp_path / "saved"))
    two._at = one._at
    for scene in (one, two):
        scene.step()
    for a, b in zip(one.engine.net.state_dict().values(), two.engine.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_saved_learner_keeps_its_layout(tmp_path: Path) -> None:
    learner = Learner("er", classes=4, shape=(3, 8, 8), memory=10, net="resnet18(width=16)", layout="contiguous", device="cpu")
    learner.learn(np.zeros((2, 3, 8, 8), np.uint8), [0, 1])
    learner.save(tmp_path / "saved")
    assert not is_channels_last(Learner.load(tmp_path / "saved", device="cpu").engine)
