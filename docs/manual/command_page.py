"""The page of the command line: the help of every verb, from the parser itself."""

from __future__ import annotations

import contextlib
import io
import os

from gracecl.lab import cli
from gracecl.lab.cli.main import VERBS
from manual.pages import ROOT, write_page

PAGE = ROOT / "docs/reference/command.md"
OPENING = """\
# Command line

`gracecl VERB --help` prints what stands here. Exit codes: 0, done; 1, a crash (please report it); 2, an error
that you can fix, in one sentence; 130, interrupted, and the same command continues.
"""


def write() -> None:
    parts = [OPENING, box(help_of())]
    for verb in VERBS:
        parts.append(f"## gracecl {verb}\n\n{box(help_of(verb))}")
    write_page(PAGE, "\n".join(parts))


def help_of(*words: str) -> str:
    """Return what `gracecl WORDS --help` prints on a plain terminal of 96 columns."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": "96", "NO_COLOR": "1"}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.call([*words, "--help"])
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return printed.getvalue()


def box(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"
