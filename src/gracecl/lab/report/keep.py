"""Keep what of finished runs is worth committing: all data of tables and figures, without weights and most steps."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from gracecl.errors import UserError
from gracecl.files import make_folder, parse_json, read_file, read_sealed, write_bytes
from gracecl.lab.report.kept import KEPT, in_order, line_of, lines_in
from gracecl.lab.report.runs import CONFIG, MATRICES, RECORD, SUMMARY, TIMING, Run, find_any, line_for, read_runs


def keep_runs(source: Path, to: Path, every: int) -> tuple[list[Path], list[str]]:
    """Write the finished runs below a folder into `to`/runs.jsonl, beside those it has; keep every `every`-th step.

    A study reads them like its own runs and does not execute them again. The file is replaced as a whole, or not at all. Returns
    the paths by which the kept runs are known, and a sentence about each run that cannot be read and is left out.
    """
    if every < 1:
        raise UserError(f"--every must be at least 1, not {every}")
    kept, (runs, damaged) = {}, read_runs(find_any(source))
    for run in runs:
        if run.finished:
            try:
                kept[run.path.relative_to(source)] = parts_of(run, every)
            except UserError as error:
                damaged.append(str(error))
        elif run.timing:  # which is written after the last step
            damaged.append(
                f"{run.path} has no {SUMMARY} although the run came to its end; write it with: gracecl resume {run.path}"
            )
    if not kept and not damaged:
        raise UserError(f"{source} holds no finished run; finish some with 'gracecl resume {source}'")
    if kept:
        lines = {}
        for line in lines_in(to / KEPT):
            line.read()  # which refuses a damaged one: it would be lost here
            lines[Path(line.folder)] = line.data + b"\n"
        lines |= {place: line_of(PurePosixPath(place), parts) for place, parts in kept.items()}
        make_folder(to)
        write_bytes(to / KEPT, b"".join(lines[place] for place in in_order(lines)))
    return [to / place for place in kept], damaged


def parts_of(run: Run, every: int) -> dict[str, Any]:
    """Collect what a line holds of a finished run."""
    if line := line_for(run.path):
        parts = line.read()
        return parts | {"record": thinned(parts["record"], every)}
    record = read_file(run.path / RECORD).splitlines() if (run.path / RECORD).is_file() else []
    return {
        "config": read_sealed(run.path / CONFIG),
        "summary": read_sealed(run.path / SUMMARY),
        # Older copies of runs have their matrices without the record.
        "accuracy": run.matrices() if run.evals else read_sealed(run.path / MATRICES),
        "timing": read_sealed(run.path / TIMING),
        "record": thinned([parse_json(text) for text in record if text.strip()], every),
    }


def thinned(record: list[Any], every: int) -> list[Any]:
    """Keep evaluations, ends of tasks, and every `every`-th step of a record."""

    def stays(entry: Any) -> bool:
        return not isinstance(entry, dict) or entry.get("kind") != "step" or entry["step"] % every == 0

    return list(filter(stays, record))
