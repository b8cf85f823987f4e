"""CCIL against numbers that its authors' program computed: losses and gradients of one step, and of one of self-distillation."""

from __future__ import annotations

import numpy as np
import torch
from cosine_net import GRADIENTS, VALUES, engine_with, rows_of, set_weights
from small import load

from gracecl.core import Batch, Block, Plan, Planning, Progress, apart
from gracecl.engine.engine import Engine
from gracecl.inputs import Inputs
from gracecl.methods.ccil import CCIL

GOLDEN = load("ccil")
OLD, NEW = int(GOLDEN["in_C_old"]), int(GOLDEN["in_C_new"])
WIDTH, INPUTS = GOLDEN["in_body_W"].shape
BEFORE = Progress(4, 0, seen=tuple(range(OLD)), current=tuple(range(OLD)))
NOW = Progress(5, 1, seen=tuple(range(OLD + NEW)), current=tuple(range(OLD, OLD + NEW)))


def method() -> CCIL:
    return CCIL(
        strength=float(GOLDEN["in_lambda"] * GOLDEN["in_w_kd"]),
        power=float(GOLDEN["in_power"]),
        temperature=float(GOLDEN["in_T"]),
        self_weight=float(GOLDEN["in_sd_weight"]),
        self_distillation=1,
    )


def build() -> Engine:
    """In the second task, with the file's teacher and student."""
    engine = engine_with(method(), INPUTS, WIDTH, OLD + NEW, "sgd(lr=0.1)")
    set_weights(engine.net, GOLDEN, "in_teacher_body", GOLDEN["in_teacher_W"], GOLDEN["in_teacher_sigma"])
    engine.method.end_task(engine.memories, BEFORE)
    rows = np.concatenate([GOLDEN["in_W_old"], GOLDEN["in_W_new"]])
    set_weights(engine.net, GOLDEN, "in_body", rows, GOLDEN["in_sigma"])
    return engine


def batch() -> Batch:
    """The stream's images, then those of memory, in blocks of their own as a plan of ours has them."""
    n, m = len(GOLDEN["in_y"]), len(GOLDEN["in_v"])
    x, labels = (np.concatenate([GOLDEN[one], GOLDEN[two]]) for one, two in (("in_x", "in_u"), ("in_y", "in_v")))
    blocks = {"new": Block(0, n, 1, n, ()), "replay": Block(n, m, 1, 0, ())}
    return Batch(torch.from_numpy(x), labels, np.arange(n + m), blocks, NOW, OLD + NEW, seed=0, plan=Plan({}, apart(blocks)))


def test_one_step() -> None:
    engine, step = build(), batch()
    n = len(GOLDEN["in_y"])
    logits = engine.net(step.x).logits[0].detach().numpy()
    np.testing.assert_allclose(logits[:n], GOLDEN["out_z_x"], **VALUES)
    np.testing.assert_allclose(logits[n:], GOLDEN["out_z_u"], **VALUES)
    engine.net.backbone.kept.clear()

    table = engine.update(step)
    assert [len(kept) for kept in engine.net.backbone.kept] == [n, len(GOLDEN["in_v"])], "stream and memory have a forward each"
    told = step.targets["ccil"][0, :, :OLD].numpy()
    np.testing.assert_allclose(told[:n], GOLDEN["out_z_teacher_x"], **VALUES)
    np.testing.assert_allclose(told[n:], GOLDEN["out_z_teacher_u"], **VALUES)
    table = {row: value.item() for row, value in table.items() if not row.startswith("log/")}
    assert table.keys() == {"ce/new", "kd/new", "ce/replay", "kd/replay"}
    factor = engine.method.weight("new", NOW)
    np.testing.assert_allclose(factor, GOLDEN["out_factor"], **VALUES)
    np.testing.assert_allclose(table["ce/new"], GOLDEN["out_L_new"], **VALUES)
    np.testing.assert_allclose(table["ce/replay"], GOLDEN["out_L_ex"], **VALUES)
    np.testing.assert_allclose(table["kd/new"] / factor, GOLDEN["out_KL_el_x"], **VALUES)
    np.testing.assert_allclose(table["kd/replay"] / factor, GOLDEN["out_KL_el_u"], **VALUES)
    np.testing.assert_allclose((table["kd/new"] + table["kd/replay"]) / factor, GOLDEN["out_L_kd"], **VALUES)
    np.testing.assert_allclose(sum(table.values()), GOLDEN["out_loss"], **VALUES)

    body, head = engine.net.backbone.linear, engine.net.classifier
    found = {
        "body_W": body.weight.grad.numpy(),
        "body_b": body.bias.grad.numpy(),
        "W_old": rows_of(head.weight.grad)[:OLD],
        "W_new": rows_of(head.weight.grad)[OLD:],
        "sigma": head.scale.grad.reshape(1).numpy(),
    }
    for name, value in found.items():
        np.testing.assert_allclose(value, GOLDEN[f"out_grad_{name}"], err_msg=name, **GRADIENTS)


def test_self_distillation() -> None:
    """A first task of C_new classes; the copy that its closing steps begin with is the file's."""
    classes = tuple(range(NEW))
    progress = Progress(3, 0, seen=classes, current=classes)
    engine = engine_with(method(), INPUTS, WIDTH, NEW, "sgd(lr=0.1)")
    memory = engine.memories.stores["replay"] = type(engine.memories.replay)(1, Inputs((1, 1, INPUTS)))
    memory.filled = 1
    set_weights(engine.net, GOLDEN, "in_sd_teacher_body", GOLDEN["in_sd_teacher_W"], GOLDEN["in_sd_teacher_sigma"])
    [plan] = engine.chain.closing(progress, engine.memories, Planning(np.random.default_rng(0)))
    [block] = plan.blocks
    set_weights(engine.net, GOLDEN, "in_sd_body", GOLDEN["in_sd_W"], GOLDEN["in_sd_sigma"])
    n = len(GOLDEN["in_sd_y"])
    x = torch.from_numpy(GOLDEN["in_x"])
    step = Batch(x, GOLDEN["in_sd_y"], np.arange(n), {block: Block(0, n, 1, 0, ())}, progress, NEW, seed=0)
    table = engine.update(step)
    table = {row: value.item() for row, value in table.items() if not row.startswith("log/")}
    assert table.keys() == {"ce/again", "kd/again"}
    np.testing.assert_allclose(table["ce/again"], GOLDEN["out_sd_L_cls"], **VALUES)
    np.testing.assert_allclose(table["kd/again"] / GOLDEN["in_sd_weight"], GOLDEN["out_sd_KL_el"], **VALUES)
    np.testing.assert_allclose(sum(table.values()), GOLDEN["out_sd_loss"], **VALUES)
    np.testing.assert_allclose(rows_of(engine.net.classifier.weight.grad), GOLDEN["out_sd_grad_W"], **GRADIENTS)
