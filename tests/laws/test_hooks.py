"""Hooks: wrappers and sums pass every one of them on, and CONTRIBUTING says who uses which."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracecl.methods.base import Addition, Method, Sum, Wrapper
from gracecl.registry import methods

NO_HOOKS = ("name", "as_learner")
OF_A_CLASS = ("boundaries", "wants_taps", "repeats", "trains", "needs_attention", "clock")
HOOKS = [name for name, value in vars(Method).items() if (callable(value) or isinstance(value, property)) and name[0] != "_"]
HOOKS = [name for name in HOOKS if name not in NO_HOOKS]
INSTEAD = {("ema", "eval_net")}
"""overrides that stand in place of the inner method's: EMA predicts with its own average"""
AT_MOST_LISTED = 8
CLASSES: dict[str, type[Method]] = {name: methods.get(name) for name in methods.names()}


def overridden(cls: type, until: type) -> Iterator[tuple[type, str]]:
    """The hooks that a class and its parents below `until` define."""
    for parent in cls.__mro__[: cls.__mro__.index(until)]:
        yield from ((parent, hook) for hook in HOOKS if hook in vars(parent))


def test_a_wrapper_has_every_hook() -> None:
    assert [hook for hook in HOOKS if hook not in vars(Wrapper)] == [], "Wrapper must pass these on to the method inside"


@pytest.mark.parametrize("name", [name for name, cls in CLASSES.items() if issubclass(cls, Wrapper)])
def test_an_override_in_a_wrapper_calls_what_it_overrides(name: str) -> None:
    for parent, hook in overridden(CLASSES[name], Wrapper):
        found = vars(parent)[hook]
        text = inspect.getsource(found.fget if isinstance(found, property) else found)
        assert re.search(rf"(super\(.*?\)|inner)\.{hook}\b", text) or (name, hook) in INSTEAD, (
            f"{name}.{hook} leaves the method inside out"
        )


@pytest.mark.parametrize("name", [name for name, cls in CLASSES.items() if issubclass(cls, Addition)])
def test_a_sum_passes_on_every_hook_of_an_addition(name: str) -> None:
    left_out = {hook for _, hook in overridden(CLASSES[name], Addition)} - vars(Sum).keys()
    assert not left_out, f"Sum must pass {left_out} on to {name}"


def users(hook: str) -> str:
    """The files of methods that define a hook, or how many there are."""
    files = {
        Path(inspect.getfile(parent)).stem
        for cls in CLASSES.values()
        for parent in cls.__mro__
        if issubclass(parent, Method) and parent not in (Method, Wrapper, Sum, Addition) and hook in vars(parent)
    }
    return ", ".join(f"`{name}`" for name in sorted(files)) if len(files) <= AT_MOST_LISTED else f"{len(files)} files"


def test_the_table_of_hooks_is_what_the_code_says() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", text, flags=re.M))
    expected = {hook: users(hook) for hook in [*HOOKS, *OF_A_CLASS]}
    assert table == expected, "\n".join(f"| `{hook}` | … | {who} |" for hook, who in expected.items() if table.get(hook) != who)
