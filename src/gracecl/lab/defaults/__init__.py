"""Published option values on benchmarks, for options that the user leaves open.

Each file in this folder is a set, chosen by name: `--defaults own` is `own.toml`. It names its streams and lists entries for each
method::

    streams = ["split-cifar100"]

    [[er]]
    memory = [1000, 2000, 5000]
    optimizer = "sgd(lr=0.1)"
    augment = "none"
    n_recall = 10
    source = "..."

An entry applies to the streams and memory sizes that it lists, or to all if it lists none; an unlisted size uses the entry with
the nearest one. The user's values take precedence over the file, the file over the built-in defaults. Every method in an
expression takes its hyperparameters from its own entry; options that a wrapper gives its inner method count as the user's. A run
has one optimizer and one augmentation: that of the outermost method whose entry names one, so grace(er()) trains as er() does; of
a sum, the learner on the left decides. On other streams a file changes nothing.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from gracecl.errors import UserError
from gracecl.files import parse_toml, read_file, without_nul
from gracecl.functional import optim
from gracecl.images.augment import augmentation
from gracecl.methods.base import Addition, Method
from gracecl.registry import methods, nearest, normal, spec
from gracecl.registry.objects import is_opaque
from gracecl.registry.spec import Call
from gracecl.streams import ALIASES

DEFAULT = "grace-paper"
"""the default set: optimizer, batch and replay size of the GRACE paper for every method"""
NONE = "none"
"""the name of no set: built-in values"""
SETTINGS = ("optimizer", "augment")
"""settings of the run that an entry may hold"""
ABOUT = ("streams", "memory", "source")
"""fields of an entry that are no options"""
PROVENANCE = "provenance"
"""the table of a file that says how it was made"""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """Method expression and settings of a run, completed from a set of defaults; None means the built-in value."""

    method: str
    optimizer: str | None
    augment: str | None
    taken: str = ""
    """which values came from which set, in a line; empty where no set applies"""
    tuned_on: str | None = None
    """where a search chose the values that were taken; None where none did"""


@dataclass(frozen=True)
class DefaultSet:
    """A file of default values."""

    name: str
    streams: tuple[str, ...] | None
    """streams that the set covers; None for all"""
    entries: dict[str, list[Entry]]
    """method -> its entries"""
    tuned_on: str | None = None
    """where a search chose the values, if one did"""

    def on(self, stream: str, memory: int) -> Benchmark | None:
        """Return the entries for a stream, None if the set has none."""
        if self.streams is not None and stream not in self.streams:
            return None
        held = {
            method: [entry for entry in listed if stream in entry.get("streams", [stream])]
            for method, listed in self.entries.items()
        }
        return Benchmark(self.name, stream, memory, {method: listed for method, listed in held.items() if listed})


@dataclass
class Benchmark:
    """Entries of a set for one stream and one memory size."""

    name: str
    stream: str
    memory: int
    entries: dict[str, list[Entry]]
    taken: dict[str, dict[str, Any]] = field(default_factory=dict)
    """method -> what was taken from its entry"""

    def entry(self, method: str) -> Entry:
        """Return the method's entry for the nearest listed memory size; of two equally near, the smaller."""
        return min(self.entries.get(normal(method), [{}]), key=lambda entry: (self.distance(entry), min(entry.get("memory", [0]))))

    def distance(self, entry: Entry) -> int:
        return min((abs(size - self.memory) for size in entry.get("memory", ())), default=0)

    def options(self, method: str, given: set[str]) -> dict[str, Any]:
        """Return hyperparameters that the set has and the expression does not give, and note them as taken."""
        known = {name: value for name, value in self.entry(method).items() if name not in (*SETTINGS, *ABOUT, *given)}
        self.taken.setdefault(normal(method), {}).update(known)
        return known

    def setting(self, name: str, learner: Method) -> str | None:
        """Return a setting of the run from the outermost method whose entry has it."""
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
    """Fill in what a method's expression and the settings of its run leave open; None is a setting not given."""
    if defaults == NONE:
        return Resolved(method, optimizer, augment)
    name = stream_name(stream)
    if is_opaque(method):  # which no entry can be about
        return Resolved(method, optimizer, augment, "" if defaults == DEFAULT else f"defaults {defaults}: nothing for {method}")
    found = read(defaults)
    if (benchmark := found.on(name, memory)) is None:
        return Resolved(method, optimizer, augment, "" if defaults == DEFAULT else f"defaults {defaults}: nothing for {name}")
    learner: Method = spec.build_method(_filled(spec.read_method(method), benchmark))
    settings = {"optimizer": optimizer, "augment": augment}
    for setting, given in settings.items():
        settings[setting] = benchmark.setting(setting, learner) if given is None else given
    tuned_on = found.tuned_on if any(benchmark.taken.values()) else None
    return Resolved(repr(learner), settings["optimizer"], settings["augment"], str(benchmark), tuned_on)


