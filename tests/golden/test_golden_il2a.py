"""IL2A against numbers that its authors' program computed: mixes, statistics, losses and gradients of a step of a later task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor, nn

from gracecl.core import Batch, Block, Progress
from gracecl.engine.engine import Engine
from gracecl.functional.losses import cross_entropy
from gracecl.images.augment import central_shares, pair_number
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.il2a import IL2A
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = load("il2a")
OLD, NEW = int(GOLDEN["in_C_old"]), int(GOLDEN["in_C_new"])
SEEN = OLD + NEW
SHAPE = (GOLDEN["in_x"].shape[1], 1, 1)
VALUE, GRADIENT = 1e-9, 1e-8


class Tanh(Backbone):
    """The file's backbone, tanh(W x + b)."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        weight = torch.from_numpy(GOLDEN[f"{prefix}W"])
        self.layers, self.width = 1, len(weight)
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        self.linear.load_state_dict({"weight": weight, "bias": torch.from_numpy(GOLDEN[f"{prefix}b"])})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.flatten(1))).unsqueeze(0)


class Recorded:
    """A generator that gives the draws of the file, in its order."""

    def __init__(self) -> None:
        self._orders, self._used = iter(GOLDEN["in_perms"]), 0

    def permutation(self, n: int) -> Any:
        order = next(self._orders)
        assert len(order) == n
        return order

    def beta(self, a: float, b: float, n: int) -> Any:
        assert a == b == 20
        self._used += n
        return GOLDEN["in_beta_draws"][self._used - n : self._used]

    def integers(self, low: int, high: int, n: int) -> Any:
        """Places among the old classes, which are remembered by rising number here."""
        assert (low, high, n) == (0, OLD, len(GOLDEN["in_proto_class"]))
        return GOLDEN["in_proto_class"]


def engine(memory: int = 0) -> Engine:
    """In the later task, with the file's weights, and its statistics of the old classes."""
    net = TappedNet(Tanh("in_body_"), SEEN, embedding=1).double()
    method = IL2A(
        mixed_classes=NEW,
        mix_times=len(GOLDEN["in_perms"]),
        temperature=float(GOLDEN["in_temp"]),
        spread=float(GOLDEN["in_gamma"]),
        semantic_weight=float(GOLDEN["in_w_sem"]),
        kd_weight=float(GOLDEN["in_w_kd"]),
        n_prototypes=len(GOLDEN["in_proto_class"]),
    )
    made = Engine(method, net, Memories(memory, Images(SHAPE)), optimizer="sgd(lr=0.0)", augmentation="none")
    weight, bias = torch.from_numpy(GOLDEN["in_head_W"]).T[None], torch.from_numpy(GOLDEN["in_head_b"])[None, None]
    with torch.no_grad():
        for head, columns in ((net.classifier, slice(0, SEEN)), (method.pairs, slice(SEEN, None))):
            head.weight.copy_(weight[..., columns])
            head.bias.copy_(bias[..., columns])
    return made


def in_later_task() -> tuple[Engine, IL2A]:
    made = engine()
    method = made.method
    assert isinstance(method, IL2A)
    method.teacher.renew()
    assert method.teacher.copy is not None
    method.teacher.copy.backbone = Tanh("in_teacher_body_").requires_grad_(False)
    for label in range(OLD):
        method.remember(label, torch.from_numpy(GOLDEN["in_mu"][label])[None], root(GOLDEN["in_Sigma"][label])[None])
    return made, method


def root(covariance: Any) -> Tensor:
    """R with RᵀR = Σ."""
    values, vectors = np.linalg.eigh(covariance)
    return torch.from_numpy((vectors * np.sqrt(values.clip(min=0))).T.copy())


def step_batch() -> Batch:
    y = GOLDEN["in_y"]
    progress = Progress(7, 1, False, tuple(range(SEEN)), tuple(range(OLD, SEEN)))
    x = torch.from_numpy(GOLDEN["in_x"]).view(-1, *SHAPE)
    batch = Batch(x, y, np.arange(len(y)), {"new": Block(0, len(y), 1, len(y), (0,))}, progress, SEEN, seed=0)
    recorded = Recorded()
    batch.rng = lambda purpose: recorded  # type: ignore[assignment,return-value]
    return batch


