"""`load`, `check` and `get`: everything the outside does with a data set's name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from gracecl.data.cache import decoded, files_key
from gracecl.data.dataset import Data
from gracecl.data.domains import domains_of, from_domain_folders
from gracecl.data.download import fetch_source
from gracecl.data.folder import from_folder
from gracecl.data.locations import cache_folder, data_root
from gracecl.data.shards import damaged_shards, from_shards, is_packed
from gracecl.data.source import Source
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.registry import datasets
from gracecl.registry.spec import parse_numbers

log = logging.getLogger(__name__)

FOLDER, DOMAINS, SHARDS = "folder:", "domains:", "shards:"


def load(
    name: str,
    root: str | Path | None = None,
    *,
    classes: str | Sequence[int] | None = None,
    size: int | None = None,
    mmap_bytes: int | None = None,
) -> Data:
    """A data set by name (`gracecl list datasets`), `folder:PATH` for a folder of images, `domains:PATH` for one per domain, or
    `shards:PATH` for what `pack` made.

    It is looked for in `root`, else $GRACECL_DATA, else the user's cache. `classes` ("0-19", "0,3,7" or numbers) picks classes
    and numbers them anew in the order given; a selection is held in memory, unless it is of shards. `size` asks for another,
    square resolution. Arrays above `mmap_bytes` (else $GRACECL_MMAP_BYTES, else 1 GB) are memory-mapped. `tasks` stays the
    usual number even if it does not divide the classes picked; a stream then asks for another.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UserError(f"size must be a whole number of pixels, not {size!r}")
    if name.startswith(FOLDER):
        data = from_folder(name.removeprefix(FOLDER), root=root, size=size, mmap_bytes=mmap_bytes)
    elif name.startswith(DOMAINS):
        data = from_domain_folders(name.removeprefix(DOMAINS), size=size, root=root)
    elif name.startswith(SHARDS):
        if size is not None:
            raise UserError("shards hold images of one size; give --size when they are packed, and leave it out here")
        data = from_shards(name.removeprefix(SHARDS))
    else:
        known = datasets.get(name)
        place = data_root(root)
        data = _from_source(known(), place, size, mmap_bytes) if _is_source(known) else _made(name, known, place, size)
    return data if classes is None else _picked(data, classes)


def check(name: str, root: str | Path | None = None) -> list[str]:
    """List what is wrong with the copy of a data set in `root`, one sentence each; empty when complete and
    decodable.
    """
    found: list[str] = []
    try:
        if is_packed(name):
            return damaged_shards(name)
        known = None if name.startswith((FOLDER, DOMAINS)) else datasets.get(name)
        if _is_source(known):
            source = known()
            found += source.problems(_existing(source, data_root(root)))
        load(name, root)
    except UserError as error:
        found.append(str(error))
    return found


def get(name: str, root: str | Path | None = None, *, url: str | None = None, progress: bool = True) -> Path:
    """Download a data set into `root` and return its folder; nothing is downloaded when a complete copy is there.

    `url` names a mirror: the file itself, or a folder when it ends in a slash or the set has several files. The SHA-256
    check is the same. An interrupted download continues where it stopped when this is called again.
    """
    known = datasets.get(name)
    if not _is_source(known):
        raise UserError(f"'{name}' needs no download")
    return fetch_source(known(), data_root(root), url, show=progress)


def _is_source(known: Any) -> TypeGuard[type[Source]]:
    return isinstance(known, type) and issubclass(known, Source)


def _made(name: str, function: Callable[[Path, int | None], Any], root: Path, size: int | None) -> Data:
    data = function(root, size)
    if not isinstance(data, Data):
        raise UserError(f"the data set '{name}' is registered, but gave {type(data).__name__} instead of gracecl.data.Data")
    return data


def _existing(source: Source, root: Path) -> Path:
    folder = root / source.folder
    if not folder.is_dir():
        raise UserError(
            f"{source.name} is not in {root} (no folder '{source.folder}'): "
            f"run 'gracecl data get {source.name} --data {root}', or name the right folder with --data or GRACECL_DATA"
        )
    return folder


def _from_source(source: Source, root: Path, size: int | None, mmap_bytes: int | None) -> Data:
    folder = _existing(source, root)
    side = size or source.size
    extent = (side, side)
    entry = cache_folder(root) / f"{source.name}-{side}px-{sha256(str(folder).encode()).hexdigest()[:8]}"
    key = files_key(source.files(folder), extent)
    arrays = decoded(entry, key, lambda: source.read(folder), extent, source.name, mmap_bytes)
    if len(arrays.class_names) < source.classes:
        _say_once(
            f"{source.name}: {folder} holds {len(arrays.class_names)} of {source.classes} classes; these are used, "
            f"numbered in their official order ('gracecl data check {source.name} --data {root}' lists what is missing)"
        )
    return Data(
        name=source.name,
        train_x=torch.from_numpy(arrays.train_x),
        train_y=arrays.train_y,
        test_x=torch.from_numpy(arrays.test_x),
        test_y=arrays.test_y,
        inputs=Images(arrays.train_x.shape[1:], source.mean, source.std),
        class_names=arrays.class_names,
        tasks=source.tasks,
    )


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)


def _picked(data: Data, classes: str | Sequence[int]) -> Data:
    """Keep only these classes, numbered 0, 1, … in the order given; images keep their order."""
    if not isinstance(classes, str | Sequence | np.ndarray):
        raise UserError(f"classes is text such as '0-19' or a list of numbers, not {classes!r}")
    wanted = parse_numbers(classes, "classes") if isinstance(classes, str) else list(classes)
    if not wanted:
        raise UserError("classes picks none; give for example 0-19 or 0,3,7")
    if len(set(wanted)) < len(wanted):
        raise UserError(f"classes names some class twice: {classes}")
    for number in wanted:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < data.classes:
            raise UserError(f"classes asks for class {number!r}, but {data.name} has 0 … {data.classes - 1}")
    new_number = np.full(data.classes, -1, dtype=np.int64)
    new_number[wanted] = np.arange(len(wanted))
    train, test = (np.flatnonzero(new_number[y] >= 0) for y in (data.train_y, data.test_y))
    return replace(
        data,
        train_x=data.train_x[torch.from_numpy(train)],
        train_y=new_number[data.train_y[train]],
        test_x=data.test_x[torch.from_numpy(test)],
        test_y=new_number[data.test_y[test]],
        class_names=tuple(data.class_names[number] for number in wanted),
        labels=data.labels and tuple(data.labels[number] for number in wanted),
        **domains_of(data, train, test),
    )
