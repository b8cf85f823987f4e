"""`gracecl keep`."""

from __future__ import annotations

from pathlib import Path

from gracecl.cli.ending import tell
from gracecl.terminal import print_out


def keep(folder: Path, to: Path, /, every: int = 50) -> int:
    """Copy what is worth keeping of the finished runs below a folder: configuration, results, and a thinned record; no weights.

    A study that finds such a copy in its folder uses it as if it had made the run itself.

    Args:
        folder: what was given as --out
        to: where the copies go, each in the same place below it
        every: steps between two that are kept of the record; evaluations and ends of tasks all are
    """
    from gracecl.report.keep import keep_runs

    kept, damaged = keep_runs(folder, to, every)
    print_out(f"{len(kept)} runs are kept in {to}")
    return tell(damaged)
