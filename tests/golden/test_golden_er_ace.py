"""ER-ACE against numbers that its authors' program computed: the cosine head, the masked loss and its gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import Batch, Block, Progress, Taps
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.er_ace import ERACE
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = np.load(Path(__file__).with_name("er_ace.npz"))
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}


class Given(Backbone):
    """Features that are the images themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.width = 1, width

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).unsqueeze(0)


def test_cosine_head() -> None:
    weight = torch.from_numpy(GOLDEN["head_W"])
    net = TappedNet(Given(weight.shape[1]), len(weight), Images((1, 1, 1), (0.0,), (1.0,))).double()
    ERACE(head="cosine").attach(net, Memories(0, Images((1, 1, weight.shape[1]))))
    with torch.no_grad():
        net.classifier.weight[0] = weight.T
    logits = net(torch.from_numpy(GOLDEN["head_f"])).logits[0]
    np.testing.assert_allclose(logits.detach().numpy(), GOLDEN["head_logits"], **TOLERANCE)


@pytest.mark.parametrize("case", ["ace", "ace_unseen"])
def test_masked_loss_and_gradient(case: str) -> None:
    labels = GOLDEN[f"{case}_y"]
    logits = torch.from_numpy(GOLDEN["ace_z"]).unsqueeze(0).requires_grad_()
    n, classes = logits.shape[1:]
    seen = range(classes) if case == "ace" else GOLDEN["ace_unseen_seen"]
    progress = Progress(seen=tuple(int(label) for label in seen))
    batch = Batch(torch.zeros(n), labels, np.arange(n), {"new": Block(0, n, 1, n, ())}, progress, classes, seed=0)
    table = ERACE(keep_unseen=case == "ace_unseen").losses(Taps(logits, logits, torch.nn.Identity()), batch)
    table["ce/new"].sum().backward()
    np.testing.assert_allclose(table["ce/new"].item(), GOLDEN[f"{case}_loss"], **TOLERANCE)
    np.testing.assert_allclose(logits.grad[0].numpy(), GOLDEN[f"{case}_grad"], **TOLERANCE)
