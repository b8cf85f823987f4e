"""ER-AML against numbers that its authors' program computed: who may be paired, the contrast, its gradients, the triplet loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl import rng
from gracecl.core import Batch, Block, Progress, Taps
from gracecl.functional.losses import contrast
from gracecl.inputs import Images
from gracecl.memory import Memory
from gracecl.methods.er_aml import BASE_TEMPERATURE, ERAML, draw_pairs

GOLDEN = np.load(Path(__file__).with_name("er_aml.npz"))
TEMPERATURE = float(GOLDEN["aml_tau"])
VALID = np.flatnonzero(~GOLDEN["aml_invalid"])
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}


def test_pairs_come_from_exactly_the_valid_candidates() -> None:
    """Slots in the order of the stored memory, so that our numbers of pool entries are theirs; 2000 draws meet every candidate."""
    labels, held = GOLDEN["aml_y"], GOLDEN["aml_mem_y"]
    memory = Memory(len(held), Images((1, 1, 1)))
    memory.add(rng.generator("golden"), torch.zeros(len(held), 1, 1, 1, dtype=torch.uint8), held)
    met = {kind: np.zeros((len(labels), len(held) + len(labels)), bool) for kind in ("pos", "neg")}
    for number in range(2000):
        anchors, partners = draw_pairs(labels, memory, rng.generator("pairs", number))
        np.testing.assert_array_equal(anchors, VALID)
        for kind, drawn in zip(("pos", "neg"), np.split(partners, 2), strict=True):
            met[kind][anchors, drawn] = True
    for kind in ("pos", "neg"):
        np.testing.assert_array_equal(met[kind][VALID], GOLDEN[f"aml_valid_{kind}"][VALID])


def encoded() -> tuple[Tensor, Taps, Batch]:
    """Anchors, then the positives and negatives that the program drew, through its encoder tanh(x W)."""
    weight = torch.from_numpy(GOLDEN["aml_W"]).requires_grad_()
    pool = np.concatenate([GOLDEN["aml_mem_x"], GOLDEN["aml_x"]])
    pool_labels = np.concatenate([GOLDEN["aml_mem_y"], GOLDEN["aml_y"]])
    partners = np.concatenate([GOLDEN["aml_pos"][VALID], GOLDEN["aml_neg"][VALID]])
    x = torch.from_numpy(np.concatenate([GOLDEN["aml_x"][VALID], pool[partners]]))
    labels = np.concatenate([GOLDEN["aml_y"][VALID], pool_labels[partners]])
    n = len(VALID)
    blocks = {"anchors": Block(0, n, 1, n, ()), "pairs": Block(n, 2 * n, 1, 0, ())}
    batch = Batch(x, labels, np.arange(3 * n), blocks, Progress(), int(pool_labels.max()) + 1, seed=0)
    features = torch.tanh(x @ weight).unsqueeze(0)
    return weight, Taps(features, features, torch.nn.Identity()), batch


def test_contrast_and_the_encoder_s_gradient() -> None:
    weight, out, batch = encoded()
    np.testing.assert_array_equal(batch.labels[len(VALID) :], GOLDEN["aml_v"])
    table = ERAML(temperature=TEMPERATURE).losses(out, batch)
    assert set(table) == {"sc"}
    table["sc"].sum().backward()
    np.testing.assert_allclose(table["sc"].item(), GOLDEN["aml_loss"], **TOLERANCE)
    np.testing.assert_allclose(weight.grad.numpy(), GOLDEN["aml_grad_W"], **TOLERANCE)


def test_gradients_at_the_unit_vectors() -> None:
    h, others = (torch.from_numpy(GOLDEN[f"aml_{name}"]).unsqueeze(0).requires_grad_() for name in ("h", "V"))
    y, others_y = (torch.from_numpy(GOLDEN[f"aml_{name}"]) for name in ("yk", "v"))
    (TEMPERATURE / BASE_TEMPERATURE * contrast(h, y, others, others_y, TEMPERATURE)).sum().backward()
    np.testing.assert_allclose(h.grad[0].numpy(), GOLDEN["aml_grad_h"], **TOLERANCE)
    np.testing.assert_allclose(others.grad[0].numpy(), GOLDEN["aml_grad_V"], **TOLERANCE)


@pytest.mark.parametrize("order", ["as drawn", "stream images first"])
def test_triplet(order: str) -> None:
    """Also where a block has its partners in another order, as a plan that draws from stream and memory does."""
    _, out, batch = encoded()
    method = ERAML(metric="triplet")
    n = len(VALID)
    shuffle = torch.arange(2 * n) if order == "as drawn" else torch.arange(2 * n).flip(0)
    rows = torch.cat([torch.arange(n), n + shuffle])
    batch.blocks["pairs"].found["place"] = torch.argsort(shuffle)
    value = method.losses(out[rows], batch)["sc"]
    np.testing.assert_allclose(value.item(), GOLDEN["aml_triplet_loss"], **TOLERANCE)
