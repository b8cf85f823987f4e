"""The command, called in this process, and what it left behind."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from gracecl.lab import cli


class Said(NamedTuple):
    """A command's exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence that a refused command says, after any lines of progress."""
        complaints = [line for line in self.err.splitlines() if line.startswith("gracecl: ")]
        assert len(complaints) == 1, f"not one sentence but:\n{self.err}"
        assert self.err.rstrip("\n").endswith(complaints[0]), f"something follows the sentence:\n{self.err}"
        assert "Traceback" not in self.err
        return complaints[0]


def gracecl(*arguments: str | Path) -> Said:
    """The parser of flags leaves by SystemExit, as in a shell."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.call([str(argument) for argument in arguments])
        except SystemExit as leave:
            code = int(leave.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def only_run(out: Path) -> Path:
    """The folder of the one run below this one."""
    (config,) = out.rglob("config.json")
    return config.parent


def records(folder: Path) -> list[dict[str, Any]]:
    """A run's record."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
