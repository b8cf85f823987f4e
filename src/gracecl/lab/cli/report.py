"""`gracecl report`."""

from __future__ import annotations

from pathlib import Path

from gracecl.errors import UserError
from gracecl.lab.cli.output import print_damaged, print_report
from gracecl.lab.cli.values import with_copies


@with_copies("sources", "out")
def report(
    sources: tuple[str, ...],
    /,
    formats: str = "html,md",
    metrics: str = "acc,aia,forgetting,forgetting_mose",
    paper: str = "auto",
    out: Path | None = None,
) -> int:
    """Report on runs: a table here, and a page, tables and figures as files.

    Args:
        sources: folders of runs (what was given as --out, a URL such as s3://bucket/runs too), or the name of a study
        formats: which files, such as html,md,csv,tex,pdf; or all. html is a page to open in a browser, tex a table for a paper
            (booktabs), pdf, svg and png are figures
        metrics: columns of the tables, such as acc, aia, forgetting, forgetting_mose (the paper's AF), aaa, min_acc, ece; beside
            prequential accuracy and kappa stand those of blind baselines. docs/evaluation.md has all of them
        paper: the numbers that the tables have beside ours: auto is the paper's column of the same data set and memory, 1000 that
            of this memory, none no numbers
        out: folder for the files (default: the folder of the runs)
    """
    from gracecl.lab import report as reports
    from gracecl.lab.report.compare import check_metric
    from gracecl.lab.report.measures import with_baselines
    from gracecl.lab.report.select import folder_of

    if not sources:
        raise UserError("name the runs to report on: folders that were given as --out, or a study")
    folders = [folder_of(source) for source in sources]
    if out is None and len(folders) > 1:
        raise UserError("a report on several folders needs a folder of its own; name it with --out")
    kinds = list(reports.FORMATS) if formats == "all" else [kind.strip() for kind in formats.split(",")]
    if unknown := [kind for kind in kinds if kind not in reports.FORMATS]:
        raise UserError(f"there is no format '{unknown[0]}' (there are: {', '.join(reports.FORMATS)}, all)")
    columns = with_baselines([metric.strip() for metric in metrics.split(",")])
    for metric in columns:
        check_metric(metric)
    runs, damaged = reports.read_runs([place for folder in folders for place in reports.find_places(folder)])
    if not runs and not damaged:
        raise UserError(f"there is no run in {' or '.join(map(str, folders))} or below; give what was given as --out")
    if runs:
        print_report(out or folders[0], runs, kinds, columns, paper)
    return print_damaged(damaged)
