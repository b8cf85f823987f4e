"""Finished runs in one file, `runs.jsonl`: a line of JSON for each, in the order of their folders, which they no longer need.

    {"folder":"<stream>/<method>/<hash>/<seed>","config":{…},"summary":{…},"accuracy":{…},"timing":{…},"record":[…],"digest":"…"}

The parts are what the files of a run's folder hold, the record thinned. A run keeps the path that its folder would have below
that of the file, so it can be found by its path. The digest covers all bytes before it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gracecl.errors import UserError
from gracecl.files import Digest, finite, parse_json, read_file

KEPT = "runs.jsonl"
PARTS = {"config": dict, "summary": dict, "accuracy": dict, "timing": dict, "record": list}
"""what a line holds of a run"""
BEGINNING, SEAL = '{"folder":', ',"digest":"'
FILES_CACHED = 64


@dataclass(frozen=True)
class KeptRun:
    """A line of `runs.jsonl`: one finished run."""

    file: Path
    number: int
    folder: str
    """of the run, below that of the file; empty where the line does not say"""
    data: bytes

    def __str__(self) -> str:
        return f"line {self.number} of {self.file}"

    @property
    def path(self) -> Path:
        """Where the run's folder would be."""
        return self.file.parent / self.folder if self.folder else self.file

    def read(self) -> dict[str, Any]:
        """Return the parts of the run; refuse a line that was changed."""
        body, _, seal = self.data.rpartition(SEAL.encode())
        try:
            values = dict(parse_json(self.data)) if seal == f'{Digest().add(body)}"}}'.encode() else {}
        except (ValueError, TypeError):
            values = {}
        if not self.folder or not all(isinstance(values.get(name), kind) for name, kind in PARTS.items()):
            raise UserError(f"{self} was changed by hand or damaged; put it back from a copy, or delete it and keep the run again")
        return {name: values[name] for name in PARTS}


def line_of(folder: PurePosixPath, parts: dict[str, Any]) -> bytes:
    """Encode a run as a line."""
    values = finite({"folder": str(folder), **{name: parts[name] for name in PARTS}})
    body = json.dumps(values, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + f'{SEAL}{Digest().add(body)}"}}\n'.encode()


def lines_in(file: Path) -> tuple[KeptRun, ...]:
    """Return the kept runs in a file; none if it does not exist."""
    if not file.is_file():
        return ()
    found = file.stat()
    return _split(file, (found.st_ino, found.st_mtime_ns, found.st_size))


@functools.lru_cache(FILES_CACHED)
def _split(file: Path, _: tuple[int, ...]) -> tuple[KeptRun, ...]:
    """Split a file into runs; cached until it changes, as a study looks up each of its runs in every file."""
    lines, known = [], set[str]()
    for number, data in enumerate(read_file(file).split(b"\n"), start=1):
        if data.strip():
            folder = _folder_in(data)
            # The second line of one run would be counted as another seed.
            lines.append(KeptRun(file, number, "" if folder in known else folder, data))
            known.add(folder)
    return tuple(lines)


def _folder_in(data: bytes) -> str:
    """Return the run's folder that a line names; empty if it names none below its own."""
    text = data.decode("utf-8", errors="replace")
    try:
        folder, _ = json.JSONDecoder().raw_decode(text, len(BEGINNING) if text.startswith(BEGINNING) else len(text))
    except ValueError:
        return ""
    place = PurePosixPath(folder) if isinstance(folder, str) and "\0" not in folder else PurePosixPath("/")
    return "" if place.is_absolute() or ".." in place.parts else str(place)


def find_line(folder: Path) -> KeptRun | None:
    """Find the kept run that would have this folder, in files of the folders above it."""
    for above in folder.parents:
        if lines := lines_in(above / KEPT):
            name = folder.relative_to(above).as_posix()
            if found := [line for line in lines if line.folder == name]:
                return found[0]
    return None


def find_lines(root: Path) -> list[KeptRun]:
    """Find all kept runs in a folder and below."""
    return [line for at, _, names in os.walk(root) if KEPT in names for line in lines_in(Path(at) / KEPT)]


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sort folders by configuration and seed."""
    return sorted(paths, key=lambda path: (path.parent, len(path.name), path.name))
