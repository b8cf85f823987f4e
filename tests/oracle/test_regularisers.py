"""Quadratic penalties and CPR against literal loops over images, weights and tasks, and the invariants of their specifications."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import NO_TASK, Progress, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy
from gracecl.methods.cpr import CPR
from gracecl.methods.quadratic import QuadraticPenalty
from gracecl.nets.flat import FlatParameters
from gracecl.registry.spec import parse_method
from gracecl.testing import TOY_SHAPE, assert_same, feed, toy_engine, toy_stream

FACTORS = {"ewc": 1 / 2, "ewc_on": 1 / 2, "ewc_pp": 1, "si": 1, "mas": 1}
"""what each paper multiplies λ Σ Ω (θ - θ*)² by"""
PENALTIES = list(FACTORS)


def right(engine: Engine) -> Any:
    """The penalty in `learner + penalty`."""
    return engine.method.right


def after_first_task(method: str, **options: Any) -> Engine:
    """An engine whose first task has just ended: six steps of three images."""
    engine = toy_engine(method, **options)
    stream = toy_stream()
    feed(engine, stream, until=6)
    assert stream.ends_task(5)
    return engine


def named(engine: Engine, vector: Tensor) -> dict[str, Tensor]:
    name_of = {id(parameter): name for name, parameter in engine.net.named_parameters()}
    return {name_of[id(parameter)]: value for parameter, value in right(engine).flat.scatter(vector).items()}


def images_of(engine: Engine, count: int = 7) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 256, (count, *TOY_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return engine.net.inputs.normalise(x), torch.arange(count) % 6


# The penalty itself.


@pytest.mark.parametrize("name", PENALTIES)
def test_without_strength_and_in_the_first_task_it_is_fine_tuning_to_the_bit(name: str) -> None:
    plain = toy_engine("sgd()")
    feed(plain, toy_stream(), until=6)
    assert_same(after_first_task(f"{name}(strength=50)").net.state_dict(), plain.net.state_dict(), name)
    feed(plain, toy_stream())
    without = toy_engine(f"{name}(strength=0)")
    feed(without, toy_stream())
    assert_same(without.net.state_dict(), plain.net.state_dict(), name)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("taps", [1, 4])
def test_it_is_zero_and_flat_at_the_anchor_and_the_parabola_elsewhere(name: str, taps: int) -> None:
    options = ", refresh=2" if name == "ewc_pp" else ""
    engine = after_first_task(f"{name}(strength=3{options})", taps=taps)
    method: QuadraticPenalty = right(engine)
    assert (method.importance >= 0).all()
    assert method.importance.max() > 0
    (row,) = method.losses(None, None).values()
    assert row.tolist() == [0.0] * taps
    with torch.no_grad():
        for parameter in engine.net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    for parameter in engine.net.parameters():
        parameter.grad = None
    (row,) = method.losses(None, None).values()
    row.sum().backward()
    factor = 3 * FACTORS[name]
    away = method.flat.snapshot() - method.anchor
    torch.testing.assert_close(method.flat.gradient(), 2 * factor * method.importance * away, rtol=1e-5, atol=1e-7)
    assert row.sum().item() == pytest.approx(factor * (method.importance * away**2).sum().item(), rel=1e-4)


@pytest.mark.parametrize("name", PENALTIES)
def test_it_pulls(name: str) -> None:
    """With the penalty, important weights end nearer to where they were after the first task."""
    options = ", refresh=2" if name == "ewc_pp" else ""
    strength, far = 0.0, []
    for _ in range(2):
        engine = after_first_task(f"{name}(strength={strength}{options})", optimizer="sgd(lr=0.01)", net="mlp(width=12, depth=2)")
        method = right(engine)
        anchor, importance = method.anchor.clone(), method.importance.clone()
        strength = 20 / importance.max().item()  # as strong as steps of this size bear
        feed(engine, toy_stream(), until=12)
        far.append((importance * (method.flat.snapshot() - anchor) ** 2).sum().item())
    assert far[1] < 0.8 * far[0]


@pytest.mark.parametrize("name", PENALTIES)
def test_a_step_goes_down_the_data_terms_and_once_down_the_penalty(name: str) -> None:
    """At an equal batch and equal weights, what the penalty adds to a step of plain descent is its own gradient."""
    options = ", refresh=2" if name == "ewc_pp" else ""
    engine = after_first_task(f"{name}(strength=3{options})", taps=4, optimizer="sgd(lr=0.01)")
    method: QuadraticPenalty = right(engine)
    with torch.no_grad():
        for parameter in engine.net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    before, importance, anchor = method.flat.snapshot(), method.importance.clone(), method.anchor.clone()
    state = copy.deepcopy(engine.state_dict())
    moved = []
    for method.strength in (0.0, 3.0):
        engine.load_state_dict(copy.deepcopy(state))
        feed(engine, toy_stream(), until=7)
        moved.append(method.flat.snapshot() - before)
    slope = 3 * FACTORS[name] * 2 * importance * (before - anchor)
    assert slope.abs().max() > 1e-4
    torch.testing.assert_close(moved[1] - moved[0], -0.01 * slope, rtol=1e-3, atol=1e-6)


def test_a_free_head_has_no_importance() -> None:
    for name in PENALTIES:
        engine = after_first_task(f"{name}(exclude_head=True{', refresh=2' if name == 'ewc_pp' else ''})")
        values = named(engine, right(engine).importance)
        assert all(value.eq(0).all() for key, value in values.items() if key.startswith("classifier."))
        assert any(value.ne(0).any() for key, value in values.items() if key.startswith("backbone."))


def test_gradients_seen_after_backward_are_those_of_the_data_alone() -> None:
    engine = after_first_task("sgd() + si(strength=100)")
    with torch.no_grad():
        for parameter in engine.net.parameters():
            parameter += 0.05
    stream, seen = toy_stream(), {}
    method = right(engine)
    original = method.after_backward

    def remember(batch: Any) -> None:
        original(batch)
        seen["gradient"], seen["batch"] = batch.targets["si/gradient"], batch
        seen["before"] = {name: value.detach().clone() for name, value in engine.net.named_parameters()}
        for name, buffer in engine.net.named_buffers():
            seen["before"][name] = buffer.clone()

    method.after_backward = remember
    feed(engine, stream, until=7)
    applied = method.flat.gradient()
    engine.net.load_state_dict(seen["before"])
    loss = cross_entropy(engine.net(seen["batch"].x).logits, seen["batch"].y).sum()
    for parameter in engine.net.parameters():
        parameter.grad = None
    loss.backward()
    torch.testing.assert_close(seen["gradient"], method.flat.gradient(), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(applied, seen["gradient"], rtol=1e-2), "the optimizer never saw the penalty"


@pytest.mark.parametrize("name", PENALTIES)
def test_without_task_marks_it_consolidates_every_so_many_steps(name: str) -> None:
    data = toy_stream().data
    for every, expected in ((0, False), (3, True)):
        engine = toy_engine(f"{name}(every={every})")
        for step in range(4):
            rows = np.arange(3 * step, 3 * step + 3)
            engine.learn(StreamBatch(data.train_x[torch.from_numpy(rows)], data.train_y[rows], task=NO_TASK))
            assert right(engine).consolidated == (expected and step >= 2)


def test_bad_options_are_refused() -> None:
    of_all = ("ewc(strength=-1)", "si(every=-2)", "ewc(n_fisher=0)", "ewc_pp(refresh=0)", "ewc_pp(new_share=1.5)")
    for text in (*of_all, "ewc_on(decay=-0.1)", "mas(keep=1.5)", "si(damping=0)", "lwf(every=-1)", "lwf(strength=-1)"):
        with pytest.raises(UserError):
            parse_method(text)


# Layers of parameters.


def test_every_weight_counts_for_the_first_tap_that_depends_on_it() -> None:
    engine = toy_engine("er()", taps=4, net="resnet18(width=2)")
    flat = FlatParameters(engine.net, engine.net.inputs)
    assert sum(flat.sizes) == sum(parameter.numel() for parameter in engine.net.parameters())
    name_of = {id(parameter): name for name, parameter in engine.net.named_parameters()}
    expected = {"stem": 0} | {f"{part}.{i}": i for part in ("stages", "gates", "chains") for i in range(4)}
    for piece in flat.pieces:
        name = name_of[id(piece.parameter)]
        if name.startswith("backbone."):
            assert piece.layer == next(layer for part, layer in expected.items() if name.startswith(f"backbone.{part}.")), name
        else:
            assert piece.layer == piece.part
    ones = torch.ones(sum(flat.sizes))
    assert flat.by_layer(ones).tolist() == flat.sizes


def test_weights_that_start_at_zero_hide_nothing() -> None:
    engine = toy_engine("er()", taps=4, net="mlp(width=5, depth=4)")
    with torch.no_grad():
        engine.net.backbone.hidden[2].weight.zero_()
    flat = FlatParameters(engine.net, engine.net.inputs)
    layer = {id(piece.parameter): piece.layer for piece in flat.pieces}
    for number, linear in enumerate(engine.net.backbone.hidden):
        assert layer[id(linear.weight)] == layer[id(linear.bias)] == number


def test_a_module_that_no_tap_depends_on_counts_for_the_last() -> None:
    engine = toy_engine("mose()", taps=4)
    flat = FlatParameters(engine.net, engine.net.inputs)
    extra = {id(parameter) for parameter in engine.net.extras.parameters()}
    assert extra
    assert {piece.layer for piece in flat.pieces if id(piece.parameter) in extra} == {3}


def test_flat_vectors_go_both_ways() -> None:
    engine = toy_engine("er()", taps=4, net="resnet18(width=2)")
    flat = FlatParameters(engine.net, engine.net.inputs)
    for parameter, value in flat.scatter(flat.snapshot()).items():
        assert torch.equal(parameter, value)
    batch = engine.net(torch.randn(3, *TOY_SHAPE))
    batch.logits.square().sum().backward()
    gradient = flat.gradient()
    flat.set_gradient(2 * gradient)
    torch.testing.assert_close(flat.gradient(), 2 * gradient)


# EWC.


def literal_fisher(engine: Engine, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """One image after the other; `labels [n, L]`."""
    engine.net.eval()
    fisher = {name: torch.zeros_like(value) for name, value in engine.net.named_parameters()}
    for image, of_heads in zip(x, labels, strict=True):
        log_p = F.log_softmax(engine.net(image[None]).logits[:, 0], dim=-1)
        likelihood = sum(log_p[head, label] for head, label in enumerate(of_heads.tolist()))
        parameters = dict(engine.net.named_parameters())
        for name, gradient in zip(
            parameters, torch.autograd.grad(likelihood, list(parameters.values()), allow_unused=True), strict=True
        ):
            if gradient is not None:
                fisher[name] += gradient**2 / len(x)
    engine.net.train()
    return fisher


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("labels", ["true", "pred"])
def test_fisher_is_the_mean_of_squared_gradients_of_single_images(taps: int, labels: str) -> None:
    engine = after_first_task(f"ewc(labels='{labels}')", taps=taps)
    x, y = images_of(engine)
    engine.net.eval()
    guesses = engine.net(x).logits.argmax(dim=-1).T
    engine.net.train()
    fisher = named(engine, right(engine).fisher(x, y, np.random.default_rng(0)))
    for name, value in literal_fisher(engine, x, y[:, None].expand(-1, taps) if labels == "true" else guesses).items():
        torch.testing.assert_close(fisher[name], value, rtol=1e-4, atol=1e-8)


def test_fisher_of_a_head_is_the_closed_form() -> None:
    """For softmax regression: E[(p - 1_y)² x²], and not the square of the batch's mean gradient."""
    engine = after_first_task("ewc()", net="mlp(width=6, depth=1)")
    x, y = images_of(engine)
    out = engine.net(x)
    off = out.logits[0].softmax(dim=-1) - F.one_hot(y, 6)
    expected = torch.einsum("nc,nd->dc", off**2, out.features[0] ** 2) / len(x)
    fisher = named(engine, right(engine).fisher(x, y, np.random.default_rng(0)))["classifier.weight"][0]
    torch.testing.assert_close(fisher, expected.detach(), rtol=1e-4, atol=1e-8)
    of_the_mean = (out.features[0].T @ off / len(x)) ** 2
    assert not torch.allclose(fisher, of_the_mean, rtol=0.1)


