"""Plugins: the user's own modules and files that register methods, nets, streams, data sets, controllers or renderers.

What plugins register holds while they are in use (`in_use`), and in no other run: two runs of one process may name two files that
register one name. A plugin is executed once per process, as any module is, and anew when its code has changed.

The digest of plugins is made of files, before any of them is executed: the plugin's own, and the user's modules that it and they
name in an `import` statement, wherever that stands. What a plugin loads in other ways (importlib) is found among the loaded modules
of its folder, once it is there (`Code.late_files`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from gracecl.errors import UserError
from gracecl.files import read_file
from gracecl.registry import of_plugins

HERE = Path(__file__).parents[1]
INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
SITES = {"site-packages", "dist-packages"}
DIGITS = 12
"""of the digest of plugins that a configuration holds"""
Files = list[dict[str, str]]
"""for each plugin, files in its folder, each with a digest of its content"""


@dataclass(frozen=True)
class Plugin:
    """A module or file of the user's code, as found on disk."""

    name: str
    """that holds in any folder: the path of a file, or the name of a module"""
    file: Path
    around: tuple[Path, ...] = ()
    """the __init__.py of each package that a module is in"""

    @classmethod
    def find(cls, name: str) -> Plugin:
        file = Path(name).resolve()
        if file.suffix == ".py":
            read_file(file)  # an unreadable one is reported under the name that was given
            return cls(str(file), file)
        *around, module = _files_of(name, _places_of(name))
        if module is None:
            raise ModuleNotFoundError(f"there is no module '{name}' with a source")
        return cls(name, module, tuple(file for file in around if file))

    @property
    def folder(self) -> Path:
        """Where its helpers are: the whole package of a module, else the folder of the file."""
        return (*self.around, self.file)[0].parent

    @property
    def own_files(self) -> list[Path]:
        """Its file, or all of a package."""
        return sorted(self.file.parent.rglob("*.py")) if self.file.name == "__init__.py" else [self.file]

    def imported_files(self) -> set[Path]:
        """The user's other modules that its files import, and those that these import."""
        found = {*self.own_files, *self.around}
        waiting = list(found)
        while waiting:
            file = waiting.pop()
            for name, level in _imports(read_file(file)):
                places = file.parents[level - 1 : level] if level else (self.folder, *_places_of(name))
                reached = {place for place in _files_of(name, places) if place and (self.holds(place) or not _is_installed(place))}
                waiting += reached - found
                found |= reached
        return found - set(self.own_files)

    def holds(self, file: Path) -> bool:
        """Return whether a file belongs to the plugin: in its folder, or in its package wherever that is installed."""
        if file == self.file or not str(file).startswith(f"{self.folder}{os.sep}") or file.is_relative_to(HERE):
            return file == self.file
        return not _is_installed(file) or (self.folder / "__init__.py").is_file()

    def execute(self) -> None:
        if not self.name.endswith(".py"):
            importlib.import_module(self.name)
            return
        # A name that no other file has: dataclasses look in sys.modules for what their annotations mean.
        name = f"gracecl_plugin_{self.file.stem}_{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        exec(compile(read_file(self.file), self.file, "exec"), module.__dict__)  # not a compiled file that may be older


class Code:
    """Plugins with what they registered and loaded."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self.plugins = tuple(plugins)
        self.registered: dict[str, dict[str, Any]] = {}
        """kind -> name -> thing"""
        self.of_runs: tuple[str, ...] = ()
        """names of the plugins that runs depend on: all but those that register renderers and nothing else"""
        self.executed = False
        self._covered: set[Path] = set()
        """files that the digest is made of"""
        digests = []
        for plugin in plugins:
            with _told_of(plugin.name):
                own, others = plugin.own_files, plugin.imported_files()
                texts = [*map(read_file, own), *sorted(map(read_file, others))]
            self._covered |= {*own, *others}
            digests.append(hashlib.sha256(b"\0".join(texts)).hexdigest())
        self.digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:DIGITS] if digests else None
        """of the plugins' files; None for no plugins"""
        self._late: Files = [{} for _ in plugins]
        self._modules: dict[str, ModuleType] = {}
        self._path: list[str] = []
        """sys.path as it was before the plugins"""
        self._places: list[str] = []
        """what they put into it"""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(plugin.name for plugin in self.plugins)

    @property
    def unchanged(self) -> bool:
        """Return whether the files are still those that were executed."""
        return Code(self.plugins).digest == self.digest and changed(self.names, self._late) is None

    def late_files(self, before: Files) -> Files:
        """Return files outside the digest that were loaded by now or `before`, as first seen; [] for none."""
        self._note_late_files()
        late = [old | new for old, new in zip(before or self._late, self._late, strict=False)]
        return late if any(late) else []

    def enter(self) -> None:
        """Make the plugins' modules and folders importable."""
        self._path = [*sys.path]
        sys.path[:0] = self._places
        sys.modules.update(self._modules)

    def leave(self) -> None:
        self._note_late_files()
        self._modules = _take_out(self.plugins)
        self._places = [place for place in sys.path if place not in self._path]
        sys.path[:] = self._path

    def execute(self) -> None:
        for plugin in self.plugins:
            before = {kind: len(names) for kind, names in self.registered.items()}
            with _told_of(plugin.name):
                plugin.execute()
            added = {kind for kind, names in self.registered.items() if len(names) > before.get(kind, 0)}
            self.of_runs += () if added == {"renderer"} else (plugin.name,)
        self.executed = True

    def _note_late_files(self) -> None:
        for plugin, late in zip(self.plugins, self._late, strict=True):
            for file in {_real(str(module.__file__)) for module in _modules_of([plugin]).values()} - self._covered:
                late.setdefault(file.relative_to(plugin.folder).as_posix(), _digest_of(file))


