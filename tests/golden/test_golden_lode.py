"""LODE on DER++ against numbers that the authors' program computed: the two parts per image, the loss, a step of SGD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import SmallNet, load

from gracecl.core import MEMORY_SOURCE, Batch, Block, Progress, is_loss
from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories, Memory
from gracecl.methods.derpp import DERpp
from gracecl.methods.lode import LODE

GOLDEN = load("lode")
CLASSES, PER_TASK = len(GOLDEN["b2"]), int(GOLDEN["classes_per_task"])
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}


def build() -> tuple[SmallNet, Engine]:
    """The program's net, and a memory whose slots hold the logits of its replayed images."""
    small = SmallNet(GOLDEN)
    slots = np.arange(len(GOLDEN["o1"]))
    memories = Memories(len(slots), Images(small.shape))
    attributes = {"logits": torch.from_numpy(GOLDEN["o1"]).unsqueeze(1)}
    memories.replay.put(slots, torch.zeros(len(slots), *small.shape, dtype=torch.uint8), slots, GOLDEN["v2"], 0, attributes)
    inner = DERpp(alpha=float(GOLDEN["alpha"]), beta=float(GOLDEN["beta"]))
    method = LODE(inner, rho=float(GOLDEN["rho"]), intra_weight=float(GOLDEN["C"]))
    return small, Engine(method, small.net, memories, optimizer=f"sgd(lr={float(GOLDEN['lr'])})", augmentation="none")


def batch(small: SmallNet, memory: Memory, task: int, image: int | None = None) -> Batch:
    """The program's views, as the blocks of a step; the stream's part may be a single image."""
    pick = slice(None) if image is None else slice(image, image + 1)
    x, y = GOLDEN["x"][pick], GOLDEN[f"t{task}_y"][pick]
    n, m = len(y), len(GOLDEN["v2"])
    places = {"new": (0, n, 1, n), "replay": (n, m, 1, 0), "dark": (n + m, m, 1, 0)}
    blocks = {name: Block(*place, (), memory=memory) for name, place in places.items()}
    labels = np.concatenate([y, GOLDEN["v2"], np.zeros(m, np.int64)])
    sources = np.concatenate([np.arange(n), MEMORY_SOURCE + np.arange(m), MEMORY_SOURCE + np.arange(m)])
    seen = tuple(range(PER_TASK * (task + 1)))
    progress = Progress(step=1, task=task, seen=seen, current=seen[-PER_TASK:])
    return Batch(small.images(np.concatenate([x, GOLDEN["u2"], GOLDEN["u1"]])), labels, sources, blocks, progress, CLASSES, seed=0)


@pytest.mark.parametrize("task", [0, 1, 2])
def test_step(task: int) -> None:
    small, engine = build()
    table = engine.update(batch(small, engine.memories.replay, task))
    loss = sum(float(value) for row, value in table.items() if is_loss(row))
    np.testing.assert_allclose(loss, GOLDEN[f"t{task}_loss"], **DOUBLE)
    np.testing.assert_allclose(small.weights(), GOLDEN[f"t{task}_theta_after"], **DOUBLE)
    if task > 0:
        np.testing.assert_allclose(float(table["log/inter"]), GOLDEN[f"t{task}_L_inter"], **DOUBLE)
        np.testing.assert_allclose(float(table["log/intra"]), GOLDEN[f"t{task}_L_intra"], **DOUBLE)


@pytest.mark.parametrize("task", [1, 2])
def test_parts_per_image(task: int) -> None:
    small, engine = build()
    for image in range(len(GOLDEN["x"])):
        single = batch(small, engine.memories.replay, task, image)
        with torch.no_grad():
            engine.update.prepare(single)
            table = engine.chain.losses(engine.net(single.x), single)
        np.testing.assert_allclose(float(table["log/inter"]), GOLDEN[f"t{task}_inter_per_sample"][image], **DOUBLE)
        np.testing.assert_allclose(float(table["log/intra"]), GOLDEN[f"t{task}_intra_per_sample"][image], **DOUBLE)
