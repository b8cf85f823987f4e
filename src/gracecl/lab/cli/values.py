"""Values of options that several verbs take."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from gracecl.errors import UserError
from gracecl.lab.runs.cluster import Cluster
from gracecl.registry.options import takes
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


def with_cluster(verb: F) -> F:
    """Decorate a verb: add the options of `Cluster` to it, and pass it one as `cluster`."""
    own = [parameter for name, parameter in inspect.signature(verb).parameters.items() if name != "cluster"]
    names = [field.name for field in dataclasses.fields(Cluster)]

    @functools.wraps(verb)
    def within(*arguments: Any, **options: Any) -> Any:
        cluster = Cluster(**{name: options.pop(name) for name in names if name in options})
        cluster.check()
        return verb(*arguments, cluster=cluster, **options)

    within.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    within.__annotations__.pop("cluster")
    return takes(Cluster, leave_out=())(within)  # type: ignore[return-value]


def with_copies(*names: str) -> Callable[[F], F]:
    """Decorate a verb: where these arguments are URLs, pass it local copies, and upload afterwards what it wrote."""

    def apply(verb: F) -> F:
        order = list(inspect.signature(verb).parameters)

        @functools.wraps(verb)
        def within(*arguments: Any, **options: Any) -> Any:
            with contextlib.ExitStack() as copies:

                def local(name: str, value: Any) -> Any:
                    return _copied(value, copies) if name in names else value

                placed = [local(name, value) for name, value in zip(order, arguments, strict=False)]
                return verb(*placed, **{name: local(name, value) for name, value in options.items()})

        return within  # type: ignore[return-value]

    return apply


def _copied(given: Any, copies: contextlib.ExitStack) -> Any:
    """Return an argument, a place or some of them, with a local copy in place of each URL."""
    if isinstance(given, tuple):
        return tuple(_copied(one, copies) for one in given)
    if ":/" not in str(given):
        return given
    from gracecl.lab.runs.remote import copied  # needs the modules of runs

    return type(given)(copies.enter_context(copied(given)))


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
