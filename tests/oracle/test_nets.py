"""Networks: parameter counts by arithmetic, initialisation, the shape of the taps, and the heads against plain layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl import Learner, nets, rng
from gracecl.engine.recipe import taps_for
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.er import ER
from gracecl.methods.grace import Grace
from gracecl.methods.mose import MOSE
from gracecl.nets.class_means import class_means
from gracecl.nets.identity import identity
from gracecl.nets.resnet import Conv3x3, Gate, ResNet18, enlarge, separable_down
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.testing import toy_data


def build(expression: str, shape: tuple[int, int, int] = (3, 8, 8), classes: int = 5, taps: int | None = None) -> TappedNet:
    with rng.torch_seed(0, "net"):
        return nets.build(expression, Images(shape), classes, taps)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def paper_net() -> TappedNet:
    """The paper's net: width 64, four taps, MOSE's adaptation layer attached."""
    net = build("resnet18(width=64)", (3, 32, 32), 100)
    MOSE().attach(net, Memories(0, Images((3, 32, 32))))
    return net


@pytest.fixture(scope="module")
def plain_net() -> TappedNet:
    return build("resnet18", (3, 32, 32), 100, taps=1)


# grace.md 1.2.


def test_parameters_by_part(paper_net: TappedNet) -> None:
    backbone = paper_net.backbone
    assert isinstance(backbone, ResNet18)
    assert count(backbone.stem) + count(backbone.stages) == 11_168_832
    assert count(backbone.gates) == 182_784
    assert count(backbone.chains) == 726_528
    assert count(paper_net.classifier) == 205_200
    assert count(paper_net.projector) == 262_656
    assert count(paper_net.extras) == 262_656
    assert count(paper_net) == 12_808_656


def test_parameters_at_200_classes_and_of_the_plain_net(plain_net: TappedNet) -> None:
    tapped = build("resnet18(width=64)", (3, 64, 64), 200)
    MOSE().attach(tapped, Memories(0, Images((3, 64, 64))))
    assert count(tapped) == 13_013_856
    assert count(plain_net) == 11_285_796
    assert count(build("resnet18", (3, 64, 64), 200, taps=1)) == 11_337_096


def test_grace_adds_no_parameters() -> None:
    a, b = build("resnet18(width=4)"), build("resnet18(width=4)")
    MOSE().chain.attach(a, Memories(0, Images((3, 8, 8))))
    Grace().chain.attach(b, Memories(0, Images((3, 8, 8))))
    assert count(a) == count(b)


@pytest.mark.parametrize(("inputs", "outputs"), [(4, 4), (4, 8), (64, 128)])
def test_parameters_of_a_separable_block(inputs: int, outputs: int) -> None:
    """Depthwise 3×3, pointwise, BN, depthwise 3×3, pointwise, BN, without biases."""
    assert (
        count(separable_down(inputs, outputs)) == 9 * inputs + inputs**2 + 2 * inputs + 9 * inputs + inputs * outputs + 2 * outputs
    )


# Initialisation.


def spread(weight: Tensor) -> float:
    return weight.detach().std(correction=0).item()


def test_tapped_net_starts_kaiming_normal_by_fan_out(paper_net: TappedNet) -> None:
    """std = √(2 / (outputs · 9)), for depthwise kernels too, whose outputs are not divided by the groups."""
    backbone = paper_net.backbone
    deep = backbone.stages[3][1].conv2
    assert spread(deep.weight) == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    assert deep.weight.abs().max() > 3.5 * spread(deep.weight)  # a normal distribution, not a uniform one
    assert spread(backbone.stages[1][0].shortcut[0].weight) == pytest.approx(math.sqrt(2 / 128), rel=0.04)
    assert spread(backbone.stem[0].weight) == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.1)
    depthwise = backbone.gates[2].look[0]
    assert depthwise.groups == 256
    assert spread(depthwise.weight) == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.08)
    assert spread(backbone.chains[0][2][4].weight) == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.08)
    assert spread(backbone.chains[0][2][5].weight) == pytest.approx(math.sqrt(2 / 512), rel=0.02)


def test_plain_net_starts_as_pytorch_does(plain_net: TappedNet) -> None:
    """Uniform within ± 1/√fan_in."""
    for conv, fan_in in ((plain_net.backbone.stages[3][1].conv2, 512 * 9), (plain_net.backbone.stages[1][0].conv1, 64 * 9)):
        bound = fan_in**-0.5
        assert conv.weight.abs().max().item() <= bound
        assert conv.weight.abs().max().item() > 0.99 * bound
        assert spread(conv.weight) == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_norms_start_at_one_and_zero_without_conv_biases(paper_net: TappedNet) -> None:
    norms = [module for module in paper_net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 1 + 4 * 4 + 3 + 3 * 3 + 6 * 2  # stem, blocks, shortcuts, gates, chains
    for norm in norms:
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()
        assert (norm.eps, norm.momentum) == (1e-5, 0.1)
    assert all(module.bias is None for module in paper_net.modules() if isinstance(module, nn.Conv2d))


def test_heads_start_as_linear_layers_do(paper_net: TappedNet) -> None:
    for head in (paper_net.classifier, paper_net.projector):
        for value in (head.weight, head.bias):
            assert value.abs().max().item() <= 512**-0.5
            assert spread(value) == pytest.approx(512**-0.5 / math.sqrt(3), rel=0.1)
    assert len({round(layer.std().item(), 9) for layer in paper_net.classifier.weight}) == 4


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    a = build("resnet18(width=4)")
    torch.manual_seed(2)
    b = build("resnet18(width=4)")
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)


# What the net computes.


@pytest.mark.parametrize("layers", [1, 3])
def test_stacked_heads_are_separate_linear_layers(layers: int) -> None:
    head, x = StackedLinear(layers, 5, 2), torch.randn(layers, 4, 5)
    for layer in range(layers):
        expected = F.linear(x[layer], head.weight[layer].T, head.bias[layer, 0])
        torch.testing.assert_close(head(x)[layer], expected)


@pytest.mark.parametrize("size", [8, 15])
def test_gate_weighs_by_at_least_a_half(size: int) -> None:
    """On a map of ones the gated map is the gate: in [1/2, 1), not constant, and per position."""
    torch.manual_seed(0)
    gate = Gate(6)
    for parameter in gate.parameters():
        nn.init.normal_(parameter, std=0.5)
    gate.train()
    x = torch.rand(7, 6, size, size) + 0.1
    weight = gate(x) / x
    assert weight.min() >= 0.5 - 1e-6
    assert weight.max() < 1
    assert (weight > 0.55).any()
    assert (weight < 0.5001).any()


def test_gate_is_the_formula() -> None:
    """x · sigmoid(up(ReLU(BN(D(x))))), up bilinear by two with half-pixel centres."""
    torch.manual_seed(0)
    gate, x = Gate(3), torch.randn(4, 3, 8, 8)
    gate.eval()
    coarse = torch.relu(gate.norm(gate.look(x)))
    up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    torch.testing.assert_close(gate(x), x * torch.sigmoid(up(coarse)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(4, 4, 8, 8), (16, 16, 32, 32), (5, 3, 9, 5), (1, 2, 1, 3)])
def test_enlarging_is_bilinear_interpolation(size: tuple[int, int, int, int], layout: torch.memory_format) -> None:
    h, w, height, width = size
    maps = torch.randn(3, 2, h, w, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    ours, theirs = enlarge(maps, height, width), F.interpolate(maps, (height, width), mode="bilinear", align_corners=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(made, maps, slope)[0] for made in (ours, theirs)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_of_small_maps_are_convolutions(
    size: tuple[int, int], stride: int, groups: int, layout: torch.memory_format
) -> None:
    conv = Conv3x3(6, 6 if groups > 1 else 5, stride, groups).double()
    x = torch.randn(3, 6, *size, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    ours, theirs = conv(x), F.conv2d(x, conv.weight, None, stride, 1, groups=groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours.is_contiguous(memory_format=layout)
    slope = torch.randn_like(ours)
    for mine, plain in zip(*(torch.autograd.grad(made, (x, conv.weight), slope) for made in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def test_stages_read_the_ungated_map_and_taps_count_from_the_last() -> None:
    """With equal weights, a net with fewer taps gives the same features at its stages; the plain net at the last."""
    full, x = build("resnet18(width=4)").backbone, torch.randn(5, 3, 8, 8)
    features = full(x)
    for taps in (1, 2):
        some, state = build("resnet18(width=4)", taps=taps).backbone, full.state_dict()
        for name in [name for name in state if name.startswith(("gates", "chains"))]:
            part, number, tail = name.split(".", 2)
            value = state.pop(name)
            if int(number) >= 4 - taps:
                state[f"{part}.{int(number) - (4 - taps)}.{tail}"] = value
        some.load_state_dict(state)
        torch.testing.assert_close(some(x), features[4 - taps :])
        assert len(some.gates) == taps - 1


@pytest.mark.parametrize(("channels", "size", "images"), [(1, 28, 2), (3, 15, 2), (3, 8, 1)])
def test_any_image_size_trains(channels: int, size: int, images: int) -> None:
    """Odd sizes, one channel, one image: four taps of equal width, finite values and gradients everywhere they should be."""
    net = build("resnet18(width=4)", (channels, size, size), 7)
    net.train()
    out = net(torch.randn(images, channels, size, size))
    assert out.features.shape == (4, images, 32)
    assert out.logits.shape == (4, images, 7)
    assert out.embedding.shape == (4, images, 128)
    (out.logits.square().mean() + out.embedding.square().mean()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_rectangles() -> None:
    assert build("resnet18(width=4)", (3, 13, 8))(torch.randn(2, 3, 13, 8)).features.shape == (4, 2, 32)


def test_a_batch_of_one_value_per_channel_leaves_statistics_alone() -> None:
    """At 8 px the last maps of one image are single values, from which no variance can be told; the rest is normalised as usual."""
    net = build("resnet18(width=4)")
    last, first = net.backbone.stages[3][1].norm2, net.backbone.stem[1]
    net.train()
    net(torch.randn(1, 3, 8, 8))
    assert (last.running_var == 1).all()
    assert (first.running_var != 1).all()
    net(torch.randn(2, 3, 8, 8))
    assert (last.running_var != 1).all()


def test_mlp_is_its_layers() -> None:
    net = build("mlp(width=6, depth=3)", (1, 2, 3), 4, taps=2)
    x = torch.randn(5, 1, 2, 3)
    h = x.flatten(1)
    features = []
    for layer in net.backbone.hidden:
        h = torch.relu(h @ layer.weight.T + layer.bias)
        features.append(h)
    torch.testing.assert_close(net(x).features, torch.stack(features[1:]))
    assert build("mlp(depth=2)").layers == 2  # auto: as many as there are
    assert build("mlp(depth=6)").layers == 4  # auto: the paper's four


def test_auto_taps() -> None:
    assert taps_for(ER(), None) == 1
    assert taps_for(MOSE(), None) is None
    assert taps_for(Grace("er()"), None) is None
    assert taps_for(ER(), 3) == taps_for(MOSE(), 3) == 3


@pytest.mark.parametrize(
    ("expression", "taps"), [("resnet18", 5), ("resnet18", 0), ("mlp(depth=2)", 3), ("resnet18(width=0)", 1), ("mlp(depth=0)", 1)]
)
def test_impossible_nets_are_refused(expression: str, taps: int) -> None:
    with pytest.raises(UserError):
        build(expression, taps=taps)


@pytest.mark.parametrize("taps", [0, -1])
def test_an_mlp_needs_a_tap(taps: int) -> None:
    with pytest.raises(UserError):
        build("mlp(depth=2)", taps=taps)


# Scoring passes and class means.


def test_a_sweep_is_the_net_in_eval_mode_and_leaves_no_trace() -> None:
    net = build("resnet18(width=4)")
    net.train()
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    parts = [(rows, taps.features) for rows, taps in net.sweep(images, batch=2)]
    assert net.training
    assert all(module.training for module in net.modules())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert [(rows.start, rows.stop) for rows, _ in parts] == [(0, 2), (2, 3)]
    net.eval()
    with torch.no_grad():
        at_once = net(net.inputs.normalise(images)).features
    torch.testing.assert_close(torch.cat([features for _, features in parts], dim=1), at_once, rtol=1e-4, atol=1e-5)
    assert not any(features.requires_grad for _, features in parts)


def test_class_means_are_the_loop() -> None:
    """mu = n(mean of n(f)) per layer and class, image by image; a seen class without images gets a unit direction of its own."""
    net = build("mlp(width=9, depth=4)", classes=6)
    images = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    labels = np.array([0, 0, 0, 2, 2, 5, 5, 5, 5])
    means = class_means(net, images, labels, seen=(5, 0, 2, 3))
    with torch.no_grad():
        features = net(net.inputs.normalise(images)).features
    for layer in range(4):
        for label in (0, 2, 5):
            unit = [features[layer, i] / features[layer, i].norm() for i in np.flatnonzero(labels == label)]
            mean = sum(unit) / len(unit)
            torch.testing.assert_close(means[layer, label], mean / mean.norm(), rtol=1e-4, atol=1e-5)
        assert means[layer, 3].norm().item() == pytest.approx(1, abs=1e-5)
        assert (means[layer, [1, 4]] == 0).all()
    assert not torch.equal(means[0, 3], means[1, 3])
    # By when the class was met, not by its number: class 4 in the same place gets the same direction.
    assert torch.equal(class_means(net, images, labels, seen=(5, 0, 2, 4))[:, 4], means[:, 3])


def test_identity_gives_the_inputs_as_features() -> None:
    x = torch.randn(5, 2, 3, 4)
    backbone = identity((2, 3, 4), 4, at_most=True)
    assert (backbone.layers, backbone.width) == (1, 24)
    assert torch.equal(backbone(x), x.flatten(1)[None])
    assert torch.equal(identity((4,), 1, at_most=False)(x[:, 0, 0]), x[:, 0, 0][None])
    with pytest.raises(UserError, match="no layers to tap"):
        identity((2, 3, 4), 2, at_most=False)


def test_closed_forms_on_identity_are_those_of_the_inputs() -> None:
    """Class means of images by hand, and a learner that trains a head on them."""
    data = toy_data()
    learner = Learner("ncm(score='euclidean')", net="identity()", memory=0)
    learner.learn(data.train_x, data.train_y)
    pixels = (data.train_x.flatten(1).double() / 255 - 0.5) / 0.25
    means = torch.stack([pixels[data.train_y == label].mean(dim=0) for label in range(6)])
    probe = (data.test_x.flatten(1).double() / 255 - 0.5) / 0.25
    assert (learner.predict(data.test_x) == torch.cdist(probe, means).argmin(dim=1).numpy()).all()
    trained = Learner("er()", net="identity()", memory=10, augment="none")
    assert trained.learn(data.train_x[:8], data.train_y[:8])


def test_a_learner_takes_features_as_they_are() -> None:
    """Float vectors, which nothing normalises: discriminant analysis of scikit-learn on them."""
    generator = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = (generator.normal(size=(120, 7)) + 3 * np.eye(7)[y] + 50).astype(np.float32)
    learner = Learner("closed(shrink=0.1)", net="identity()", memory=0)
    for rows in np.array_split(generator.permutation(90), 9):
        learner.learn(x[rows], y[rows])
    analysis = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(x[:90].astype(np.float64), y[:90])
    assert (learner.predict(x[90:]) == analysis.predict(x[90:].astype(np.float64))).all()
    chances = learner.predict_proba(x[90:])[:, np.argsort(learner.classes_)]
    assert np.abs(chances - analysis.predict_proba(x[90:].astype(np.float64))).max() < 0.05
