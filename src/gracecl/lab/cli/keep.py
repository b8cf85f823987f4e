"""`gracecl keep`."""

from __future__ import annotations

from pathlib import Path

from gracecl.lab.cli.output import print_damaged
from gracecl.terminal import print_out


def keep(folder: Path, to: Path, /, every: int = 50) -> int:
    """Keep what is worth committing of the finished runs below a folder: configuration, results, and a thinned record; no weights.

    TO/runs.jsonl gets a line for each run, in place of the line that it had. A study that finds a run there uses it as if it had
    made it itself.

    Args:
        folder: what was given as --out, or a folder with such files below it
        to: the folder of runs.jsonl
        every: steps between two that are kept of the record; evaluations and ends of tasks all are
    """
    from gracecl.lab.report.keep import keep_runs
    from gracecl.lab.report.kept import KEPT

    kept, damaged = keep_runs(folder, to, every)
    print_out(f"{len(kept)} runs are kept in {to / KEPT}")
    return print_damaged(damaged)
