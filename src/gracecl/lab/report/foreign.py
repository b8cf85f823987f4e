"""Import results of other programs as runs, so that they stand in every table beside ours.

A file of JSON holds one result or a list of them:

    {"method": "DER++ (authors' code)", "stream": "split-cifar100(tasks=3)", "seed": 0,
     "accuracy": [[91.0], [80.5, 88.0], [70.2, 75.1, 86.3]],
     "memory": 1000, "net": "resnet18(width=64)", "seconds": 1234.5}

`accuracy[t][j]` is the percentage right on task j after task t; a row that is not known is null, and metrics that need it are not
shown. Everything after `accuracy` may be left out, and more may be there: it is kept in the configuration. Either all results of an
import are taken over or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.files import (
    DIGESTS,
    as_name,
    finite,
    make_folder,
    parse_json,
    read_file,
    read_sealed,
    sync_folder,
    write_sealed,
    write_text,
)
from gracecl.lab.report.runs import IMPORTED, RECORD, SETTINGS
from gracecl.lab.report.write import write_run_report
from gracecl.registry.options import run_name

NEEDED = ("method", "stream", "seed")
RULE = "reported"
"""the name of the inference rule, which is not known"""
LARGEST = 1e18
"""number that a result may hold"""


def import_results(source: Path, out: Path) -> list[Path]:
    """Turn each result in a file, or in every .json below a folder, into a run's folder below `out`."""
    if not source.exists():
        raise UserError(f"there is no file or folder {source}; name a JSON file of results, or a folder of them")
    files = sorted(source.rglob("*.json")) if source.is_dir() else [source]
    results = [(file, result) for file in files for result in read(file)]
    if not results:
        raise UserError(f"{source} holds no result; docs/reports.md shows what one looks like")
    places = [out / as_name(result["stream"]) / as_name(result["method"]) / IMPORTED / str(result["seed"]) for _, result in results]
    if twice := {place for place in places if places.count(place) > 1}:
        which = sorted(twice)[0].relative_to(out)
        raise UserError(f"two results have the same method, stream and seed, but for signs: {which}; name them apart")
    for place, (file, result) in zip(places, results, strict=True):
        _check_vacant(place, result, file)
    with _beside(out) as beside:
        for place, (file, result) in zip(places, results, strict=True):
            write(beside / "new" / place.relative_to(out), result, file)
        for place in places:
            _move(beside / "new" / place.relative_to(out), place, beside / "old" / place.relative_to(out))
    return places


def _check_vacant(place: Path, result: dict[str, Any], file: Path) -> None:
    """Refuse a folder that holds another result: names that differ only in special characters share one."""
    try:
        held = read_sealed(place / "config.json")
    except (OSError, UserError):  # nothing, or nothing that can be read
        return
    if other := [name for name in NEEDED if held.get(name) != result[name]]:
        raise UserError(f"{place} holds another result ({other[0]} {held.get(other[0])!r}); import {file} to another --out")


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Yield a temporary folder in `out`, whose contents can be moved into place by renaming; delete it afterwards."""
    make_folder(out)
    folder = out / f".{os.getpid()}.part"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # which is not empty
            out.rmdir()


def _move(new: Path, place: Path, old: Path) -> None:
    """Move a finished folder into place and delete an earlier one."""
    make_folder(place.parent)
    if place.exists():
        old.parent.mkdir(parents=True, exist_ok=True)
        place.rename(old)
    new.rename(place)
    sync_folder(place.parent)


def read(file: Path) -> list[dict[str, Any]]:
    """Read and check the results in a file."""
    try:
        content = parse_json(read_file(file))
    except ValueError as error:
        raise UserError(f"cannot read {file}: {error}; docs/reports.md shows what a result looks like") from None
    results = content if isinstance(content, list) else [content]
    for number, result in enumerate(results, start=1):
        if problem := problem_of(result):
            raise UserError(f"result {number} of {file} {problem}; docs/reports.md shows what one looks like")
    return results


def problem_of(result: Any) -> str:
    """Return what is wrong with a result; empty if nothing is."""
    if not isinstance(result, dict):
        return "is no object with method, stream, seed and accuracy"
    if not isinstance(result.get("accuracy"), list):
        return "needs 'accuracy' as a list of rows"
    if wrong := [name for name, fits in SETTINGS.items() if name in (*NEEDED, *result) and not fits(result.get(name))]:
        return f"needs '{wrong[0]}' as {'text' if wrong[0] in ('method', 'stream', 'rule', 'stream_hash') else 'a whole number'}"
    if "seconds" in result and not (_is_number(result["seconds"]) and result["seconds"] >= 0):
        return "needs 'seconds' as a number"
    if wrong := [name for name in ("method", "stream") if not (result[name].strip() and result[name].isprintable())]:
        return f"needs a '{wrong[0]}' of printable characters"
    rows = result["accuracy"]
    for task, row in enumerate(rows, start=1):
        if row is not None and (not isinstance(row, list) or len(row) != task or not all(map(_is_percent, row))):
            return f"needs {task} percentages from 0 to 100 in row {task} of 'accuracy', or null"
    if not rows or rows[-1] is None:
        return "needs the last row of 'accuracy'"
    return "" if finite(result) == result else "holds a number that is not finite"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_percent(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 100


def write(folder: Path, result: dict[str, Any], file: Path) -> None:
    """Write a result as the folder of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = result["accuracy"]
    config = {name: value for name, value in result.items() if name not in ("accuracy", "seconds", DIGESTS)}
    config |= {"rule": RULE, "tasks": len(rows), "imported_from": file.name}
    write_sealed(folder / "config.json", config)
    evaluations = [
        {"kind": "eval", "step": task, "task": task, "task_end": True, "accuracy": {RULE: row}}
        for task, row in enumerate(rows)
        if row is not None
    ]
    write_text(folder / RECORD, "".join(json.dumps(line) + "\n" for line in evaluations))
    timing = {"steps": len(rows)} | ({"train_seconds": result["seconds"]} if "seconds" in result else {})
    write_sealed(folder / "timing.json", timing | {"run": run_name(config)})
    write_run_report(folder)
