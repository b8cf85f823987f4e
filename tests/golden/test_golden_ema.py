"""EMA against numbers that the authors' program computed: each update's momentum and the shadow after it, BatchNorm included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import load

from gracecl import nets
from gracecl.core import Batch, Block, Progress
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.ema import EMA
from gracecl.methods.sgd import SGD
from gracecl.nets.tapped import TappedNet

GOLDEN = load("ema")
SIZES = GOLDEN["entry_sizes"].tolist()
HIDDEN, CLASSES = SIZES[1], SIZES[7]
SHAPE = (1, 1, SIZES[0] // HIDDEN)
ENTRIES = (
    "backbone.hidden.0.weight",
    "backbone.hidden.0.bias",
    "backbone.norms.0.weight",
    "backbone.norms.0.bias",
    "backbone.norms.0.running_mean",
    "backbone.norms.0.running_var",
    "classifier.weight",
    "classifier.bias",
)
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def write(net: TappedNet, state: np.ndarray) -> None:
    """Puts a flat state of the program's net into ours."""
    ours = net.state_dict()
    for name, part in zip(ENTRIES, np.split(state, np.cumsum(SIZES)[:-1]), strict=True):
        value = torch.from_numpy(part.copy())
        ours[name].copy_(value.view(CLASSES, HIDDEN).T[None] if name == "classifier.weight" else value.view(ours[name].shape))


def read(net: TappedNet) -> np.ndarray:
    state = net.state_dict()
    parts = [state[name][0].T if name == "classifier.weight" else state[name] for name in ENTRIES]
    return np.concatenate([part.numpy().ravel() for part in parts])


def build(method: EMA) -> tuple[EMA, TappedNet]:
    net = nets.build(f"mlp(width={HIDDEN}, depth=1, norm=True)", Images(SHAPE, (0.0,), (1.0,)), CLASSES, taps=1)
    write(net, GOLDEN["model_0"])
    method.attach(net, Memories(0, Images(SHAPE)))
    return method, net


def step(method: EMA, net: TappedNet, number: int, task: int) -> None:
    """What the engine does after an optimizer step that led to the program's weights."""
    write(net, GOLDEN["model"][number])
    net.backbone.norms[0].num_batches_tracked.fill_(number + 1)
    batch = Batch(torch.zeros(1, *SHAPE), np.zeros(1, np.int64), np.zeros(1, np.int64), {"all": Block(0, 1, 1, 1, ())},
                  Progress(number, task), CLASSES, seed=0)  # fmt: skip
    net.eval()
    with torch.no_grad():
        method.after_step(net(batch.x), batch)


@pytest.mark.parametrize("warm_up", ["given", "first task"])
def test_shadow_after_each_step(warm_up: str) -> None:
    length = int(GOLDEN["S"])
    method, net = build(EMA(SGD(), warm_up=length if warm_up == "given" else None))
    np.testing.assert_array_equal(read(method.shadow), GOLDEN["shadow_0"])
    for number in range(len(GOLDEN["model"])):
        task = int(number >= length)
        if number == length:
            method.end_task(Memories(0, Images(SHAPE)), Progress(number, 0))
        np.testing.assert_allclose(method.momentum_now(Progress(number, task)), GOLDEN["mu"][number], **DOUBLE)
        step(method, net, number, task)
        np.testing.assert_allclose(read(method.shadow), GOLDEN["shadow"][number], **DOUBLE)
        assert method.shadow.backbone.norms[0].num_batches_tracked == number + 1