def stream_name(expression: str) -> str:
    """Return the benchmark's name: `split-cifar100` for `seq-cifar100(tasks=5)`."""
    family, _, dataset = normal(spec.parse_call(expression).name).partition("_")
    return f"{ALIASES.get(family, family)}-{dataset}"


def sets() -> list[str]:
    """List the sets that come with the library."""
    names = (file.name for file in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read(name: str) -> DefaultSet:
    """Read a set by its name, or a user's file by its path."""
    if name in sets():
        text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml"):
        try:
            text = read_file(without_nul(name)).decode("utf-8")
        except (FileNotFoundError, IsADirectoryError):
            raise UserError(f"--defaults {name}: there is no such file; name a TOML file, or one of: {', '.join(sets())}") from None
        except UnicodeDecodeError:
            raise UserError(f"--defaults {name} is not a TOML file: it is not UTF-8") from None
    else:
        known = [*sets(), NONE]
        raise UserError(
            f"--defaults '{name}' is no set{nearest(name, known)} (there are: {', '.join(known)}, or your own FILE.toml)"
        )
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise UserError(f"--defaults {name} is not a TOML file: {error}") from None
    tuned_on = _tuned_on(content.pop(PROVENANCE, None))
    if name not in sets():
        _check(content, f"--defaults {name}")
    streams = content.pop("streams", None)
    entries: dict[str, list[Entry]] = {normal(methods.real_name(method)): listed for method, listed in content.items()}
    return DefaultSet(name, None if streams is None else tuple(streams), entries, tuned_on)


def _tuned_on(provenance: Any) -> str | None:
    """Return the stream that a search says it used; None where none does."""
    match provenance:
        case {"data": {"stream": str(stream)}}:
            return stream
    return None


def _check(content: dict[str, Any], file: str) -> None:
    """Refuse a user's file that no run could use; entries for methods that are not registered are ignored."""
    _check_kinds({key: value for key, value in content.items() if key in KINDS}, file)
    names: dict[str, str] = {}
    for method, listed in content.items():
        if method == "streams":
            continue
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise UserError(f"{file}: '{method}' is not an entry; begin each with [[method]], such as [[er]]")
        if (other := names.setdefault(known := normal(methods.real_name(method)), method)) != method:
            raise UserError(f"{file} has both [[{other}]] and [[{method}]], which name one method; write one of them everywhere")
        for number, entry in enumerate(listed, start=1):
            where = f"{file}: [[{method}]]" + (f" {number}" if len(listed) > 1 else "")
            _check_kinds(entry, where)
            options = {option: value for option, value in entry.items() if option not in (*SETTINGS, *ABOUT)}
            try:
                if known in methods.names():
                    spec.construct(methods, Call(method, (), options))
                if "optimizer" in entry:
                    optim.check(entry["optimizer"])
                if "augment" in entry:
                    augmentation(entry["augment"])
            except UserError as error:
                raise UserError(f"{where}: {error}") from None


def _check_kinds(values: dict[str, Any], where: str) -> None:
    for name, (fits, wanted) in KINDS.items():
        if name in values and not fits(values[name]):
            raise UserError(f"{where}: {name} must be {wanted}, not {reprlib.repr(values[name])}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_streams(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(size) is int and 0 <= size < spec.LARGEST for size in value)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "streams": (_are_streams, 'a list of names such as ["split-digits"]'),
    "memory": (_are_sizes, "a list of whole numbers such as [1000]"),
    "source": (_is_text, "text in quotes"),
    "optimizer": (_is_text, 'text in quotes such as "sgd(lr=0.1)"'),
    "augment": (_is_text, 'text in quotes such as "none"'),
}
"""types of the keys of a file and of an entry that are no options of a method"""


def outside_in(method: Method) -> Iterator[Method]:
    """Yield the parts of a learner from the outermost on, without additions."""
    return (part for part in reversed(method.parts) if not isinstance(part, Addition))


def _filled(read: Any, benchmark: Benchmark) -> Any:
    """Return the expression with the set's values for options not given, in every method it names or wraps by
    default.
    """
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
