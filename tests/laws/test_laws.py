"""The laws over everything registered, alone and under grace."""

from __future__ import annotations

import pytest

from gracecl import spec
from gracecl.memory import Memory
from gracecl.nets.mlp import mlp
from gracecl.nets.resnet import resnet18
from gracecl.registry import methods, nets
from gracecl.streams.iid import offline, shuffled
from gracecl.testing import METHOD_LAWS, check_backbone, check_memory, check_stream, toy_stream

METHODS = [name for name in methods.names() if name != "grace"]
EXPRESSIONS = [*(f"{name}()" for name in METHODS), *(f"grace({name}())" for name in METHODS), "er(reduction='sum_of_means')"]
READINGS = [f"grace(mose(), {option})" for option in (
    "entropy_mode='cpr'", "entropy_mode='target'", "entropy_mode='deviation'", "entropy_mode='cpr_literal'",
    "entropy_mode='uniform'", "entropy_mode='none'", "adaptive=False", "alpha_on='ce_new'", "alpha_on='all'",
    "val_source='heldout'", "entropy_on='new'", "entropy_on='stream'", "classes='seen'",
    "unbiased=True", "attached=True", "sigma_floor=0.05",
)]  # fmt: skip


@pytest.mark.parametrize("law", METHOD_LAWS)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_method(expression: str, law: str) -> None:
    METHOD_LAWS[law](expression)


@pytest.mark.parametrize("expression", [f"{name}()" for name in METHODS] + ["grace(mose())"])
def test_resumes_exactly_on_the_paper_s_net(expression: str) -> None:
    METHOD_LAWS["resumes_exactly"](expression, net="resnet18(width=2)")


@pytest.mark.parametrize("law", ["losses_are_pure", "rows_are_per_layer_and_finite", "resumes_exactly", "expression_comes_back"])
@pytest.mark.parametrize("expression", READINGS)
def test_reading_of_grace(expression: str, law: str) -> None:
    METHOD_LAWS[law](expression)


@pytest.mark.parametrize("stream", [toy_stream(), shuffled(toy_stream(), 5), offline(toy_stream(), 2, 7), toy_stream().cut(7)])
def test_stream(stream) -> None:
    check_stream(stream)


def test_memory() -> None:
    check_memory(Memory)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(
    "make", [lambda shape, taps: resnet18(shape, taps, False, width=2), lambda s, t: mlp(s, t, False, 8, depth=4)]
)
def test_backbone(make, taps: int) -> None:
    check_backbone(make, taps)


def test_every_net_is_checked() -> None:
    assert set(nets.names()) == {"resnet18", "mlp"}, "add the new net to test_backbone"


def test_every_registered_method_says_what_it_is() -> None:
    for name, line in methods.summaries().items():
        assert line, f"{name} has no docstring"
        assert spec.parse_method(name).name == name
