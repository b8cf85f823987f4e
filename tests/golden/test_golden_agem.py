"""A-GEM against numbers that its authors' program (bare vectors) and a reference program (nets) computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import SmallNet, load
from whole_steps import engine_with

from gracecl.core import Batch, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.agem import AGEM, project

GOLDEN = load("agem")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("case", ["viol", "ok"])
def test_projection(case: str) -> None:
    g, reference = (torch.from_numpy(GOLDEN[f"{name}_{case}"]) for name in ("g", "g_ref"))
    found = project(g, reference)
    np.testing.assert_allclose(found.numpy(), GOLDEN[f"g_tilde_{case}"], **SINGLE)
    assert torch.equal(found, g) == (case == "ok")


@pytest.mark.parametrize("case", ["viol", "ok"])
def test_step_along_given_gradients(case: str) -> None:
    """Through `after_backward`, with the given vectors as gradients, and the optimizer."""
    given = len(GOLDEN[f"g_{case}"])
    small = SmallNet.of_sizes(given, 1, 1, np.float32)  # some net with weights enough
    n = sum(parameter.numel() for parameter, _ in small.parts)
    pad = {name: np.pad(GOLDEN[f"{name}_{case}"], (0, n - given)) for name in ("theta", "g", "g_ref")}
    small.set(pad["theta"])
    engine = Engine(AGEM(), small.net, Memories(1, Images(small.shape)), optimizer=f"sgd(lr={float(GOLDEN['lr'])})")
    flat = engine.method.weights
    (flat.vector() @ small.in_our_order(flat, pad["g"])).backward()
    engine.method.reference = lambda images, labels: small.in_our_order(flat, pad["g_ref"])
    batch = Batch(torch.zeros(0), np.empty(0, np.int64), np.empty(0, np.int64), {}, Progress(), 1, seed=0)
    batch.targets = dict.fromkeys(("agem/images", "agem/labels"), batch.x)
    engine.method.after_backward(batch)
    np.testing.assert_allclose(small.gradient()[:given], GOLDEN[f"g_tilde_{case}"], **SINGLE)
    engine.optimizer.step()
    np.testing.assert_allclose(small.weights()[:given], GOLDEN[f"theta_after_{case}"], **SINGLE)


@pytest.mark.parametrize("case", ["viol", "ok"])
def test_whole_step(case: str) -> None:
    """Forward over both batches, both gradients, the projection, the optimizer."""
    p = f"net_{case}_"
    small = SmallNet(GOLDEN, p)
    stream, slots = GOLDEN[p + "y"], GOLDEN[p + "ym"]
    engine = engine_with(small, AGEM(), f"sgd(lr={float(GOLDEN['net_lr'])})", GOLDEN[p + "xm"], slots)
    found = {}
    flat, reference = engine.method.weights, engine.method.reference

    def watched(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found["g"], found["g_ref"] = flat.gradient(), reference(images, labels)
        return found["g_ref"]

    engine.method.reference = watched
    engine.learn(StreamBatch(small.images(GOLDEN[p + "x"]), stream))
    for name in ("g", "g_ref"):
        np.testing.assert_allclose(small.join(flat.scatter(found[name]).__getitem__), GOLDEN[p + name], **DOUBLE)
    np.testing.assert_allclose(small.gradient(), GOLDEN[p + "g_tilde"], **DOUBLE)
    np.testing.assert_allclose(small.weights(), GOLDEN[p + "theta_after"], **DOUBLE)
