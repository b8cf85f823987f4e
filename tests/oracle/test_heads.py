"""Heads that learn their scale, are imprinted and hold rows; taps before the last ReLU; what steps on them need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from common import noise
from torch import Tensor
from torch.nn import functional as F

from gracecl import nets, rng
from gracecl.core import NO_TASK, Plan, Planning, StreamBatch
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.functional.losses import cosine_distance
from gracecl.inputs import Images
from gracecl.memory import Memories, Memory
from gracecl.methods.base import Addition, Sum
from gracecl.methods.er import ER
from gracecl.nets.flat import FlatParameters
from gracecl.nets.heads import CosineHead, HeldRows
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.testing import assert_same, feed, toy_engine, toy_stream

LAYERS, WIDTH, CLASSES = 3, 5, 7


def marked(*classes: int) -> Tensor:
    return torch.tensor([c in classes for c in range(CLASSES)])


def cosine_head(learned: bool = True, scale: float = 4.0) -> CosineHead:
    head = CosineHead(StackedLinear(LAYERS, WIDTH, CLASSES).double(), scale, 1e-12, learned)
    with torch.no_grad():
        head.weight.copy_(noise(LAYERS, WIDTH, CLASSES, seed=1))
    return head


# Features.


def test_cosine_distance_is_the_loop() -> None:
    a, b = noise(LAYERS, 6, WIDTH), noise(LAYERS, 6, WIDTH, seed=1)
    for layer, value in enumerate(cosine_distance(a, b).tolist()):
        terms = []
        for u, v in zip(a[layer].tolist(), b[layer].tolist(), strict=True):
            product = sum(x * y for x, y in zip(u, v, strict=True))
            terms.append(1 - product / (math.hypot(*u) * math.hypot(*v)))
        assert value == pytest.approx(sum(terms) / len(terms), rel=1e-10)


def test_cosine_distance_at_its_ends() -> None:
    a = noise(LAYERS, 6, WIDTH)
    assert cosine_distance(a, 3 * a).abs().max() < 1e-12
    assert cosine_distance(a, -a).tolist() == pytest.approx([2] * LAYERS)
    assert cosine_distance(a.bfloat16(), a.bfloat16()).dtype == torch.float32


# The cosine head.


def test_logits_are_the_scale_times_cosines() -> None:
    head, x = cosine_head(), noise(LAYERS, 4, WIDTH)
    with torch.no_grad():
        head.scale.copy_(torch.tensor([2.0, -1.0, 0.5]).view(-1, 1, 1))
    logits = head(x)
    for layer, scale in enumerate([2.0, -1.0, 0.5]):
        expected = scale * F.normalize(x[layer], dim=1) @ F.normalize(head.weight[layer].T, dim=1).T
        torch.testing.assert_close(logits[layer], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(logits[layer], scale * head.cosine(x)[layer])
    torch.testing.assert_close(head(5 * x), logits)
    with torch.no_grad():
        head.weight *= torch.arange(1, CLASSES + 1)
    torch.testing.assert_close(head(x), logits)


def test_a_learned_scale_is_each_tap_s_own_parameter() -> None:
    head, x = cosine_head(), noise(LAYERS, 4, WIDTH)
    assert head.scale.shape == (LAYERS, 1, 1)
    assert head.scale.tolist() == [[[4.0]]] * LAYERS
    (head(x)[1] * noise(4, CLASSES, seed=3)).sum().backward()
    expected = (head.cosine(x)[1] * noise(4, CLASSES, seed=3)).sum()
    assert head.scale.grad[1].item() == pytest.approx(expected.item(), rel=1e-9)
    assert head.scale.grad[[0, 2]].tolist() == [[[0.0]], [[0.0]]]
    fixed = cosine_head(learned=False)
    assert dict(fixed.named_parameters()).keys() == {"weight"}
    torch.testing.assert_close(fixed(x), cosine_head()(x))


def test_a_learned_scale_counts_for_its_layer() -> None:
    """As weights that belong to one layer do, where penalties are made rows."""
    net = nets.build("mlp(width=5, depth=3)", Images((1, 2, 2), (0.5,), (0.25,)), CLASSES, taps=3)
    net.classifier = CosineHead(net.classifier, 1.0, 1e-12, learned=True)
    pieces = [piece for piece in FlatParameters(net, net.inputs).pieces if piece.parameter is net.classifier.scale]
    assert [(piece.part, piece.layer, piece.size, piece.head) for piece in pieces] == [(i, i, 1, True) for i in range(3)]


def test_imprinted_rows_point_along_their_directions_and_are_as_long_as_the_others() -> None:
    head = cosine_head()
    before = head.weight.detach().clone()
    directions = F.normalize(noise(LAYERS, CLASSES, WIDTH, seed=2), dim=-1) * marked(2, 5)[:, None]
    head.imprint(directions, like=marked(0, 1, 6))
    others = [0, 1, 3, 4, 6]
    assert torch.equal(head.weight[:, :, others], before[:, :, others])
    for layer in range(LAYERS):
        length = sum(before[layer, :, c].norm().item() for c in (0, 1, 6)) / 3
        for c in (2, 5):
            torch.testing.assert_close(head.weight[layer, :, c], length * directions[layer, c])


def test_a_row_without_direction_stays() -> None:
    head = cosine_head()
    before = head.weight.detach().clone()
    directions = torch.zeros(LAYERS, CLASSES, WIDTH).double()
    directions[0, 2, 3] = 1
    head.imprint(directions, like=marked(0))
    assert torch.equal(head.weight[1:], before[1:])
    assert not torch.equal(head.weight[0], before[0])


# Rows that stay.


@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.1, momentum=0.9, weight_decay=0.1)", "adam(lr=0.1, weight_decay=0.1)", "adamw(lr=0.1)"]
)
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_held_rows_stay_to_the_bit_and_others_move_as_ever(optimizer: str, kind: str) -> None:
    def trained(moving: Tensor | None) -> StackedLinear:
        with rng.torch_seed(0, "head"):
            head = StackedLinear(LAYERS, WIDTH, CLASSES).double()
        if kind == "cosine":
            head = CosineHead(head, 1.0, 1e-12, learned=True)
        held, steps = HeldRows(head), optim.build(optimizer, [(1.0, list(head.parameters()))])
        for step in range(4):
            steps.zero_grad()
            loss = (head.weight * noise(LAYERS, WIDTH, CLASSES, seed=step)).sum()
            if head.bias is not None:
                loss = loss + (head.bias * noise(LAYERS, 1, CLASSES, seed=step)).sum()
            loss.backward()
            held.remember()
            steps.step()
            if moving is not None:
                held.put_back(moving)
        return head

    with rng.torch_seed(0, "head"):
        start = StackedLinear(LAYERS, WIDTH, CLASSES).double()
    free, some = trained(None), trained(marked(1, 4))
    still = [0, 2, 3, 5, 6]
    assert torch.equal(some.weight[:, :, still], start.weight[:, :, still])
    assert torch.equal(some.weight[:, :, [1, 4]], free.weight[:, :, [1, 4]])
    assert not (free.weight == start.weight).any()
    if kind == "linear":
        assert torch.equal(some.bias[:, :, still], start.bias[:, :, still])
        assert torch.equal(some.bias[:, :, [1, 4]], free.bias[:, :, [1, 4]])


# Taps before the last ReLU.


def build(expression: str, taps: int) -> TappedNet:
    with rng.torch_seed(0, "net"):
        return nets.build(expression, Images((3, 16, 16)), CLASSES, taps)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("expression", ["resnet18(width=2)", "mlp(width=6, depth=4, norm=True)"])
def test_without_the_last_relu_features_may_be_negative(expression: str, taps: int) -> None:
    """Every tap's are, in training and with gradients everywhere; names of weights do not change."""
    net, plain = build(expression, taps), build(expression, taps)
    net.backbone.drop_last_relu()
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    signed, before = net(x).features, plain(x).features
    assert (before >= 0).all()
    assert (signed < 0).flatten(1).any(dim=1).all()
    assert net.state_dict().keys() == plain.state_dict().keys()
    signed.square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in net.backbone.parameters())


