"""LwF against numbers that three programs computed, each with its own convention, from one pair of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor

from gracecl import nets
from gracecl.core import Batch, Block, Progress, Taps
from gracecl.functional.losses import entropy
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.lwf import LwF

GOLDEN = load("lwf")
N, CLASSES = GOLDEN["z"].shape
OLD, T = int(GOLDEN["n_old"]), float(GOLDEN["T"])
SHAPE = (1, 1, 4)
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}


def method() -> LwF:
    """At the end of a task after which `OLD` classes are known."""
    lwf = LwF(temperature=T)
    lwf.attach(nets.build("mlp(width=3, depth=1)", Images(SHAPE, (0.0,), (1.0,)), CLASSES, taps=1), Memories(0, Images(SHAPE)))
    lwf.end_task(Memories(0, Images(SHAPE)), Progress(5, 0, seen=tuple(range(OLD)), current=tuple(range(OLD))))
    return lwf


def row(lwf: LwF, logits: Tensor) -> Tensor:
    labels = np.full(N, OLD)
    progress = Progress(6, 1, seen=tuple(range(CLASSES)), current=tuple(range(OLD, CLASSES)))
    batch = Batch(torch.zeros(N, *SHAPE), labels, np.arange(N), {"all": Block(0, N, 1, N, ())}, progress, CLASSES, seed=0)
    lwf.prepare(batch)
    batch.targets = {name: torch.from_numpy(GOLDEN["z_teacher"])[None] for name in batch.targets}
    return lwf.losses(Taps(logits, logits, lambda x: x), batch)["kd/lwf"]


@pytest.fixture
def logits() -> Tensor:
    return torch.from_numpy(GOLDEN["z"])[None].requires_grad_()


def test_divergence(logits: Tensor) -> None:
    np.testing.assert_allclose(row(method(), logits).item(), T**2 * GOLDEN["lwf_KL_noT2"], **DOUBLE)


def test_cross_entropies_differ_by_the_teacher_s_entropy(logits: Tensor) -> None:
    lwf = method()
    divergence = row(lwf, logits).item() / T**2
    of_teacher = float(entropy(torch.from_numpy(GOLDEN["z_teacher"])[None] / T, lwf.teacher.classes))
    np.testing.assert_allclose(divergence + of_teacher, GOLDEN["lwf_crossentropy_noT2"], **DOUBLE)
    np.testing.assert_allclose(T**2 * (divergence + of_teacher), GOLDEN["lwf_T2_crossentropy"], **DOUBLE)


def test_gradient(logits: Tensor) -> None:
    row(method(), logits).sum().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad[0].numpy(), GOLDEN["lwf_grad_z"], **DOUBLE)
