"""Memory layouts: which one a learner gets, that the mathematics is the same, and that a checkpoint made in one goes on exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.scene import Scene
from gracecl import Learner, checkpoint
from gracecl.engine.engine import Engine
from gracecl.engine.recipe import layout_of
from gracecl.errors import UserError
from gracecl.lab.runs.run import RunConfig, Work


def is_channels_last(engine: Engine) -> bool:
    weight = engine.net.get_parameter("backbone.stages.0.0.conv1.weight")
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@pytest.mark.parametrize(
    ("cpu", "width", "side", "layout", "expected"),
    [
        ("AVX512", 8, 32, "auto", True),
        ("AVX512", 7, 32, "auto", False),
        ("AVX512", 15, 33, "auto", False),
        ("AVX512", 16, 64, "auto", True),
        ("AVX2", 8, 64, "auto", True),
        ("AVX2", 7, 8, "auto", False),
        ("DEFAULT", 15, 8, "auto", False),
        ("AVX2", 16, 8, "contiguous", False),
        ("AVX2", 8, 8, "channels_last", True),
    ],
)
def test_which_layout(cpu: str, width: int, side: int, layout: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last from as many channels on as are safe on the CPU."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    engine = Scene("er", f"resnet18(width={width})", memory=10, shape=(3, side, side), layout=layout, device="cpu").engine
    assert is_channels_last(engine) is expected
    assert layout_of(engine.net) == ("channels_last" if expected else "contiguous")


@pytest.mark.parametrize(("cpu", "fewest"), [("DEFAULT", 16), ("AVX512", 8), ("AVX2", 8)])
def test_narrow_nets_are_refused_where_they_would_be_unsafe(cpu: str, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    with pytest.raises(UserError, match=f"fewer than {fewest} channels in images of 32 pixels; use a wider net or --layout auto"):
        Scene("er", "resnet18(width=7)", memory=10, layout="channels_last", device="cpu")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap checker is glibc's")
def test_the_layout_chosen_here_writes_nowhere_else() -> None:
    """Two steps under glibc's heap checker, which ends the process where a kernel wrote outside its buffers."""
    settings = [(7, 32), (8, 32), (8, 64), (12, 64), (16, 64)]
    program = f"""
from benchmarks.scene import Scene
for width, side in {settings}:
    scene = Scene("er", f"resnet18(width={{width}})", 20, (3, side, side), device="cpu")
    scene.step()
    scene.step()
    del scene
    print((width, side), flush=True)
"""
    checker = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | checker, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == [*map(str, settings)], ended.stderr


def test_a_run_keeps_the_layout_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another CPU `auto` would mean another one, and the run would not go on to the same bits."""
    config = RunConfig(method="er", net="resnet18(width=8)", memory=10, stream="split-digits(size=8)", steps=3, device="cpu")
    work = Work.new(config, tmp_path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    work.run()
    assert json.loads((work.folder / "config.json").read_text())["layout_used"] == "channels_last"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert work.as_begun().layout == "channels_last"
    assert work.config.layout == "auto"
    (work.folder / "summary.json").unlink()
    with pytest.raises(UserError, match="unsafe on this CPU with fewer than 16 channels"):
        work.run()


def test_nets_without_convolutions_take_any() -> None:
    assert Scene("er", "mlp", memory=10, layout="channels_last", device="cpu").step().images > 0


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
    """The optimizer's moments come back in the layout of their weights, or a fused step would mix them up."""
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
