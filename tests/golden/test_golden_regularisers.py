"""EWC, online EWC, EWC++, SI, MAS and CPR against what the authors' programs computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import LinearNet, SmallNet, load
from torch import Tensor
from whole_steps import engine_with

from gracecl.core import Batch, Block, LossTable, Progress, StreamBatch, Taps, total
from gracecl.engine.engine import Engine, split
from gracecl.functional.losses import entropy
from gracecl.methods.base import Addition, Method
from gracecl.methods.cpr import CPR
from gracecl.methods.ewc import EWC
from gracecl.methods.ewc_on import EWCOnline
from gracecl.methods.ewc_pp import EWCpp
from gracecl.methods.mas import MAS
from gracecl.methods.quadratic import QuadraticPenalty
from gracecl.methods.sgd import SGD
from gracecl.methods.si import SI

DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
NO_BATCH: Any = SimpleNamespace(targets={})


def engine_of(small: SmallNet | LinearNet, method: Method, addition: Addition, lr: float = 1.0) -> Engine:
    """`method + addition` without memory, whose steps are plain gradient descent; images that it keeps are vectors.

    All classes count as met, whichever the labels of a file are: what a batch says of it, the engine replaces.
    """
    images = small.images(np.zeros((0, small.shape[0])))
    engine = engine_with(small, method + addition, f"sgd(lr={lr})", images, [])
    for store in engine.memories.stores.values():
        store.images = store.images.to(images.dtype)
    engine.progress = Progress(seen=tuple(range(small.net.classes)))
    return engine


def batch_of(small: SmallNet | LinearNet, x: np.ndarray, y: np.ndarray | None = None) -> StreamBatch:
    labels = np.zeros(len(x), np.int64) if y is None else y
    return StreamBatch(small.images(x), labels, progress=Progress(seen=tuple(range(small.net.classes))))


def end_task_with(engine: Engine, batch: StreamBatch) -> None:
    """The stream brings these images at the weights that the net has, and the task ends."""
    engine.chain.after_batch(engine.memories, replace(batch, rng=lambda _: np.random.default_rng(0)))
    engine.chain.end_task(engine.memories, batch.progress)


def penalty(method: QuadraticPenalty) -> Tensor:
    """The row that the method adds to the objective."""
    table = method.losses(NO_BATCH, NO_BATCH)
    assert split(table) == ({}, table)
    (row,) = table.values()
    assert row.shape == (1,)
    return row.sum()


@dataclass(eq=False, repr=False)
class GivenGradient(SGD):
    """A learner whose data have the gradient of the file."""

    def follow(self, small: SmallNet, gradient: np.ndarray) -> None:
        self.small, self.slopes = small, small.split(gradient)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        weights = [parameter for parameter, _ in self.small.parts]
        return {"given": sum((value * slope).sum() for value, slope in zip(weights, self.slopes, strict=True))[None]}


# EWC.


@pytest.mark.parametrize("labels", ["true", "pred", "all"])
def test_ewc(labels: str) -> None:
    """The program divides by n - 1 where the paper has the mean over n."""
    g = load("ewc")
    small, method = SmallNet(g, "theta1_"), EWC(strength=1, labels=labels)
    engine = engine_of(small, SGD(), method)
    n, expected = len(g["y1"]), 0.0
    for task in (1, 2):
        small.set(g[f"theta{task}"])
        end_task_with(engine, batch_of(small, g[f"x{task}"], g[f"y{task}"]))
        expected = expected + g[f"ewc_F{task}_{labels}"] * (n - 1) / n
        np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), expected, **DOUBLE)
    small.set(g["theta3"])
    assert penalty(method).item() == pytest.approx(float(g[f"ewc_penalty_{labels}"]) * (n - 1) / n, rel=1e-7)


def test_online_ewc() -> None:
    g = load("ewc")
    gamma, n = float(g["oewc_gamma"]), len(g["y1"])
    small, method = SmallNet(g, "theta1_"), EWCOnline(strength=1, decay=gamma)
    engine = engine_of(small, SGD(), method)
    for task in (1, 2):
        small.set(g[f"theta{task}"])
        end_task_with(engine, batch_of(small, g[f"x{task}"], g[f"y{task}"]))
    np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g["oewc_F"] * (n - 1) / n, **DOUBLE)
    small.set(g["theta3"])
    assert penalty(method).item() == pytest.approx(float(g["oewc_penalty"]) * (n - 1) / (n * gamma), rel=1e-7)


def test_online_ewc_with_squares_weighted_by_confidence() -> None:
    """Up to the weights after a whole step of the engine."""
    g = load("ewc")
    small = SmallNet(g, "theta1_")
    method = EWCOnline(strength=2 * float(g["mam_lambda"]), decay=float(g["mam_gamma"]), labels="true_weighted")
    engine = engine_of(small, SGD(), method, float(g["mam_lr"]))
    for task in (1, 2):
        small.set(g[f"theta{task}"])
        end_task_with(engine, batch_of(small, g[f"x{task}"], g[f"y{task}"]))
        np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g[f"mam_F_after_task{task}"], **DOUBLE)
    small.set(g["theta3"])
    held = penalty(method)
    assert held.item() == pytest.approx(float(g["mam_penalty"]), rel=1e-7)
    held.backward()
    np.testing.assert_allclose(small.gradient(), g["mam_penalty_grad"], **DOUBLE)
    engine.learn(batch_of(small, g["x1"], g["y1"]))
    np.testing.assert_allclose(small.weights(), g["mam_theta_after"], **DOUBLE)


# EWC++ and SI, whose gradients and weights are given step by step.


def test_ewc_pp() -> None:
    g = load("ewc_pp")
    inputs, hidden, outputs = sizes_of(len(g["task1_anchor"]))
    small = SmallNet.of_sizes(inputs, hidden, outputs)
    method = EWCpp(strength=float(g["lam"]), new_share=float(g["alpha"]), refresh=int(g["K"]))
    memories = small.attach(method)
    for task in (1, 2):
        for gradient, weights in zip(g[f"task{task}_g"], g[f"task{task}_theta_before_step"], strict=True):
            small.set(weights)
            small.put_gradient(gradient)
            method.after_backward(NO_BATCH)
        small.set(g[f"task{task}_anchor"])
        method.end_task(memories, Progress())
        np.testing.assert_allclose(small.in_file_order(method.flat, method.running), g[f"task{task}_F"], **DOUBLE)
        np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g[f"task{task}_Fhat"], **DOUBLE)
        small.set(g[f"task{task}_theta_probe"])
        assert penalty(method).item() == pytest.approx(float(g[f"task{task}_penalty"]), rel=1e-7)


def test_si() -> None:
    g = load("si")
    inputs, hidden, outputs = sizes_of(g["task1_g"].shape[1])
    small = SmallNet.of_sizes(inputs, hidden, outputs, np.float32)
    small.set(g["task1_theta"][0])
    method = SI(strength=float(g["c"]), damping=float(g["xi"]))
    memories = small.attach(method)
    for task in (1, 2):
        path = g[f"task{task}_theta"]
        for step, gradient in enumerate(g[f"task{task}_g"]):
            small.set(path[step])
            small.put_gradient(gradient)
            method.after_backward(NO_BATCH)
            small.set(path[step + 1])
            method.after_step(NO_BATCH, NO_BATCH)
        np.testing.assert_allclose(small.in_file_order(method.flat, method.path), g[f"task{task}_omega"], **SINGLE)
        table = method.losses(NO_BATCH, NO_BATCH)
        assert list(table) == ([] if task == 1 else ["penalty/si"]), "before the second task nothing is held"
        added = total(table).item() / float(g["c"]) if table else 0.0  # the file leaves c out
        assert added == pytest.approx(float(g[f"task{task}_regulariser"]), rel=1e-4, abs=1e-5)
        method.end_task(memories, Progress())
        np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g[f"task{task}_Omega"], **SINGLE)
        np.testing.assert_allclose(small.in_file_order(method.flat, method.anchor), g[f"task{task}_anchor"], **SINGLE)


def sizes_of(parameters: int) -> tuple[int, int, int]:
    """Some net with so many parameters: how they are shared out among its layers does not matter here."""
    for hidden in range(1, 9):
        for outputs in range(1, 9):
            inputs, left = divmod(parameters - hidden - hidden * outputs - outputs, hidden)
            if left == 0 and inputs > 0:
                return inputs, hidden, outputs
    raise AssertionError(f"no net has {parameters} parameters")


# MAS.


def test_mas() -> None:
    """Up to the weights after a whole step of the engine, from the file's gradient of the data."""
    g = load("mas")
    small, method, learner = SmallNet(g), MAS(strength=float(g["lam"])), GivenGradient()
    engine = engine_of(small, learner, method, float(g["lr"]))
    end_task_with(engine, batch_of(small, g["x"]))
    np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g["omega_per_sample"], **DOUBLE)
    assert not np.allclose(g["omega_batch4"], g["omega_per_sample"]), "the file could not tell the two"
    small.set(g["theta"])
    learner.follow(small, g["g"])
    engine.learn(batch_of(small, g["x"]))
    np.testing.assert_allclose(small.weights(), g["theta_after"], **DOUBLE)


