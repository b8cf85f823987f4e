"""What of a finished run is worth committing: everything that tables and pictures are made of, without weights and most steps."""

from __future__ import annotations

from pathlib import Path

from gracecl.errors import UserError
from gracecl.files import Written, parse_json, read_file, write_bytes, write_sealed, write_text
from gracecl.registry.options import run_name
from gracecl.report.runs import RECORD, SUMMARY, find_begun, read_runs, read_summary

WHOLE = ("config.json", "accuracy.json", "timing.json")


def keep_runs(source: Path, to: Path, every: int) -> tuple[list[Path], list[str]]:
    """Copies the finished runs below a folder, each to the same place below another; of steps every `every`-th record stays.

    A study reads them like its own runs and does not carry them out again. A run that cannot be read is left out; there is a
    sentence about each of these.
    """
    if every < 1:
        raise UserError(f"--every must be at least 1, not {every}")
    folders = find_begun(source)
    kept, (runs, damaged) = [], read_runs(folders)
    for run in runs:
        folder = run.path
        if (result := read_summary(folder)) is None:
            if run.finished:
                damaged.append(
                    f"{folder} has no {SUMMARY} although the run came to its end; write it with: gracecl resume {folder}"
                )
            continue
        place = to / folder.relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in WHOLE:
            if (folder / name).is_file():
                write_bytes(place / name, read_file(folder / name))
        write_text(place / RECORD, thinned(folder / RECORD, every))
        owner = {"run": run_name(run.config)}  # which an older summary does not name
        write_sealed(place / SUMMARY, result | owner | {"record": Written.to(place / RECORD)._asdict()})
        kept.append(place)
    if not kept and not damaged:
        raise UserError(f"{source} holds no finished run; finish some with 'gracecl resume {source}'")
    return kept, damaged


def thinned(record: Path, every: int) -> str:
    """Evaluations and ends of tasks, and some of the steps."""
    lines = [line for line in record.read_text(encoding="utf-8").splitlines() if line.strip()] if record.is_file() else []
    chosen = [line for line in lines if (entry := parse_json(line))["kind"] != "step" or entry["step"] % every == 0]
    return "".join(f"{line}\n" for line in chosen)