def test_exact_fisher_is_the_mean_of_sampled_ones() -> None:
    engine = after_first_task("ewc(labels='all')", net="mlp(width=4, depth=1)", taps=1)
    method = right(engine)
    x, y = images_of(engine, 4)
    exact = method.fisher(x, y, np.random.default_rng(0))
    method.labels = "sample"
    many = torch.stack([method.fisher(x, y, np.random.default_rng(seed)) for seed in range(400)])
    error = (many.mean(dim=0) - exact) / (many.std(dim=0) / 20).clamp(min=1e-7)
    assert error.abs().max() < 5
    assert error.abs().mean() < 1.2


def test_penalty_is_the_sum_over_all_tasks() -> None:
    """One parabola in place of many has their value in each layer, and their gradient."""
    engine = after_first_task("ewc(strength=2)", taps=4)
    method = right(engine)
    generator = torch.Generator().manual_seed(5)
    pairs = [(method.importance.clone(), method.anchor.clone())]
    for _ in range(3):
        with torch.no_grad():
            for parameter in engine.net.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        fisher = torch.rand(len(method.anchor), generator=generator) * (torch.rand(len(method.anchor), generator=generator) < 0.5)
        method.remember(fisher)
        pairs.append((fisher, method.flat.snapshot()))
    with torch.no_grad():
        for parameter in engine.net.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.grad = None
    (row,) = method.losses(None, None).values()
    row.sum().backward()
    weights = method.flat.snapshot()
    expected = sum(method.flat.by_layer(fisher * (weights - anchor) ** 2) for fisher, anchor in pairs)
    torch.testing.assert_close(row.detach(), expected, rtol=1e-4, atol=1e-6)
    slope = sum(2 * fisher * (weights - anchor) for fisher, anchor in pairs)
    torch.testing.assert_close(method.flat.gradient(), slope, rtol=1e-4, atol=1e-5)


