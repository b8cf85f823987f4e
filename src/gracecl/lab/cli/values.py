"""Values of options that several verbs take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from gracecl.errors import UserError
from gracecl.registry.plugins import in_use
from gracecl.registry.spec import LONGEST_NUMBER, parse_numbers

F = TypeVar("F", bound=Callable[..., Any])
Trackers = tuple[Literal["tensorboard", "wandb", "mlflow"], ...]
"""values of --log"""


def with_plugins(verb: F) -> F:
    """Decorate a verb: activate the plugins of its option, and pass it their names in a form valid in any folder."""

    @functools.wraps(verb)
    def within(*arguments: Any, plugin: tuple[str, ...] = (), **options: Any) -> Any:
        with in_use(plugin) as code:
            return verb(*arguments, plugin=code.names, **options)

    return within  # type: ignore[return-value]


def only_run(folder: Path) -> Path:
    """Return the run in a folder, or the only one below it."""
    from gracecl.lab.report import find_begun

    found = find_begun(folder)
    if len(found) > 1:
        raise UserError(f"{folder} holds {len(found)} runs; name one of them, such as {found[0]}")
    return found[0] if found else folder


def number_of(jobs: str) -> int | None:
    """Parse --jobs; None for auto."""
    if jobs == "auto":
        return None
    if not jobs.isdecimal() or not jobs.strip("0"):
        raise UserError(f"--jobs must be auto or a whole number of at least 1, not '{jobs}'")
    return int(jobs[:LONGEST_NUMBER])  # a longer one is as impossible


def seeds_of(text: str) -> list[int]:
    """Parse --seeds; each seed once."""
    numbers = list(dict.fromkeys(parse_numbers(text, "--seeds")))
    if not numbers:
        raise UserError(f"--seeds '{text}' names none; write for example 0-4 or 0,3,7")
    return numbers
