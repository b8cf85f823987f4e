"""Options of any net: what a frozen trunk keeps, what adapters compute, which learning rate reaches what."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl import nets, rng
from gracecl.core import StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.er import ER
from gracecl.nets.tapped import Backbone, TappedNet
from gracecl.nets.trunk import LowRankLinear
from gracecl.registry import nets as registry
from gracecl.testing import METHOD_LAWS, TOY_SHAPE, assert_same, feed, toy_engine, toy_stream

VIT = "patch=4, dim=12, depth=4, heads=2"


def build(expression: str, shape: tuple[int, int, int] = TOY_SHAPE, taps: int | None = None) -> TappedNet:
    with rng.torch_seed(0, "net"):
        return nets.build(expression, Images(shape), 6, taps)


def copies(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def trained(net: str, method: str = "grace(mose())", steps: int = 6) -> tuple[Engine, dict[str, Tensor], dict[str, Tensor]]:
    """An engine after some steps, and its net's state before and after them."""
    engine = toy_engine(method, net=net)
    before = copies(engine.net)
    feed(engine, toy_stream(), until=steps)
    return engine, before, copies(engine.net)


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def named(net: TappedNet, parameters: list[nn.Parameter]) -> set[str]:
    chosen = {id(parameter) for parameter in parameters}
    return {name for name, parameter in net.named_parameters() if id(parameter) in chosen}


def is_trunk(name: str) -> bool:
    """By the names of resnet18 and vit: everything in the backbone but gates, chains and the taps' own norms."""
    return name.startswith("backbone.") and not name.startswith(("backbone.gates.", "backbone.chains.", "backbone.tap_norms."))


# Frozen.


@pytest.mark.parametrize("net", [f"vit({VIT}", "resnet18(width=2"])
def test_trunk_is_the_backbone_without_its_taps(net: str) -> None:
    made = build(f"{net})")
    assert named(made, made.backbone.trunk_parameters()) == {name for name, _ in made.named_parameters() if is_trunk(name)}
    assert any(not is_trunk(name) for name, _ in made.backbone.named_parameters("backbone"))


@pytest.mark.parametrize("net", [f"vit({VIT}", "resnet18(width=2", "mlp(width=12, depth=4, norm=True"])
def test_a_frozen_trunk_keeps_weights_and_statistics_and_everything_else_learns(net: str) -> None:
    engine, before, after = trained(f"{net}, freeze=True)")
    changed = moved(before, after)
    assert not {name for name in changed if is_trunk(name)}
    learning = {name for name, value in before.items() if not is_trunk(name) and value.is_floating_point()}
    assert {name for name in learning if not name.startswith("backbone.")} <= changed
    assert {name for name in learning if name.endswith(("running_mean", "running_var"))} <= changed
    given = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    assert named(engine.net, given) == {name for name, _ in engine.net.named_parameters() if not is_trunk(name)}
    assert all(parameter.grad is None for parameter in engine.net.backbone.trunk_parameters())
    # The same net without the option learns everywhere.
    _, before, after = trained(f"{net})")
    assert {name for name in before if is_trunk(name) and name.endswith("running_mean")} <= moved(before, after)


def test_modes_of_a_frozen_trunk() -> None:
    net = build("resnet18(width=2, freeze=True)")
    norms = {name: part for name, part in net.named_modules() if isinstance(part, nn.BatchNorm2d)}
    for mode in (True, False, True):
        net.train(mode)
        assert net.training == net.backbone.training == mode
        for name, norm in norms.items():
            assert norm.training == (mode and not is_trunk(name)), name
    copied = copy.deepcopy(net).train()
    assert not copied.backbone.stem[1].training
    assert copied.backbone.gates[0].norm.training
    for _ in net.sweep(torch.zeros(3, *TOY_SHAPE, dtype=torch.uint8)):
        pass
    assert not net.backbone.stem[1].training
    assert net.backbone.gates[0].norm.training


# Adapters.


def test_adapters_change_nothing_at_first() -> None:
    """The same weights and heads as the plain net's, and the same outputs to the bit."""
    plain, adapted = build(f"vit({VIT})"), build(f"vit({VIT}, lora=3, lora_alpha=8)")
    x = torch.randn(5, *TOY_SHAPE)
    one, two = plain(x), adapted(x)
    assert torch.equal(one.features, two.features)
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.embedding, two.embedding)
    state = adapted.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    assert {name.rsplit(".", 1)[1] for name in state.keys() - plain.state_dict().keys()} == {"down", "up"}


