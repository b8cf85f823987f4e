"""The values that papers and their programs use on a benchmark, for whatever the user leaves open.

Each file in this folder is a set of them, chosen by name: `--defaults own` is `own.toml`. It says which streams it is about, and
lists entries for each method::

    streams = ["split-cifar100"]

    [[er]]
    memory = [1000, 2000, 5000]
    optimizer = "sgd(lr=0.1)"
    augment = "none"
    n_recall = 10
    source = "..."

An entry holds for the streams and the sizes of the memory that it lists, or for all if it lists none; a size that no entry lists
gets the entry that lists the nearest one. What the user writes comes before the file, the file before the built-in defaults. Every
method in an expression takes its own hyperparameters from its own entry; what a wrapper says of the method inside it counts as
written. A run has one optimizer and one augmentation: that of the outermost method whose entry names one, so grace(er()) trains as
er() does, and of a sum the learner on the left decides. On a stream that a file is not about it changes nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from gracecl.errors import UserError
from gracecl.files import read_file, without_nul
from gracecl.methods.base import Method, Wrapper
from gracecl.registry import methods, nearest, normal, spec
from gracecl.registry.spec import Call
from gracecl.streams import ALIASES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "grace-paper"
"""the set that a run takes unless it says otherwise: every method in the frame of the paper's own system, hence on equal terms"""
NONE = "none"
"""leaves the built-in values alone"""
SETTINGS = ("optimizer", "augment")
"""what an entry may say about the run"""
ABOUT = ("streams", "memory", "source")
"""what an entry says about itself"""
PROVENANCE = "provenance"
"""the table of a file that says how it was made, for whoever reads it"""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A method's expression and the run's settings, with everything filled in that a set knows; None is for the built-in."""

    method: str
    optimizer: str | None
    augment: str | None
    taken: str = ""
    """which values came from which set, in a line; nothing where no set was asked for and none is about the stream"""


@dataclass(frozen=True)
class DefaultSet:
    """A file of entries."""

    name: str
    streams: tuple[str, ...] | None
    """those it is about; None is all of them"""
    entries: dict[str, list[Entry]]
    """method -> its entries"""

    def on(self, stream: str, memory: int) -> Benchmark | None:
        """What it says of one stream; None if it is not about it."""
        if self.streams is not None and stream not in self.streams:
            return None
        held = {
            method: [entry for entry in listed if stream in entry.get("streams", [stream])]
            for method, listed in self.entries.items()
        }
        return Benchmark(self.name, stream, memory, {method: listed for method, listed in held.items() if listed})


@dataclass
class Benchmark:
    """The entries of one set for one stream, at one size of the memory."""

    name: str
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
                near = min(listed, key=lambda size: (abs(size - self.memory), size))
                where = "" if near == self.memory else f" (those listed for {near:,})"
                told.append(" ".join([method, *(f"{name}={value}" for name, value in values.items())]) + where)
        nothing = f"nothing for {' and '.join(self.taken)}"
        return f"defaults {self.name} of {self.stream}, memory {self.memory:,}: {'; '.join(told) or nothing}"


def resolve(
    method: str, stream: str, memory: int, optimizer: str | None = None, augment: str | None = None, defaults: str = DEFAULT
) -> Resolved:
    """Fills in what the expression of a method and the settings of its run leave open; None is a setting not given."""
    if defaults == NONE:
        return Resolved(method, optimizer, augment)
    name = stream_name(stream)
    if (benchmark := read(defaults).on(name, memory)) is None:
        return Resolved(method, optimizer, augment, "" if defaults == DEFAULT else f"defaults {defaults}: nothing for {name}")
    learner: Method = spec.build_method(_filled(spec.read_method(method), benchmark))
    settings = {"optimizer": optimizer, "augment": augment}
    for setting, given in settings.items():
        settings[setting] = benchmark.setting(setting, learner) if given is None else given
    return Resolved(repr(learner), settings["optimizer"], settings["augment"], str(benchmark))


def stream_name(expression: str) -> str:
    """`split-cifar100` of `seq-cifar100(tasks=5)`."""
    family, _, dataset = normal(spec.parse_call(expression).name).partition("_")
    return f"{ALIASES.get(family, family)}-{dataset}"


def sets() -> list[str]:
    """The sets that come with the library."""
    names = (file.name for file in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read(name: str) -> DefaultSet:
    """A set by its name, or a file of one's own, by its path."""
    if name in sets():
        text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml"):
        try:
            text = read_file(without_nul(name)).decode("utf-8")
        except FileNotFoundError:
            raise UserError(f"--defaults {name}: there is no such file") from None
        except UnicodeDecodeError:
            raise UserError(f"--defaults {name} is not a TOML file: it is not UTF-8") from None
    else:
        known = [*sets(), NONE]
        raise UserError(
            f"--defaults '{name}' is no set{nearest(name, known)} (there are: {', '.join(known)}, or your own FILE.toml)"
        )
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--defaults {name} is not a TOML file: {error}") from None
    streams = content.pop("streams", None)
    content.pop(PROVENANCE, None)
    for method, listed in content.items():
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise UserError(f"--defaults {name}: '{method}' is not an entry; begin each with [[method]], such as [[er]]")
    entries: dict[str, list[Entry]] = {normal(methods.real_name(method)): listed for method, listed in content.items()}
    return DefaultSet(name, None if streams is None else tuple(streams), entries)


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