def test_online_ewc_after_one_task_is_ewc() -> None:
    one, two = after_first_task("ewc()"), after_first_task("ewc_on()")
    assert torch.equal(right(one).importance, right(two).importance)
    assert torch.equal(right(one).anchor, right(two).anchor)


def test_the_task_s_images_are_kept_until_it_ends_and_counted() -> None:
    engine, stream = toy_engine("er() + ewc(n_fisher=10)"), toy_stream()
    feed(engine, stream, until=3)
    assert len(engine.memories["ewc"]) == 9
    feed(engine, stream, until=5)
    assert len(engine.memories["ewc"]) == 10
    assert set(engine.memories["ewc"].labels.tolist()) <= set(engine.progress.current)
    feed(engine, stream, until=6)
    assert len(engine.memories["ewc"]) == 0
    assert engine.memories.beyond_budget == 10
    feed(engine, stream, until=8)
    assert set(engine.memories["ewc"].labels[:6].tolist()) <= set(engine.progress.current)


# EWC++.


@pytest.mark.parametrize("refreshes", [1, 2, 5])
def test_running_fisher_of_a_constant_gradient(refreshes: int) -> None:
    """F after n refreshes is g² (1 - (1-α)ⁿ - α (1-α)ⁿ⁻¹ / K): the first refresh holds K - 1 squares."""
    engine = toy_engine("ewc_pp(new_share=0.7, refresh=4)")
    method = right(engine)
    for _ in range(4 * refreshes):
        for parameter in engine.net.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        method.after_backward(None)
    expected = 9 * (1 - 0.3**refreshes - 0.7 * 0.3 ** (refreshes - 1) / 4)
    assert method.running.tolist() == pytest.approx([expected] * len(method.running), rel=1e-5)