def close(value: Any, golden: Any, tolerance: float = VALUE) -> None:
    found = value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)
    assert found.shape == golden.shape
    np.testing.assert_allclose(found, golden, rtol=0, atol=tolerance * max(1.0, float(np.abs(golden).max())))


def test_shares_and_pairs() -> None:
    close(central_shares(len(GOLDEN["out_mix_l"]), 20.0, Recorded()), GOLDEN["out_mix_l"])  # type: ignore[arg-type]
    for field, classes, first in (("out_pair_label", NEW, SEEN), ("out_pair_label_task0", NEW + 2, NEW + 2)):
        a, b = np.mgrid[:classes, :classes]
        labels = np.where(a == b, -1, first + pair_number(a, b, classes))
        np.testing.assert_array_equal(labels, GOLDEN[field])


def test_class_augmentation() -> None:
    _, method = in_later_task()
    batch = step_batch()
    method.prepare(batch)
    np.testing.assert_array_equal(batch.labels, GOLDEN["out_Y"])
    np.testing.assert_array_equal(batch.y.numpy(), GOLDEN["out_Y"])
    close(batch.x.flatten(1), GOLDEN["out_X"])


def test_statistics() -> None:
    """Of images in memory, when their task ends."""
    made = engine(memory=len(GOLDEN["in_stat_y"]))
    memory, method = made.memories.replay, made.method
    assert isinstance(method, IL2A)
    memory.images = torch.zeros(memory.capacity, *SHAPE, dtype=torch.float64)
    memory.add(np.random.default_rng(0), torch.from_numpy(GOLDEN["in_stat_x"]).view(-1, *SHAPE), GOLDEN["in_stat_y"], 0)
    method.end_task(made.memories, Progress(5, 0, False, tuple(range(OLD)), tuple(range(OLD))))
    close(method.means[0, :OLD], GOLDEN["out_stat_mu"])
    factors = method.factors[0, :OLD]
    close(factors.transpose(1, 2) @ factors, GOLDEN["out_stat_Sigma"])


def test_a_whole_step() -> None:
    """Losses, and the gradients that the engine's own update leaves."""
    made, method = in_later_task()
    table = made.update(step_batch())
    table = {row: value for row, value in table.items() if not row.startswith("log/")}
    assert table.keys() == {"ce/all", "ce/semantic", "kd/features"}
    close(table["ce/all"][0], GOLDEN["out_L_cls"])
    close(table["ce/semantic"][0] / GOLDEN["in_w_sem"], GOLDEN["out_L_sem"])
    close(table["kd/features"][0] / GOLDEN["in_w_kd"], GOLDEN["out_L_kd"])
    close(sum(value[0] for value in table.values()), GOLDEN["out_loss"])
    body, heads = made.net.backbone.linear, (made.net.classifier, method.pairs)
    close(body.weight.grad, GOLDEN["out_grad_body_W"], GRADIENT)
    close(body.bias.grad, GOLDEN["out_grad_body_b"], GRADIENT)
    close(torch.cat([head.weight.grad[0] for head in heads], dim=1).T, GOLDEN["out_grad_head_W"], GRADIENT)
    close(torch.cat([head.bias.grad[0, 0] for head in heads]), GOLDEN["out_grad_head_b"], GRADIENT)


def test_semantic_logits() -> None:
    _, method = in_later_task()
    close(method.semantic_logits(torch.from_numpy(GOLDEN["in_proto_class"]))[0], GOLDEN["out_sem_logits"])


def test_a_class_is_given_the_covariance_of_another_only_if_asked_for() -> None:
    """The program's value comes out where its store is followed, two tasks of equal size, the newest first."""
    _, method = in_later_task()
    drawn = torch.from_numpy(GOLDEN["in_quirk_proto_class"])
    seen = torch.ones(SEEN, dtype=torch.bool)

    def loss() -> float:
        return cross_entropy(method.semantic_logits(drawn) / method.temperature, drawn, seen).item()

    official, stored = float(GOLDEN["out_quirk_L_sem_official"]), GOLDEN["in_quirk_store_labels"].tolist()
    assert loss() != pytest.approx(official, rel=1e-3)
    method.old = []
    for newest in (stored[OLD // 2 :], stored[: OLD // 2]):
        method.put_first(tuple(newest))
        method.old += newest
    assert method.covariance_of[method.old].tolist() == stored
    assert loss() == pytest.approx(official, rel=VALUE)