def test_only_what_a_tap_reads_changes() -> None:
    """The MLP's next layer still sees its rectified input: each tap, rectified, is what it was."""
    net, plain = build("mlp(width=6, depth=4)", 4), build("mlp(width=6, depth=4)", 4)
    net.backbone.drop_last_relu()
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net(x).features.relu(), plain(x).features)


def test_the_maps_of_a_residual_net_are_rectified_before_they_are_averaged_or_not_at_all() -> None:
    net = build("resnet18(width=2)", 1)
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    maps: list[Tensor] = []
    net.backbone.drop_last_relu()
    net.backbone.stages[-1].register_forward_hook(lambda module, inputs, output: maps.append(output.detach().clone()))
    net.eval()
    signed = net(x).features
    torch.testing.assert_close(signed[0], maps[0].mean(dim=(2, 3)))
    plain = build("resnet18(width=2)", 1).eval()
    torch.testing.assert_close(plain(x).features[0], maps[0].relu().mean(dim=(2, 3)))


def test_a_net_whose_taps_end_in_no_relu_stays() -> None:
    net = build("vit(patch=4, dim=8, depth=4, heads=2)", 2).eval()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = net(x).features
    net.backbone.drop_last_relu()
    assert torch.equal(net(x).features, before)
    assert (before < 0).any()


