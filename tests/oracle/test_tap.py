"""`tap` against plain loops over the model's own parts: what each tap reads, where it taps, and that the model stays itself."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import gracecl
from gracecl import Learner, UserError, tap
from gracecl.inputs import Images
from gracecl.nets import ModuleBackbone, TappedNet, build
from gracecl.nets.tapped import Backbone
from gracecl.registry import nets
from gracecl.testing import METHOD_LAWS, TOY_SHAPE, check_backbone


def stage(inputs: int, outputs: int, stride: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class SmallResNet(nn.Module):
    """Stages as attributes, and a head of its own, as most image models have."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 4, 3, padding=1)
        self.layer1, self.layer2, self.layer3 = stage(4, 4), stage(4, 6), stage(6, 8)
        self.late_norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.stem(x)))))
        out: Tensor = self.fc(self.late_norm(x).mean((2, 3)))
        return out


class Block(nn.Module):
    """A transformer's block that returns its state in a tuple, as transformers' do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(width), nn.Linear(5, 5), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x)), None


class SmallTransformer(nn.Module):
    def __init__(self, class_token: bool, depth: int = 8, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 16, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width)) if class_token else None
        self.mixing = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def tokens(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.cls_token is None:
            mixed: Tensor = self.mixing(x.transpose(1, 2)).transpose(1, 2)
            return mixed
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x, _ = block(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def plain_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def mapped(reader: nn.Module, value: Tensor) -> Tensor:
    """A row at a time through the tap's linear map, where it has one."""
    if isinstance(reader.map, nn.Identity):
        return value
    return torch.stack([reader.map.weight @ row + reader.map.bias for row in value])


def normed(reader: nn.Module, value: Tensor) -> Tensor:
    centred = value - value.mean(1, keepdim=True)
    unit = centred / (centred.square().mean(1, keepdim=True) + reader.norm.eps).sqrt()
    return unit * reader.norm.weight + reader.norm.bias


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# What a tap reads.


@pytest.mark.parametrize("training", [True, False])
def test_maps_are_averaged_and_mapped_to_the_last_width(training: bool) -> None:
    model = SmallResNet()
    net = tap(model, at=["layer1", "layer2", "layer3"], classes=7, embedding=128).train(training)
    x = torch.randn(5, 3, 32, 32)
    reference = copy.deepcopy(model)
    h, expected = F.relu(reference.stem(x)), []
    for part, reader in zip((reference.layer1, reference.layer2, reference.layer3), net.backbone.readers, strict=True):
        h = part(h)
        expected.append(mapped(reader, torch.stack([torch.stack([h[i, c].mean() for c in range(h.shape[1])]) for i in range(5)])))
    out = net(x)
    close(out.features, torch.stack(expected))
    assert (net.layers, net.width, out.logits.shape, out.embedding.shape) == (3, 8, (3, 5, 7), (3, 5, 128))
    assert [tuple(reader.map.weight.shape) for reader in net.backbone.readers[:2]] == [(8, 4), (8, 6)]
    assert isinstance(net.backbone.readers[2].map, nn.Identity)
    for layer in range(3):
        close(out.logits[layer], out.features[layer] @ net.classifier.weight[layer] + net.classifier.bias[layer])


@pytest.mark.parametrize(
    ("class_token", "pool"), [(True, "auto"), (False, "auto"), (True, "mean"), (False, "class"), (True, "maps")]
)
def test_sequences_give_a_token_through_a_norm_of_its_own(class_token: bool, pool: Any) -> None:
    model = SmallTransformer(class_token)
    net = tap(model, classes=4, pool=pool)
    assert net.backbone.names == ("blocks.1", "blocks.3", "blocks.5", "blocks.7")
    for reader in net.backbone.readers:
        for parameter in reader.norm.parameters():
            nn.init.normal_(parameter)
    x = torch.randn(3, 3, 32, 32)
    h, expected = model.tokens(x), []
    for number, block in enumerate(model.blocks):
        h, _ = block(h)
        if number % 2:
            reader = net.backbone.readers[number // 2]
            takes_first = pool == "class" or (pool == "auto" and class_token)
            if pool == "maps":
                expected.append(h.mean(2))
            else:
                expected.append(normed(reader, h[:, 0] if takes_first else h.mean(1)))
    close(net(x).features, torch.stack(expected))


def test_vectors_are_taken_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    net, x = tap(model, classes=2, example=(1, 7)), torch.randn(4, 7)
    assert net.backbone.names == ("1", "3")  # the activations; the last layer gives the model's output and is its head
    close(net(x).features, torch.stack([model[:2](x), model[:4](x)]))


def test_float_inputs_of_any_shape() -> None:
    """Nothing is normalised: sequences, signals and volumes reach the model as they are, in a scoring pass too."""
    signal = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.ReLU())
    net, x = tap(signal, classes=3, example=(1, 2, 20)), torch.randn(6, 2, 20)
    close(net(x).features, torch.stack([signal[:2](x).mean(2), signal(x).mean(2)]))
    parts = [taps.features for _, taps in net.sweep(x, batch=4)]
    close(torch.cat(parts, dim=1), net(x).features.detach())


