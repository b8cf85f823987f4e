"""Find finished runs of other studies: a run is named by its configuration, so it has the same path below each study's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gracecl import __version__
from gracecl.errors import UserError
from gracecl.lab.report import read_config
from gracecl.lab.runs.run import Work

PLACES = (Path("results"), Path("runs"))
"""default folders of studies"""
SAME_NUMBERS = ("0.1.0", "0.2.0", __version__)
"""versions that give the same results; CHANGELOG.md names the exceptions under Numbers. When a version changes results of most
methods, the earlier ones leave this list."""


def reuse(works: Sequence[Work], out: Path) -> tuple[list[Work], dict[str, int]]:
    """Point each unfinished run to a folder where another study finished it; return the runs and counts by folder."""
    others = [folder for folder in folders_beside(out) if folder.resolve() != out.resolve()]
    found, taken = [], Counter[str]()
    for work in works:
        place = work.folder.relative_to(out)
        homes = [] if work.finished else [home for home in others if fits(replace(work, folder=home / place))]
        if homes:
            taken[str(homes[0])] += 1
        found.append(replace(work, folder=homes[0] / place) if homes else work)
    return found, dict(taken)


def folders_beside(out: Path) -> list[Path]:
    """List the folders beside `out` and in the usual places."""
    parents = {place.resolve(): place for place in (out.parent, *PLACES) if place.is_dir()}
    return sorted({folder for place in parents.values() for folder in place.iterdir() if folder.is_dir()})


def fits(work: Work) -> bool:
    """Return whether the run was finished by this version of the library or by one with the same results."""
    if not work.finished:
        return False
    try:
        versions = read_config(work.folder).get("versions", {})
    except (OSError, UserError):
        return False
    return versions.get("gracecl") in SAME_NUMBERS
