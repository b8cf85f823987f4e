"""`gracecl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.errors import UserError
from gracecl.lab.cli.output import print_damaged
from gracecl.lab.cli.values import only_run
from gracecl.terminal import print_out


def export(source: str, file: Path, /, what: Literal["runs", "evaluations", "steps"] = "runs", rule: str | None = None) -> int:
    """Write runs as a table (.csv, .parquet), or a learner as a model (.safetensors, .pt2, .onnx), by the file's name.

    Args:
        source: folder of runs, or the name of a study; of a model, the run's folder, or a file of Learner.save
        file: what to write
        what: of a table: a row per run, per evaluation, rule and task, or per step, term and layer
        rule: inference rule whose metrics or predictions are meant (default: each method's own)
    """
    tables, models = (".csv", ".parquet"), (".safetensors", ".pt2", ".onnx")
    if file.suffix not in (*tables, *models):
        raise UserError(f"the name of {file} must end in .csv, .parquet or {', '.join(models)}")
    if Path(source).is_file():
        if file.suffix in tables:
            raise UserError(f"{source} is a file, and tables are of runs; give the folder of some, or write {', '.join(models)}")
        from gracecl.learner import Learner

        print_out(Learner.load(source).export(file, rule))
        return 0
    from gracecl.lab.report.select import folder_of

    folder = folder_of(source)
    if file.suffix in tables:
        from gracecl.lab.report import find_runs
        from gracecl.lab.report.frames import write_table

        damaged: list[str] = []
        print_out(f"{write_table(find_runs(folder, damaged), file, what, rule):,} rows are in {file}")
        return print_damaged(damaged)
    from gracecl.lab.runs.export import export_run

    print_out(export_run(only_run(folder), file, rule))
    return 0