def test_an_example_may_be_whole_numbers() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first, self.second = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.second(torch.relu(self.first(self.embed(x)))))

    words = torch.randint(0, 20, (3, 4))
    net = tap(Words(), at=["first", "second"], classes=2, example=words)
    assert net(words).features.shape == (2, 3, 8)


def test_maps_with_channels_last_are_told_by_square_images() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.two(torch.relu(self.one(x.permute(0, 2, 3, 1)))))

    model, x = Last(), torch.randn(2, 3, 8, 8)
    net = tap(model, at=["one"], classes=2, example=(1, 3, 8, 8))
    close(net(x).features[0], normed(net.backbone.readers[0], model.one(x.permute(0, 2, 3, 1)).mean((1, 2))))
    wide = tap(model, at=["one"], classes=2, example=(1, 3, 8, 12), pool="mean")
    assert wide.width == 6


class Returning(nn.Module):
    """A model whose part returns something made of its features."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.part, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.part.forward = lambda x, forward=self.part.forward: wrap(forward(x))  # type: ignore[method-assign,misc]

    def forward(self, x: Tensor) -> Any:
        return self.part(x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda h: (h, None),
        lambda h: [None, h, h + 1],
        lambda h: {"hidden": h},
        lambda h: OrderedDict(attentions=h + 1, last_hidden_state=h),
    ],
)
def test_the_hidden_state_is_found_in_tuples_and_mappings(wrap: Callable[[Tensor], Any]) -> None:
    model, x = Returning(wrap), torch.randn(3, 4)
    net = tap(model, at="part", classes=2, example=x)
    close(net(x).features[0], F.linear(x, model.part.weight, model.part.bias))


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        (lambda h: None, "'part' returns a NoneType without a tensor"),
        (lambda h: {"name": "x"}, "'part' returns a dict without a tensor"),
        (lambda h: h.sum(), r"shape \[\] for 2 inputs; a tap reads floats with the batch first"),
        (lambda h: h.flatten(), r"shape \[8\] for 2 inputs"),
        (lambda h: h.T, r"shape \[4, 2\] for 2 inputs"),
        (lambda h: h[:, :, None, None, None], r"shape \[2, 4, 1, 1, 1\]"),
        (lambda h: h.argmax(1, keepdim=True), "torch.int64"),
    ],
)
def test_what_a_tap_cannot_read_is_said(wrap: Callable[[Tensor], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tap(Returning(wrap), at=["part"], classes=2, example=(1, 4))


# Where it taps.


class Nested(nn.Module):
    """Three stages of several blocks: the stages are the blocks, not the layers of the longest one."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.stages = nn.ModuleList(nn.Sequential(*(stage(4, 4, 1) for _ in range(blocks))) for _ in range(3))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.stages:
            x = part(x)
        out: Tensor = self.classifier(x.mean((2, 3)))
        return out


