"""Co2L against numbers that its authors' program computed: projections, both losses, their gradients, the relations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor, nn

from gracecl.core import Batch, Block, Progress, total
from gracecl.engine.engine import Engine
from gracecl.functional.losses import asymmetric_contrast, contrast_of_each, log_relations
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.co2l import HIDDEN, Co2L, projected
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = load("co2l")
N, INPUTS = GOLDEN["in_x_view1"].shape
SHAPE = (INPUTS, 1, 1)
VALUES, GRADIENTS = {"rtol": 1e-9, "atol": 1e-9}, {"rtol": 1e-8, "atol": 1e-8}
PER_TASK = int(GOLDEN["in_classes_per_task"])
CURRENT = range(int(GOLDEN["in_task"]) * PER_TASK, (int(GOLDEN["in_task"]) + 1) * PER_TASK)
CLASSES = 1 + max(int(GOLDEN["in_y"].max()), int(GOLDEN["in_y_task0"].max()), CURRENT[-1])
TAU, BASE = float(GOLDEN["in_tau"]), float(GOLDEN["in_base_temperature"])


class Encoder(Backbone):
    """tanh(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.width = 1, len(GOLDEN["in_enc_b"])
        self.linear = nn.Linear(INPUTS, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.flatten(1))).unsqueeze(0)


def parts(net: TappedNet) -> dict[str, tuple[Tensor, Tensor]]:
    """The file's layers, each with its weights as [out, in] and its biases."""
    hidden, last, encoder = net.extras[HIDDEN], net.projector, net.backbone.linear
    return {
        "enc": (encoder.weight, encoder.bias),
        "proj1": (hidden.weight[0].T, hidden.bias[0, 0]),
        "proj2": (last.weight[0].T, last.bias[0, 0]),
    }


def gradients(net: TappedNet) -> dict[str, tuple[Tensor, Tensor]]:
    hidden, last, encoder = net.extras[HIDDEN], net.projector, net.backbone.linear
    return {
        "enc": (encoder.weight.grad, encoder.bias.grad),
        "proj1": (hidden.weight.grad[0].T, hidden.bias.grad[0, 0]),
        "proj2": (last.weight.grad[0].T, last.bias.grad[0, 0]),
    }


def put(net: TappedNet, prefix: str) -> None:
    with torch.no_grad():
        for name, (weight, bias) in parts(net).items():
            weight.copy_(torch.from_numpy(GOLDEN[f"{prefix}{name}_W"]))
            bias.copy_(torch.from_numpy(GOLDEN[f"{prefix}{name}_b"]))


def build(with_teacher: bool, **options: Any) -> Engine:
    """A learner with the file's weights; its teacher was made when the net had the file's teacher's."""
    settings = {
        "temperature": TAU,
        "base_temperature": BASE,
        "distillation": float(GOLDEN["in_w_ird"]),
        "relation_temperature": float(GOLDEN["in_kappa"]),
        "teacher_temperature": float(GOLDEN["in_kappa_star"]),
    }
    method = Co2L(**settings | options)
    net = TappedNet(Encoder(), CLASSES, embedding=len(GOLDEN["in_proj2_b"]))
    engine = Engine(method, net, Memories(0, Images(SHAPE)))
    net.double()
    if with_teacher:
        put(net, "in_teacher_")
        method.end_task(engine.memories, Progress())
    put(net, "in_")
    return engine


def table(engine: Engine, y: Any, current: Any) -> tuple[Batch, Any]:
    """The real path from two views of the images to the losses."""
    views = np.concatenate([GOLDEN["in_x_view1"], GOLDEN["in_x_view2"]])
    progress = Progress(1, int(GOLDEN["in_task"]), seen=tuple(range(CLASSES)), current=tuple(current))
    blocks = {"all": Block(0, N, 2, N, ())}
    batch = Batch(torch.from_numpy(views).view(-1, *SHAPE), np.tile(y, 2), np.arange(2 * N), blocks, progress, CLASSES, seed=0)
    engine.update.prepare(batch)
    return batch, engine.chain.losses(engine.update.forward(batch), batch)