def test_normalised_fisher_spans_zero_to_one() -> None:
    method = right(after_first_task("ewc_pp(refresh=2)"))
    assert method.importance.min() == 0
    assert method.importance.max().item() == pytest.approx(1)


# SI.


def test_path_integral_is_the_drop_of_the_loss() -> None:
    """Full batch, small steps: Σ ω is within 5 % of what the loss lost along the path."""
    engine = toy_engine("si()", net="mlp(width=8, depth=1)", optimizer="sgd(lr=0.002)")
    data = toy_stream().data
    rows = np.flatnonzero(data.train_y < 2)
    x = data.train_x[torch.from_numpy(rows)]
    engine.augmentation = ()
    losses = [engine.learn(StreamBatch(x, data.train_y[rows], task=0)).table["ce/all"].item() for _ in range(60)]
    last = cross_entropy(engine.net(engine.net.inputs.normalise(x)).logits, torch.from_numpy(data.train_y[rows])).item()
    assert losses[0] - last > 0.1
    assert right(engine).path.sum().item() == pytest.approx(losses[0] - last, rel=0.05)


def test_weights_that_do_not_move_have_no_importance() -> None:
    engine = after_first_task("si()")
    values = named(engine, right(engine).importance)
    assert values["projector.weight"].eq(0).all()


