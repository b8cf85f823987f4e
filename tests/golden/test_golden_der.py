"""DER and DER++ against numbers that the authors' program computed: terms, gradients, a step of SGD, the logits stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import SmallNet, load
from torch import Tensor

from gracecl.core import MEMORY_SOURCE, Batch, Block, LossTable, Plan, Progress, StreamBatch, apart, is_loss
from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories, Memory
from gracecl.methods.base import Method
from gracecl.methods.der import DER
from gracecl.methods.derpp import DERpp

GOLDEN = load("der")
CLASSES = len(GOLDEN["b2"])
ALPHA, BETA, LR = (float(GOLDEN[name]) for name in ("alpha", "beta", "lr"))
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}


def build(method: Method) -> tuple[SmallNet, Engine]:
    """The program's net, and a memory whose slots hold the logits of its replayed images."""
    small = SmallNet(GOLDEN)
    memories = Memories(len(GOLDEN["o1"]), Images(small.shape))
    memories.replay.attributes["logits"] = torch.from_numpy(GOLDEN["o1"]).unsqueeze(1)
    return small, Engine(method, small.net, memories, optimizer=f"sgd(lr={LR})", augmentation="none")


def batch(small: SmallNet, memory: Memory, *replayed: str) -> tuple[Batch, dict[str, Tensor]]:
    """The program's views of the stream and of its draws, as the blocks of a step, and what that will keep."""
    n, parts = len(GOLDEN["y"]), {"new": ("x", "y"), "replay": ("u2", "v2"), "dark": ("u1", None)}
    images, labels, sources, blocks = [], [], [], {}
    for block in ("new", *replayed):
        x, y = parts[block]
        size = len(GOLDEN[x])
        blocks[block] = Block(sum(map(len, images)), size, 1, n if block == "new" else 0, (), memory=memory)
        images.append(GOLDEN[x])
        labels.append(GOLDEN[y] if y else np.zeros(size, np.int64))
        sources.append(np.arange(size) + (0 if block == "new" else MEMORY_SOURCE))
    x, progress = small.images(np.concatenate(images)), Progress(1, seen=tuple(range(CLASSES)))
    new = StreamBatch(x[:n], labels[0])
    labels, sources = np.concatenate(labels), np.concatenate(sources)
    return Batch(x, labels, sources, blocks, progress, CLASSES, seed=0, plan=Plan({}, apart(blocks)), new=new), new.kept


def loss(table: LossTable) -> float:
    return sum(float(value) for row, value in table.items() if is_loss(row))


def test_derpp_step() -> None:
    small, engine = build(DERpp(alpha=ALPHA, beta=BETA))
    step, kept = batch(small, engine.memories.replay, "replay", "dark")
    table = engine.update(step)
    np.testing.assert_allclose(float(table["kd/logits"]), GOLDEN["alpha_mse"], **DOUBLE)
    np.testing.assert_allclose(float(table["ce/replay"]), GOLDEN["beta_ce"], **DOUBLE)
    np.testing.assert_allclose(loss(table), GOLDEN["loss_total"], **DOUBLE)
    np.testing.assert_allclose(small.gradient(), GOLDEN["grad"], **DOUBLE)
    np.testing.assert_allclose(small.weights(), GOLDEN["theta_after"], **DOUBLE)
    np.testing.assert_allclose(kept["logits"].squeeze(1).numpy(), GOLDEN["stored_logits"], **DOUBLE)


def test_der_step() -> None:
    small, engine = build(DER(alpha=ALPHA))
    step, kept = batch(small, engine.memories.replay, "dark")
    table = engine.update(step)
    np.testing.assert_allclose(loss(table), GOLDEN["der_loss"], **DOUBLE)
    np.testing.assert_allclose(small.weights(), GOLDEN["der_theta_after"], **DOUBLE)
    np.testing.assert_allclose(kept["logits"].squeeze(1).numpy(), GOLDEN["stored_logits"], **DOUBLE)


@pytest.mark.parametrize("method", [DER(alpha=ALPHA), DERpp(alpha=ALPHA, beta=BETA)])
def test_step_with_an_empty_memory(method: Method) -> None:
    small, engine = build(method)
    table = engine.update(batch(small, engine.memories.replay)[0])
    np.testing.assert_allclose(loss(table), GOLDEN["empty_loss"], **DOUBLE)
    np.testing.assert_allclose(small.weights(), GOLDEN["empty_theta_after"], **DOUBLE)
