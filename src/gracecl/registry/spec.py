"""Configurations are expressions: `grace(er(n_recall=64) + ewc(strength=3))`, the same text everywhere.

The grammar is a small part of Python's: names, calls with literal arguments, `+`, read from the syntax tree and never evaluated.
`show` writes an object's expression back, naming only what differs from the defaults, so `parse(show(m))` gives m again.

What an option may be is declared with it and checked here: its type, and the range of a number, as in
`n_recall: Annotated[int, AtLeast(0)] = 64`. Numbers are finite, as an expression has no word for others.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from gracecl.errors import UserError
from gracecl.registry import Registry, methods, nearest
from gracecl.registry.objects import is_opaque

MOST_NUMBERS = 100_000
"""that a text such as 0-3,7 may name"""
LONGEST_NUMBER = 18
"""digits of a whole number that fits into 64 bits"""
LARGEST = 1 << 63
"""that whole numbers stay below, of either sign"""
LARGEST_FLOAT = 1e38
"""that numbers do not exceed, of either sign: single precision has no larger ones"""
DEEPEST = 50
"""methods inside methods, or added to one another"""


@dataclass(frozen=True)
class Call:
    """A name with its arguments, not yet resolved."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """The range of a numeric option, in its annotation. Its text follows "temperature must be"."""

    bound: float
    words: ClassVar[str]
    compare: ClassVar[Callable[[Any, Any], bool]]

    def holds(self, value: float) -> bool:
        return type(self).compare(value, self.bound)

    def __str__(self) -> str:
        return f"{self.words} {self.bound}"


class AtLeast(Limit):
    words, compare = "at least", operator.ge


class AtMost(Limit):
    words, compare = "at most", operator.le


class Above(Limit):
    words, compare = "above", operator.gt


class Below(Limit):
    words, compare = "below", operator.lt


@dataclass(frozen=True)
class Within(Limit):
    """From `bound` to `highest`, both included."""

    highest: float

    def holds(self, value: float) -> bool:
        return self.bound <= value <= self.highest

    def __str__(self) -> str:
        return f"between {self.bound} and {self.highest}"


def parse_call(text: str) -> Call:
    """Parse `resnet18(width=64)` or `split-cifar100` to a name and literal arguments."""
    node = _parse(text)
    call = _read(node, text)
    if not isinstance(call, Call):
        raise UserError(f"'{text}' is not a name such as er, or a call such as er(n_recall=64)")
    return call


def with_option(text: str, name: str, value: Any) -> str:
    """Add an option to a call: `split-digits(tasks=5)` with epochs=3 is `split-digits(tasks=5, epochs=3)`."""
    call = parse_call(text)
    if name in call.kwargs:
        raise UserError(f"'{text}' gives {name} already; leave that or --{name.replace('_', '-')} out")
    stem = text.strip()
    if not stem.endswith(")"):
        return f"{stem}({name}={value!r})"
    between = ", " if call.args or call.kwargs else ""
    return f"{stem[:-1].rstrip(', ')}{between}{name}={value!r})"


def parse_method(text: str) -> Any:
    """Build the method that an expression names."""
    return build_method(read_method(text))


def in_full(text: str) -> str:
    """Return the canonical expression of a method: `grace(mose())` for `grace`."""
    return text if is_opaque(text) else repr(parse_method(text))


def read_method(text: str) -> Any:
    """Parse the expression of a method to a `Call` or `(left, "+", right)`, not yet resolved."""
    read = _read(_parse(text), text)
    if not _names_methods(read):
        raise UserError(f"'{text}' is not a method such as er or grace(er(n_recall=64)); only methods can be added")
    return _without_aliases(read)


def build_method(read: Any) -> Any:
    """Build the method that `read_method` parsed."""
    return _build_method(read).as_learner()


def parse_numbers(text: str, what: str) -> list[int]:
    """Parse `0-3,7` to 0, 1, 2, 3, 7."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"cannot read {what} '{text}'; write for example 0-4 or 0,3,7")
        last = last if dash else first
        if max(len(first), len(last)) > LONGEST_NUMBER:
            raise UserError(f"{what} '{_short(text)}' has a number of more than {LONGEST_NUMBER} digits; use smaller ones")
        if len(numbers) + int(last) - int(first) >= MOST_NUMBERS:
            raise UserError(f"{what} '{_short(text)}' names more than {MOST_NUMBERS:,} numbers; name fewer")
        numbers += range(int(first), int(last) + 1)
    return numbers


