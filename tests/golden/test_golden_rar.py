"""Repeated augmented rehearsal against numbers that its authors' program computed: the losses and the weights of each iteration."""

from __future__ import annotations

import numpy as np
import torch
from small import SmallNet, load
from whole_steps import engine_with

from gracecl.core import Batch, Block, Progress
from gracecl.methods.rar import RAR

GOLDEN = load("rar")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}


def test_iterations() -> None:
    memory_weight, stream_weight = float(GOLDEN["w_m"]), float(GOLDEN["w_s"])
    small = SmallNet(GOLDEN)
    method = RAR(memory_weight=memory_weight, stream_weight=stream_weight)
    engine = engine_with(small, method, f"sgd(lr={float(GOLDEN['lr'])})", GOLDEN["u"][0], GOLDEN["v"][0])
    n, r, classes = len(GOLDEN["y"]), len(GOLDEN["v"][0]), len(GOLDEN["b2"])
    blocks = {"new": Block(0, n, 1, n, ()), "replay": Block(n, r, 1, 0, ())}
    for k, (x, u, v) in enumerate(zip(GOLDEN["x"], GOLDEN["u"], GOLDEN["v"], strict=True)):
        images, labels = torch.cat([small.images(x), small.images(u)]), np.concatenate([GOLDEN["y"], v])
        batch = Batch(images, labels, np.arange(n + r), blocks, Progress(seen=tuple(range(classes))), classes, seed=0, repeat=k)
        table, _ = engine.update(batch)
        np.testing.assert_allclose(table["ce/new"].numpy() / stream_weight, GOLDEN["loss_stream"][k : k + 1], **DOUBLE)
        np.testing.assert_allclose(table["ce/replay"].numpy() / memory_weight, GOLDEN["loss_mem"][k : k + 1], **DOUBLE)
        total = table["ce/new"] + table["ce/replay"]
        np.testing.assert_allclose(total.numpy(), GOLDEN["loss"][k : k + 1], **DOUBLE)
        np.testing.assert_allclose(small.weights(), GOLDEN["theta"][k], **DOUBLE)
