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
from gracecl.data.dataset import Data, Labels
from gracecl.data.domains import domains_of, from_domain_folders
from gracecl.data.download import fetch_source
from gracecl.data.features import from_features
from gracecl.data.folder import from_folder
from gracecl.data.locations import cache_folder, data_root, placed
from gracecl.data.shards import damaged_shards, from_shards, is_packed
from gracecl.data.source import Source
from gracecl.data.unread import Unread
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.registry import datasets
from gracecl.registry.spec import parse_numbers

log = logging.getLogger(__name__)

FOLDER, DOMAINS, SHARDS, FEATURES = "folder:", "domains:", "shards:", "features:"
PLACES = (FOLDER, DOMAINS, SHARDS, FEATURES)
"""what stands before the path of data that have no name"""


def load(
    name: str,
    root: str | Path | None = None,
    *,
    classes: str | Sequence[int] | None = None,
    size: int | None = None,
    mmap_bytes: int | None = None,
) -> Data:
    """A data set by name (`gracecl list datasets`), `folder:PATH` for a folder of images, `domains:PATH` for one per domain, or
    `shards:PATH` for what `pack` made, `features:PATH` for a file of features.

    It is looked for in `root`, else $GRACECL_DATA, else the user's cache; so is a PATH that the working folder does not have.
    `classes` ("0-19", "0,3,7" or numbers) picks classes and numbers them anew in the order given; a selection is held in memory,
    unless it is of shards. `size` asks for another, square resolution. Arrays above `mmap_bytes` (else $GRACECL_MMAP_BYTES, else
    1 GB) are memory-mapped. `tasks` stays the usual number even if it does not divide the classes picked; a stream then asks for
    another.
    """
    _check_size(size)
    if name.startswith(FEATURES):
        if size is not None:
            raise UserError("size= is that of images, and features have none; leave it out, or compute features at another size")
        data = from_features(placed(name.removeprefix(FEATURES), root))
    elif name.startswith(FOLDER):
        data = from_folder(placed(name.removeprefix(FOLDER), root), root=root, size=size, mmap_bytes=mmap_bytes)
    elif name.startswith(DOMAINS):
        data = from_domain_folders(placed(name.removeprefix(DOMAINS), root), size=size, root=root)
    elif name.startswith(SHARDS):
        if size is not None:
            raise UserError("shards hold images of one size; give --size when they are packed, and leave it out here")
        data = from_shards(placed(name.removeprefix(SHARDS), root))
    else:
        known = datasets.get(name)
        place = data_root(root)
        data = _from_source(known(), place, size, mmap_bytes) if _is_source(known) else _made(name, known, place, size)
    return data if classes is None else _picked(data, classes)


def unread(
    name: str, root: str | Path | None = None, *, classes: str | Sequence[int] | None = None, size: int | None = None
) -> Unread:
    """The data set that `load` finds, its images not decoded where it has files of its own; other sets are loaded."""
    _check_size(size)
    known = None if name.startswith(PLACES) else datasets.get(name)
    if not _is_source(known):
        return Unread.of(load(name, root, classes=classes, size=size))
    source, place = known(), data_root(root)
    folder, side = _existing(source, place), size or source.size
    contents = source.read(folder)
    _name_missing(source, len(contents.class_names), folder, place)
    found = Unread(
        name=source.name,
        train=contents.train,
        train_y=contents.train_y,
        test=contents.test,
        test_y=contents.test_y,
        inputs=Images((contents.train.channels, side, side), source.mean, source.std),
        class_names=contents.class_names,
        tasks=source.tasks,
        key=files_key(source.files(folder), (side, side)),
    )
    if classes is None:
        return found
    wanted, new_number = _renumbered(classes, len(found.class_names), found.name)
    train, test = (np.flatnonzero(new_number[y] >= 0) for y in (found.train_y, found.test_y))
    return replace(
        found,
        train=found.train.chosen(train),
        train_y=new_number[found.train_y[train]],
        test=found.test.chosen(test),
        test_y=new_number[found.test_y[test]],
        class_names=tuple(found.class_names[number] for number in wanted),
        key=f"{found.key}-{wanted}",
    )


def _check_size(size: int | None) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UserError(f"size must be a whole number of pixels, not {size!r}")


def check(name: str, root: str | Path | None = None) -> list[str]:
    """List what is wrong with the copy of a data set in `root`, one sentence each; empty when complete and
    decodable.
    """
    found: list[str] = []
    try:
        if is_packed(name):
            return damaged_shards(name)
        known = None if name.startswith(PLACES) else datasets.get(name)
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
    _name_missing(source, len(arrays.class_names), folder, root)
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


def _name_missing(source: Source, classes: int, folder: Path, root: Path) -> None:
    """Say that a copy holds some of the classes only."""
    if classes < source.classes:
        _say_once(
            f"{source.name}: {folder} holds {classes} of {source.classes} classes; these are used, "
            f"numbered in their official order ('gracecl data check {source.name} --data {root}' lists what is missing)"
        )


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)


def _picked(data: Data, classes: str | Sequence[int]) -> Data:
    """Keep only these classes, numbered 0, 1, … in the order given; images keep their order."""
    wanted, new_number = _renumbered(classes, data.classes, data.name)
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


def _renumbered(classes: str | Sequence[int], count: int, name: str) -> tuple[list[int], Labels]:
    """The classes that are picked of `count`, in their order, and the new number of each class, -1 where it is left out."""
    if not isinstance(classes, str | Sequence | np.ndarray):
        raise UserError(f"classes is text such as '0-19' or a list of numbers, not {classes!r}")
    wanted = parse_numbers(classes, "classes") if isinstance(classes, str) else list(classes)
    if not wanted:
        raise UserError("classes picks none; give for example 0-19 or 0,3,7")
    if len(set(wanted)) < len(wanted):
        raise UserError(f"classes names some class twice: {classes}")
    for number in wanted:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < count:
            raise UserError(f"classes asks for class {number!r}, but {name} has 0 … {count - 1}")
    new_number = np.full(count, -1, dtype=np.int64)
    new_number[wanted] = np.arange(len(wanted))
    return wanted, new_number