# CPR.


def close(value: Any, golden: np.ndarray, tolerance: float) -> None:
    """Relative to the stored value, or to 1: 1e-9 for values, 1e-8 for gradients."""
    difference = np.abs(np.asarray(value) - golden)
    assert np.all(difference <= tolerance * np.maximum(1.0, np.abs(golden)))


def test_cpr() -> None:
    """The objective of `sgd() + cpr()`, as an update makes it; the file's lacks the constant β ln K."""
    g = load("cpr")
    n, classes = g["in_logits"].shape
    beta = float(g["in_beta"])
    logits = torch.from_numpy(g["in_logits"]).requires_grad_()
    [slope] = torch.autograd.grad(entropy(logits[None]).sum(), logits)
    close(entropy(logits[None]).item(), g["out_H_mean"], 1e-9)
    close(slope, g["out_dH_dlogits"], 1e-8)
    engine = engine_of(LinearNet(1, classes), SGD(), CPR(beta=beta))
    blocks, progress = {"all": Block(0, n, 1, n, (0,))}, Progress(seen=tuple(range(classes)))
    batch = Batch(torch.zeros(n, 1, 1, 1), g["in_y"], np.arange(n), blocks, progress, classes, seed=0)

    def forward(batch: Batch) -> Taps:
        return Taps(torch.zeros(1, n, 1), logits[None], lambda features: features)

    _, table = engine.update.losses(batch, forward)
    loss = total(table)
    close(loss.item() - beta * math.log(classes), g["out_loss_ce_minus_beta_H"], 1e-9)
    [slope] = torch.autograd.grad(loss, logits)
    close(slope, g["out_dloss_dlogits"], 1e-8)


