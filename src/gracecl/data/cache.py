"""Decoding is done once: the arrays of a data set kept on disk, and mapped into memory when they are large.

An entry is a folder with four `.npy` files and `entry.json`. It is written under another name and renamed when
complete, it is used only if the key of its source files still matches, and one that does not match its digests is made again. Of
several processes that need an entry at once, one decodes and the others wait for it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gracecl.data.dataset import ImageArray, Labels
from gracecl.data.pixels import Extent, Pixels
from gracecl.data.progress import Advance, progress
from gracecl.data.source import Contents
from gracecl.errors import UserError
from gracecl.files import file_digests, lock, read_sealed, sealed
from gracecl.machine import check_room

log = logging.getLogger(__name__)

FORMAT = 2
MMAP_BYTES = 1_000_000_000
ABANDONED_AFTER = 86_400
SPLITS = ("train", "test")

_compared: set[tuple[Path, int, int, int]] = set()
"""mapped files that this process found to match their digests"""


class Decoded(NamedTuple):
    """Decoded arrays."""

    train_x: ImageArray
    train_y: Labels
    test_x: ImageArray
    test_y: Labels
    class_names: tuple[str, ...]


def mmap_limit(mmap_bytes: int | None) -> int:
    """Return the size above which arrays are memory-mapped: the argument, else $GRACECL_MMAP_BYTES, else 1 GB."""
    if mmap_bytes is not None:
        return mmap_bytes
    text = os.environ.get("GRACECL_MMAP_BYTES", str(MMAP_BYTES))
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise UserError(f"GRACECL_MMAP_BYTES must be a number of bytes, not '{text}'") from None


def files_key(files: Sequence[Path], extent: Extent | None) -> str:
    """Return a key that changes when a source file is added, removed, replaced or touched, or with the extent."""
    digest = hashlib.sha256(repr((FORMAT, extent)).encode())
    for path in files:
        state = path.stat()
        digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def decoded(
    entry: Path, key: str, read: Callable[[], Contents], extent: Extent | None, title: str, mmap_bytes: int | None
) -> Decoded:
    """Return the arrays from the cache `entry`, or decode the source files and keep them there.

    Without an `extent` the images keep their own. A disk that is full or cannot be written costs the cache, not the
    run.
    """
    limit = mmap_limit(mmap_bytes)
    if (ready := _opened(entry, key, limit)) is not None:
        return ready
    with _alone_in(entry.parent) as alone:
        if (ready := _opened(entry, key, limit)) is not None:
            return ready
        contents = read()
        _check_room(entry, contents, extent, limit)
        try:
            _sweep(entry, alone)
            _write(entry, key, contents, extent, title)
        except OSError as error:
            log.warning(
                "cannot keep the decoded images in %s (%s); going on without, so the next start decodes again", entry, error
            )
        else:
            if (ready := _opened(entry, key, limit)) is not None:
                return ready
    return _in_memory(contents, extent, title)


def _check_room(entry: Path, contents: Contents, extent: Extent | None, limit: int) -> None:
    """Refuse decoded images that fit neither into memory nor onto the disk that they are mapped from."""
    parts = (contents.train, contents.test)
    sizes = [len(part) * part.channels * math.prod(extent or part.native) for part in parts]
    what, remedy = (
        f"{sum(map(len, parts))} images of {' × '.join(map(str, extent or parts[0].native))} pixels",
        "use a smaller size",
    )
    check_room(sum(sizes), what, remedy, shutil.disk_usage(entry.parent).free if max(sizes) > limit else None)


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Wait until no other process decodes into the folder; yield False where that cannot be known."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    alone = False
    try:
        with suppress(OSError):
            alone = lock(handle, wait=True)
        yield alone
    finally:
        os.close(handle)


def _opened(entry: Path, key: str, limit: int) -> Decoded | None:
    """Open an entry; None when it is absent, of other files, or damaged."""
    try:
        about = read_sealed(entry / "entry.json")
        if about["key"] != key:
            return None
        arrays = {name: _array(entry / f"{name}.npy", digests, limit) for name, digests in about["arrays"].items()}
        names = tuple(about["class_names"])
        return Decoded(arrays["train_x"], arrays["train_y"], arrays["test_x"], arrays["test_y"], names)
    except FileNotFoundError:
        return None
    except (OSError, UserError, ValueError, KeyError, TypeError, EOFError) as error:
        log.info("the cache entry %s is damaged (%s) and will be made again", entry, error)
        return None


def _array(path: Path, digests: list[str], limit: int) -> Any:
    """Open an array: large ones are mapped and compared with their digests once per process, small ones at every
    read.
    """
    state = path.stat()
    mapped = state.st_size > limit
    identity = (path, state.st_ino, state.st_size, state.st_mtime_ns)
    if not (mapped and identity in _compared):
        wrong = [number for number, pair in enumerate(zip_longest(file_digests(path), digests)) if pair[0] != pair[1]]
        if wrong:
            raise ValueError(f"{path.name} does not match its digest in chunk {wrong[0]}")
        _compared.add(identity)
    return np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)


def _write(entry: Path, key: str, contents: Contents, extent: Extent | None, title: str) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        with progress(f"decoding {title}", len(contents.train) + len(contents.test)) as advance:
            for split in SPLITS:
                np.save(draft / f"{split}_y.npy", getattr(contents, f"{split}_y"))
                _write_pixels(draft / f"{split}_x.npy", getattr(contents, split), extent, advance)
        arrays = {file.stem: file_digests(file) for file in sorted(draft.glob("*.npy"))}
        about = {"key": key, "class_names": contents.class_names, "arrays": arrays}
        (draft / "entry.json").write_text(sealed(about), encoding="utf-8")
        draft.chmod(0o755)
        _replace(draft, entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(entry: Path, alone: bool) -> None:
    """Remove drafts that a killed process left behind: whoever is alone in the folder at once, else after a day."""
    for draft in entry.parent.glob(f".{entry.name}-*"):
        if alone or time.time() - draft.stat().st_mtime > ABANDONED_AFTER:
            shutil.rmtree(draft, ignore_errors=True)


def _write_pixels(path: Path, pixels: Pixels, extent: Extent | None, advance: Advance) -> None:
    """Append blocks one by one, so that a large set never needs to fit in memory.

    Plain writes, not a memory map: a full disk is then an error that can be caught, not a bus fault.
    """
    shape = (len(pixels), pixels.channels, *(extent or pixels.native))
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for block in pixels.blocks(extent or pixels.native):
            file.write(np.ascontiguousarray(block).data)
            advance(len(block))


def _replace(draft: Path, entry: Path) -> None:
    """Move a folder into place; the old one is moved aside first, and whoever has it open keeps it."""
    if entry.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        entry.rename(old / "old")
        shutil.rmtree(old, ignore_errors=True)
    try:
        draft.rename(entry)
    except OSError:
        if not entry.is_dir():  # if it is there, another process was faster
            raise


def _in_memory(contents: Contents, extent: Extent | None, title: str) -> Decoded:
    with progress(f"decoding {title}", len(contents.train) + len(contents.test)) as advance:
        train, test = (_gathered(pixels, extent, advance) for pixels in (contents.train, contents.test))
    return Decoded(train, contents.train_y, test, contents.test_y, contents.class_names)


def _gathered(pixels: Pixels, extent: Extent | None, advance: Advance) -> ImageArray:
    images = np.empty((len(pixels), pixels.channels, *(extent or pixels.native)), dtype=np.uint8)
    filled = 0
    for block in pixels.blocks(extent or pixels.native):
        images[filled : filled + len(block)] = block
        filled += len(block)
        advance(len(block))
    return images
