"""The laws over everything registered, alone and under grace."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor, nn

from gracecl.errors import UserError
from gracecl.memory import Memory
from gracecl.methods.base import Addition, Wrapper
from gracecl.nets import Backbone, ModuleBackbone
from gracecl.nets.mlp import mlp
from gracecl.nets.resnet import resnet18
from gracecl.nets.vit import vit
from gracecl.registry import methods, nets, spec
from gracecl.streams.iid import offline, shuffled
from gracecl.testing import (
    METHOD_LAWS,
    TOY_TRANSFORMER,
    check_backbone,
    check_memory,
    check_stream,
    feed,
    next_batch,
    prepared,
    resumes_exactly,
    toy_engine,
    toy_stream,
)

METHODS = [name for name in methods.names() if name != "grace"]
SHORTER = {
    "ranpac": "projections=20",
    **dict.fromkeys(("acil", "air", "foal", "gacl", "klda", "randumb"), "size=20"),
    "rar": "iterations=2",
    "gdumb": "epochs=6",
    "adversarial_replay": "attack_steps=1",
    "online_lora": "n_hard=2",
    "ocm": "n_recall=4",
    "onpro": "n_recall=4",
}
"""what makes a method's laws take less time and changes nothing else"""
ALONE = [f"{name}({SHORTER.get(name, '')})" for name in METHODS]
IN_GRACE = [f"grace({method})" for method in ALONE if spec.parse_method(method).chain.traits.trains != "never"]
CLOSED = [
    "closed(solver='ridge', weights='exact', refresh=5)",
    "closed(map='rff', size=20, members=2, temperature=True)",
    "ranpac(projections=20, ridge='held_out')",
    "slda(reference=True)",
]
EXPRESSIONS = [*ALONE, *IN_GRACE, *CLOSED, "er(reduction='sum_of_means')", "bic(held_out=0.5)"]
SUMS = ["er() + ewc() + cpr()", "grace(er() + ewc())", "grace(sgd(classes='current') + lwf())", "grace(derpp() + si())"]
NETS = ["resnet18(width=2)", TOY_TRANSFORMER, "own_cnn"]
ON_NETS = [
    (method, net)
    for method in [*ALONE, "grace(er())", "grace(mose())", "grace(ema())", "grace(gdumb(epochs=6))"]
    for net in NETS
    if net == TOY_TRANSFORMER or not spec.parse_method(method).chain.traits.attention
]
"""GRACE's own state is the same around every method, so a few stand for all; on the toy net it is around each of them"""
STANDING_FOR_ALL = ("grace(er())", "grace(mose())", "grace(gdumb(epochs=6))", "er()", "mose()", "online_lora(n_hard=2)")
READINGS = [f"grace(mose(), {option})" for option in (
    "entropy_mode='cpr'", "entropy_mode='target'", "entropy_mode='deviation'", "entropy_mode='cpr_literal'",
    "entropy_mode='uniform'", "entropy_mode='none'", "adaptive=False", "alpha_on='ce_new'", "alpha_on='all'",
    "val_source='heldout'", "entropy_on='new'", "entropy_on='stream'", "classes='seen'",
    "alpha_on='ce_past'", "alpha_on='entropy'", "past_tasks='finished'", "past_head='ncm'", "past_head='others'",
    "entropy_of='features'",
    "entropy_layers='last'", "entropy_sum=True", "unbiased=True", "attached=True", "sigma_floor=0.05", "accuracy_floor=0.05",
    "strength='bayes'", "strength='bayes(c=1, tau=0.5)'", "strength='pi'", "strength='balance'",
)]  # fmt: skip


@nets.register("own_cnn")
def own_cnn(shape: tuple[int, int, int], taps: int, at_most: bool) -> Backbone:
    """A user's own module: three blocks of different width, tapped where their outputs are."""
    widths = [shape[0], 3, 4, 5]
    blocks = (nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths))
    return ModuleBackbone(nn.Sequential(*blocks), None, taps, at_most, (1, *shape))


def when(expression: str, law: str) -> Any:
    """`make test` has all laws of a few methods and a short law of each, `make test-all` all laws of all methods and those that
    GRACE's own code can break around each.
    """
    if expression in STANDING_FOR_ALL or law == "losses_are_pure":
        return ()
    short = expression not in IN_GRACE or law == "rows_are_per_layer_and_finite"
    return pytest.mark.slow if short else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("expression", "law"),
    [pytest.param(expression, law, marks=when(expression, law)) for expression in EXPRESSIONS for law in METHOD_LAWS],
)
def test_method(expression: str, law: str) -> None:
    METHOD_LAWS[law](expression)


