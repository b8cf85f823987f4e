"""PCR against numbers that its authors' program computed: loss, gradients, and the weights after one step of the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gracecl.core import Batch, Block, Plan, Progress, apart
from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.pcr import PCR
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = np.load(Path(__file__).with_name("pcr.npz"))
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}


class Encoder(Backbone):
    """The program's stand-in encoder, tanh(W x + b); keeps its features so that their gradient can be looked at."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.layers, self.width = 1, width
        self.linear = nn.Linear(inputs, width)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.linear(x))
        features.retain_grad()
        self.kept.append(features)
        return features.unsqueeze(0)


def build() -> tuple[Engine, Encoder]:
    classes = len(GOLDEN["W"])
    width, inputs = GOLDEN["enc_W"].shape
    backbone = Encoder(inputs, width)
    net = TappedNet(backbone, classes, Images((1, 1, 1), (0.0,), (1.0,)))
    method = PCR(temperature=float(GOLDEN["tau"]))
    engine = Engine(method, net, Memories(0, Images((1, 1, inputs))), optimizer=f"sgd(lr={float(GOLDEN['lr'])})")
    net.double()
    with torch.no_grad():
        net.classifier.weight[0] = torch.from_numpy(GOLDEN["W"]).T
        backbone.linear.weight.copy_(torch.from_numpy(GOLDEN["enc_W"]))
        backbone.linear.bias.copy_(torch.from_numpy(GOLDEN["enc_b"]))
    return engine, backbone


def batch() -> Batch:
    """Memory's two views, then the stream's, as a plan of ours has them."""
    r, b = len(GOLDEN["v"]), len(GOLDEN["y"])
    x = torch.from_numpy(np.concatenate([GOLDEN[name] for name in ("u", "u_aug", "x", "x_aug")]))
    labels = np.concatenate([np.tile(GOLDEN["v"], 2), np.tile(GOLDEN["y"], 2)])
    np.testing.assert_array_equal(labels, GOLDEN["l"])
    blocks = {"replay": Block(0, r, 2, 0, (0,)), "new": Block(2 * r, b, 2, b, (0,))}
    return Batch(
        x, labels, np.arange(len(labels)), blocks, Progress(step=1), len(GOLDEN["W"]), seed=0, plan=Plan({}, apart(blocks))
    )


def test_one_step() -> None:
    engine, backbone = build()
    table = engine.update(batch())
    assert {row for row in table if not row.startswith("log/")} == {"ce/proxy"}
    np.testing.assert_allclose(table["ce/proxy"].item(), GOLDEN["L"], **TOLERANCE)
    assert len(backbone.kept) == 2, "memory and stream have a forward each"
    features = torch.cat([part.detach() for part in backbone.kept])
    gradients = torch.cat([part.grad for part in backbone.kept])
    np.testing.assert_allclose(features.numpy(), GOLDEN["F"], **TOLERANCE)
    np.testing.assert_allclose(gradients.numpy(), GOLDEN["grad_F"], **TOLERANCE)
    proxies = engine.net.classifier.weight
    np.testing.assert_allclose(proxies.grad[0].T.numpy(), GOLDEN["grad_W"], **TOLERANCE)
    absent = np.setdiff1d(np.arange(len(GOLDEN["W"])), GOLDEN["l"])
    assert len(absent)
    assert (proxies.grad[0].T[absent] == 0).all()
    np.testing.assert_allclose(proxies[0].T.detach().numpy(), GOLDEN["W_after"], **TOLERANCE)
    np.testing.assert_allclose(backbone.linear.weight.detach().numpy(), GOLDEN["enc_W_after"], **TOLERANCE)
    np.testing.assert_allclose(backbone.linear.bias.detach().numpy(), GOLDEN["enc_b_after"], **TOLERANCE)
