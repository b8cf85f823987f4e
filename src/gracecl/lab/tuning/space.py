"""Parse search spaces such as `lr=1e-4..1e-1:log n_recall=16,32,64`.

A name is an option of a method in the expression, an option of the optimizer, or one of the run's own settings `optimizer` and
`augment`. Where two have an option of that name, its owner stands before it: `ewc.strength=1..100`, `optimizer.lr=0.01,0.1`. Its
values are all between two numbers, on a logarithmic scale with `:log`, or those of a list. Numbers are whole where the option takes
no others. A list holds numbers, words and expressions without spaces, `optimizer=sgd(lr=0.1),adam(lr=0.001)`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.lab.defaults import SETTINGS
from gracecl.lab.runs.check import EXPRESSIONS
from gracecl.lab.runs.run import RunConfig
from gracecl.methods.base import Method
from gracecl.registry import methods, nearest, normal, spec
from gracecl.registry.spec import Call

OPTIMIZER, RUN = "optimizer", "run"
"""owners of options besides methods"""
LONGEST_SHOWN = 80
"""characters of a text in an error"""
EXAMPLE = "write for example --space lr=1e-4..1e-1:log n_recall=16,32,64"

Name = tuple[str, str]
"""owner and option"""
Values = Mapping[Name, Any]


@dataclass(frozen=True)
class Range:
    """All numbers between two bounds."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' if self.log else ''}"


@dataclass(frozen=True)
class Choice:
    """A list of values."""

    values: tuple[Any, ...]

    @property
    def by_text(self) -> dict[str, Any]:
        return {str(value): value for value in self.values}

    def __str__(self) -> str:
        return ",".join(self.by_text)


Space = dict[Name, Range | Choice]


def parse(texts: Sequence[str], config: RunConfig, method: str) -> Space:
    """Parse a search space for a configuration; check every listed value and both ends of each range against it.

    `method` is the expression as the user wrote it: what it gives comes before any file of defaults, so there is no search for it.
    """
    owners, given = _owners(config), set(_given(spec.read_method(method)))
    space: Space = {}
    for text in (word for line in texts for word in line.split()):
        written, equals, values = text.partition("=")
        text = _short(text)
        if not equals or not values:
            raise UserError(f"--space: '{text}' is not an option and its values; {EXAMPLE}")
        name = _find(written, owners)
        if name in space:
            raise UserError(f"--space names {written} twice; leave one of them out")
        if name in given:
            raise UserError(f"'{method}' gives {name[1]} already; leave it out there, or out of --space")
        space[name] = _dimension(text, values, name, config)
    if not space:
        raise UserError(f"--space is empty; {EXAMPLE}")
    return space


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """Return the configuration with these values."""
    read = _in_methods(spec.read_method(config.method), values)
    config = replace(config, method=repr(spec.build_method(read)), **_of(RUN, values))
    if chosen := _of(OPTIMIZER, values):
        call = spec.parse_call(config.optimizer)
        given = dict(zip(_options(_optimizer(config)), call.args, strict=False)) | call.kwargs
        arguments = ", ".join(f"{option}={value!r}" for option, value in (given | chosen).items())
        config = replace(config, optimizer=f"{call.name}({arguments})")
    return config


def without(config: RunConfig, space: Space) -> RunConfig:
    """Return the configuration with built-in values for the searched options of methods."""
    return with_values(config, {name: _default(name, config) for name in space if name[0] not in (OPTIMIZER, RUN)})


def _of(owner: str, values: Values) -> dict[str, Any]:
    return {option: value for (whose, option), value in values.items() if whose == owner}


def _in_methods(read: Any, values: Values) -> Any:
    """Set the values in every method of an expression that they are for."""
    match read:
        case (left, "+", right):
            return (_in_methods(left, values), "+", _in_methods(right, values))
        case Call(name, args, kwargs):
            inside = {option: _in_methods(value, values) for option, value in kwargs.items()}
            return Call(name, tuple(_in_methods(value, values) for value in args), inside | _of(normal(name), values))
    return read


