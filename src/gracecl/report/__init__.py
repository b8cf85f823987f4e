"""Records in, tables, pictures and pages out. Reads run folders; knows nothing of torch."""

from gracecl.report.runs import (
    SUMMARY,
    Run,
    check_folder_name,
    find_begun,
    find_folders,
    find_runs,
    read_run,
    read_runs,
    read_summary,
    remedy_for_config,
    summary,
    without_config,
)
from gracecl.report.write import FORMATS, write_comparison, write_figures, write_run_report

__all__ = [
    "FORMATS",
    "SUMMARY",
    "Run",
    "check_folder_name",
    "find_begun",
    "find_folders",
    "find_runs",
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
