"""`gracecl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.errors import UserError
from gracecl.lab.cli.output import print_damaged
from gracecl.lab.cli.values import only_run
from gracecl.terminal import print_out


def export(source: str, file: Path, /, what: Literal["runs", "evaluations", "steps"] = "runs", rule: str | None = None) -> int:
    """Write runs as a table (.csv, .parquet), or a run's learner as a model (.safetensors, .pt2, .onnx), by the file's name.

    Args:
        source: folder of runs, or the name of a study; of a model, the run's folder
        file: what to write
        what: of a table: a row per run, per evaluation, rule and task, or per step, term and layer
        rule: inference rule whose metrics or predictions are meant (default: each method's own)
    """
    from gracecl.lab.report.select import folder_of

    folder = folder_of(source)
    if file.suffix in (".csv", ".parquet"):
        from gracecl.lab.report import find_runs
        from gracecl.lab.report.frames import write_table

        damaged: list[str] = []
        print_out(f"{write_table(find_runs(folder, damaged), file, what, rule):,} rows are in {file}")
        return print_damaged(damaged)
    from gracecl.lab.runs.export import MODELS, export_run

    if file.suffix not in MODELS:
        raise UserError(f"the name of {file} must end in .csv, .parquet or {', '.join(MODELS)}")
    print_out(export_run(only_run(folder), file, rule))
    return 0