def test_which_sum_is_kept_from_becoming_negative() -> None:
    for rectify, expected in (("sum", 0.5 / 0.1 - 0.2 / 0.1), ("increment", 0.5 / 0.1)):
        engine = toy_engine(f"si(rectify='{rectify}', damping=0.1)")
        method = right(engine)
        for share in (0.5, -0.2):
            method.path = torch.full_like(method.path, share)
            method.consolidate(engine.memories, Progress())
        assert method.importance.tolist() == pytest.approx([expected] * len(method.importance), rel=1e-6)


# MAS.


def test_sensitivity_is_the_mean_of_absolute_gradients_of_single_images() -> None:
    engine = after_first_task("mas()", taps=4)
    x, _ = images_of(engine)
    classes = torch.tensor([True, True, False, True, False, False])
    engine.net.eval()
    parameters = dict(engine.net.named_parameters())
    expected = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for image in x:
        norm = engine.net(image[None]).logits[..., classes].square().sum()
        for name, gradient in zip(parameters, torch.autograd.grad(norm, list(parameters.values()), allow_unused=True), strict=True):
            if gradient is not None:
                expected[name] += gradient.abs() / len(x)
    engine.net.train()
    found = named(engine, right(engine).sensitivity(x, classes))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_sensitivity_of_a_task_is_that_of_the_classes_met() -> None:
    """Two of six classes were met when the task ends; the others' logits do not count."""
    engine, stream = toy_engine("mas()", taps=4), toy_stream()
    for step in range(6):
        engine.learn(replace(stream.batch(step), last_of_task=False))
    method, seen = right(engine), torch.zeros(6, dtype=torch.bool)
    seen[list(engine.progress.seen)] = True
    assert seen.sum() == 2
    images = engine.memories["mas"].images[: len(engine.memories["mas"])].clone()
    of_seen, of_all = method.sensitivity(images, seen), method.sensitivity(images, torch.ones(6, dtype=torch.bool))
    assert not torch.allclose(of_seen, of_all, rtol=0.1)
    engine.end_task()
    torch.testing.assert_close(method.importance, of_seen)