def test_cpr_with_ewc() -> None:
    """A whole step of `sgd() + ewc() + cpr()` at the rate 1 on a linear model."""
    g = load("cpr")
    classes, inputs = g["in_W"].shape
    beta = float(g["in_beta"])
    linear, ewc = LinearNet(inputs, classes), EWC(strength=float(g["in_lambda_ewc"]))
    engine = engine_of(linear, SGD() + ewc, CPR(beta=beta))
    vectors = {
        name: linear.in_our_order(ewc.flat, g[f"in_{W}"], g[f"in_{b}"])
        for name, W, b in (("anchor", "W_anchor", "b_anchor"), ("importance", "fisher_W", "fisher_b"))
    }
    ewc.load_state_dict(vectors | {"consolidated": True, "lowest": torch.zeros(1)})
    linear.set(g["in_W"], g["in_b"])
    step = engine.learn(batch_of(linear, g["in_x"], g["in_y"]))
    assert step is not None
    assert sorted(engine.progress.seen) == list(range(classes))
    close(total(step.table).item() - beta * math.log(classes), g["out_loss_ewc_cpr"], 1e-9)
    weight, bias = linear.get()
    close(g["in_W"] - weight, g["out_grad_W"], 1e-8)
    close(g["in_b"] - bias, g["out_grad_b"], 1e-8)