def construct(registry: Registry, call: Call, *before: Any) -> Any:
    """Call what the registry holds under the name; `before` are arguments that the expression does not give."""
    return checked_call(registry.get(call.name), call, *before)


def checked_call(target: Callable[..., Any], call: Call, *before: Any) -> Any:
    """Call a function or class with an expression's arguments; report a mistake in them as a sentence."""
    return target(*before, **arguments(target, call, len(before)))


def arguments(target: Callable[..., Any], call: Call, before: int = 0) -> dict[str, Any]:
    """Return an expression's arguments by name, checked; the first `before` parameters are not the expression's."""
    options = list(inspect.signature(target).parameters)[before:]
    if len(call.args) > len(options):
        raise UserError(f"{call.name} takes at most {len(options)} arguments, {len(call.args)} were given")
    given = dict(zip(options, call.args, strict=False))
    for name in call.kwargs:
        if name not in options:
            raise UserError(f"{call.name} has no option '{name}'{nearest(name, options)} (options: {', '.join(options) or 'none'})")
        if name in given:
            raise UserError(f"{call.name} was given its option '{name}' twice")
    given |= call.kwargs
    if inspect.isfunction(target):  # classes check their own fields, which may be more generous
        check_options(target, call.name, given)
    elif dataclasses.is_dataclass(target) and (lost := given.keys() - {field.name for field in dataclasses.fields(target)}):
        raise UserError(
            f"{call.name}: {min(lost)} is an argument of __init__ and not a field, so no run could record it; write @dataclass("
            f"eq=False, repr=False) above the class and {min(lost)} as a field"
        )
    return given


def check_fields(thing: Any, name: str) -> None:
    """Check the type and range of every field of a dataclass."""
    check_options(type(thing), name, {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)})


def check_options(target: Callable[..., Any], owner: str, given: dict[str, Any]) -> None:
    """Check the type and range of arguments that `owner` was given."""
    hints = _hints(target)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):  # an option without annotation takes what is written
            raise UserError(f"{owner}: {name} must be {_wanted(hints[name], value)}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a value for an error: its text if that is short, else its type."""
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"a {type(value).__name__}"


def show(thing: Any, name: str) -> str:
    """Return the expression of a dataclass: fields that differ from their defaults; method parts first, unnamed."""
    parts = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if dataclasses.is_dataclass(value):
            parts.append(repr(value))
        elif value != field.default:
            parts.append(f"{field.name}={value!r}")
    return f"{name}({', '.join(parts)})"


def _parse(text: str) -> ast.expr:
    # A hyphen between letters belongs to a name (er-ace, split-cifar100), and so does ++ after one (der++, as `normal` has it);
    # quoted text is left alone.
    if is_opaque(text):
        raise UserError(f"'{text}' stands for an object that a program gave; only with that object can it be made again")
    in_a_name = r"""("[^"]*"|'[^']*')|(?<=[A-Za-z0-9])(?:-(?=[A-Za-z])|(\+\+)(?=\s*(?:$|[(),+])))"""
    plain = re.sub(in_a_name, lambda m: m.group(1) or ("_pp" if m.group(2) else "_"), text)
    try:
        tree = ast.parse(plain.strip(), mode="eval").body
        if _depth(tree) <= DEEPEST:
            return tree
    except SyntaxError as error:
        raise UserError(
            f"cannot read the expression '{_short(text)}': {error.msg}; write for example grace(er(n_recall=64))"
        ) from None
    except ValueError as error:  # a NUL in it
        raise UserError(f"cannot read the expression {_short(text)!r}: {error}; write for example grace(er(n_recall=64))") from None
    except (RecursionError, MemoryError):
        pass
    raise UserError(f"the expression '{_short(text)}' has more than {DEEPEST} parts inside or beside one another; leave some out")


def _depth(node: ast.AST) -> int:
    """Return the depth of an expression's tree."""
    depth, level = 0, [node]
    while level and depth <= DEEPEST:
        depth, level = (
            depth + 1,
            [child for parent in level for child in ast.iter_child_nodes(parent) if isinstance(child, ast.expr)],
        )
    return depth


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _read(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Name(id=name):
            return Call(name, (), {})
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = {}
            for keyword in keywords:
                if keyword.arg is None:
                    raise UserError(f"'**' cannot stand in the expression '{text}'")
                if keyword.arg in named:
                    raise UserError(f"{name} was given its option '{keyword.arg}' twice in the expression '{text}'")
                named[keyword.arg] = _read(keyword.value, text)
            return Call(name, tuple(_read(arg, text) for arg in args), named)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_read(left, text), "+", _read(right, text))
    try:
        value = ast.literal_eval(node)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"'{ast.get_source_segment(text, node) or value}' in the expression '{text}' is not a finite number")
        if isinstance(value, str) and "\0" in value:
            raise UserError(f"the text {value!r} holds a NUL, which no name or path has; leave it out")
        return value
    except (ValueError, TypeError):
        raise UserError(
            f"cannot read '{ast.unparse(node)}' in the expression '{text}'; values are numbers, words in quotes, lists"
        ) from None


