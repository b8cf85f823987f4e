"""Names: which methods, streams, nets and data sets there are, found without importing any of them.

A thing registers itself where it is written::

    @methods.register("er")
    class ER(Method): ...

The files of a package are read as text for such lines, so that listing names and their one-line descriptions needs no torch;
a file is imported when one of its names is asked for. Code outside this package registers in the same way when it is imported.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gracecl.errors import UserError
from gracecl.files import read_file

T = TypeVar("T")


SIMILAR = 0.65
"""of two names, as difflib measures it, from which one may be a misspelling of the other: 'mpl' of 'mlp'"""


def normal(name: str) -> str:
    """`ER-ACE`, `er_ace` and `Er_Ace` are one name, and so are `EWC++` and `ewc_pp`."""
    return name.strip().lower().replace("-", "_").replace("++", "_pp")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'er'?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=SIMILAR)
    return f"; did you mean '{close[0]}'?" if close else ""


class UnknownName(UserError):
    """Nothing is registered under a name."""


class Registry:
    """The names of one kind of thing."""

    def __init__(self, kind: str, package: str, aliases: dict[str, str] | None = None) -> None:
        self.kind, self.package = kind, package
        self.aliases = aliases or {}
        """what others call a thing -> its name here"""
        self.loaded: dict[str, Any] = {}
        self._name_of: dict[Any, str] = {}

    def register(self, name: str, override: bool = False) -> Callable[[T], T]:
        """Decorator: the class or function below it goes by `name`, which may be one of this package's only with `override`."""

        def keep(thing: T) -> T:
            outside = not str(getattr(thing, "__module__", "")).startswith(f"{self.package}.")
            if outside and not override and normal(name) in self.written:
                raise UserError(
                    f"'{name}' is a {self.kind} of gracecl itself; register yours under another name, "
                    f'or write register("{name}", override=True) to put it in its place'
                )
            self.loaded[normal(name)] = thing
            self._name_of[thing] = normal(name)
            return thing

        return keep

    @cached_property
    def written(self) -> dict[str, tuple[str, str]]:
        """name -> (module, first line of its docstring), read from the files of the package."""
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
        """The name a thing was registered under, or its own in lower case."""
        return self._name_of.get(thing) or str(thing.__name__).lower()

    def names(self) -> list[str]:
        return sorted({*self.written, *self.loaded})

    def real_name(self, name: str) -> str:
        """The name that an alias stands for; any other name stays as it is written."""
        key = normal(name)
        return name if key in self.loaded or key in self.written else self.aliases.get(key, name)

    def summaries(self) -> dict[str, str]:
        """name -> one line, without importing what is not imported yet."""
        outside = {name: (thing.__doc__ or "").strip().split("\n", 1)[0] for name, thing in self.loaded.items()}
        return {name: self.written[name][1] if name in self.written else outside[name] for name in self.names()}

    def get(self, name: str) -> Any:
        """The thing of a name or alias."""
        key = normal(self.real_name(name))
        if key not in self.loaded and key in self.written:
            importlib.import_module(self.written[key][0])
        if key not in self.loaded:
            close = nearest(key, [*self.names(), *self.aliases])
            raise UnknownName(f"unknown {self.kind} '{name}'{close} ('gracecl list {self.kind}s' prints all of them)")
        return self.loaded[key]


_plugins: dict[str, str] = {}
"""plugins that were loaded, each with a digest of its source as it then was"""
_sources: dict[Path, bytes] = {}
"""what their files held when they were loaded"""


def load_plugins(names: Iterable[str]) -> tuple[str, ...]:
    """Imports modules by name or by file, so that what they register is known; returns names that hold in any folder.

    A file that changed since it was loaded is loaded anew.
    """
    return tuple(_load_plugin(name) for name in names)


def plugin_digest(names: Iterable[str]) -> str | None:
    """A short digest of what plugins, which are loaded, consist of; None for none."""
    digests = [_plugins[name] for name in load_plugins(names)]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12] if digests else None


def _load_plugin(name: str) -> str:
    try:
        file = Path(name).resolve()
        if file.suffix != ".py":
            module = importlib.import_module(name)
            if name not in _plugins:
                _plugins[name] = _digest(Path(getattr(module, "__file__", None) or ""))
            return name
        if _sources.get(file) != (source := read_file(file)) or f"gracecl_plugin_{file.stem}" not in sys.modules:
            _execute(file)
            _sources[file] = source
            _plugins[str(file)] = _digest(file)
        return str(file)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever somebody else's code may do)
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserError(
            f"cannot import the plugin '{name}' ({why}); give a module name or a .py file that can be imported"
        ) from None


def _execute(file: Path) -> None:
    """Imports a file under a name of its own."""
    module_name = f"gracecl_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    # Dataclasses look for the names in their annotations in sys.modules.
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _digest(file: Path) -> str:
    """Of a module's file, or of all files of a package, and of the user's other modules that they import.

    Of nothing where there is no source.
    """
    own = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file] if file.is_file() else []
    found, waiting = set(own), list(own)
    while waiting:
        new = _imported_by(waiting.pop()) - found
        found |= new
        waiting += new
    texts = [*map(_source, own), *sorted(map(_source, found - set(own)))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _source(file: Path) -> bytes:
    if file not in _sources:
        _sources[file] = file.read_bytes()
    return _sources[file]


def _imported_by(file: Path) -> set[Path]:
    """Files of loaded modules that a file imports, but for Python's own, those of installed packages and of this one."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(_source(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)}
    loaded = [Path(place) for module in [*sys.modules.values()] if (place := getattr(module, "__file__", None))]
    installed = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[1])
    wanted = {
        "/".join(parts[:depth]) for parts in (name.split(".") for name in names if name) for depth in range(1, len(parts) + 1)
    }
    return {
        place
        for place in loaded
        if place.suffix == ".py"
        and any(place.as_posix().endswith((f"/{name}.py", f"/{name}/__init__.py")) for name in wanted)
        and not any(place.is_relative_to(root) for root in installed)
    }


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
}
"""what other libraries and papers call a method; `der++` is `der_pp`. A run is recorded under the name on the right"""

methods = Registry("method", "gracecl.methods", METHOD_ALIASES)
nets = Registry("net", "gracecl.nets")
streams = Registry("stream", "gracecl.streams")
datasets = Registry("dataset", "gracecl.data")
controllers = Registry("controller", "gracecl.controllers")
