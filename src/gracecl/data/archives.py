"""Tar archives in WebDataset's layout: files of one example have one name up to its first dot, such as 0007.jpg and 0007.cls."""

from __future__ import annotations

import glob
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.data.folder import ENDINGS
from gracecl.data.pixels import InArchive
from gracecl.data.splits import held_out
from gracecl.errors import UserError
from gracecl.files import check_readable, parse_json

LABEL_FILES = ("cls", "json", "txt")
"""endings of the files that hold a label, in the order in which they are looked for"""
LABEL_ENTRIES = ("label", "cls", "class", "target", "y")
"""what a label is called in a JSON file"""

Labelled = list[tuple[InArchive, Any]]
"""(image, label)"""


def archives_of(source: str | Path) -> list[Path]:
    """The archives that a path, a folder or a pattern such as 'train-*.tar' names; empty if it names none."""
    place = Path(source).expanduser()
    if place.is_dir():
        return sorted(place.glob("*.tar"))
    return sorted(Path(name).resolve() for name in glob.glob(str(place)) if name.endswith(".tar"))


def examples_in(archives: list[Path]) -> Labelled:
    """Every image with its label, in the order of the archives. Images are not read yet."""
    rows: Labelled = []
    for path in archives:
        members: dict[str, dict[str, tarfile.TarInfo]] = {}
        try:
            check_readable(path)
            with tarfile.open(path, "r:") as archive:  # without compression, so that a file can be read at its place
                for member in archive:
                    if member.isfile() and not Path(member.name).name.startswith("."):
                        folder, _, name = member.name.rpartition("/")
                        key, _, ending = name.partition(".")
                        members.setdefault(f"{folder}/{key}", {})[ending.lower()] = member
                rows += [(_image(path, key, files), _label(archive, path, key, files)) for key, files in members.items()]
        except (tarfile.TarError, OSError) as error:
            raise UserError(f"cannot read the archive {path} ({error}); give tar files without compression") from None
    if not rows:
        raise UserError(f"{archives[0]} has no images with labels, such as 0007.jpg beside 0007.cls")
    return rows


def split_off(rows: Labelled, fraction: float, seed: int) -> tuple[Labelled, Labelled]:
    """A training and a test part: of each class this fraction is held out, chosen by the names of the examples."""
    labels = np.unique([str(label) for _, label in rows], return_inverse=True)[1]
    held = held_out([image.name for image, _ in rows], labels, fraction, seed)
    return [row for row, out in zip(rows, held, strict=True) if not out], [row for row, out in zip(rows, held, strict=True) if out]


def _image(path: Path, key: str, files: dict[str, tarfile.TarInfo]) -> InArchive:
    for ending, member in files.items():
        if f".{ending}" in ENDINGS:
            return InArchive(path, member.name, member.offset_data, member.size)
    raise UserError(f"the example {key.lstrip('/')} in {path} has no image ({', '.join(sorted(ENDINGS))})")


def _label(archive: tarfile.TarFile, path: Path, key: str, files: dict[str, tarfile.TarInfo]) -> Any:
    for ending in LABEL_FILES:
        if ending not in files:
            continue
        content = archive.extractfile(files[ending])
        text = (content.read() if content else b"").decode("utf-8", "replace").strip()
        if ending != "json":
            return int(text) if text.lstrip("-").isdecimal() else text
        try:
            entries = parse_json(text)
        except (ValueError, json.JSONDecodeError) as error:
            raise UserError(f"{files[ending].name} in {path} is no label: {error}") from None
        if isinstance(entries, dict) and (name := next((name for name in LABEL_ENTRIES if name in entries), None)):
            return entries[name]
    raise UserError(f"the example {key.lstrip('/')} in {path} has no label: a file that ends in .cls, .txt, or .json with 'label'")
