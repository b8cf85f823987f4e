"""`gracecl import`."""

from __future__ import annotations

from pathlib import Path

from gracecl.terminal import print_out


def import_results(source: Path, /, out: Path = Path("runs/imported")) -> None:
    """Take over results that others made, to stand in the same tables: a JSON file, or a folder of them.

    Args:
        source: docs/reports.md shows what a result looks like
        out: folder for them
    """
    from gracecl.lab.report.foreign import import_results

    places = import_results(source, out)
    print_out(f"{len(places)} results are in {out}; 'gracecl report runs {out} --out report' would set them beside others")
