"""SS-IL against numbers that its authors' program computed: logits, losses and gradients of one step of the engine."""

from __future__ import annotations

import numpy as np
import torch
from small import load
from torch import Tensor, nn

from gracecl.core import Batch, Block, Progress
from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.ssil import SSIL
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = load("ssil")
BOUNDS = GOLDEN["in_bounds"].tolist()
CLASSES, WIDTH = GOLDEN["in_head_W"].shape
INPUTS = GOLDEN["in_x"].shape[1]
SHAPE = (1, 1, INPUTS)
VALUES, GRADIENTS = ({"rtol": tol, "atol": tol} for tol in (1e-9, 1e-8))


class Encoder(Backbone):
    """The file's net, tanh(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.width = 1, WIDTH
        self.linear = nn.Linear(INPUTS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.flatten(1))).unsqueeze(0)


def put(net: TappedNet, prefix: str) -> None:
    """Gives a net the file's weights."""
    with torch.no_grad():
        net.backbone.linear.weight.copy_(torch.from_numpy(GOLDEN[f"{prefix}body_W"]))
        net.backbone.linear.bias.copy_(torch.from_numpy(GOLDEN[f"{prefix}body_b"]))
        net.classifier.weight[0] = torch.from_numpy(GOLDEN[f"{prefix}head_W"]).T
        net.classifier.bias[0, 0] = torch.from_numpy(GOLDEN[f"{prefix}head_b"])


def progress(task: int) -> Progress:
    return Progress(1, task, seen=tuple(range(BOUNDS[task + 1])), current=tuple(range(BOUNDS[task], BOUNDS[task + 1])))


def learner(task: int) -> tuple[Engine, SSIL]:
    """In a task, after those before it: the teacher has the file's weights."""
    net = TappedNet(Encoder(), CLASSES, Images((1, 1, 1), (0.0,), (1.0,)), embedding=1).double()
    method = SSIL(temperature=float(GOLDEN["in_T"]))
    engine = Engine(method, net, Memories(0, Images(SHAPE)), optimizer="sgd(lr=0)")
    put(net, "in_teacher_")
    for earlier in range(task):
        method.end_task(engine.memories, progress(earlier))
    put(net, "in_")
    return engine, method


def batch(task: int, labels: np.ndarray, replayed: bool) -> Batch:
    n, m = len(GOLDEN["in_x"]), len(GOLDEN["in_u"]) if replayed else 0
    blocks = {"new": Block(0, n, 1, n, ())} | ({"replay": Block(n, m, 1, 0, ())} if m else {})
    x = torch.from_numpy(np.concatenate([GOLDEN["in_x"], GOLDEN["in_u"][:m]])).view(-1, *SHAPE)
    return Batch(x, labels, np.arange(n + m), blocks, progress(task), CLASSES, seed=0)


def test_step() -> None:
    engine, method = learner(len(BOUNDS) - 2)
    step = batch(len(BOUNDS) - 2, np.concatenate([GOLDEN["in_y"], GOLDEN["in_v"]]), replayed=True)
    with torch.no_grad():
        np.testing.assert_allclose(engine.net(step.x).logits[0].numpy(), GOLDEN["out_logits"], **VALUES)
        method.prepare(step)
        np.testing.assert_allclose(step.targets["ssil"][0].numpy(), GOLDEN["out_teacher_logits"], **VALUES)
    table = engine.update(step)
    table = {row: value.item() for row, value in table.items() if not row.startswith("log/")}
    assert table.keys() == {"ce/new", "ce/replay", "kd/tasks"}
    np.testing.assert_allclose(len(step) * table["ce/new"], GOLDEN["out_L_new"], **VALUES)
    np.testing.assert_allclose(len(step) * table["ce/replay"], GOLDEN["out_L_old"], **VALUES)
    np.testing.assert_allclose(table["ce/new"] + table["ce/replay"], GOLDEN["out_L_ce"], **VALUES)
    np.testing.assert_allclose(table["kd/tasks"], GOLDEN["out_L_tkd"], **VALUES)
    np.testing.assert_allclose(sum(table.values()), GOLDEN["out_loss"], **VALUES)
    body, head = engine.net.backbone.linear, engine.net.classifier
    np.testing.assert_allclose(body.weight.grad.numpy(), GOLDEN["out_grad_body_W"], **GRADIENTS)
    np.testing.assert_allclose(body.bias.grad.numpy(), GOLDEN["out_grad_body_b"], **GRADIENTS)
    np.testing.assert_allclose(head.weight.grad[0].T.numpy(), GOLDEN["out_grad_head_W"], **GRADIENTS)
    np.testing.assert_allclose(head.bias.grad[0, 0].numpy(), GOLDEN["out_grad_head_b"], **GRADIENTS)
    assert not head.weight.grad[0, :, BOUNDS[-1] :].any(), "classes that never came are touched"


def test_first_task() -> None:
    engine, _ = learner(0)
    table = engine.update(batch(0, GOLDEN["in_y_task0"], replayed=False))
    assert {row for row in table if not row.startswith("log/")} == {"ce/new"}
    np.testing.assert_allclose(table["ce/new"].item(), GOLDEN["out_L_task0"], **VALUES)
