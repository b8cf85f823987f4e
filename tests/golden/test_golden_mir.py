"""MIR against numbers that its authors' program computed: the virtual step, the scores, the selection, the step."""

from __future__ import annotations

import numpy as np
import torch
from small import SmallNet, load
from torch.nn import functional as F
from whole_steps import engine_with

from gracecl.core import Planning, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.methods.mir import BEST_LOSS, MIR
from gracecl.nets.scoring import gradient, loss_of_each, step_ahead

GOLDEN = load("mir")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
R, C = int(GOLDEN["R"]), len(GOLDEN["yc"])


def build(**options: str) -> tuple[SmallNet, Engine]:
    small = SmallNet(GOLDEN)
    method = MIR(n_recall=R, n_candidates=C, **options)
    engine = engine_with(small, method, f"sgd(lr={float(GOLDEN['virtual_lr'])})", GOLDEN["xc"], GOLDEN["yc"])
    np.testing.assert_allclose(small.weights(), GOLDEN["theta"], **DOUBLE)
    return small, engine


def incoming(small: SmallNet) -> StreamBatch:
    x, y = small.images(GOLDEN["x"]), GOLDEN["y"]
    return StreamBatch(x, y, np.arange(len(y)), progress=Progress(1, seen=tuple(range(len(GOLDEN["b3"])))))


def scores(engine: Engine, small: SmallNet) -> np.ndarray:
    """By how much the loss of each candidate would grow, at the program's rate of the virtual step."""
    planning = Planning(engine.rng("plan"), learning_rate=float(GOLDEN["virtual_lr"]))
    before, after = engine.method.losses_around_the_step(incoming(small), engine.memories, planning, np.arange(C))
    return (after - before).numpy()


def test_virtual_step() -> None:
    small, _ = build()
    names = {id(parameter): name for name, parameter in small.net.named_parameters()}
    g = gradient(small.net, small.images(GOLDEN["x"]), torch.from_numpy(GOLDEN["y"]), "frozen")
    np.testing.assert_allclose(small.join(lambda parameter: g[names[id(parameter)]]), GOLDEN["g"], **DOUBLE)
    ahead = step_ahead(small.net, g, float(GOLDEN["virtual_lr"]))
    np.testing.assert_allclose(small.join(lambda parameter: ahead[names[id(parameter)]]), GOLDEN["theta_v"], **DOUBLE)
    candidates, labels = small.images(GOLDEN["xc"]), torch.from_numpy(GOLDEN["yc"])
    np.testing.assert_allclose(loss_of_each(small.net, candidates, labels).numpy(), GOLDEN["loss_pre"], **DOUBLE)
    np.testing.assert_allclose(loss_of_each(small.net, candidates, labels, ahead).numpy(), GOLDEN["loss_post"], **DOUBLE)


def test_scores() -> None:
    small, engine = build()
    np.testing.assert_allclose(scores(engine, small), GOLDEN["s"], **DOUBLE)


def test_whole_step() -> None:
    """Draws, scores, selection and update as `learn` makes them; the candidates are all that memory holds."""
    small, engine = build()
    chosen = engine.plan(incoming(small))["replay"].slots
    assert set(chosen) == set(GOLDEN["selected"])
    engine.learn(StreamBatch(small.images(GOLDEN["x"]), GOLDEN["y"]))
    np.testing.assert_allclose(small.weights(), GOLDEN["theta_after"], **DOUBLE)


def test_second_criterion() -> None:
    small, engine = build(criterion="over_best")
    past = F.cross_entropy(torch.from_numpy(GOLDEN["logits_past"]), torch.from_numpy(GOLDEN["yc"]), reduction="none")
    engine.memories.replay.attributes[BEST_LOSS] = past
    np.testing.assert_allclose(scores(engine, small), GOLDEN["s_crit2"], **DOUBLE)
    assert set(engine.plan(incoming(small))["replay"].slots) == set(GOLDEN["selected_crit2"])
