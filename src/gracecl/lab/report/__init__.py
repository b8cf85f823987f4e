"""Read recorded runs and make tables, figures and pages of them, without torch."""

from gracecl.lab.report.kept import KEPT, lines_in
from gracecl.lab.report.runs import (
    SUMMARY,
    Run,
    check_folder_name,
    find_begun,
    find_places,
    find_runs,
    is_finished,
    line_for,
    read_config,
    read_run,
    read_runs,
    read_summary,
    remedy_for_config,
    summary,
    without_config,
)
from gracecl.lab.report.write import FORMATS, write_comparison, write_figures, write_run_report

__all__ = [
    "FORMATS",
    "KEPT",
    "SUMMARY",
    "Run",
    "check_folder_name",
    "find_begun",
    "find_places",
    "find_runs",
    "is_finished",
    "line_for",
    "lines_in",
    "read_config",
    "read_run",
    "read_runs",
    "read_summary",
    "remedy_for_config",
    "summary",
    "without_config",
    "write_comparison",
    "write_figures",
    "write_run_report",
]
