"""Records in, tables, pictures and pages out. Reads run folders; knows nothing of torch."""

from gracecl.report.runs import Run, find_folders, find_runs, read_run, read_runs, read_summary, summary
from gracecl.report.write import FORMATS, write_comparison, write_figures, write_run_report

__all__ = [
    "FORMATS",
    "Run",
    "find_folders",
    "find_runs",
    "read_run",
    "read_runs",
    "read_summary",
    "summary",
    "write_comparison",
    "write_figures",
    "write_run_report",
]