def _names_methods(read: Any) -> bool:
    match read:
        case (left, "+", right):
            return _names_methods(left) and _names_methods(right)
    return isinstance(read, Call)


def _without_aliases(read: Any) -> Any:
    """Return the expression's tree with aliases of methods resolved."""
    match read:
        case Call(name, args, kwargs):
            named = {option: _without_aliases(value) for option, value in kwargs.items()}
            return Call(methods.real_name(name), tuple(map(_without_aliases, args)), named)
        case (left, "+", right):
            return (_without_aliases(left), "+", _without_aliases(right))
    return read


def _build_method(read: Any) -> Any:
    match read:
        case Call(name, args, kwargs):
            built = Call(name, tuple(map(_build_method, args)), {key: _build_method(value) for key, value in kwargs.items()})
            return construct(methods, built)
        case (left, "+", right):
            return _build_method(left) + _build_method(right)
    return read


@cache
def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        where = f"{target.__module__}.{target.__qualname__}"
        raise UserError(f"cannot read the annotations of {where} ({error}); import that name where it is run, too") from None


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _fits(value, hint.__origin__) and all(limit.holds(value) for limit in _limits(hint) if _is_number(value))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return _is_number(value) and abs(value) <= LARGEST_FLOAT
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, hint)


def _wanted(hint: Any, value: Any) -> str:
    """Return what an annotation requires and the value is not: a type, else a range."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return " and ".join(map(str, _limits(hint))) if _fits(value, hint.__origin__) else _wanted(hint.__origin__, value)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_wanted(option, value) for option in typing.get_args(hint))
    if hint is float and _is_number(value):
        return f"a number of at most {LARGEST_FLOAT:g}" if LARGEST_FLOAT < abs(value) < math.inf else "a finite number"
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return f"a whole number below {LARGEST}"
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a word in quotes", type(None): "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _limits(hint: Any) -> list[Limit]:
    return [limit for limit in hint.__metadata__ if isinstance(limit, Limit)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


__all__ = [
    "Above",
    "AtLeast",
    "AtMost",
    "Below",
    "Call",
    "Limit",
    "Within",
    "arguments",
    "build_method",
    "check_fields",
    "check_options",
    "checked_call",
    "construct",
    "in_full",
    "parse_call",
    "parse_method",
    "parse_numbers",
    "read_method",
    "show",
    "with_option",
]
