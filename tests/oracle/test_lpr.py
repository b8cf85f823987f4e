"""LPR: the matrices, the gradients and the updates against literal loops, through the engine's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import longer, noise
from torch import Tensor, nn

from gracecl.core import Batch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.methods.base import Chain
from gracecl.nets.affine import Affine, affine_layers, second_moments
from gracecl.nets.tapped import StackedLinear
from gracecl.testing import feed, next_batch, toy_engine, toy_stream

RESNET = "resnet18(width=2)"


def inputs_of(engine: Engine, images: Tensor) -> dict[str, Tensor]:
    """What goes into each layer on raw images, in evaluation mode, by a pass of its own."""
    net = engine.net.eval()
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda module, args, out, name=name: seen.__setitem__(name, args[0].detach().clone()))
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear | StackedLinear)
    ]
    with torch.no_grad():
        net(net.inputs.normalise(images)).embedding  # noqa: B018 (the projectors are asked only then)
    for handle in handles:
        handle.remove()
    net.train()
    return seen


def patches(x: Tensor, module: nn.Conv2d) -> list[list[Tensor]]:
    """For each image the list of its patches, cut out one after the other."""
    (high, wide), (down, across), (top, left) = module.kernel_size, module.stride, module.padding
    padded = nn.functional.pad(x, (left, left, top, top))  # type: ignore[arg-type]
    rows = range(0, padded.shape[2] - high + 1, down)
    columns = range(0, padded.shape[3] - wide + 1, across)
    return [[image[:, r : r + high, c : c + wide].reshape(-1) for r in rows for c in columns] for image in padded]


def literal_inverse(inputs: list[list[Tensor]], bias: bool, omega: float, beta: float) -> Tensor:
    """(I + ω / p^β · 1/n Σ z zᵀ)⁻¹, one outer product after the other, in double precision."""
    if bias:
        inputs = [[torch.cat([z, torch.ones(1)]) for z in image] for image in inputs]
    n, p, d = len(inputs), len(inputs[0]), len(inputs[0][0])
    moments = torch.zeros(d, d, dtype=torch.float64)
    for image in inputs:
        for z in image:
            moments += torch.outer(z.double(), z.double())
    return torch.linalg.inv(torch.eye(d, dtype=torch.float64) + omega / p**beta * moments / n)


@pytest.mark.parametrize("net", [RESNET, "mlp(width=8, depth=4)"])
def test_the_matrices_are_those_of_the_paper(net: str) -> None:
    engine = toy_engine("lpr(er(n_recall=6), strength=3.0, position_power=1.5, refresh_every=4)", net=net, taps=4, memory=7)
    stream = toy_stream()
    feed(engine, stream, until=5)  # the second step looks at the memory, and the sixth plans to
    memory = engine.memories.replay
    seen = inputs_of(engine, memory.images[: len(memory)])
    next_batch(engine, stream)
    assert engine.method.inverses.keys() == affine_layers(engine.net).keys()
    for name, layer in affine_layers(engine.net).items():
        x, module, found = seen[name], layer.module, engine.method.inverses[name].double()
        bias = len(layer.parameters) == 2
        if isinstance(module, StackedLinear):
            expected = torch.stack([literal_inverse([[z] for z in tap], bias, 3.0, 1.5) for tap in x])
        elif isinstance(module, nn.Conv2d):
            expected = literal_inverse(patches(x, module), bias, 3.0, 1.5)
        else:
            expected = literal_inverse([[z] for z in x], bias, 3.0, 1.5)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


def spied(engine: Engine) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    """Of each update from now on: gradients as the losses gave them, weights before, and weights after."""
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]] = []
    method: Any = engine.method
    backward, step = method.inner.after_backward, method.inner.after_step

    def of(what: str) -> dict[str, Tensor]:
        pairs = engine.net.named_parameters()
        return {n: (v.grad if what == "grad" else v).detach().clone() for n, v in pairs if v.grad is not None}

    def after_backward(batch: Batch) -> None:
        backward(batch)
        seen.append((of("grad"), of("weights"), {}))

    def after_step(out: Taps, batch: Batch) -> None:
        step(out, batch)
        seen[-1][2].update(of("weights"))

    method.inner.after_backward, method.inner.after_step = after_backward, after_step
    engine.chain = engine.update.chain = Chain(method)
    return seen


def as_matrix(name: str, module: nn.Module, values: dict[str, Tensor]) -> Tensor:
    """`[outputs, inputs and the bias]`, of each tap for heads."""
    weight = values[f"{name}.weight"]
    if isinstance(module, StackedLinear):
        return torch.cat([weight, values[f"{name}.bias"]], dim=1).transpose(1, 2)
    weight = weight.reshape(len(weight), -1)
    return torch.cat([weight, values[f"{name}.bias"][:, None]], dim=1) if f"{name}.bias" in values else weight


@pytest.mark.parametrize("acts_on", ["gradient", "update"])
@pytest.mark.parametrize("net", [RESNET, "mlp(width=8, depth=4)"])
def test_each_step_is_multiplied_by_the_inverse(net: str, acts_on: str) -> None:
    """G P⁻¹, weight and bias as one matrix, then plain gradient descent: both ways are the same there."""
    engine = toy_engine(
        f"lpr(er(n_recall=6), strength=3.0, position_power=1.0, refresh_every=2, acts_on='{acts_on}')",
        net=net,
        taps=4,
        optimizer="sgd(lr=0.1)",
    )
    seen = spied(engine)
    feed(engine, toy_stream(), until=6)
    gradients, before, after = seen[-1]
    held = {f"{name}.{part}" for name in engine.method.inverses for part in ("weight", "bias")}
    moved = 0.0
    for name, layer in affine_layers(engine.net).items():
        if f"{name}.weight" not in gradients:  # the projectors, which er does not use
            continue
        g, inverse = as_matrix(name, layer.module, gradients), engine.method.inverses[name]
        expected = as_matrix(name, layer.module, before) - 0.1 * g @ inverse
        torch.testing.assert_close(as_matrix(name, layer.module, after), expected, rtol=1e-4, atol=1e-6)
        assert (g @ inverse).norm() <= g.norm()
        assert (g * (g @ inverse)).sum() >= 0
        moved += float((g - g @ inverse).norm())
    assert moved > 0
    for name in gradients.keys() - held:  # BatchNorm, depthwise convolutions
        torch.testing.assert_close(after[name], before[name] - 0.1 * gradients[name])


def test_update_changes_what_adam_did() -> None:
    """The step from the weights before it, weight decay included, not the gradient that Adam sees."""
    options = "strength=3.0, refresh_every=100, acts_on='update'"
    plain, held = (
        toy_engine(method, optimizer="adam(lr=0.01, weight_decay=0.1)", taps=4)
        for method in ("er(n_recall=6)", f"lpr(er(n_recall=6), {options})")
    )
    for engine in (plain, held):
        feed(engine, toy_stream(), until=1)  # there is no memory before: both are alike
    start = dict(plain.net.named_parameters())["classifier.weight"].detach().clone()
    bias = dict(plain.net.named_parameters())["classifier.bias"].detach().clone()
    for engine in (plain, held):
        feed(engine, toy_stream(), until=2)
    inverse = held.method.inverses["classifier"]
    before = torch.cat([start, bias], dim=1)
    step = torch.cat([plain.net.classifier.weight, plain.net.classifier.bias], dim=1).detach() - before
    expected = before + torch.stack([one @ two for one, two in zip(inverse, step, strict=True)])
    found = torch.cat([held.net.classifier.weight, held.net.classifier.bias], dim=1).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, before + step)


def test_without_strength_and_without_memory_it_is_the_inner_method_to_the_bit() -> None:
    for options, memory in (("strength=0.0", 20), ("strength=4.0", 0)):
        one, two = (toy_engine(method, memory=memory) for method in ("er(n_recall=6)", f"lpr(er(n_recall=6), {options})"))
        for engine in (one, two):
            feed(engine, toy_stream(), until=9)
        assert all(torch.equal(a, b) for a, b in zip(one.net.state_dict().values(), two.net.state_dict().values(), strict=True))
        assert one.net.meter.forward == two.net.meter.forward


def test_one_input_is_shrunk_and_what_is_orthogonal_to_it_is_not() -> None:
    engine = toy_engine("lpr(strength=2.0)", net="mlp(width=8, depth=4)", taps=1)
    images = toy_stream().batch(0).x[:1]
    engine.method.refresh(images)
    z = torch.cat([inputs_of(engine, images)["classifier"][0, 0], torch.ones(1)])
    inverse = engine.method.inverses["classifier"][0]
    torch.testing.assert_close(inverse @ z, z / (1 + 2.0 * z @ z))
    other = noise(len(z)).float()
    other -= (other @ z) / (z @ z) * z
    torch.testing.assert_close(inverse @ other, other, rtol=1e-4, atol=1e-6)


def test_how_often_an_image_stands_in_the_memory_and_where_does_not_matter() -> None:
    engine = toy_engine("lpr()", net=RESNET, taps=4)
    images = toy_stream().batch(0).x
    layers = affine_layers(engine.net)
    first = second_moments(engine.net, layers, images)
    for others in (images.repeat(3, 1, 1, 1), images.flip(0)):
        again = second_moments(engine.net, layers, others, batch=5)
        for name, (moments, positions) in first.items():
            torch.testing.assert_close(again[name][0], moments, rtol=1e-4, atol=1e-5)
            assert again[name][1] == positions


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(3, 4, (3, 2), padding=(0, 1), bias=False),
        nn.Conv2d(3, 4, 3, dilation=2, padding=2),
        nn.Conv2d(3, 4, 1, stride=2, bias=False),
    ],
)
def test_rows_times_the_matrix_are_the_convolution(module: nn.Conv2d) -> None:
    x, layer = noise(2, 3, 7, 6).float(), Affine(module)
    rows, positions = layer.rows(x)
    y = module(x)
    found = (rows @ layer.matrix(torch.Tensor.detach)).view(2, positions, 4).transpose(1, 2).reshape(y.shape)
    torch.testing.assert_close(found, y)


def test_what_is_read_as_a_matrix_is_written_back() -> None:
    for module in (nn.Conv2d(3, 4, 3), nn.Linear(5, 2), nn.Linear(5, 2, bias=False), StackedLinear(4, 5, 3)):
        layer, expected = Affine(module), [value.detach().clone() for value in module.parameters()]
        matrix = layer.matrix(torch.Tensor.detach)
        for value in module.parameters():
            value.data.zero_()
        layer.put(matrix, torch.Tensor.detach)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected, strict=True))


def test_looking_at_the_memory_leaves_the_net_as_it_is() -> None:
    engine = toy_engine("lpr(er(n_recall=6))", net=RESNET)
    feed(engine, toy_stream(), until=4)
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    modes = [module.training for module in engine.net.modules()]
    gradients = [value.grad.clone() for value in engine.net.parameters() if value.grad is not None]
    engine.method.refresh(engine.memories.replay.images[:5])
    assert all(torch.equal(value, before[name]) for name, value in engine.net.state_dict().items())
    assert modes == [module.training for module in engine.net.modules()]
    after = [value.grad for value in engine.net.parameters() if value.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, after, strict=True))
    assert not any(module._forward_pre_hooks for module in engine.net.modules())


@pytest.mark.parametrize(("n_images", "expected"), [(4, [0, 5, 10, 15]), (50, list(range(20)))])
def test_it_looks_every_so_many_updates_at_evenly_spaced_slots(n_images: int, expected: list[int]) -> None:
    engine = toy_engine(f"lpr(er(n_recall=6, mem_iters=2), refresh_every=5, n_images={n_images})", memory=20)
    looks: list[Tensor] = []
    refresh, updates, at = engine.method.refresh, [0], []

    def spy(images: Tensor) -> None:
        looks.append(images)
        at.append(updates[0])
        refresh(images)

    step = engine.method.after_step

    def count(out: Taps, batch: Batch) -> None:
        step(out, batch)
        updates[0] += 1

    engine.method.refresh, engine.method.after_step = spy, count
    stream = longer()
    feed(engine, stream, until=9)
    assert at == [2, 7, 12, 17]  # the first batch of two updates finds no memory
    feed(engine, stream, until=11)
    assert at[-1] == 17
    before = engine.memories.replay.images[:20].clone()
    feed(engine, stream, until=12)
    assert torch.equal(looks[-1], before[expected])


def test_the_look_is_counted() -> None:
    plain, held = toy_engine("er(n_recall=6)", memory=8), toy_engine("lpr(er(n_recall=6), n_images=5)", memory=8)
    for engine in (plain, held):
        feed(engine, toy_stream(), until=4)
    looked = min(5, len(toy_stream().batch(0)))
    assert held.net.meter.forward == plain.net.meter.forward + looked
    assert held.net.meter.backward == plain.net.meter.backward


def test_averages_around_it_follow_the_weights_that_a_step_ends_with() -> None:
    """lpr(mkd(…)) and mkd(lpr(…)) train alike: the teacher takes on weights after LPR changed the step."""
    engines = [
        toy_engine(method)
        for method in (
            "lpr(mkd(er(n_recall=6), teacher_rate=0.5), acts_on='update')",
            "mkd(lpr(er(n_recall=6), acts_on='update'), teacher_rate=0.5)",
        )
    ]
    for engine in engines:
        feed(engine, toy_stream(), until=6)
    teachers = (engines[0].method.inner.teacher.copy, engines[1].method.teacher.copy)
    for a, b in zip(*(teacher.parameters() for teacher in teachers), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", ["strength=-1.0", "refresh_every=0", "n_images=0"])
def test_options_out_of_range_are_told(options: str) -> None:
    with pytest.raises(UserError, match=f"lpr: {options.split('=')[0]} must be "):
        toy_engine(f"lpr(er(), {options})")


def test_a_method_without_steps_on_the_stream_is_refused() -> None:
    with pytest.raises(UserError, match="lpr changes steps on the stream, of which gdumb"):
        toy_engine("lpr(gdumb())")
