"""EWC, online EWC, EWC++, SI, MAS and CPR against what the authors' programs computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import SmallNet, load

from gracecl.core import Batch, Block, Progress, Taps
from gracecl.engine.engine import split
from gracecl.functional.losses import cross_entropy, entropy
from gracecl.methods.cpr import CPR
from gracecl.methods.ewc import EWC
from gracecl.methods.ewc_on import EWCOnline
from gracecl.methods.ewc_pp import EWCpp
from gracecl.methods.mas import MAS
from gracecl.methods.quadratic import QuadraticPenalty
from gracecl.methods.si import SI

DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
NO_BATCH: Any = SimpleNamespace()


def penalty(method: QuadraticPenalty) -> torch.Tensor:
    """The row that the method adds to the objective."""
    table = method.losses(NO_BATCH, NO_BATCH)
    assert split(table) == ({}, table)
    (row,) = table.values()
    assert row.shape == (1,)
    return row.sum()


def penalty_gradient(small: SmallNet, method: QuadraticPenalty) -> np.ndarray:
    for parameter in small.net.parameters():
        parameter.grad = None
    penalty(method).backward()
    return small.gradient()


# EWC.


@pytest.mark.parametrize("labels", ["true", "pred", "all"])
def test_ewc(labels: str) -> None:
    """The program divides by n - 1 where the paper has the mean over n."""
    g = load("ewc")
    small, method = SmallNet(g, "theta1_"), EWC(strength=1, labels=labels)
    small.attach(method)
    n = len(g["y1"])
    for task in (1, 2):
        small.set(g[f"theta{task}"])
        fisher = method.fisher(small.images(g[f"x{task}"]), torch.from_numpy(g[f"y{task}"]), np.random.default_rng(0))
        expected = g[f"ewc_F{task}_{labels}"] * (n - 1) / n
        np.testing.assert_allclose(small.in_file_order(method.flat, fisher), expected, **DOUBLE)
        method.remember(fisher)
        method.consolidated = True
    small.set(g["theta3"])
    assert penalty(method).item() == pytest.approx(float(g[f"ewc_penalty_{labels}"]) * (n - 1) / n, rel=1e-7)


def test_online_ewc() -> None:
    g = load("ewc")
    gamma, n = float(g["oewc_gamma"]), len(g["y1"])
    small, method = SmallNet(g, "theta1_"), EWCOnline(strength=1, decay=gamma)
    small.attach(method)
    for task in (1, 2):
        small.set(g[f"theta{task}"])
        method.remember(method.fisher(small.images(g[f"x{task}"]), torch.from_numpy(g[f"y{task}"]), np.random.default_rng(0)))
    method.consolidated = True
    np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g["oewc_F"] * (n - 1) / n, **DOUBLE)
    small.set(g["theta3"])
    assert penalty(method).item() == pytest.approx(float(g["oewc_penalty"]) * (n - 1) / (n * gamma), rel=1e-7)


def test_online_ewc_with_squares_weighted_by_confidence() -> None:
    g = load("ewc")
    small = SmallNet(g, "theta1_")
    method = EWCOnline(strength=2 * float(g["mam_lambda"]), decay=float(g["mam_gamma"]), labels="true_weighted")
    small.attach(method)
    for task in (1, 2):
        small.set(g[f"theta{task}"])
        method.remember(method.fisher(small.images(g[f"x{task}"]), torch.from_numpy(g[f"y{task}"]), np.random.default_rng(0)))
        np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g[f"mam_F_after_task{task}"], **DOUBLE)
    method.consolidated = True
    small.set(g["theta3"])
    assert penalty(method).item() == pytest.approx(float(g["mam_penalty"]), rel=1e-7)
    of_penalty = penalty_gradient(small, method)
    np.testing.assert_allclose(of_penalty, g["mam_penalty_grad"], **DOUBLE)
    cross_entropy(small.net(small.images(g["x1"])).logits, torch.from_numpy(g["y1"])).sum().backward()
    np.testing.assert_allclose(g["theta3"] - float(g["mam_lr"]) * small.gradient(), g["mam_theta_after"], **DOUBLE)


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
        before = method.distance().item()
        assert before == pytest.approx(float(g[f"task{task}_regulariser"]), rel=1e-4, abs=1e-5)
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
    g = load("mas")
    small, method = SmallNet(g), MAS(strength=float(g["lam"]))
    small.attach(method)
    outputs = torch.ones(len(g["b2"]), dtype=torch.bool)
    method.remember(method.sensitivity(small.images(g["x"]), outputs))
    method.consolidated = True
    np.testing.assert_allclose(small.in_file_order(method.flat, method.importance), g["omega_per_sample"], **DOUBLE)
    assert not np.allclose(g["omega_batch4"], g["omega_per_sample"]), "the file could not tell the two"
    small.set(g["theta"])
    gradient = g["g"] + penalty_gradient(small, method)
    np.testing.assert_allclose(g["theta"] - float(g["lr"]) * gradient, g["theta_after"], **DOUBLE)


# CPR.


def test_cpr() -> None:
    g = load("cpr")
    logits = torch.from_numpy(g["in_logits"]).requires_grad_()
    y, beta, classes = torch.from_numpy(g["in_y"]), float(g["in_beta"]), g["in_logits"].shape[1]
    [slope] = torch.autograd.grad(entropy(logits[None]).sum(), logits)
    assert entropy(logits[None]).item() == pytest.approx(float(g["out_H_mean"]), rel=1e-6)
    np.testing.assert_allclose(slope, g["out_dH_dlogits"], rtol=0, atol=5e-5 * np.abs(g["out_dH_dlogits"]).max())
    row = cpr_row(CPR(beta=beta), logits, g["in_y"])
    loss = cross_entropy(logits[None], y).sum() + row - beta * np.log(classes)
    assert loss.item() == pytest.approx(float(g["out_loss_ce_minus_beta_H"]), rel=1e-6)
    [slope] = torch.autograd.grad(loss, logits)
    np.testing.assert_allclose(slope, g["out_dloss_dlogits"], rtol=0, atol=5e-5 * np.abs(g["out_dloss_dlogits"]).max())


def test_cpr_with_ewc() -> None:
    """A linear model; the library's nets have a hidden layer, so the anchor acts on its head and the rest is the identity."""
    g = load("cpr")
    weight, bias = torch.from_numpy(g["in_W"]).requires_grad_(), torch.from_numpy(g["in_b"]).requires_grad_()
    small = SmallNet.of_sizes(weight.shape[1], weight.shape[1], weight.shape[0])
    with torch.no_grad():
        head = small.net.classifier
        head.weight.copy_(torch.from_numpy(g["in_W_anchor"]).T[None])
        head.bias.copy_(torch.from_numpy(g["in_b_anchor"])[None, None])
    ewc = EWC(strength=float(g["in_lambda_ewc"]))
    small.attach(ewc)
    of_head = {
        id(head.weight): torch.from_numpy(g["in_fisher_W"]).T[None],
        id(head.bias): torch.from_numpy(g["in_fisher_b"])[None, None],
    }
    ewc.remember(ewc.flat.gather(lambda parameter: of_head.get(id(parameter), torch.zeros_like(parameter))))
    ewc.consolidated = True
    with torch.no_grad():
        head.weight.copy_(weight.T[None])
        head.bias.copy_(bias[None, None])
    logits = torch.from_numpy(g["in_x"]) @ head.weight[0] + head.bias[0]
    beta, classes = float(g["in_beta"]), len(g["in_b"])
    row = cpr_row(CPR(beta=beta), logits, g["in_y"]) - beta * np.log(classes)
    loss = cross_entropy(logits[None], torch.from_numpy(g["in_y"])).sum() + row + penalty(ewc)
    assert loss.item() == pytest.approx(float(g["out_loss_ewc_cpr"]), rel=1e-6)
    loss.backward()
    for ours, theirs in ((head.weight.grad[0].T, g["out_grad_W"]), (head.bias.grad[0, 0], g["out_grad_b"])):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5 * np.abs(theirs).max())


def cpr_row(method: CPR, logits: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    """What CPR adds for a stream batch with these logits, all classes met."""
    n, classes = logits.shape
    blocks = {"all": Block(0, n, 1, n, (0,))}
    batch = Batch(torch.zeros(n, 1, 1, 1), labels, np.arange(n), blocks, Progress(seen=tuple(range(classes))), classes, seed=0)
    out = Taps(torch.zeros(1, n, 1), logits[None], lambda features: features)
    (row,) = method.losses(out, batch).values()
    return row.sum()