def test_scaled_logits_scale_importances_by_the_square() -> None:
    engine = after_first_task("mas()", net="mlp(width=6, depth=1)")
    x, _ = images_of(engine)
    everything = torch.ones(6, dtype=torch.bool)
    before = named(engine, right(engine).sensitivity(x, everything))["backbone.hidden.0.weight"]
    with torch.no_grad():
        engine.net.classifier.weight *= 3
        engine.net.classifier.bias *= 3
    after = named(engine, right(engine).sensitivity(x, everything))["backbone.hidden.0.weight"]
    torch.testing.assert_close(after, 9 * before, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        engine.net.backbone.hidden[0].bias[2] = -1e6
    dead = named(engine, right(engine).sensitivity(x, everything))["backbone.hidden.0.weight"]
    assert dead[2].eq(0).all()


def test_labels_are_never_read() -> None:
    engine, stream = toy_engine("mas()"), toy_stream()
    feed(engine, stream, until=5)
    method, store = right(engine), engine.memories["mas"]
    state = copy.deepcopy(engine.memories.state_dict()["mas"])
    method.consolidate(engine.memories, engine.progress)
    first = method.importance.clone()
    store.load_state_dict(state)
    store.labels[: len(store)] = 5
    method.importance = torch.zeros_like(first)
    method.consolidate(engine.memories, engine.progress)
    assert torch.equal(method.importance, first)


def test_importances_add_up_or_mix() -> None:
    for text, expected in (("mas()", 3.0), ("mas(keep=0.5)", 1.25)):
        engine = toy_engine(text)
        method = right(engine)
        for value in (1.0, 2.0):
            method.remember(torch.full_like(method.anchor, value))
        assert method.importance.unique().tolist() == pytest.approx([expected])


# CPR.


def test_cpr_is_the_divergence_from_uniform_over_the_classes_met() -> None:
    engine, stream = toy_engine("er() + cpr(beta=0.3)", taps=4), toy_stream()
    feed(engine, stream, until=8)
    seen: dict[str, Any] = {}
    method, original = right(engine), right(engine).losses

    def remember(out: Taps, batch: Any) -> Any:
        seen.update(out=out, batch=batch, table=original(out, batch))
        return seen["table"]

    method.losses = remember
    feed(engine, stream, until=9)
    batch, classes = seen["batch"], list(engine.progress.seen)
    assert len(classes) == 4
    expected = []
    for layer in seen["out"].logits:
        rows = [layer[row, classes].softmax(dim=0) for row in range(3)]  # the stream's own images stand first
        divergences = [sum((p * (p.log() + math.log(len(classes)))).item() for p in row) for row in rows]
        expected.append(0.3 * sum(divergences) / 3)
    assert len(batch) > 3
    assert seen["table"]["cpr"].tolist() == pytest.approx(expected, rel=1e-4)


def test_cpr_of_flat_logits_is_zero_and_peaks_are_pushed_down() -> None:
    engine, stream = toy_engine("sgd()"), toy_stream()
    feed(engine, stream, until=1)
    new = incoming(engine)
    batch = engine.assemble(engine.plan(new), new)
    flat = Taps(torch.zeros(1, 3, 1), torch.zeros(1, 3, 6), lambda features: features)
    assert CPR(classes="all").losses(flat, batch)["cpr"].item() == pytest.approx(0, abs=1e-7)
    logits = torch.tensor([0.0, 1, 2, 0, 0, 0]).expand(1, 3, 6).clone().requires_grad_()
    CPR(classes="all").losses(Taps(torch.zeros(1, 3, 1), logits, lambda features: features), batch)["cpr"].sum().backward()
    assert (logits.grad[0, :, 2] > 0).all()
    assert CPR(beta=0).losses(flat, batch) == {}


def incoming(engine: Engine) -> Any:
    from gracecl.core import StreamBatch

    data = toy_stream().data
    return StreamBatch(data.train_x[:3], data.train_y[:3], np.arange(3), progress=engine.progress)


@pytest.mark.parametrize("addition", ["si()", "ewc()", "mas()"])
def test_momentum_of_weights_that_only_the_penalty_reaches(addition: str) -> None:
    """The projector has no gradient in the first task, and that of the penalty later."""
    engine = toy_engine(f"er() + {addition}", optimizer="sgd(lr=0.01, momentum=0.9)")
    feed(engine, toy_stream(), until=12)
    assert engine.net.projector.weight in engine.optimizer.state
