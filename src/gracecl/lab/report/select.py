"""Select runs by name: a folder's, or a method's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gracecl.errors import UserError
from gracecl.lab.report.groups import Group, group_apart
from gracecl.lab.report.runs import Run, find_runs
from gracecl.registry import nearest
from gracecl.registry.spec import in_full


def select(names: Sequence[str], root: Path, rule: str | None = None, damaged: list[str] | None = None) -> list[list[Group]]:
    """Return the groups that each name means, under `rule` if given; a single folder becomes one selection per method.

    A run that cannot be read is an error, or a sentence in the list `damaged`.
    """
    if not names:
        raise UserError("name what to compare: folders of runs, or methods among those below --runs, the first against the others")
    chosen = {name: runs_of(name, root, damaged) for name in dict.fromkeys(names)}
    selections = group_apart(chosen)
    for name, selection in zip(chosen, selections, strict=True):
        if not selection:
            raise UserError(f"'{name}' has no finished run; finish some with 'gracecl resume'")
    if len(selections) == 1:
        by_method: dict[str, list[Group]] = {}
        for group in selections[0]:
            by_method.setdefault(group.method, []).append(group)
        selections = list(by_method.values())
    if len(selections) < 2:
        raise UserError(f"'{names[0]}' is one method; name another to compare it with")
    if rule is not None:
        selections = [[group.under(rule) for group in selection] for selection in selections]
    return selections


def folder_of(name: str) -> Path:
    """Return a folder, or the folder of the study with that name."""
    places = [Path(name), Path("results") / name, Path("runs") / name]
    found = [place for place in places if place.is_dir()]
    if not found:
        raise UserError(f"there is no folder {name}, and no study's runs in {places[1]} or {places[2]}")
    return found[0]


def runs_of(name: str, root: Path, damaged: list[str] | None = None) -> list[Run]:
    """Return the runs in the folder of that name, or of that method below `root`."""
    if Path(name).is_dir():
        return find_runs(name, damaged)
    if not root.is_dir():
        raise UserError(f"there is no folder {name}, and no folder {root} to look for a method in; say where with --runs")
    found = find_runs(root, damaged)
    methods = list(dict.fromkeys(str(run.config["method"]) for run in found))
    wanted = name
    if name not in methods:
        with suppress(UserError):  # what is no expression may be the name of somebody's result
            wanted = in_full(name)
    if wanted not in methods:
        raise UserError(f"{root} has no run of '{name}'{nearest(name, methods)} (it has: {', '.join(methods) or 'no runs at all'})")
    return [run for run in found if run.config["method"] == wanted]
