"""Online-LoRA against numbers that its authors' program computed: forward, detector, whole runs, importance, folding.

Fields that end in `_official` carry the program's faults, which `reference=True` has too; those that end in `_spec` are ours
without them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor, nn

from gracecl.core import Batch, Block, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.inputs import Images, Inputs
from gracecl.memory import Memories
from gracecl.methods.online_lora import LossWindow, OnlineLoRA
from gracecl.nets.tapped import Backbone, TappedNet
from noting import note_batch_losses

GOLDEN = load("online_lora")
BLOCKS, _, WIDTH = GOLDEN["in_qkv_W"].shape
STEPS, SIZE, TOKENS, _ = GOLDEN["in_stream_x"].shape
SHAPE = (1, TOKENS, WIDTH)
CLASSES, RANK, HARD = len(GOLDEN["in_init_head_b"]), GOLDEN["in_init_Anew"].shape[1], int(GOLDEN["in_h"])
FIRES = GOLDEN["in_fire_steps"].tolist()
VALUES, GRADIENTS = {"rtol": 1e-9, "atol": 1e-9}, {"rtol": 1e-8, "atol": 1e-8}


class Attention(nn.Module):
    """h + softmax(q k^T / sqrt d) v, without output projection."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        with torch.no_grad():
            self.qkv.double()
            self.qkv.weight.copy_(torch.from_numpy(weight))
            self.qkv.bias.copy_(torch.from_numpy(bias))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).split(WIDTH, dim=-1)
        return h + (q @ k.transpose(-2, -1) / WIDTH**0.5).softmax(dim=-1) @ v


class Tokens(Backbone):
    """Images are tokens; features are the mean over the last block's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.width = 1, WIDTH
        pairs = zip(GOLDEN["in_qkv_W"], GOLDEN["in_qkv_b"], strict=True)
        self.blocks = nn.ModuleList(Attention(weight, bias) for weight, bias in pairs)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1, 2)
        for block in self.blocks:
            h = block(h)
        return h.mean(dim=1).unsqueeze(0)


def build(**options: Any) -> Engine:
    net = TappedNet(Tokens(), CLASSES, Inputs(SHAPE)).double()
    memories = Memories(HARD * SIZE, Images(SHAPE))
    memories.replay.images = torch.zeros(HARD * SIZE, *SHAPE, dtype=torch.float64)
    settings = {"rank": RANK, "n_hard": HARD, "strength": float(GOLDEN["in_lambda"]), "lr": float(GOLDEN["in_lr"])}
    return Engine(OnlineLoRA(**settings | options), net, memories, augmentation="none")


def images(x: Any) -> Tensor:
    return torch.from_numpy(x).reshape(-1, *SHAPE)


@torch.no_grad()
def put_head(net: TappedNet, weight: Any, bias: Any) -> None:
    net.classifier.weight.copy_(torch.from_numpy(weight).T[None])
    net.classifier.bias.copy_(torch.from_numpy(bias)[None, None])


@torch.no_grad()
def put_pair(engine: Engine, down: Any, up: Any) -> None:
    """Gives the adapters the file's factors, query and value of block after block."""
    for number, adapter in enumerate(engine.method.adapters):
        two = slice(2 * number, 2 * number + 2)
        adapter.down.copy_(torch.from_numpy(down[two]).flatten(0, 1))
        adapter.up.copy_(torch.from_numpy(up[two]))


