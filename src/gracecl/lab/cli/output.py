"""Print the results of runs: tables, report files, unfinished and damaged runs; return the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gracecl.terminal import print_err, print_out, print_table

if TYPE_CHECKING:
    from gracecl.lab.report import Run
    from gracecl.lab.runs.jobs import Outcome

MOST_IN_DETAIL = 8
"""most methods whose inference rules are printed one by one"""


def conclude(out: Path, outcomes: Sequence[Outcome]) -> int:
    """Print the report of the finished runs, name the others, and return the exit code."""
    from gracecl.lab import report

    runs, damaged = report.read_runs(outcome.work.folder for outcome in outcomes if outcome.status == "finished")
    if runs:
        print_report(out, runs)
    return print_unfinished(outcomes) or print_damaged(damaged)


def print_report(
    out: Path,
    runs: Sequence[Run],
    formats: Sequence[str] = ("html", "md"),
    metrics: Sequence[str] | None = None,
    paper: str = "auto",
) -> None:
    """Print the table of runs and write their report as files; `paper` selects the paper's numbers beside ours."""
    from gracecl.lab import report
    from gracecl.lab.report.beside_paper import column_for
    from gracecl.lab.report.groups import group_runs
    from gracecl.lab.report.tables import COMPARED, comparison_table, rules_table, run_table

    metrics, column = metrics or COMPARED, column_for(runs, paper)
    if len(runs) == 1:
        print_table(run_table(runs[0]))
    groups = group_runs(runs, unfinished_too=True)
    for group in groups if len(groups) <= MOST_IN_DETAIL else []:
        print_table(rules_table(group.runs))
    print_table(comparison_table(runs, metrics, column))
    written = report.write_comparison(out, runs, formats, metrics, paper)
    for run in runs:
        print_out(run.path)
    tables = [str(path) for path in written if path.parent == out and path.suffix != ".html"]
    if tables:
        drawn_alone = all((run.path / "matrix.png").is_file() for run in runs)  # kept runs have no folder
        beside = "; each folder has matrix.png, layers.png and losses.png" if drawn_alone else ""
        print_out(f"{', '.join(tables)} compare them{beside}")
    if drawn := [path for path in written if path.parent != out]:
        print_out(f"{drawn[0].parent} has {len(drawn)} figures")
    if "html" in formats:
        print_out(f"Open {out / 'report.html'} in a browser to look at them")


def print_damaged(damaged: Sequence[str]) -> int:
    """Print a sentence for each run that cannot be read, and return the exit code."""
    for text in damaged:
        print_err(f"gracecl: {text}")
    return 2 if damaged else 0


def print_unfinished(outcomes: Sequence[Outcome]) -> int:
    """Name the runs that did not finish, and return the exit code."""
    others = [outcome for outcome in outcomes if outcome.status != "finished"]
    if not others:
        return 0
    names = "; ".join(outcome.work.config.title for outcome in others)
    print_err(f"gracecl: {len(others)} of {len(outcomes)} runs did not finish, for the reasons above: {names}")
    return 1 if any(outcome.status == "crashed" for outcome in others) else 2
