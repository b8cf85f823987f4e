"""Runs whose folder is an object store: `--out s3://bucket/runs`, or any other URL that fsspec knows.

A run writes into a local copy below the user's cache, `remote/<protocol>/<path>`, and uploads whole files after each checkpoint:
the record before the checkpoint that counts on it, the summary, which marks a run as finished, last. So the store holds at any time
a state to continue from, with the digests that every file carries. Who takes a run over fetches it first; the store is the truth.

An object `lease` keeps two processes out of one run. Its holder writes it anew every few seconds; one that did not change for a
while is of a process that died, and is taken over. Before each upload the holder looks whether the lease is still its own. Two
processes that take an absent lease in the same instant may both work until one of them uploads; as a run is a function of its
configuration, both would upload the same.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gracecl.data.locations import user_cache
from gracecl.errors import UserError
from gracecl.files import make_folder, replacing
from gracecl.lab.report.runs import CHECKPOINT, RECORD, SUMMARY
from gracecl.lab.runs.lock import locked

URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")
"""also as a path has it, which takes two slashes for one"""
ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs"}
"""stores in which an upload is whole or absent; elsewhere a file is renamed when it is whole"""
LEASE, LOCK = "lease", ".lock"
LARGE = (CHECKPOINT, "snapshots")
"""what a report does not need"""
LAST = (RECORD, CHECKPOINT, SUMMARY)
"""uploaded after everything else, in this order"""
SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_OF_A_LEASE = 30.0
CLOCK_TICK = 1e-3


def copies() -> Path:
    """Return the folder of local copies."""
    return user_cache().resolve() / "remote"


def url_in(place: str | Path) -> str | None:
    """Return the URL that an argument is; None for a path."""
    found = URL.fullmatch(str(place))
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2].rstrip('/')}" if found else None


def url_of(folder: Path) -> str | None:
    """Return the URL that a folder is a local copy of; None for any other folder."""
    try:
        protocol, *rest = folder.resolve().relative_to(copies()).parts
    except ValueError:
        return None
    return f"{protocol}://{'/' if protocol == 'file' else ''}{'/'.join(rest)}"


def copy_of(url: str) -> Path:
    """Return the folder of the local copy of a URL."""
    protocol, _, rest = url.partition("://")
    return copies() / protocol / rest.lstrip("/")


def address(folder: Path) -> str:
    """Return what names a folder on any node: a URL, or an absolute path."""
    return url_of(folder) or str(folder.resolve())


def folder_at(address: str) -> Path:
    """Return the folder on this node of what `address` returned elsewhere."""
    url = url_in(address)
    return copy_of(url) if url else Path(address)


@contextlib.contextmanager
def copied(place: Path) -> Iterator[Path]:
    """Yield a path as it is, and for a URL its local copy without checkpoints; upload what the block wrote beside the runs."""
    url = url_in(place)
    if url is None:
        yield place
        return
    store, folder = Store(url), copy_of(url)
    make_folder(folder)
    store.fetch(folder, large=False)
    began = time.time_ns()
    try:
        yield folder
    finally:
        of_runs = {file.parent for file in folder.rglob(LOCK) if file.parent != folder}
        for file in sorted(folder.rglob("*")):
            new = file.is_file() and file.stat().st_mtime_ns >= began and not of_runs.intersection(file.parents)
            if new and file.name != LOCK:
                store.put(file, file.relative_to(folder).as_posix())


@contextlib.contextmanager
def kept(folder: Path, patience: float = 0.0) -> Iterator[Callable[[], None]]:
    """Fetch a run that is kept at a URL, and hold its lease; yield what uploads it, which the end of the block does too."""
    url = url_of(folder)
    if url is None:
        yield lambda: None
        return
    store = Store(url)
    with store.lease(patience) as check:
        store.fetch(folder, large=True)
        known: dict[str, tuple[int, int]] = {}

        def upload() -> None:
            check()
            files = [file for file in folder.rglob("*") if file.is_file() and file.name != LOCK and not file.name.endswith(".part")]
            for file in sorted(files, key=lambda file: LAST.index(file.name) if file.name in LAST else -1):
                name, found = file.relative_to(folder).as_posix(), file.stat()
                if known.get(name) != (found.st_mtime_ns, found.st_size):
                    store.put(file, name)
                    known[name] = found.st_mtime_ns, found.st_size

        try:
            yield upload
        finally:
            upload()


def fetch_results(folder: Path) -> None:
    """Fetch what a report needs of a run that another node finished."""
    if url := url_of(folder):
        make_folder(folder)
        Store(url).fetch(folder, large=False)


class Store:
    """The files below a URL."""

    def __init__(self, url: str) -> None:
        self.url, self.protocol = url, url.partition("://")[0]
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError:
            raise UserError(f"{url} needs fsspec; install it with: pip install 'gracecl[s3]'") from None
        try:
            self.files, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            extra = "'gracecl[s3]'" if self.protocol.startswith("s3") else "the package that fsspec names"
            raise UserError(f"{url} cannot be opened ({error}); install {extra} with pip") from None
        except ValueError as error:
            raise UserError(f"{url} cannot be opened ({error}); use s3://…, gs://… or a folder") from None

    def put(self, file: Path, name: str) -> None:
        """Upload a file as a whole."""
        with self._told("write"):
            self._write(name, lambda place: self.files.put_file(str(file), place))

    def _write(self, name: str, write: Callable[[str], Any]) -> None:
        place = f"{self.root}/{name}"
        if self.protocol in ATOMIC:
            write(place)
            return
        self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
        beside = f"{place}.{uuid.uuid4().hex}.part"
        write(beside)
        self.files.mv(beside, place)

    def fetch(self, folder: Path, *, large: bool) -> None:
        """Make a folder what the store holds, checkpoints and snapshots only if `large`; a run at work here is left alone."""
        with self._told("read"):
            found = {
                name: about
                for place, about in self.files.find(self.root, detail=True).items()
                if (name := place.removeprefix(self.root).lstrip("/"))
                and name != LEASE
                and not name.endswith((f"/{LEASE}", ".part"))
            }
        wanted = {name: about for name, about in found.items() if large or not set(LARGE).intersection(name.split("/"))}
        if large and found:  # what was written here and never uploaded does not belong to what was
            for file in folder.rglob("*"):
                if file.is_file() and file.name != LOCK and file.relative_to(folder).as_posix() not in found:
                    file.unlink()
        by_folder: dict[Path, list[str]] = {}
        for name in wanted:
            by_folder.setdefault((folder / name).parent, []).append(name)
        for inside, names in by_folder.items():
            make_folder(inside)
            with contextlib.ExitStack() as alone:
                if not large and (inside / LOCK).exists():
                    try:
                        alone.enter_context(locked(inside))
                    except UserError:
                        continue
                for name in names:
                    self._get(name, folder / name, wanted[name])

    def _get(self, name: str, file: Path, about: dict[str, Any]) -> None:
        """Download a file unless it is here; the time of the object tells."""
        written: Any = about.get("LastModified") or about.get("last_modified") or about.get("updated") or about.get("mtime") or 0.0
        stamp = float(written.timestamp() if hasattr(written, "timestamp") else written)
        here = file.stat() if file.is_file() else None
        if here and here.st_size == about["size"] and abs(here.st_mtime - stamp) < CLOCK_TICK:
            return
        with self._told("read"):
            with replacing(file) as temporary:
                self.files.get_file(f"{self.root}/{name}", str(temporary))
            os.utime(file, (stamp, stamp))

    @contextlib.contextmanager
    def lease(self, patience: float) -> Iterator[Callable[[], None]]:
        """Hold the lease of a run while the block runs; yield what raises an error if another process took it over."""
        mine = f"{uuid.uuid4().hex} {socket.gethostname()}"
        self._await_lease(patience)
        over = threading.Event()
        self._renew(mine, 0)

        def check() -> None:
            holder, _, _ = self._holder().rpartition(" ")
            if holder != mine:
                raise UserError(f"another process took over the run in {self.url}, so this one stops; it loses nothing")

        def renew() -> None:
            number = 0
            while not over.wait(SECONDS_BETWEEN_RENEWALS):
                with contextlib.suppress(UserError, OSError):  # the next upload says what is wrong
                    check()
                    number += 1
                    self._renew(mine, number)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            check()
            yield check
        finally:
            over.set()
            thread.join()
            with contextlib.suppress(UserError, OSError):
                check()
                self.files.rm_file(f"{self.root}/{LEASE}")

    def _await_lease(self, patience: float) -> None:
        """Wait until nobody holds the lease: it is absent, or did not change for as long as a lease lasts."""
        known, since = self._holder(), time.monotonic()
        until = since + patience
        while known and time.monotonic() - since < SECONDS_OF_A_LEASE:
            time.sleep(min(SECONDS_BETWEEN_RENEWALS, SECONDS_OF_A_LEASE) / 5)
            now = self._holder()
            if now != known:
                known, since = now, time.monotonic()
                if now and time.monotonic() > until:
                    raise UserError(f"another process is working on {self.url}; wait for it or choose another --out")

    def _holder(self) -> str:
        """Return what the lease says; empty if there is none."""
        with self._told("read"):
            try:
                return str(self.files.cat_file(f"{self.root}/{LEASE}").decode())
            except FileNotFoundError:
                return ""

    def _renew(self, holder: str, number: int) -> None:
        with self._told("write"):
            self._write(LEASE, lambda place: self.files.pipe_file(place, f"{holder} {number}".encode()))

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn errors of the store into a sentence."""
        try:
            yield
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:  # noqa: BLE001 (every store has errors of its own)
            raise UserError(
                f"cannot {what} {self.url} ({type(error).__name__}: {error}); check the address and the credentials, then give the "
                f"same command again: what was uploaded is intact, and {copy_of(self.url)} has a copy"
            ) from None