class Functional(nn.Module):
    """Layers as attributes, everything between them as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.b, self.a = nn.Linear(6, 10), nn.Conv2d(4, 6, 3), nn.Conv2d(3, 4, 3)  # not in the order in which they run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(F.relu(self.b(F.relu(self.a(x)))).mean((2, 3)))
        return out


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (SmallResNet, ("layer1", "layer2", "layer3")),
        (plain_cnn, ("1", "5", "8")),
        (lambda: Nested(6), ("stages.0", "stages.1", "stages.2")),
        (Functional, ("a", "b")),
        (lambda: SmallTransformer(True, depth=12), ("blocks.2", "blocks.5", "blocks.8", "blocks.11")),
        (lambda: nn.Sequential(*(stage(3, 3, 1) for _ in range(5))), ("1", "2", "3", "4")),
        (lambda: nn.Sequential(OrderedDict(body=nn.Sequential(*(stage(3, 3, 1) for _ in range(4))), top=nn.Flatten())),
         ("body.0", "body.1", "body.2", "body.3")),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), nn.ReLU(), nn.Linear(4, 2)), ("2",)),
    ],
)  # fmt: skip
def test_automatic_names(make: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    net = tap(make(), classes=3, example=(1, 3, 32, 32))
    assert net.backbone.names == names
    assert net(torch.randn(2, 3, 32, 32)).logits.shape == (len(names), 2, 3)


@pytest.mark.parametrize(("taps", "names"), [(1, (7,)), (2, (3, 7)), (3, (2, 5, 7)), (8, tuple(range(8))), (20, tuple(range(8)))])
def test_evenly_spaced_blocks_and_always_the_last(taps: int, names: tuple[int, ...]) -> None:
    assert tap(SmallTransformer(True), classes=3, taps=taps).backbone.names == tuple(f"blocks.{number}" for number in names)


def test_names_are_put_in_the_order_in_which_they_run() -> None:
    assert tap(SmallResNet(), ["layer3", "stem", "layer2"], classes=3).backbone.names == ("stem", "layer2", "layer3")


def test_all_names_are_tapped_however_many() -> None:
    names = [f"blocks.{number}" for number in range(7)]
    assert tap(SmallTransformer(True), names, classes=3).backbone.names == tuple(names)


def test_a_part_that_runs_twice_is_read_the_last_time() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)
            self.after = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.after(self.part(self.part(x))))

    model, x = Twice(), torch.randn(3, 4)
    close(tap(model, at=["part"], classes=2)(x).features[0], model.part(model.part(x)))
    both = tap(model, at=["part", "after"], classes=2)
    close(both(x).features, torch.stack([model.part(model.part(x)), model.after(model.part(model.part(x)))]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"at": ["layr2"]}, "no module 'layr2' to tap; did you mean 'layer"),
        ({"at": ["blocks"]}, "no module 'blocks'"),
        ({"at": []}, "names no module"),
        ({"at": ["layer1", "layer1"]}, "twice"),
        ({"at": ["layer1"], "pool": "max"}, "pool must be one of auto, class, mean, maps"),
        ({"at": ["layer1"], "pool": "class"}, "pool='class' needs sequences"),
        ({"taps": 0}, "at least 1"),
        ({"classes": 0}, "classes is a whole number of at least 1"),
        ({"example": (1, 4, 32, 32)}, r"SmallResNet does not take inputs of the shape \[2, 4, 32, 32\]: .* 3 channels"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tap(SmallResNet(), **{"classes": 3} | options)


def test_lists_are_not_called_but_their_members_are() -> None:
    with pytest.raises(UserError, match=r"'blocks' is not called by the model's forward.*such as 'blocks\.7'"):
        tap(SmallTransformer(True), at=["blocks"], classes=3)


def test_what_cannot_be_guessed_is_asked_for() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[-1] == 48, "48 pixels, please"
            out: Tensor = self.conv(x)
            return out

    with pytest.raises(UserError, match=r"cannot guess what Odd takes \(tried .*48 pixels, please.*give example="):
        tap(Odd(), at=["conv"], classes=3)
    assert tap(Odd(), at=["conv"], classes=3, example=(1, 3, 48, 48)).width == 4
    with pytest.raises(UserError, match="cannot guess what Embedding takes; give example="):
        tap(nn.Embedding(3, 4), classes=3)
    with pytest.raises(UserError, match="no blocks to tap were found in Linear"):
        tap(nn.Linear(3, 4), classes=3)


def test_a_transformer_of_images_of_224_pixels_is_guessed() -> None:
    class Fixed(SmallTransformer):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 224:
                raise ValueError("224 pixels")
            return super().forward(F.interpolate(x, (32, 32)))

    assert tap(Fixed(True), classes=3).layers == 4


# The model stays itself.


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_construction_leaves_no_trace() -> None:
    model = SmallResNet()
    model.layer2.eval()
    model.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    ModuleBackbone(model, "layer3")
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks_of(model) == 0


def test_hooks_are_gone_after_a_forward_and_after_a_failed_one() -> None:
    model = SmallResNet()
    theirs: list[Any] = []
    model.layer2.register_forward_hook(lambda *call: theirs.append(call))
    net = tap(model, classes=3)
    theirs.clear()
    net(torch.randn(2, 3, 32, 32))
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 5, 32, 32))
    assert hooks_of(model) == 1
    assert len(theirs) == 1


def test_the_model_still_runs_by_itself_to_its_own_end() -> None:
    model = SmallResNet().eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    net = tap(model, classes=3)
    net.eval()(x)
    close(model(x), before)


def test_the_model_s_own_head_is_neither_run_nor_trained() -> None:
    model = SmallResNet()
    net = tap(model, classes=3, embedding=128)
    runs: list[int] = []
    model.late_norm.register_forward_hook(lambda *call: runs.append(1))
    fc = model.fc.weight.detach().clone()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1)
    out = net(torch.randn(4, 3, 32, 32))
    (out.logits.square().sum() + out.embedding.square().sum()).backward()
    optimizer.step()
    assert not runs
    assert (model.late_norm.running_mean == 0).all()
    assert torch.equal(model.fc.weight, fc)
    for name, parameter in net.named_parameters():
        behind = name.startswith(("backbone.model.late_norm", "backbone.model.fc"))
        assert (parameter.grad is None) is behind, name
        assert behind or (parameter.grad.isfinite().all() and parameter.grad.any()), name


def test_each_tap_s_gradient_reaches_its_part_and_no_deeper() -> None:
    model = SmallResNet()
    net = tap(model, classes=3)
    for layer, reached in ((0, {"layer1"}), (1, {"layer1", "layer2"}), (2, {"layer1", "layer2", "layer3"})):
        net.zero_grad()
        net(torch.randn(2, 3, 32, 32)).features[layer].square().sum().backward()
        assert {name.split(".")[0] for name, value in model.named_parameters() if value.grad is not None and value.grad.any()} == {
            "stem",
            *reached,
        }


def test_a_deep_copy_is_a_net_of_its_own() -> None:
    net, x = tap(SmallResNet(), classes=3).eval(), torch.randn(2, 3, 32, 32)
    net(x)
    before = net(x).logits
    other = copy.deepcopy(net)
    close(other(x).logits, before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert not torch.allclose(other(x).logits, before)
    assert torch.equal(net(x).logits, before)
    assert other.backbone.model is not net.backbone.model


def test_weights_come_back_from_a_state_dict(tmp_path: Path) -> None:
    one, two, x = tap(SmallResNet(), classes=3), tap(SmallResNet(), classes=3), torch.randn(2, 3, 32, 32)
    one(x)  # moves statistics
    torch.save(one.state_dict(), tmp_path / "net.pt")
    two.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert torch.equal(one.eval()(x).logits, two.eval()(x).logits)
    assert {name.split(".")[1] for name in one.state_dict() if name.startswith("backbone.")} == {"model", "readers"}


def test_a_functional_call_uses_the_weights_it_is_given() -> None:
    net, x = tap(SmallResNet(), classes=3).eval(), torch.randn(2, 3, 32, 32)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    close(functional_call(net, dict(other.named_parameters()), (x,)).logits, other(x).logits)
    assert not torch.allclose(net(x).logits, other(x).logits)


def test_a_model_that_works_in_place_is_read_before_it_does() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 3, 8, 8)
    close(tap(conv, at=["0", "2"], classes=2, example=x)(x).features[0], conv[0](x).mean((2, 3)))
    linear = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 5))
    net, v = tap(linear, at=["0", "2"], classes=2), torch.randn(2, 3)
    features = net(v).features
    close(features[0], mapped(net.backbone.readers[0], linear[0](v)))
    features.square().sum().backward()
    assert linear[0].weight.grad is not None


def test_readers_learn_where_the_model_runs_its_trunk_without_gradient() -> None:
    class Frozen(SmallResNet):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    net = tap(Frozen(), classes=3)
    net(torch.randn(2, 3, 32, 32)).logits.square().sum().backward()
    assert all(value.grad is None for value in net.backbone.model.parameters())
    assert all(value.grad is not None for value in net.backbone.readers.parameters())


def test_one_image_with_one_value_per_channel_uses_running_statistics() -> None:
    net = tap(SmallResNet(), classes=3, example=(1, 3, 8, 8))
    net.train()
    assert net(torch.randn(1, 3, 8, 8)).logits.isfinite().all()
    first, last = net.backbone.model.layer1[1], net.backbone.model.layer3[1]
    assert first.num_batches_tracked == 1
    assert last.num_batches_tracked == 0
    assert last.training
    assert hooks_of(net) == 0


def test_a_tapped_net_inside_another() -> None:
    """The inner net leaves its model early without ending the outer forward, and the other way round."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = ModuleBackbone(SmallResNet(), "layer2"), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.after(self.inner(x)[0])
            return out

    x = torch.randn(2, 3, 32, 32)
    assert tap(Outer(), at=["after"], classes=2)(x).features.shape == (1, 2, 5)
    assert tap(Outer(), at=["inner.model.layer1"], classes=2)(x).features.shape == (1, 2, 4)


