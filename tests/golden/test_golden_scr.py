"""SCR against numbers that its authors' program computed: the contrast and its gradient, nearest-mean predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import Batch, Block, Progress, Taps
from gracecl.functional.losses import contrast
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.scr import SCR
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = np.load(Path(__file__).with_name("scr.npz"))
IDENTITY = Images((1, 1, 1), (0.0,), (1 / 255,))


class Given(Backbone):
    """Features that are the images themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.width = 1, width

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).unsqueeze(0)


def views(values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """N × 2 × d as our rows: all first views, then all second ones."""
    return torch.from_numpy(np.concatenate([values[:, 0], values[:, 1]])).to(dtype).unsqueeze(0)


def loss(method: SCR, raw: np.ndarray, labels: np.ndarray, dtype: torch.dtype = torch.float32) -> float:
    n = len(labels)
    blocks = {"raw": Block(0, n, 1, n, (0,)), "augmented": Block(n, n, 1, n, ())}
    features = views(raw, dtype)
    batch = Batch(torch.zeros(2 * n), np.tile(labels, 2), np.arange(2 * n), blocks, Progress(), int(labels.max()) + 1, seed=0)
    table = method.losses(Taps(features, features, torch.nn.Identity()), batch)
    assert set(table) == {"ce/contrast"}
    return table["ce/contrast"].item()


@pytest.mark.parametrize("case", range(3))
def test_contrast(case: int) -> None:
    method = SCR(temperature=float(GOLDEN["taus"][case]), projector="none")
    assert loss(method, GOLDEN["raw"], GOLDEN["y"]) == pytest.approx(float(GOLDEN["loss"][case]), abs=3e-5)
    precise = loss(method, GOLDEN["raw"], GOLDEN["y"], torch.float64)
    assert precise == pytest.approx(float(GOLDEN["loss_f64"][case]), rel=1e-10)


@pytest.mark.parametrize("case", range(3))
def test_gradient_at_the_unit_vectors(case: int) -> None:
    z, y = views(GOLDEN["z"]).requires_grad_(), torch.from_numpy(np.tile(GOLDEN["y"], 2))
    contrast(z, y, z, y, float(GOLDEN["taus"][case]), exclude_self=True).sum().backward()
    golden = views(GOLDEN["grad_z"][case])
    np.testing.assert_allclose(z.grad.numpy(), golden.numpy(), rtol=0, atol=5e-5 * float(golden.abs().max()))


def test_distinct_labels_and_a_single_image() -> None:
    method = SCR(temperature=0.1, projector="none")
    n = len(GOLDEN["y"])
    assert loss(method, GOLDEN["raw"], np.arange(n)) == pytest.approx(float(GOLDEN["loss_all_distinct"]), abs=3e-5)
    assert loss(method, GOLDEN["raw"][:1], GOLDEN["y"][:1]) == float(GOLDEN["loss_single_image"]) == 0


def test_nearest_mean_predictions() -> None:
    held, labels = GOLDEN["ncm_buffer_features"], GOLDEN["ncm_buffer_y"]
    classes, width = int(labels.max()) + 1, held.shape[1]
    net = TappedNet(Given(width), classes, IDENTITY)
    memories = Memories(len(held), Images((1, 1, width)))
    method = SCR()
    method.attach(net, memories)
    # The stored features stand for images; they are no bytes, so they are put where the memory keeps its own.
    memory = memories.replay
    memory.images, memory.labels, memory.filled = torch.from_numpy(held).view(-1, 1, 1, width), labels, len(labels)
    method.before_eval(net, memories, Progress(seen=tuple(range(classes))))
    [(_, out)] = net.sweep(torch.from_numpy(GOLDEN["ncm_features"]).view(-1, 1, 1, width))
    np.testing.assert_array_equal(method.rules(out)["ncm"][0].argmax(dim=1).numpy(), GOLDEN["ncm_pred"])