@pytest.mark.parametrize(("alpha", "scale"), [("", 1.0), (", lora_alpha=6", 2.0), (", lora_alpha=1.5", 0.5)])
def test_adapters_are_a_low_rank_change_of_query_and_value(alpha: str, scale: float) -> None:
    """Put into the weights of a plain net as W + (alpha / r) B A, they give the same features; the key's rows stay."""
    engine, before, after = trained(f"vit({VIT}, lora=3{alpha})", steps=12)
    plain = build(f"vit({VIT})").backbone
    plain.tap_norms.load_state_dict(engine.net.backbone.tap_norms.state_dict())
    with torch.no_grad():
        for number, block in enumerate(plain.blocks):
            layer = engine.net.backbone.blocks[number].attn.qkv
            assert isinstance(layer, LowRankLinear)
            assert layer.scale == scale
            down = after[f"backbone.blocks.{number}.attn.qkv.down"]
            up = after[f"backbone.blocks.{number}.attn.qkv.up"]
            assert down.shape == (6, 12)
            assert up.shape == (2, 12, 3)
            assert up.abs().max() > 0
            block.attn.qkv.weight[:12] += scale * up[0] @ down[:3]
            block.attn.qkv.weight[24:] += scale * up[1] @ down[3:]
    x = torch.randn(5, *TOY_SHAPE)
    torch.testing.assert_close(engine.net.backbone(x), plain(x), rtol=1e-5, atol=1e-5)
    changed = moved(before, after)
    assert {name for name in changed if is_trunk(name)} == {name for name in before if name.endswith((".down", ".up"))}
    assert {name for name in before if "tap_norms" in name or name.startswith("classifier")} <= changed


def test_adapters_have_their_own_randomness_and_size() -> None:
    net = build("vit(patch=4, dim=64, depth=2, heads=2, lora=4)", (3, 8, 8))
    learning = [parameter for parameter in net.backbone.trunk_parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in learning) == 2 * 2 * (4 * 64 + 64 * 4)
    one, two = (net.backbone.blocks[number].attn.qkv.down for number in range(2))
    assert not torch.equal(one, two)
    for down in (one, two):
        assert 0.9 / 8 < down.abs().max() <= 1 / 8
        assert down.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)


def test_adapted_nets_can_be_copied_saved_and_loaded() -> None:
    engine, _, after = trained(f"vit({VIT}, lora=2)")
    x = torch.randn(3, *TOY_SHAPE)
    copied = copy.deepcopy(engine.net)
    other = build(f"vit({VIT}, lora=2)")
    other.load_state_dict({name: value for name, value in after.items() if not name.startswith("extras")})
    expected = engine.net(x).logits
    assert torch.equal(copied(x).logits, expected)
    assert torch.equal(other(x).logits, expected)
    with torch.no_grad():
        copied.backbone.blocks[0].attn.qkv.up += 1
    assert not torch.equal(copied(x).logits, expected)
    assert torch.equal(engine.net(x).logits, expected)


class Attention(nn.Module):
    """Attention over the rows of an image, as other libraries write it, with layers of the given names."""

    def __init__(self, names: tuple[str, str, str], size: int = 8) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(size, size))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.get_submodule(name)(x) for name in self.names)
        return F.scaled_dot_product_attention(query, key, value)


class ReadsTheWeight(nn.Module):
    """Attention that takes the weight of its layer and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, dim=-1))


class Borrowed(Backbone):
    """A net of somebody else's: two attention modules, of which the second is behind the last tap and never called."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers, self.width = 1, 8
        self.first, self.unused = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:, 0]).mean(dim=1).unsqueeze(0)


@pytest.fixture
def borrowed() -> Iterator[Callable[[Callable[[], nn.Module]], None]]:
    def register(make: Callable[[], nn.Module]) -> None:
        registry.loaded["borrowed"] = lambda shape, taps, at_most: Borrowed(make)

    yield register
    registry.loaded.pop("borrowed", None)