def in_file_shape(engine: Engine, vector: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A vector over the weights as the file has it: all A, all B."""
    values = engine.method.flat.scatter(vector)
    downs = [values[adapter.down].view(2, RANK, WIDTH) for adapter in engine.method.adapters]
    return torch.cat(downs).numpy(), torch.cat([values[adapter.up] for adapter in engine.method.adapters]).numpy()


def from_file_shape(engine: Engine, down: Any, up: Any) -> Tensor:
    values = {}
    for number, adapter in enumerate(engine.method.adapters):
        two = slice(2 * number, 2 * number + 2)
        values[adapter.down], values[adapter.up] = torch.from_numpy(down[two]).flatten(0, 1), torch.from_numpy(up[two])
    return engine.method.of_adapters(lambda factor: values[factor])


def with_pairs(prefix: str, reference: bool, **options: Any) -> Engine:
    """A learner that has folded the file's A and B and goes on with its new pair."""
    engine = build(reference=reference, **options)
    put_pair(engine, GOLDEN[f"{prefix}_A"], GOLDEN[f"{prefix}_B"])
    with torch.no_grad():
        if reference:
            engine.method.add_factors()
        else:
            engine.method.fold(np.random.default_rng(0))
    put_pair(engine, GOLDEN[f"{prefix}_Anew"], GOLDEN[f"{prefix}_Bnew"])
    put_head(engine.net, GOLDEN[f"{prefix}_head_W"], GOLDEN[f"{prefix}_head_b"])
    return engine


def logits(engine: Engine, x: Any) -> np.ndarray:
    with torch.no_grad():
        return engine.net(images(x)).logits[0].numpy()


@pytest.mark.parametrize("reference", [False, True])
def test_forward(reference: bool) -> None:
    engine = with_pairs("in_fwd", reference)
    np.testing.assert_allclose(logits(engine, GOLDEN["in_fwd_x"]), GOLDEN["out_fwd_logits"], **VALUES)
    with torch.no_grad():
        qkv = engine.method.adapters[0](torch.from_numpy(GOLDEN["in_fwd_x"]))
    np.testing.assert_allclose(qkv.numpy(), GOLDEN["out_fwd_qkv_block0"], **VALUES)


@pytest.mark.parametrize("mode", ["official", "spec"])
def test_detector(mode: str) -> None:
    thresholds = float(GOLDEN["in_det_thr_mean"]), float(GOLDEN["in_det_thr_var"])
    window = LossWindow(int(GOLDEN["in_det_window"]), *thresholds, whole=mode == "spec")
    fires = []
    for step, loss in enumerate(GOLDEN["in_det_losses"].tolist()):
        fires.append(window.add(loss, ready=True))
        np.testing.assert_allclose(
            [window.mean, window.variance], [GOLDEN["out_det_mean"][step], GOLDEN["out_det_var"][step]], **VALUES
        )
    assert fires == GOLDEN[f"out_det_fires_{mode}"].astype(bool).tolist()
    assert 0 < sum(fires) < len(fires)


def run(monkeypatch: pytest.MonkeyPatch, reference: bool, steps: int) -> tuple[Engine, list[dict[str, Any]]]:
    """The file's stream, with consolidations where the file has them, and what each step showed."""
    engine = build(reference=reference)
    zeros = np.zeros_like(GOLDEN["in_init_Anew"].swapaxes(1, 2))
    put_pair(engine, GOLDEN["in_init_Anew"], zeros)
    put_head(engine.net, GOLDEN["in_init_head_W"], GOLDEN["in_init_head_b"])
    monkeypatch.setattr(LossWindow, "add", lambda window, loss, ready: engine.progress.step in FIRES)
    shown: list[dict[str, Any]] = []
    latest = note_batch_losses(engine)
    for step in range(steps):
        outcome = engine.learn(StreamBatch(images(GOLDEN["in_stream_x"][step]), GOLDEN["in_stream_y"][step]))
        kept = engine.memories.replay.images[: len(engine.memories.replay)].view(-1, SIZE, TOKENS, WIDTH).numpy()
        ids = [int(np.flatnonzero((GOLDEN["in_stream_x"] == entry).all(axis=(1, 2, 3)))[0]) for entry in kept]
        penalty = outcome.table.get("penalty/online_lora", torch.zeros(1)).item()
        shown.append({"L": latest[-1], "H": ids + [-1] * (HARD - len(ids)), "penalty": penalty, "table": outcome.table})
    return engine, shown


@pytest.mark.parametrize("reference", [False, True])
def test_run(monkeypatch: pytest.MonkeyPatch, reference: bool) -> None:
    """Without the program's faults the steps are the same up to the one after the first folding, which changes no output."""
    steps = STEPS if reference else FIRES[0] + 2
    engine, shown = run(monkeypatch, reference, steps)
    np.testing.assert_allclose([sum(step["L"]) for step in shown], GOLDEN["out_step_L"][:steps], **VALUES)
    np.testing.assert_allclose([step["L"][0] for step in shown], GOLDEN["out_step_L_cur"][:steps], **VALUES)
    summed = [(step["table"]["ce/new"] + step["table"].get("ce/hard", 0)).item() for step in shown]
    np.testing.assert_allclose(summed, GOLDEN["out_step_L"][:steps], **VALUES)
    assert [step["H"] for step in shown] == GOLDEN["out_step_H_ids"][:steps].tolist()
    if not reference:
        return
    np.testing.assert_allclose([step["penalty"] for step in shown], GOLDEN["out_step_penalty_official"], **GRADIENTS)
    method = engine.method
    for names, vector in ((("A", "B"), method.frozen), (("Anew", "Bnew"), method.of_adapters(torch.detach))):
        for name, value in zip(names, in_file_shape(engine, vector), strict=True):
            np.testing.assert_allclose(value, GOLDEN[f"out_final_{name}_official"], **GRADIENTS)
    head = engine.net.classifier
    np.testing.assert_allclose(head.weight[0].T.detach().numpy(), GOLDEN["out_final_head_W_official"], **GRADIENTS)
    np.testing.assert_allclose(head.bias[0, 0].detach().numpy(), GOLDEN["out_final_head_b_official"], **GRADIENTS)


def batch_of(x: Any) -> Batch:
    """A step whose block `hard` are these images."""
    n = len(x)
    blocks = {"new": Block(0, 0, 1, 0, ()), "hard": Block(0, n, 1, 0, ())}
    return Batch(images(x), np.zeros(n, np.int64), np.arange(n), blocks, Progress(), CLASSES, seed=0)


def test_penalty() -> None:
    engine = build()
    put_pair(engine, GOLDEN["in_pen_Anew"], GOLDEN["in_pen_Bnew"])
    method = engine.method
    method.importance, method.consolidated = from_file_shape(engine, GOLDEN["in_pen_omega_A"], GOLDEN["in_pen_omega_B"]), 1
    x = images(GOLDEN["in_fwd_x"])
    batch = Batch(
        x, np.zeros(len(x), np.int64), np.arange(len(x)), {"new": Block(0, len(x), 1, len(x), ())}, Progress(), CLASSES, seed=0
    )
    row = method.losses(engine.net(x), batch)["penalty/online_lora"]
    np.testing.assert_allclose(row.item(), GOLDEN["out_penalty"], **VALUES)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("case", ["c1", "c2"])
def test_consolidation(case: str, reference: bool) -> None:
    engine, mode = with_pairs(f"in_{case}", reference), "official" if reference else "spec"
    method, x = engine.method, GOLDEN[f"in_{case}_H_x"]
    method.sizes, method.consolidated = [x.shape[1]] * len(x), int(GOLDEN[f"in_{case}_k"]) - 1
    method.importance = from_file_shape(engine, GOLDEN[f"in_{case}_omega_prev_A"], GOLDEN[f"in_{case}_omega_prev_B"])
    batch = batch_of(x.reshape(-1, *x.shape[2:]))
    for name, value in zip("AB", in_file_shape(engine, method.squared_gradients(batch)), strict=True):
        np.testing.assert_allclose(value, GOLDEN[f"out_{case}_G_{name}_{mode}"], **GRADIENTS)
    np.testing.assert_allclose(logits(engine, GOLDEN["in_probe_x"]), GOLDEN[f"out_{case}_probe_logits_before"], **VALUES)
    with torch.no_grad():
        method.consolidate(batch)
    for name, value in zip("AB", in_file_shape(engine, method.importance), strict=True):
        np.testing.assert_allclose(value, GOLDEN[f"out_{case}_omega_{name}_{mode}"], **GRADIENTS)
    after = GOLDEN[f"out_{case}_probe_logits_after_official" if reference else f"out_{case}_probe_logits_before"]
    np.testing.assert_allclose(logits(engine, GOLDEN["in_probe_x"]), after, **VALUES)
    if reference:
        for name, value in zip("AB", in_file_shape(engine, method.frozen), strict=True):
            np.testing.assert_allclose(value, GOLDEN[f"out_{case}_{name}_after_official"], **GRADIENTS)
        assert not method.of_adapters(lambda factor: factor).any()