def test_projections() -> None:
    engine = build(with_teacher=True)
    batch, _ = table(engine, GOLDEN["in_y"], CURRENT)
    z = projected(engine.net, engine.net(batch.x).features)
    np.testing.assert_allclose(z[0].detach().numpy(), GOLDEN["out_z"], **VALUES)
    np.testing.assert_allclose(batch.targets["co2l"][0].numpy(), GOLDEN["out_z_teacher"], **VALUES)


def test_losses_and_gradients() -> None:
    engine = build(with_teacher=True)
    _, rows = table(engine, GOLDEN["in_y"], CURRENT)
    assert rows.keys() == {"ce/contrast", "kd/relations"}
    np.testing.assert_allclose(rows["ce/contrast"].item(), GOLDEN["out_L_con"], **VALUES)
    np.testing.assert_allclose(rows["kd/relations"].item(), GOLDEN["in_w_ird"] * GOLDEN["out_L_ird"], **VALUES)
    np.testing.assert_allclose(sum(row.item() for row in rows.values()), GOLDEN["out_loss"], **VALUES)
    total(rows).backward()
    for name, (weight, bias) in gradients(engine.net).items():
        np.testing.assert_allclose(weight.numpy(), GOLDEN[f"out_grad_{name}_W"], **GRADIENTS)
        np.testing.assert_allclose(bias.numpy(), GOLDEN[f"out_grad_{name}_b"], **GRADIENTS)


def test_contrast_of_each_image_and_its_gradient_at_the_vectors() -> None:
    z, y = torch.from_numpy(GOLDEN["out_z"])[None].requires_grad_(), torch.from_numpy(np.tile(GOLDEN["in_y"], 2))
    current = torch.isin(y, torch.tensor(list(CURRENT)))
    of_each, _ = contrast_of_each(z, y, z, y, TAU, exclude_self=True)
    of_images = (TAU / BASE * of_each * current).view(2, N).mean(dim=0)
    np.testing.assert_allclose(of_images.detach().numpy(), GOLDEN["out_L_con_per_image"], **VALUES)
    (TAU / BASE * asymmetric_contrast(z, y, current, TAU)).sum().backward()
    np.testing.assert_allclose(z.grad[0].numpy(), GOLDEN["out_dLcon_dz"], **GRADIENTS)


@pytest.mark.parametrize(("vectors", "temperature", "expected"), [("z", "kappa", "p"), ("z_teacher", "kappa_star", "q")])
def test_relations(vectors: str, temperature: str, expected: str) -> None:
    z = torch.from_numpy(GOLDEN[f"out_{vectors}"])[None]
    got = log_relations(z, float(GOLDEN[f"in_{temperature}"])).exp()
    np.testing.assert_allclose(got[0].numpy(), GOLDEN[f"out_{expected}"], **VALUES)


def test_first_task() -> None:
    _, rows = table(build(with_teacher=False), GOLDEN["in_y_task0"], range(CLASSES))
    assert rows.keys() == {"ce/contrast"}
    np.testing.assert_allclose(rows["ce/contrast"].item(), GOLDEN["out_loss_task0"], **VALUES)


def test_with_every_class_current_it_is_supervised_contrast() -> None:
    _, rows = table(build(with_teacher=False, base_temperature=TAU), GOLDEN["in_y"], range(CLASSES))
    np.testing.assert_allclose(rows["ce/contrast"].item(), GOLDEN["out_L_supcon_all_current_base_eq_tau"], **VALUES)


def test_with_no_class_current_there_is_no_contrast() -> None:
    _, rows = table(build(with_teacher=False), GOLDEN["in_y"], ())
    assert rows["ce/contrast"].item() == GOLDEN["out_L_con_no_current"] == 0
