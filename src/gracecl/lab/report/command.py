"""Write the command that reproduces a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from gracecl.lab.report.runs import Run
from gracecl.registry.options import RunOptions

ALWAYS_STATED = ("stream", "memory", "net", "augment", "optimizer")
"""options that a command states even at their defaults: a reader looks for them, and sets of defaults may change them"""
DEFAULTS = {field.name: field.default for field in fields(RunOptions) if field.name not in ("method", "seed")}
OPTIONS = tuple(dict.fromkeys((*ALWAYS_STATED, *DEFAULTS)))
"""those of `gracecl run` that a run's configuration holds, besides the method and the seed"""


def command(run: Run) -> str:
    """Return the command of a run with every option that differs from its default; published defaults are left out.

    Of results that others made, the command that imports them.
    """
    if imported := run.config.get("imported_from"):
        return shlex.join(["gracecl", "import", str(imported)])
    words = ["gracecl", "run", str(run.config["method"]), *option_words(run.config), "--seeds", str(run.config["seed"])]
    for plugin in run.plugins:
        words += ["--plugin", plugin]
    return as_typed(words)


def option_words(config: Mapping[str, Any], defaults: str = "none") -> list[str]:
    """Return a configuration's options as command-line arguments; missing ones come from a set of defaults."""
    return [*(word for name in OPTIONS for word in _option(name, config.get(name))), "--defaults", defaults]


def as_typed(words: Iterable[str]) -> str:
    """Join arguments into one line for a shell."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quote an argument for a shell as a person would: in double quotes where it holds single ones."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _option(name: str, value: Any) -> list[str]:
    if value is None or value is False or (value == DEFAULTS[name] and name not in ALWAYS_STATED):
        return []
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]