# As a registered net.


def my_cnn(shape: tuple[int, int, int], taps: int, at_most: bool, at: list[str] | None = None) -> Backbone:
    return ModuleBackbone(SmallResNet(shape[0]), at, taps, at_most, example=(1, *shape))


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nets.loaded, "my_cnn", my_cnn)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("method", ["grace(er())", "grace(mose())"])
def test_a_plain_cnn_resumes_exactly(method: str) -> None:
    METHOD_LAWS["resumes_exactly"](method, net="my_cnn")


def test_a_plain_cnn_is_a_backbone() -> None:
    def without_head(shape: tuple[int, int, int], taps: int) -> Backbone:
        model = SmallResNet(shape[0])
        model.late_norm, model.fc = nn.Identity(), nn.Identity()
        return ModuleBackbone(model, None, taps, True, (1, *shape))

    check_backbone(without_head, 3)


@pytest.mark.usefixtures("_registered")
def test_a_plain_cnn_under_a_learner(tmp_path: Path) -> None:
    learner = Learner("grace(er())", classes=4, shape=TOY_SHAPE, memory=10, net="my_cnn", device="cpu")
    images = np.random.default_rng(0).integers(0, 256, (5, *TOY_SHAPE), np.uint8)
    for batch in (images, images[:1]):
        learner.learn(batch, [0, 1, 2, 3, 0][: len(batch)])
    learner.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner", device="cpu")
    assert np.array_equal(again.predict_proba(images), learner.predict_proba(images))