@pytest.mark.parametrize(
    "names", [("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("to_q", "to_k", "to_v")]
)
def test_separate_query_and_value_of_any_net_are_adapted(borrowed: Callable[..., None], names: tuple[str, str, str]) -> None:
    borrowed(lambda: Attention(names))
    net = build("borrowed(lora=2)")
    query, key, value = (net.backbone.first.get_submodule(name) for name in names)
    assert type(key) is nn.Linear
    assert not any(isinstance(part, LowRankLinear) for part in net.backbone.unused.modules())
    assert torch.equal(net(torch.ones(2, *TOY_SHAPE)).logits, build("borrowed")(torch.ones(2, *TOY_SHAPE)).logits)
    x = torch.randn(3, 5, 8)
    for layer in (query, value):
        assert isinstance(layer, LowRankLinear)
        nn.init.normal_(layer.up)
        expected = x @ (layer.weight + layer.up[0] @ layer.down).T + layer.bias
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_where_adapters_could_not_act_they_are_refused(borrowed: Callable[..., None]) -> None:
    for make in (ReadsTheWeight, lambda: nn.Linear(8, 8), lambda: Attention(("value", "other", "third"))):
        borrowed(make)
        with pytest.raises(UserError, match="lora has nothing to adapt: borrowed"):
            build("borrowed(lora=2)")
    with pytest.raises(UserError, match="lora has nothing to adapt: resnet18"):
        build("resnet18(width=2, lora=4)")


# Learning rates.


@pytest.mark.parametrize("net", [f"vit({VIT}", "resnet18(width=2", f"vit({VIT}, lora=2"])
def test_the_trunk_moves_by_its_factor(net: str) -> None:
    """One step of plain SGD from the same start: w - factor · lr · gradient in the trunk, w - lr · gradient elsewhere."""
    states = []
    for option in (")", ", trunk_lr=0.25)"):
        engine = toy_engine("mose()", net=net + option, taps=4, optimizer="sgd(lr=0.5)")
        stream = toy_stream()
        for step in range(3):  # the first only fills the memory
            batch = stream.batch(step)
            before = copies(engine.net)
            if engine.learn(StreamBatch(batch.x, batch.labels, task=batch.task, sources=batch.sources)) is not None:
                break
        gradients = {name: value.grad for name, value in engine.net.named_parameters() if value.grad is not None}
        states.append((before, copies(engine.net), gradients))
    (start, _, plain), (same, after, gradients) = states
    assert not moved(start, same)
    assert any(name.startswith("extras") for name in gradients)
    assert any(is_trunk(name) and gradient.abs().max() > 0 for name, gradient in gradients.items())
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name
        rate = 0.5 * 0.25 if is_trunk(name) else 0.5
        torch.testing.assert_close(after[name], start[name] - rate * gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_groups_of_the_optimizer() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    for expression, rate in (("adam(lr=0.01)", 0.01), ("adamw", 1e-3), ("sgd(lr=2)", 2.0)):
        groups = optim.build(expression, [(0.5, [one]), (1.0, [two])]).param_groups
        assert [group["lr"] for group in groups] == [rate * 0.5, rate]
        assert groups[0]["params"][0] is one
        assert groups[1]["params"][0] is two


@pytest.mark.parametrize(
    ("expression", "make"),
    [
        (
            "adam(lr=0.01, weight_decay=0.1)",
            lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.9, 0.999), fused=True),
        ),
        ("adamw(lr=0.01)", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01, betas=(0.9, 0.999), fused=True)),
        ("sgd(lr=0.1, momentum=0.9)", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.0, fused=True)),
    ],
)
def test_one_group_is_the_plain_optimizer(expression: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    ours, theirs = build("mlp(width=5)"), build("mlp(width=5)")
    assert [factor for factor, _ in ours.parameter_groups()] == [1.0]
    assert [id(p) for p in ours.parameter_groups()[0][1]] == [id(p) for p in ours.parameters()]
    optimizers = optim.build(expression, ours.parameter_groups()), make(list(theirs.parameters()))
    for step in range(4):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(6, *TOY_SHAPE, generator=torch.Generator().manual_seed(step))
            net(x).logits.square().sum().backward()
            optimizer.step()
    assert_same(ours.state_dict(), theirs.state_dict(), "the net")
    own, plain = (optimizer.state_dict() for optimizer in optimizers)
    for unused in own["state"].keys() - plain["state"].keys():  # the projectors, which have no gradient here
        assert not own["state"].pop(unused)["momentum_buffer"].any()
    assert_same(own, plain, "the optimizer")


@dataclasses.dataclass(eq=False, repr=False)
class OwnOptimizer(ER):
    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.given = params
        return torch.optim.SGD(params, lr=0.1)


def test_a_method_s_own_optimizer_gets_what_learns() -> None:
    net, method = build("resnet18(width=2, freeze=True)"), OwnOptimizer()
    engine = Engine(method, net, Memories(4, Images(TOY_SHAPE)))
    assert named(net, method.given) == {name for name, _ in net.named_parameters() if not is_trunk(name)}
    engine.learn(StreamBatch(torch.zeros(2, *TOY_SHAPE, dtype=torch.uint8), np.array([0, 1])))


# Checkpoints, and expressions that make no sense.


@pytest.mark.slow
@pytest.mark.parametrize(
    "net",
    [
        f"vit({VIT}, freeze=True)",
        f"vit({VIT}, lora=2, lora_alpha=4, trunk_lr=0.1)",
        f"vit({VIT}, trunk_lr=0.01)",
        "resnet18(width=2, freeze=True)",
    ],
)
def test_resumes_exactly(net: str) -> None:
    METHOD_LAWS["resumes_exactly"]("grace(er())", net=net)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("freeze=1", "freeze must be True or False"),
        ("lora=0.5", "lora must be a whole number"),
        ("lora=-1", "lora must be at least 0"),
        ("lora=2, lora_alpha=0", "lora_alpha must be above 0"),
        ("lora_alpha=2", "lora_alpha scales adapters"),
        ("trunk_lr='slow'", "trunk_lr must be a number"),
        ("trunk_lr=0", "trunk_lr must be above 0, not 0"),
        ("freeze=True, trunk_lr=0.1", "trunk_lr has no meaning"),
        ("frozen=True", "vit has no option 'frozen'"),
    ],
)
def test_options_without_sense_are_refused(options: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(f"vit({VIT}, {options})")


def test_options_that_change_nothing() -> None:
    plain, named_ = build(f"vit({VIT})"), build(f"vit({VIT}, freeze=False, lora=0, trunk_lr=1.0)")
    assert not moved(copies(plain), copies(named_))
    assert all(parameter.requires_grad for parameter in named_.parameters())
    assert len(named_.parameter_groups()) == 1
