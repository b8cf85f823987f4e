"""Names: which methods, streams, nets, data sets, controllers, detectors and renderers there are, found without importing them.

A thing registers itself where it is written::

    @methods.register("er")
    class ER(Method): ...

The files of a package are read as text for such lines, so that listing names and their one-line descriptions needs no torch;
a file is imported when one of its names is asked for. Code outside this package registers in the same way when it is imported;
what a run's plugins register is known in that run alone (`plugins.py`).
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gracecl.errors import UserError

T = TypeVar("T")


of_plugins: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("of_plugins", default=None)
"""kind -> name -> what the plugins in use registered; None where plugins are not in question"""
SIMILAR = 0.65
"""of two names, as difflib measures it, from which one may be a misspelling of the other: 'mpl' of 'mlp'"""


def normal(name: str) -> str:
    """Normalise a name: `ER-ACE`, `er_ace` and `Er_Ace` are one name, and so are `EWC++` and `ewc_pp`."""
    return name.strip().lower().replace("-", "_").replace("++", "_pp")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'er'?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=SIMILAR)
    return f"; did you mean '{close[0]}'?" if close else ""


class UnknownName(UserError):
    """Nothing is registered under a name."""


class Registry:
    """The registered names of one kind of thing."""

    def __init__(self, kind: str, package: str, aliases: dict[str, str] | None = None) -> None:
        self.kind, self.package = kind, package
        self.aliases = aliases or {}
        """what others call a thing -> its name here"""
        self.loaded: dict[str, Any] = {}
        self._name_of: dict[Any, str] = {}

    def register(self, name: str, override: bool = False) -> Callable[[T], T]:
        """Decorate a class or function to register it under `name`; `override` allows a name of this package.

        What plugins register is known while they are in use (`registry.plugins`).
        """

        def keep(thing: T) -> T:
            outside = not str(getattr(thing, "__module__", "")).startswith(f"{self.package}.")
            if outside and not override and normal(name) in self.written:
                raise UserError(
                    f"'{name}' is a {self.kind} of gracecl itself; register yours under another name, "
                    f'or write register("{name}", override=True) to put it in its place'
                )
            if outside and of_plugins.get() is not None:
                other = self._of_plugins.get(normal(name), thing)
                if _origin(other) != _origin(thing):
                    raise UserError(
                        f"{_origin(other)} and {_origin(thing)} both register the {self.kind} '{name}'; "
                        "rename one of them, or use one file at a time"
                    )
                self._of_plugins[normal(name)] = thing
            else:
                self.loaded[normal(name)] = thing
                self._name_of[thing] = normal(name)
            return thing

        return keep

    @property
    def _of_plugins(self) -> dict[str, Any]:
        """Return what the plugins in use registered."""
        registered = of_plugins.get()
        return {} if registered is None else registered.setdefault(self.kind, {})

    @property
    def known(self) -> dict[str, Any]:
        """Return {name: thing} of everything imported; plugins take precedence."""
        return self.loaded | self._of_plugins

    @cached_property
    def written(self) -> dict[str, tuple[str, str]]:
        """Return {name: (module, first line of its docstring)}, read from the package's files."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ImportError(f"the package {self.package} is not installed")
        found = {}
        for file in sorted(Path(spec.origin).parent.glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            module = f"{self.package}.{file.stem}"
            for node in tree.body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                    for name in _registered_names(node):
                        text = ast.get_docstring(node) or ast.get_docstring(tree) or ""
                        found[normal(name)] = (module, text.split("\n", 1)[0])
        return found

    def name_of(self, thing: Any) -> str:
        """Return the name a thing was registered under, or its own in lower case."""
        own = (name for name, other in self._of_plugins.items() if other is thing)
        return next(own, None) or self._name_of.get(thing) or str(thing.__name__).lower()

    def names(self) -> list[str]:
        return sorted({*self.written, *self.known})

    def real_name(self, name: str) -> str:
        """Resolve an alias; other names stay as they are."""
        key = normal(name)
        return name if key in self.known or key in self.written else self.aliases.get(key, name)

    def summaries(self) -> dict[str, str]:
        """Return {name: one line} without importing what is not imported yet."""
        outside = {name: (thing.__doc__ or "").strip().split("\n", 1)[0] for name, thing in self.known.items()}
        return {name: self.written[name][1] if name in self.written else outside[name] for name in self.names()}

    def get(self, name: str) -> Any:
        """Return the thing of a name or alias."""
        key = normal(self.real_name(name))
        if key not in self.known and key in self.written:
            importlib.import_module(self.written[key][0])
        if key not in self.known:
            close = nearest(key, [*self.names(), *self.aliases])
            raise UnknownName(f"unknown {self.kind} '{name}'{close} ('gracecl list {self.kind}s' prints all of them)")
        return self.known[key]


def _origin(thing: Any) -> str:
    """Return the file in which a thing was registered, or its module."""
    module = str(getattr(thing, "__module__", ""))
    return str(getattr(sys.modules.get(module), "__file__", None) or module)


def _registered_names(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return [
        call.args[0].value
        for call in node.decorator_list
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "register"
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    ]


METHOD_ALIASES = {
    "replay": "er",
    "experience_replay": "er",
    "rehearsal": "er",
    "naive": "sgd",
    "finetune": "sgd",
    "fine_tune": "sgd",
    "finetuning": "sgd",
    "fine_tuning": "sgd",
    "cumulative": "joint",
    "joint_training": "joint",
    "der_pp": "derpp",
    "a_gem": "agem",
    "online_ewc": "ewc_on",
    "streaming_lda": "slda",
    "simplecil": "ncm",
    "f_oal": "foal",
}
"""what other libraries and papers call a method; `der++` is `der_pp`. A run is recorded under the name on the right"""

methods = Registry("method", "gracecl.methods", METHOD_ALIASES)
nets = Registry("net", "gracecl.nets")
streams = Registry("stream", "gracecl.streams")
datasets = Registry("dataset", "gracecl.data")
controllers = Registry("controller", "gracecl.controllers")
detectors = Registry("detector", "gracecl.detectors")
renderers = Registry("renderer", "gracecl.lab.studies")