@pytest.mark.parametrize("expression", ALONE)
def test_targets_are_named_after_their_method(expression: str) -> None:
    """So that no wrapper or addition takes the target of another; a method may use its parent's."""
    engine, stream = prepared(expression)
    if engine.chain.traits.trains != "never":
        own = {methods.name_of(kind) for part in engine.chain.parts for kind in type(part).__mro__ if kind in methods._name_of}
        batch, _ = next_batch(engine, stream)
        assert {target.split("/")[0] for target in batch.targets} <= own


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in methods.names() if issubclass(methods.get(name), (Wrapper, Addition))])
def test_every_pair_learns_two_tasks_or_is_refused(name: str) -> None:
    """Wrappers around each method, additions to each: nothing but a sentence of ours may stop them."""
    pairs = [f"{method} + {name}()" if issubclass(methods.get(name), Addition) else f"{name}({method})" for method in ALONE]
    learned = 0
    for pair in pairs:
        try:
            engine = toy_engine(pair)
            feed(engine, engine.as_seen(toy_stream()), until=9)
        except UserError:
            continue
        learned += 1
    assert learned > 5


@pytest.mark.parametrize("law", METHOD_LAWS)
@pytest.mark.parametrize("expression", SUMS)
def test_sum(expression: str, law: str) -> None:
    METHOD_LAWS[law](expression)


@pytest.mark.parametrize(
    ("expression", "net"),
    [
        pytest.param(expression, net, marks=() if expression in STANDING_FOR_ALL else pytest.mark.exhaustive)
        for expression, net in ON_NETS
    ],
)
def test_resumes_exactly_on_every_kind_of_net(expression: str, net: str) -> None:
    """In the middle of the second task; the first law above stops at every kind of moment, on the toy net."""
    resumes_exactly(expression, net, stops=[9], until=13)


@pytest.mark.parametrize(
    "law",
    ["losses_are_pure", "expression_comes_back"]
    + [pytest.param(law, marks=pytest.mark.exhaustive) for law in ("rows_are_per_layer_and_finite", "resumes_exactly")],
)
@pytest.mark.parametrize("expression", READINGS)
def test_reading_of_grace(expression: str, law: str) -> None:
    METHOD_LAWS[law](expression)


@pytest.mark.parametrize("stream", [toy_stream(), shuffled(toy_stream(), 5), offline(toy_stream(), 2, 7), toy_stream().cut(17)])
def test_stream(stream) -> None:
    check_stream(stream)


def test_memory() -> None:
    check_memory(Memory)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda shape, taps: resnet18(shape, taps, False, width=2),
        lambda shape, taps: mlp(shape, taps, False, 8, depth=4),
        lambda shape, taps: vit(shape, taps, False, patch=5 if shape[1] == 15 else 4, dim=8, depth=4, heads=2),
    ],
)
def test_backbone(make, taps: int) -> None:
    check_backbone(make, taps)


def test_a_backbone_whose_last_tap_is_not_the_deepest_is_found() -> None:
    class Backwards(Backbone):
        def __init__(self, inner: Backbone) -> None:
            super().__init__()
            self.inner, self.layers, self.width = inner, inner.layers, inner.width

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).flip(0)

    with pytest.raises(AssertionError, match="the deepest is not the last"):
        check_backbone(lambda shape, taps: Backwards(mlp(shape, taps, False, 8, depth=4)))


def test_every_net_is_checked() -> None:
    elsewhere = {"timm", "transformers", "efficientnet_lite0"}  # packages of others, and not any image: tests/test_pretrained.py
    without_weights = {"identity"}  # tests/oracle/test_nets.py
    checked = {"resnet18", "mlp", "vit"} | elsewhere | without_weights
    assert set(nets.names()) - {"own_cnn"} == checked, "add the new net to test_backbone"


@pytest.mark.parametrize("expression", [method for method in ALONE if spec.parse_method(method).chain.traits.trains == "never"])
@pytest.mark.parametrize("around", ["grace({})", "ema({})", "{} + ewc()"])
def test_what_makes_no_steps_is_not_wrapped(expression: str, around: str) -> None:
    with pytest.raises(UserError, match="alone"):
        spec.parse_method(around.format(expression))


def test_every_registered_method_says_what_it_is() -> None:
    for name, line in methods.summaries().items():
        assert line, f"{name} has no docstring"
        method = spec.parse_method(name)
        assert name in [part.name for part in (method, *method.parts)]
