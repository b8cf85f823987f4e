"""Where the tutorials and example programs use a name: links at the end of its page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from manual.pages import ROOT


@cache
def programs() -> dict[Path, str]:
    """Return the tutorials and the example programs by their paths below the repository."""
    paths = [*sorted((ROOT / "docs/tutorials").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


def title_of(path: Path) -> str:
    """Return the heading of a tutorial, or the name of a program."""
    title = re.search(r"^# (.+)$", programs()[path], re.MULTILINE) if path.suffix == ".md" else None
    return title[1] if title else path.name


def with_code(pattern: str) -> Iterator[Path]:
    return (path for path, text in programs().items() if re.search(pattern, text, re.MULTILINE))


def using(name: str) -> Iterator[Path]:
    """Yield the programs that use a public name, such as `gracecl.Learner`, by import or by attribute."""
    module, _, last = name.rpartition(".")
    return with_code(rf"\b{re.escape(name)}\b|^from {re.escape(module)} import .*\b{last}\b")


def name_them(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Add the links to a docstring, when Sphinx asks for it; modules, classes and functions have them, not their members."""
    of_class = what != "class" or lines[:1] == (inspect.getdoc(obj) or "").splitlines()[:1]  # and not of its __init__
    if what in ("class", "function", "exception") and of_class and (found := [*using(name)]):
        links = [
            f":doc:`/{path.with_suffix('')}`" if path.suffix == ".md" else f":download:`{path.name} </{path}>`" for path in found
        ]
        lines += ["", f"**Used in** {', '.join(links)}.", ""]
