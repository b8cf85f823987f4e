"""Retrospective adversarial replay against numbers that its authors' program computed: match, attack, losses, weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import SmallNet, load
from torch import Tensor
from whole_steps import engine_with

from gracecl.core import Batch, Block, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.methods.adversarial_replay import AdversarialReplay
from gracecl.nets.scoring import Weights, gradient, step_ahead

GOLDEN = load("adversarial_replay")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
OPTIONS = {
    "n_recall": len(GOLDEN["v"]),
    "beta": float(GOLDEN["beta"]),
    "radius": float(GOLDEN["eps"]),
    "step_size": float(GOLDEN["alpha"]),
    "attack_steps": int(GOLDEN["S"]),
    "momentum": float(GOLDEN["mu"]),
}


def build(**options: Any) -> tuple[SmallNet, Engine]:
    small = SmallNet(GOLDEN)
    method = AdversarialReplay(**OPTIONS | options)
    return small, engine_with(small, method, f"sgd(lr={float(GOLDEN['lr'])})", flat("u"), GOLDEN["v"])


def flat(field: str) -> Any:
    return GOLDEN[field].reshape(len(GOLDEN[field]), -1)


def ahead_of(small: SmallNet) -> Weights:
    g = gradient(small.net, small.images(flat("x")), torch.from_numpy(GOLDEN["y"]), "frozen")
    return step_ahead(small.net, g, float(GOLDEN["lr"]))


def test_virtual_weights_and_match() -> None:
    small, engine = build()
    ahead, names = ahead_of(small), {id(parameter): name for name, parameter in small.net.named_parameters()}
    np.testing.assert_allclose(small.join(lambda parameter: ahead[names[id(parameter)]]), GOLDEN["theta_v"], **DOUBLE)
    match = engine.method.match(small.images(flat("u")), small.images(flat("x")), ahead)
    assert match.tolist() == GOLDEN["match"].tolist()


@pytest.mark.parametrize(
    ("field", "steps", "momentum"), [("d_S1", 1, 1.0), ("d_S2", 2, 1.0), ("d_S3", 3, 1.0), ("d_S3_mu05", 3, 0.5)]
)
def test_attack(field: str, steps: int, momentum: float) -> None:
    small, engine = build(attack_steps=steps, momentum=momentum)
    attacked = engine.method.attack(small.images(flat("u")), small.images(flat("x")), ahead_of(small), np.random.default_rng(0))
    np.testing.assert_allclose(attacked.flatten(1).numpy(), flat(field), **DOUBLE)


def test_slopes() -> None:
    """What each step of the attack follows: the gradient of the distance that `look` gives."""
    small, engine = build()
    ahead = ahead_of(small)
    with torch.no_grad():
        goal = engine.method.look(small.images(flat("x")[GOLDEN["match"]]), ahead)
    for field, start in (("grad_step1", "u"), ("grad_step2", "d_S1")):
        images = small.images(flat(start)).requires_grad_()
        torch.nn.functional.mse_loss(engine.method.look(images, ahead), goal).backward()
        assert images.grad is not None
        np.testing.assert_allclose(images.grad.flatten(1).numpy(), flat(field), **DOUBLE)


def test_whole_step() -> None:
    """Draw, virtual step, match, attack and update as `learn` makes them; the draw is all that memory holds."""
    small, engine = build()
    assert not set(GOLDEN["y"]) & set(GOLDEN["v"])
    outcome = engine.learn(StreamBatch(small.images(flat("x")), GOLDEN["y"]))
    assert outcome is not None
    table = {row: float(value) for row, value in outcome.table.items()}
    assert table["ce/adversarial"] / OPTIONS["beta"] == pytest.approx(float(GOLDEN["loss_adv"]), rel=1e-7)
    assert table["ce/replay"] + table["ce/adversarial"] == pytest.approx(float(GOLDEN["loss_mem_and_adv"]), rel=1e-7)
    np.testing.assert_allclose(small.weights(), GOLDEN["theta_after"], **DOUBLE)


class Drawn:
    """The draws of the original run."""

    def random(self) -> float:
        return float(GOLDEN["mix_l"])

    def permutation(self, n: int) -> Any:
        assert n == len(GOLDEN["mix_perm"])
        return GOLDEN["mix_perm"]


class BatchOfTheirDraws(Batch):
    def rng(self, purpose: str) -> Any:
        return Drawn()


def test_whole_step_with_mixing() -> None:
    small, engine = build(mix=True)
    n, r = len(GOLDEN["y"]), len(GOLDEN["v"])
    blocks = {"new": Block(0, n, 1, n, ()), "replay": Block(n, r, 1, 0, ()), "adversarial": Block(n + r, r, 1, 0, ())}
    images = torch.cat([small.images(flat("x")), *[small.images(flat("u"))] * 2])
    labels = np.concatenate([GOLDEN["y"], GOLDEN["v"], GOLDEN["v"]])
    batch = BatchOfTheirDraws(
        images, labels, np.arange(len(labels)), blocks, Progress(), len(GOLDEN["b3"]), 0, 0, float(GOLDEN["lr"])
    )
    looked_at: list[Tensor] = []
    match = engine.method.match
    engine.method.match = lambda u, x, ahead: looked_at.extend([u, found := match(u, x, ahead)]) or found
    table = engine.update(batch)
    np.testing.assert_allclose(looked_at[0].flatten(1).numpy(), flat("mix_u"), **SINGLE)
    assert looked_at[1].tolist() == GOLDEN["mix_match"].tolist()
    np.testing.assert_allclose(batch.x[n + r :].flatten(1).numpy(), flat("mix_d"), **SINGLE)
    mixed = batch.blocks["adversarial"].found
    share, other = float(mixed["share"]), mixed["other"].numpy()
    one_hot = np.eye(len(GOLDEN["b3"]))
    np.testing.assert_allclose(share * one_hot[GOLDEN["v"]] + (1 - share) * one_hot[other], GOLDEN["mix_v"], **SINGLE)
    table = {row: float(value) for row, value in table.items()}
    assert table["ce/adversarial"] / OPTIONS["beta"] == pytest.approx(float(GOLDEN["mix_loss_adv"]), rel=1e-4)
    assert table["ce/replay"] + table["ce/adversarial"] == pytest.approx(float(GOLDEN["mix_loss"]), rel=1e-4)
    np.testing.assert_allclose(small.weights(), GOLDEN["mix_theta_after"], **SINGLE)