@pytest.mark.usefixtures("_registered")
def test_taps_of_a_registered_net_count_from_the_last() -> None:
    def names(expression: str, taps: int | None) -> tuple[str, ...]:
        net: TappedNet = build(expression, Images((3, 32, 32)), 4, taps)
        return net.backbone.names

    assert names("my_cnn", None) == ("layer1", "layer2", "layer3")
    assert names("my_cnn", 1) == ("layer3",)
    assert names("my_cnn(at=['stem', 'layer1', 'layer2'])", 2) == ("layer1", "layer2")
    assert names("my_cnn(at=['stem', 'layer1'])", None) == ("stem", "layer1")
    for expression in ("my_cnn", "my_cnn(at=['layer1', 'layer2'])"):
        with pytest.raises(UserError, match=r"places to tap .* not 5; use --taps"):
            names(expression, 5)


@pytest.mark.usefixtures("_registered")
def test_a_frozen_trunk_keeps_its_readers_and_heads_learning() -> None:
    net = build("my_cnn(freeze=True)", Images((3, 32, 32)), 4)
    before = copy.deepcopy(net.backbone.model.state_dict())
    optimizer = torch.optim.SGD([value for _, group in net.parameter_groups() for value in group], lr=0.1)
    net.train()
    net(torch.randn(3, 3, 32, 32)).logits.square().sum().backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in net.backbone.model.state_dict().items())
    assert all(value.grad is not None for value in net.backbone.readers.parameters())


def test_it_is_public() -> None:
    assert gracecl.tap is tap
    assert "tap" in gracecl.__all__


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_is_refused_in_a_sentence(kind: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(kind)
    with pytest.raises(UserError, match=r"tap takes a model in float32, not .*; use model.float\(\)"):
        tap(model, classes=3, example=torch.zeros(2, 4, dtype=kind))


def test_a_compiled_net_is_compiled_once() -> None:
    """Nothing on the module changes from step to step, so no step is compiled anew."""
    compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(4)))
    net = tap(model, classes=3, example=(1, 5))
    stepped = torch.compile(net, backend=backend)
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for _ in range(4):
            stepped(torch.randn(2, 5)).logits.sum().backward()
            counts.append(compiled)
    assert counts[0] > 0
    assert counts == counts[:1] * 4


def test_projectors_are_made_where_they_are_asked_for() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(4)))
    x = torch.randn(2, 5)
    assert tap(model, classes=3, example=x, embedding=7)(x).embedding.shape == (4, 2, 7)
    with pytest.raises(UserError, match=r"tap\(\.\.\., embedding=128\)"):
        _ = tap(model, classes=3, example=x)(x).embedding


def test_weights_that_no_tap_reads_are_not_trained() -> None:
    """The model's own head stays as it is; every other weight gets a gradient."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(4)), nn.Linear(5, 9))
    net = tap(model, classes=3, example=(1, 5))
    net(torch.randn(2, 5)).logits.sum().backward()
    assert {name for name, value in net.named_parameters() if not value.requires_grad} == {
        "backbone.model.4.weight",
        "backbone.model.4.bias",
    }
    assert all(value.grad is not None for value in net.parameters() if value.requires_grad)
