"""The values that papers and their programs use on a benchmark, for whatever the user leaves open.

`bench/<stream>.toml` holds them, a list of entries for each method::

    [[er]]
    memory = [1000, 2000, 5000]
    optimiser = "adamw(lr=0.0005, weight_decay=0.0001)"
    augment = "full"
    n_recall = 64
    source = "CCL-DC, ..."

An entry holds for the sizes of the memory that it lists, or for all if it lists none; a size that no entry lists gets the entry
that lists the nearest one. What the user writes comes before the file, the file before the built-in defaults. Every method in an
expression takes its own hyperparameters from its own entry; what a wrapper says of the method inside it counts as written. A run
has one optimiser and one augmentation: that of the outermost method whose entry names one, so grace(er()) trains as er() does,
and of a sum the learner on the left decides. A stream without a file changes nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from gracecl import spec
from gracecl.method import Method, Wrapper
from gracecl.registry import methods, normal
from gracecl.spec import Call
from gracecl.streams import ALIASES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SETTINGS = ("optimiser", "augment")
"""what an entry may say about the run"""
ABOUT = ("memory", "source")
"""what an entry says about itself"""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A method's expression and the run's settings, with everything filled in that a file knows; None is for the built-in."""

    method: str
    optimiser: str | None
    augment: str | None
    taken: str = ""
    """which values came from the file, in a line; nothing where none did"""


@dataclass
class Benchmark:
    """The entries of one stream that hold for one size of the memory."""

    stream: str
    memory: int
    entries: dict[str, list[Entry]]
    taken: dict[str, dict[str, Any]] = field(default_factory=dict)
    """method -> what was taken from its entry"""

    def entry(self, method: str) -> Entry:
        """The method's entry for the memory size, or for the nearest one that is listed; of two equally near, the smaller."""
        return min(self.entries.get(normal(method), [{}]), key=lambda entry: (self.distance(entry), min(entry.get("memory", [0]))))

    def distance(self, entry: Entry) -> int:
        return min((abs(size - self.memory) for size in entry.get("memory", ())), default=0)

    def options(self, method: str, given: set[str]) -> dict[str, Any]:
        """The hyperparameters of a method that the file knows and nobody gave; they count as taken."""
        known = {name: value for name, value in self.entry(method).items() if name not in (*SETTINGS, *ABOUT, *given)}
        self.taken.setdefault(normal(method), {}).update(known)
        return known

    def setting(self, name: str, learner: Method) -> str | None:
        """A setting of the run: that of the outermost method whose entry has it."""
        for method in outside_in(learner):
            if name in (entry := self.entry(method.name)):
                self.taken.setdefault(method.name, {})[name] = entry[name]
                return str(entry[name])
        return None

    def __str__(self) -> str:
        told = []
        for method, values in self.taken.items():
            if values:
                listed = self.entry(method).get("memory", [self.memory])
                nearest = min(listed, key=lambda size: (abs(size - self.memory), size))
                where = "" if nearest == self.memory else f" (those listed for {nearest:,})"
                told.append(" ".join([method, *(f"{name}={value}" for name, value in values.items())]) + where)
        return f"defaults of {self.stream}, memory {self.memory:,}: {'; '.join(told)}" if told else ""


def resolve(method: str, stream: str, memory: int, optimiser: str | None = None, augment: str | None = None) -> Resolved:
    """Fills in what the expression of a method and the settings of its run leave open; None is a setting not given."""
    name = stream_name(stream)
    benchmark = Benchmark(name, memory, read(name))
    if not benchmark.entries:
        return Resolved(method, optimiser, augment)
    learner: Method = spec.build_method(_filled(spec.read_method(method), benchmark))
    settings = {"optimiser": optimiser, "augment": augment}
    for setting, given in settings.items():
        settings[setting] = benchmark.setting(setting, learner) if given is None else given
    return Resolved(repr(learner), settings["optimiser"], settings["augment"], str(benchmark))


def stream_name(expression: str) -> str:
    """`split-cifar100` of `seq-cifar100(tasks=5)`."""
    family, _, dataset = normal(spec.parse_call(expression).name).partition("_")
    return f"{ALIASES.get(family, family)}-{dataset}"


def read(stream: str) -> dict[str, list[Entry]]:
    """method -> its entries on a stream; nothing for a stream without a file."""
    file = resources.files("gracecl.bench") / f"{stream}.toml"
    if not file.is_file():
        return {}
    content: dict[str, list[Entry]] = tomllib.loads(file.read_text(encoding="utf-8"))
    return content


def streams_with_defaults() -> list[str]:
    """The streams that have a file."""
    names = (file.name for file in resources.files("gracecl.bench").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def outside_in(method: Method) -> Iterator[Method]:
    """A method, the one that it wraps, and so on; of a sum the learner on the left."""
    yield method
    while isinstance(method, Wrapper):
        method = method.inner
        yield method


def _filled(read: Any, benchmark: Benchmark) -> Any:
    """The expression with the file's values where it gives none, in every method that it names or that a wrapper has by default."""
    match read:
        case (left, "+", right):
            return (_filled(left, benchmark), "+", _filled(right, benchmark))
        case Call(name, args, kwargs):
            target = methods.get(name)
            options = inspect.signature(target).parameters
            args = tuple(_filled(value, benchmark) for value in args)
            kwargs = {option: _filled(value, benchmark) for option, value in kwargs.items()}
            given = {*list(options)[: len(args)], *kwargs}
            if "inner" in options.keys() - given and isinstance(inside := options["inner"].default, str):
                kwargs["inner"] = _filled(spec.read_method(inside), benchmark)
            return Call(name, args, benchmark.options(name, given) | kwargs)
    return read