def _given(read: Any) -> Iterator[Name]:
    """Return the options that an expression gives."""
    match read:
        case (left, "+", right):
            yield from itertools.chain(_given(left), _given(right))
        case Call(name, args, kwargs):
            options = list(inspect.signature(methods.get(name)).parameters)
            for option, value in [*zip(options, args, strict=False), *kwargs.items()]:
                yield normal(name), option
                yield from _given(value)


def _owners(config: RunConfig) -> dict[str, list[str]]:
    """Return the methods and other owners of options, and their options."""
    learner: Method = spec.parse_method(config.method)
    names = [part.name for part in learner.parts if part.name in methods.names()]
    return {
        **{name: _options(methods.get(name)) for name in names},
        OPTIMIZER: _options(_optimizer(config)),
        RUN: list(SETTINGS),
    }


def _optimizer(config: RunConfig) -> Any:
    name = normal(spec.parse_call(config.optimizer).name)
    return optim.OPTIMISERS.get(name, optim.adam)  # an unknown one is refused where it is built


def _options(target: Any) -> list[str]:
    return [name for name in inspect.signature(target).parameters if name not in ("inner", "right", "params")]


def _find(written: str, owners: Mapping[str, Sequence[str]]) -> Name:
    owner, _, option = written.rpartition(".")
    found = [(whose, option) for whose, options in owners.items() if option in options and normal(owner) in ("", whose)]
    if len(found) > 1:
        raise UserError(
            f"--space: {' and '.join(whose for whose, _ in found)} have an option {option}; write {found[0][0]}.{option}"
        )
    if not found:
        known = [name for options in owners.values() for name in options]
        raise UserError(
            f"--space: there is no option '{written}' to search for{nearest(option, known)} (there are: {', '.join(known)})"
        )
    return found[0]


def _dimension(text: str, values: str, name: Name, config: RunConfig) -> Range | Choice:
    """Parse the text after the equals sign."""
    lower, dots, rest = values.partition("..")
    if not dots:
        choice = Choice(tuple({str(value): value for value in _listed(values, text)}.values()))
        if None in choice.values and _default(name, config) is not None:
            raise UserError(f"--space: '{text}' has None, which a file of defaults has no word for; leave it out")
        for value in choice.values:
            check(with_values(config, {name: value}))
        return choice
    upper, colon, scale = rest.partition(":")
    low, high = _number(lower, text), _number(upper, text)
    if (colon and scale != "log") or low >= high or (colon and low <= 0):
        raise UserError(f"--space: '{text}' is no range, which goes from less to more and with :log from above 0; {EXAMPLE}")
    if low.is_integer() and high.is_integer() and not _takes(config, name, (low + high) / 2):
        low, high = int(low), int(high)
    for end in (low, high):
        check(with_values(config, {name: end}))
    return Range(low, high, bool(colon))


def _number(text: str, whole: str) -> float:
    try:
        if math.isfinite(number := float(text)):
            return number
        raise ValueError
    except ValueError:
        raise UserError(f"--space: '{_short(text)}' in '{whole}' is not a number; {EXAMPLE}") from None


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _listed(values: str, text: str) -> Iterator[Any]:
    """Parse literals to their values; keep names and calls as text."""
    source = f"[{values}]"
    try:
        [tree] = ast.parse(source).body
        nodes = tree.value.elts  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, AttributeError):
        raise UserError(f"--space: cannot read the values of '{text}'; {EXAMPLE}") from None
    for node in nodes:
        try:
            yield ast.literal_eval(node)
        except ValueError:
            yield ast.get_source_segment(source, node)


def _default(name: Name, config: RunConfig) -> Any:
    owner, option = name
    target = {OPTIMIZER: _optimizer(config), RUN: RunConfig}.get(owner) or methods.get(owner)
    return inspect.signature(target).parameters[option].default


def _takes(config: RunConfig, name: Name, value: float) -> bool:
    try:
        check(with_values(config, {name: value}))
    except UserError:
        return False
    return True


def check(config: RunConfig) -> None:
    """Check that method, optimizer and augmentation can be built from a configuration, without a net or data."""
    for name in ("method", "augment", "optimizer"):
        EXPRESSIONS[name](getattr(config, name))


def shown(values: Values) -> str:
    """Format values: `er.n_recall=32, optimizer.lr=0.01`."""
    return ", ".join(f"{owner}.{option}={value}" for (owner, option), value in values.items())
