"""Ranges that are declared with an option: what they admit, what they say, and that nothing that is declared is lost on the way."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pytest

from gracecl.errors import UserError
from gracecl.registry import controllers, methods, spec
from gracecl.registry.spec import Above, AtLeast, AtMost, Below, Call, Within, check_fields, checked_call, parse_method


@dataclass
class Options:
    count: Annotated[int, AtLeast(2)] = 2
    few: Annotated[int, AtMost(3)] = 3
    temperature: Annotated[float, Above(0)] = 0.5
    early: Annotated[float, Below(1)] = 0.5
    share: Annotated[float, Within(0, 1)] = 0.5
    part: Annotated[float, AtLeast(0), Below(1)] = 0.5
    maybe: Annotated[int, AtLeast(1)] | None = None
    perhaps: Annotated[float | None, Above(0)] = None
    named: Annotated[float, Above(0)] | Literal["auto"] = "auto"
    free: float = 0.0
    noted: Annotated[int, "a note that is no limit"] = 0

    def __post_init__(self) -> None:
        check_fields(self, "thing")


def function(
    data: object, count: Annotated[int, AtLeast(1)] = 1, ratio: Annotated[float, Above(0)] | None = None
) -> tuple[int, float | None]:
    return count, ratio


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("count", [2, 3, 10**18]),
        ("few", [3, 0, -5]),
        ("temperature", [1e-300, 1, 1e38]),
        ("early", [0.999, 0, -3.0]),
        ("share", [0, 0.0, 0.3, 1, 1.0]),
        ("part", [0, 0.999]),
        ("maybe", [None, 1, 7]),
        ("perhaps", [None, 0.1]),
        ("named", ["auto", 2]),
        ("free", [-1e38, 0, 10**37]),
        ("noted", [-1]),
    ],
)
def test_values_inside_are_taken(name: str, inside: list[Any]) -> None:
    for value in inside:
        assert getattr(Options(**{name: value}), name) is value


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("count", 1, "at least 2, not 1"),
        ("few", 4, "at most 3, not 4"),
        ("temperature", 0, "above 0, not 0"),
        ("temperature", -1, "above 0, not -1"),
        ("early", 1.0, "below 1, not 1.0"),
        ("share", 1.5, "between 0 and 1, not 1.5"),
        ("share", -0.1, "between 0 and 1, not -0.1"),
        ("part", 1, "at least 0 and below 1, not 1"),
        ("maybe", 0, "at least 1 or None, not 0"),
        ("perhaps", -2.0, "above 0, not -2.0"),
        ("named", -1, "above 0 or one of auto, not -1"),
        ("count", 2.5, "a whole number, not 2.5"),
        ("count", True, "a whole number, not True"),
        ("share", "half", "a number, not 'half'"),
        ("share", None, "a number, not None"),
        ("maybe", "x", "a whole number or None, not 'x'"),
        ("free", math.nan, "a finite number, not nan"),
        ("free", -math.inf, "a finite number, not -inf"),
        ("share", math.nan, "a finite number, not nan"),
        ("temperature", math.inf, "a finite number, not inf"),
        ("perhaps", math.nan, "a finite number or None, not nan"),
        ("named", math.inf, "a finite number or one of auto, not inf"),
    ],
)
def test_values_outside_are_told_in_one_form(name: str, value: Any, told: str) -> None:
    with pytest.raises(UserError) as caught:
        Options(**{name: value})
    assert str(caught.value) == f"thing: {name} must be {told}"


def test_a_whole_number_too_large_for_a_float_is_told() -> None:
    with pytest.raises(UserError, match="free must be a number of at most 1e\\+38"):
        Options(free=10**400)


def test_options_of_functions_are_checked_alike() -> None:
    def call(**options: Any) -> object:
        return checked_call(function, Call("made", (), options), object())

    assert call() == (1, None)
    assert call(count=3, ratio=0.5) == (3, 0.5)
    assert call(ratio=None) == (1, None)
    for options, told in (
        ({"count": 0}, "made: count must be at least 1, not 0"),
        ({"ratio": 0.0}, "made: ratio must be above 0 or None, not 0.0"),
        ({"ratio": math.inf}, "made: ratio must be a finite number or None, not inf"),
    ):
        with pytest.raises(UserError) as caught:
            call(**options)
        assert str(caught.value) == told


def test_what_methods_inherit_is_checked_too() -> None:
    for text, told in (
        ("mose(temperature=-1)", "mose: temperature must be above 0, not -1"),
        ("mir(n_recall=-1)", "mir: n_recall must be at least 0, not -1"),
        ("ewc_on(every=-1)", "ewc_on: every must be at least 0, not -1"),
        ("onpro(temperature=0)", "onpro: temperature must be above 0, not 0"),
        ("er(n_recall=64, recall_per_class=0)", "er: recall_per_class must be at least 1 or None, not 0"),
        ("mose(balanced_weight=1e999)", "'1e999' in the expression 'mose(balanced_weight=1e999)' is not a finite number"),
    ):
        with pytest.raises(UserError) as caught:
            parse_method(text)
        assert str(caught.value) == told


@pytest.mark.parametrize("registry", [methods, controllers], ids=["methods", "controllers"])
def test_a_new_default_keeps_the_limits(registry: Any) -> None:
    """A class that gives an inherited option another default writes its annotation again, limits included."""
    seen = set()
    for made in map(registry.get, registry.names()):
        for parent in made.__mro__[1:]:
            for name in vars(parent).get("__dataclass_fields__", ()):
                own, inherited = (limits(cls, name) for cls in (made, parent))
                assert own == inherited, f"{made.__name__}.{name} has {own}, {parent.__name__}'s has {inherited}"
                seen.add(name)
    assert seen


def test_defaults_lie_within_their_limits() -> None:
    checked = 0
    for name in methods.names():
        made = methods.get(name)
        numbers = {field.name: field.default for field in fields(made) if isinstance(field.default, (int, float))}
        spec.check_options(made, name, numbers)  # raises where one does not
        checked += len(numbers)
    assert checked > 100


def limits(owner: Callable[..., Any], name: str) -> set[object]:
    hint = typing.get_type_hints(owner, include_extras=True)[name]
    parts = (hint, *typing.get_args(hint))
    return {limit for part in parts for limit in getattr(part, "__metadata__", ())}