# A draw that gives every class the same chance.


def memory_of(labels: list[int]) -> Memory:
    memory = Memory(len(labels), Images((1, 1, 1)))
    memory.add(np.random.default_rng(0), torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), np.array(labels))
    return memory


def test_every_class_held_is_drawn_equally_often() -> None:
    """Whatever the memory's composition: a class of one image as often as one of thirty, and inside a class all alike."""
    memory = memory_of([4] * 30 + [2] * 3 + [0])
    drawn = memory.draw_by_class(30_000, np.random.default_rng(0))
    counts = np.bincount(memory.labels[drawn], minlength=5)
    assert counts[[1, 3]].tolist() == [0, 0]
    np.testing.assert_allclose(counts[[4, 2, 0]] / 30_000, 1 / 3, atol=0.01)
    np.testing.assert_allclose(np.bincount(drawn)[30:33] / 10_000, 1 / 3, atol=0.02)


def test_draw_by_class_of_nothing() -> None:
    assert len(memory_of([]).draw_by_class(5, np.random.default_rng(0))) == 0
    assert len(memory_of([1, 2]).draw_by_class(0, np.random.default_rng(0))) == 0
    assert len(memory_of([1]).draw_by_class(5, np.random.default_rng(0))) == 5


def test_a_class_that_left_the_memory_is_not_drawn() -> None:
    memory = memory_of([0, 1])
    memory.put(np.array([0]), torch.zeros(1, 1, 1, 1, dtype=torch.uint8), np.array([0]), np.array([3]), NO_TASK, {})
    assert set(memory.labels[memory.draw_by_class(50, np.random.default_rng(0))].tolist()) == {1, 3}


# A method's say in the learning rate.


@dataclass(eq=False, repr=False)
class Slower(ER):
    """Experience replay at half the learning rate after the first task."""

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        return replace(super().plan(new, memories, planning), rate=0.5 if new.progress.task > 0 else 1.0)


def test_the_learning_rate_follows_the_method() -> None:
    stream, slower, halved = toy_stream(), toy_engine("er()", optimizer="sgd(lr=0.2)"), toy_engine("er()", optimizer="sgd(lr=0.2)")
    slower.method.__class__ = Slower
    for engine in (slower, halved):
        feed(engine, stream, until=6)
    halved.full_rates = [0.1]
    for engine in (slower, halved):
        feed(engine, stream, until=9)
    assert [group["lr"] for group in slower.optimizer.param_groups] == [0.1]
    assert_same(slower.net.state_dict(), halved.net.state_dict(), "half the rate in the second task")
    restored = toy_engine("er()", optimizer="sgd(lr=0.2)")
    restored.method.__class__ = Slower
    restored.load_state_dict(slower.state_dict())
    for engine in (slower, restored):
        feed(engine, stream)
    assert_same(restored.state_dict(), slower.state_dict(), "resumed at half the rate")


@dataclass(eq=False, repr=False)
class Rated(Addition):
    """An addition that wants a rate, which plans have."""

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        yield Plan({}, rate=0.5)


def test_the_learner_on_the_left_of_a_sum_sets_the_rate() -> None:
    with pytest.raises(UserError, match="defines plans"):
        Sum(ER(), Rated())
