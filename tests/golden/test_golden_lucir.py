"""LUCIR against numbers that its authors' program computed: losses, gradients and weights of one step, imprinted rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cosine_net import GRADIENTS, VALUES, engine_with, rows_of, set_weights
from small import load

from gracecl.core import Batch, Block, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.methods.lucir import LUCIR

GOLDEN = load("lucir")
OLD, NEW = int(GOLDEN["in_C_old"]), int(GOLDEN["in_C_new"])
WIDTH, INPUTS = GOLDEN["in_body_W"].shape
BEFORE = Progress(4, 0, seen=tuple(range(OLD)), current=tuple(range(OLD)))
NOW = Progress(5, 1, seen=tuple(range(OLD + NEW)), current=tuple(range(OLD, OLD + NEW)))


def build() -> Engine:
    """In the second task, with the file's teacher and student."""
    method = LUCIR(less_forget=float(GOLDEN["in_lambda_base"]), margin=float(GOLDEN["in_margin"]), nearest=int(GOLDEN["in_K"]))
    optimizer = f"sgd(lr={float(GOLDEN['in_lr'])}, momentum=0.9, weight_decay={float(GOLDEN['in_weight_decay'])})"
    engine = engine_with(method, INPUTS, WIDTH, OLD + NEW, optimizer)
    set_weights(engine.net, GOLDEN, "in_teacher_body", GOLDEN["in_W_old"])
    method.end_task(engine.memories, BEFORE)
    rows = np.concatenate([GOLDEN["in_W_old"], GOLDEN["in_W_new"]])
    set_weights(engine.net, GOLDEN, "in_body", rows, GOLDEN["in_eta"])
    return engine


def batch(rows: slice | np.ndarray = slice(None)) -> Batch:
    x, y = GOLDEN["in_x"][rows], GOLDEN["in_y"][rows]
    return Batch(torch.from_numpy(x), y, np.arange(len(y)), {"all": Block(0, len(y), 1, len(y), ())}, NOW, OLD + NEW, seed=0)


def test_one_step() -> None:
    engine, step = build(), batch()
    table = engine.update(step)
    table = {row: value.item() for row, value in table.items() if not row.startswith("log/")}
    assert table.keys() == {"ce/all", "kd/features", "margin/old"}
    np.testing.assert_allclose(engine.net.backbone.kept[0].numpy(), GOLDEN["out_f"], **VALUES)
    np.testing.assert_allclose(step.targets["lucir"][0].numpy(), GOLDEN["out_f_teacher"], **VALUES)
    np.testing.assert_allclose(table["ce/all"], GOLDEN["out_L_ce"], **VALUES)
    np.testing.assert_allclose(table["kd/features"], GOLDEN["out_L_dis"], **VALUES)
    np.testing.assert_allclose(table["margin/old"], GOLDEN["out_L_mr"], **VALUES)
    np.testing.assert_allclose(sum(table.values()), GOLDEN["out_loss"], **VALUES)
    np.testing.assert_allclose(engine.method.strength(NOW), GOLDEN["out_lambda"], **VALUES)

    body, head = engine.net.backbone.linear, engine.net.classifier
    found = {
        "body_W": body.weight.grad.numpy(),
        "body_b": body.bias.grad.numpy(),
        "W_old": rows_of(head.weight.grad)[:OLD],
        "W_new": rows_of(head.weight.grad)[OLD:],
        "eta": head.scale.grad.reshape(1).numpy(),
    }
    for name, value in found.items():
        np.testing.assert_allclose(value, GOLDEN[f"out_grad_{name}"], err_msg=name, **GRADIENTS)
    stepped = {
        "body_W": body.weight.detach().numpy(),
        "body_b": body.bias.detach().numpy(),
        "W_new": rows_of(head.weight)[OLD:],
        "eta": head.scale.detach().reshape(1).numpy(),
    }
    for name, value in stepped.items():
        np.testing.assert_allclose(value, GOLDEN[f"out_step_{name}"], err_msg=name, **GRADIENTS)
    np.testing.assert_array_equal(rows_of(head.weight)[:OLD], GOLDEN["out_step_W_old"])
    np.testing.assert_array_equal(GOLDEN["out_step_W_old"], GOLDEN["in_W_old"])


def test_cosines_and_logits() -> None:
    engine = build()
    out = engine.net(batch().x)
    np.testing.assert_allclose(engine.net.classifier.cosine(out.features)[0].detach().numpy(), GOLDEN["out_cos"], **VALUES)
    np.testing.assert_allclose(out.logits[0].detach().numpy(), GOLDEN["out_logits"], **VALUES)


def test_without_old_images() -> None:
    engine, step = build(), batch(np.flatnonzero(GOLDEN["in_y"] >= OLD))
    engine.update.prepare(step)
    table = engine.chain.losses(engine.update.forward(step), step)
    np.testing.assert_allclose(table["ce/all"].item(), GOLDEN["out_L_ce_no_old"], **VALUES)
    np.testing.assert_allclose(table["kd/features"].item(), GOLDEN["out_L_dis_no_old"], **VALUES)
    assert table["margin/old"].item() == GOLDEN["out_L_mr_no_old"] == 0


@pytest.mark.parametrize("stray", [1.0, -3.0])
def test_imprinted_rows(stray: float) -> None:
    """When the first batch of the new classes is planned and prepared; what their rows held before does not matter."""
    engine = engine_with(LUCIR(), INPUTS, WIDTH, OLD + NEW, "sgd(lr=0.1)")
    method, memories = engine.method, engine.memories
    memories.replay.images = memories.replay.images.double()
    rows = np.concatenate([GOLDEN["in_W_old"], np.full((NEW, WIDTH), stray)])
    set_weights(engine.net, GOLDEN, "in_imprint_body", rows)
    method.met = BEFORE.seen
    method.end_task(memories, BEFORE)
    x, y = torch.from_numpy(GOLDEN["in_imprint_x"]).reshape(-1, 1, 1, INPUTS), GOLDEN["in_imprint_y"]
    engine.progress = NOW
    new = StreamBatch(x, y, np.arange(len(y)), progress=NOW)
    step = engine.assemble(engine.plan(new), new, 0)
    engine.update.prepare(step)
    np.testing.assert_allclose(rows_of(engine.net.classifier.weight)[OLD:], GOLDEN["out_imprint_rows"], **VALUES)
    np.testing.assert_array_equal(rows_of(engine.net.classifier.weight)[:OLD], GOLDEN["in_W_old"])
