"""MKD: the teacher's average, its targets and the distillation against literal loops, through the engine's own step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gracecl.core import Batch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.images.rand_augment import RandAugment
from gracecl.testing import feed, next_batch, toy_engine, toy_stream


def weights(net: torch.nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.parameters()]


def divergence(teacher: list[float], student: list[float], temperature: float) -> float:
    """KL(softmax(teacher / T) ‖ softmax(student / T)), term by term."""

    def softmax(values: list[float]) -> list[float]:
        powers = [math.exp(value / temperature) for value in values]
        return [power / sum(powers) for power in powers]

    return sum(p * math.log(p / q) for p, q in zip(softmax(teacher), softmax(student), strict=True))


@pytest.mark.parametrize(("layers", "shares"), [("last", [0.0, 0.0, 0.0, 1.0]), ("all", [0.25] * 4)])
def test_the_term_is_the_printed_divergence(layers: str, shares: list[float]) -> None:
    engine = toy_engine(f"mkd(er(n_recall=6), strength=3.0, temperature=2.0, layers='{layers}', teacher_rate=0.1)", taps=4)
    stream = toy_stream()
    feed(engine, stream, until=9)
    batch, out = next_batch(engine, stream)
    row = engine.chain.losses(out, batch)["kd/teacher"].tolist()
    teacher = batch.targets["mkd"].tolist()
    student = out.logits.detach().tolist()
    for layer, share in enumerate(shares):
        terms = [divergence(t, s, 2.0) for t, s in zip(teacher[layer], student[layer], strict=True)]
        assert row[layer] == pytest.approx(3.0 * share * 2.0**2 * sum(terms) / len(terms), rel=1e-3, abs=1e-6)
    assert max(row) > 0


def test_the_term_is_of_supervised_rows_beside_a_method_with_a_teacher_of_its_own() -> None:
    """OCM trains on rotated views, too, which its head is not trained on; both teachers speak from the second task on."""
    engine, stream = toy_engine("mkd(ocm(n_recall=4), strength=3.0, temperature=2.0, teacher_rate=0.1)"), toy_stream()
    feed(engine, stream, until=9)
    batch, out = next_batch(engine, stream)
    table = engine.chain.losses(out, batch)
    assert {"kd/teacher", "kd/logits"} <= table.keys()
    rows = range(*batch.rows("supervised").indices(len(batch)))
    assert 0 < len(rows) < len(batch)
    teacher, student = (logits[0].tolist() for logits in (batch.targets["mkd"], out.logits.detach()))
    terms = [divergence(teacher[row], student[row], 2.0) for row in rows]
    assert table["kd/teacher"].tolist() == pytest.approx([3.0 * 2.0**2 * sum(terms) / len(terms)], rel=1e-3)
    others = [divergence(teacher[row], student[row], 2.0) for row in range(len(batch)) if row not in rows]
    assert abs(sum(others) / len(others) - sum(terms) / len(terms)) > 1e-4, "else the rows make no difference"


def test_the_teacher_sees_the_steps_images_with_the_batchs_statistics() -> None:
    engine, stream = toy_engine("mkd(er(n_recall=6), teacher_rate=0.1)"), toy_stream()
    feed(engine, stream, until=9)
    buffers = [value.clone() for value in engine.method.teacher.copy.buffers() if value.is_floating_point()]
    batch, _ = next_batch(engine, stream)
    twin = toy_engine("er(n_recall=6)").net.train()
    with torch.no_grad():
        for own, value in zip(twin.parameters(), engine.method.teacher.copy.parameters(), strict=True):
            own.copy_(value)
        torch.testing.assert_close(batch.targets["mkd"], twin(batch.x).logits)
    after = [value for value in engine.method.teacher.copy.buffers() if value.is_floating_point()]
    assert all(torch.equal(a, b) for a, b in zip(buffers, after, strict=True))
    assert not batch.targets["mkd"].requires_grad


def test_a_harder_view_is_randaugment_of_what_the_net_sees() -> None:
    """Drawn for each image anew in every step, from numbers that nothing else uses."""
    same, harder = (
        toy_engine(f"mkd(er(n_recall=6), teacher_rate=0.1, {option})") for option in ("harder=0", "harder=2, magnitude=9")
    )
    stream = toy_stream()
    for engine in (same, harder):
        feed(engine, stream, until=5)
    batch, _ = next_batch(harder, stream)
    view = RandAugment(2, 9)
    x = view(batch.x, batch.rng("the teacher's view").random((len(batch), 8)), harder.net.inputs)
    assert not torch.allclose(x, batch.x)
    with torch.no_grad():
        torch.testing.assert_close(batch.targets["mkd"], harder.method.teacher.copy(x).logits)
    torch.testing.assert_close(next_batch(same, stream)[0].x, batch.x)


def follow(engine: Engine) -> list[tuple[list[Tensor], list[Tensor]]]:
    """The net's and the teacher's weights after each optimizer step from now on."""
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    after = engine.method.after_step

    def spy(out: Taps, batch: Batch) -> None:
        after(out, batch)
        seen.append((weights(engine.net), weights(engine.method.teacher.copy)))

    engine.method.after_step = spy
    return seen


def test_the_teacher_starts_as_a_copy_and_follows_each_step() -> None:
    engine = toy_engine("mkd(er(n_recall=6, mem_iters=2), teacher_rate=0.25)")
    expected = weights(engine.net)
    seen = follow(engine)
    feed(engine, toy_stream(), until=3)
    assert len(seen) == 6
    for net, teacher in seen:
        expected = [0.75 * slow + 0.25 * fast for slow, fast in zip(expected, net, strict=True)]
        for a, b in zip(teacher, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_the_teacher_starts_from_the_weights_that_the_first_step_starts_from() -> None:
    """Such as those of a file, loaded after the learner was made."""
    engine = toy_engine("mkd(er(n_recall=6), teacher_rate=0.25)")
    with torch.no_grad():
        for parameter in engine.net.parameters():
            parameter.add_(1.0)
    before, seen = weights(engine.net), follow(engine)
    feed(engine, toy_stream(), until=1)
    [(net, teacher)] = seen
    for old, fast, slow in zip(before, net, teacher, strict=True):
        torch.testing.assert_close(slow, 0.75 * old + 0.25 * fast)


@pytest.mark.parametrize(("predict", "share"), [("mean", 0.5), ("teacher", 0.0), ("net", 1.0)])
def test_whose_weights_predict(predict: str, share: float) -> None:
    engine = toy_engine(f"mkd(er(n_recall=6), teacher_rate=0.1, predict='{predict}')")
    feed(engine, toy_stream(), until=9)
    before = weights(engine.net)
    net = engine.ready_to_predict()
    for value, slow, fast in zip(net.parameters(), engine.method.teacher.copy.parameters(), engine.net.parameters(), strict=True):
        torch.testing.assert_close(value, (1 - share) * slow + share * fast)
    for own, latest in zip(net.buffers(), engine.net.buffers(), strict=True):
        assert torch.equal(own, latest)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.net.parameters(), strict=True))


def test_without_strength_the_net_takes_the_inner_methods_steps_to_the_bit() -> None:
    one, two = toy_engine("er(n_recall=6)"), toy_engine("mkd(er(n_recall=6), strength=0.0)")
    for engine in (one, two):
        feed(engine, toy_stream(), until=12)
    for a, b in zip(one.net.state_dict().values(), two.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_teachers_pass_is_counted() -> None:
    one, two = (feed(toy_engine(method), toy_stream(), until=4)[-1] for method in ("er(n_recall=6)", "mkd(er(n_recall=6))"))
    assert one is not None
    assert two is not None
    assert (two.forward, two.backward) == (2 * one.forward, one.backward)


@pytest.mark.parametrize("options", ["teacher_rate=1.5", "teacher_rate=-0.1", "temperature=0.0", "harder=-1", "magnitude=31.0"])
def test_options_out_of_range_are_told(options: str) -> None:
    with pytest.raises(UserError, match=f"mkd: {options.split('=')[0]} must be "):
        toy_engine(f"mkd(er(), {options})")


def test_gradient_at_the_logits_is_the_difference_of_the_softened_softmaxes() -> None:
    engine, stream = toy_engine("mkd(er(n_recall=6), strength=2.0, temperature=4.0, teacher_rate=0.1)"), toy_stream()
    feed(engine, stream, until=9)
    batch, out = next_batch(engine, stream)
    gradient: Any = torch.autograd.grad(engine.chain.losses(out, batch)["kd/teacher"].sum(), out.logits)[0]
    teacher = batch.targets["mkd"]
    expected = 2.0 * 4.0 / len(batch) * ((out.logits / 4).softmax(-1) - (teacher / 4).softmax(-1))
    torch.testing.assert_close(gradient, expected.detach(), rtol=1e-3, atol=1e-6)