_current: ContextVar[Code | None] = ContextVar("plugins in use", default=None)
_executed: dict[tuple[str, ...], Code] = {}


@contextmanager
def in_use(names: Iterable[str]) -> Iterator[Code]:
    """Activate plugins while the block runs; names that other plugins registered are unknown in it."""
    plugins, around = tuple(_find(name) for name in names), _current.get()
    if around and around.plugins == plugins and around.unchanged:
        yield around
        return
    with _left(around):
        before = _executed.get(tuple(plugin.name for plugin in plugins))
        code = before if before and before.unchanged else Code(plugins)
        hidden = _take_out(plugins)  # the program may have loaded the same files, perhaps as they were before
        code.enter()
        used, registered = _current.set(code), of_plugins.set(code.registered)
        try:
            if not code.executed:
                code.execute()
                _executed[code.names] = code
            yield code
        finally:
            of_plugins.reset(registered)
            _current.reset(used)
            code.leave()
            sys.modules.update(hidden)


@contextmanager
def _left(code: Code | None) -> Iterator[None]:
    if code:
        code.leave()
    try:
        yield
    finally:
        if code:
            code.enter()


def found(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of plugins that are valid in any folder, without executing them."""
    return tuple(_find(name).name for name in names)


def digest_of(names: Iterable[str]) -> str | None:
    """Return the digest of plugins without executing them; None for none."""
    return Code([_find(name) for name in names]).digest


def changed(names: Iterable[str], files: Files) -> Path | None:
    """Return the first of some plugins' files that was changed, or None."""
    for name, known in zip(names, files, strict=False):
        folder = _find(name).folder
        for place, digest in known.items():
            if _digest_of(folder / place) != digest:
                return folder / place
    return None


def _find(name: str) -> Plugin:
    with _told_of(name):
        return Plugin.find(name)


def _digest_of(file: Path) -> str:
    """Return the digest of a file's content; of nothing if it cannot be read."""
    try:
        return hashlib.sha256(read_file(file)).hexdigest()[:DIGITS]
    except (OSError, UserError):
        return ""


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever somebody else's code may do)
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserError(
            f"cannot import the plugin '{name}' ({why}); give a module name or a .py file that can be imported"
        ) from None


def _modules_of(plugins: Sequence[Plugin]) -> dict[str, ModuleType]:
    """Return the loaded modules that belong to plugins."""
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()] if name != "__main__"}
    sources = {name: _real(file) for name, file in files.items() if isinstance(file, str) and file.endswith(".py")}
    return {name: sys.modules[name] for name, file in sources.items() if any(plugin.holds(file) for plugin in plugins)}


def _take_out(plugins: Sequence[Plugin]) -> dict[str, ModuleType]:
    """Unload and return the modules of plugins."""
    found = _modules_of(plugins)
    for name in found:
        del sys.modules[name]
    return found


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to Python, to an installed package or to this one."""
    return any(file.is_relative_to(root) for root in (*INSTALLED, HERE)) or not SITES.isdisjoint(file.parts)


@lru_cache(maxsize=256)
def _imports(source: bytes) -> frozenset[tuple[str, int]]:
    """Return names that a source imports, with the number of leading dots; none if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    names: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.name, 0) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = f"{node.module}." if node.module else ""
            names |= {(inside + alias.name, node.level) for alias in node.names if alias.name != "*"}
            names |= {(node.module, node.level)} if node.module else set()
    return frozenset(names)


def _places_of(name: str) -> list[Path]:
    """Return where Python looks for a module, including hooks of editable installs. Nothing is imported."""
    specs = (finder.find_spec(name.partition(".")[0], None) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    inside = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    alone = [Path(spec.origin)] if spec and spec.origin and not inside else []
    return [place.parent for place in (*inside, *alone)]


def _files_of(name: str, places: Sequence[Path]) -> list[Path | None]:
    """Return the source file of each part of a module's name, packages first; None for a part without one. Nothing
    is imported.
    """
    found: list[Path | None] = []
    for part in name.split("."):
        choices = [choice for place in places for choice in (place / part / "__init__.py", place / f"{part}.py")]
        file = next((choice.resolve() for choice in choices if part and choice.is_file()), None)
        found.append(file)
        places = [file.parent] if file and file.name == "__init__.py" else [place / part for place in places]
    return found


@cache
def _real(file: str) -> Path:
    return Path(file).resolve()
