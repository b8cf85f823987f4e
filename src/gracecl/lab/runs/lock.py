"""Keep two processes out of one folder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gracecl.errors import Caution, UserError
from gracecl.files import lock, open_own

SECONDS_BETWEEN_TRIES = 0.5


@contextmanager
def locked(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes out of a folder while the block runs; the lock ends with the process, however that ends.

    Where another process has it, wait up to `patience` seconds.
    """
    try:
        file = open_own(folder / ".lock")
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error}); choose another --out") from None
    with file:
        until = time.monotonic() + patience
        while not _taken(file.fileno()):
            if time.monotonic() >= until:
                raise UserError(f"another process is working on {folder}; wait for it or choose another --out")
            time.sleep(SECONDS_BETWEEN_TRIES)
        yield


def _taken(handle: int) -> bool:
    """Try to lock an open file; return whether this process has it now."""
    try:
        if not lock(handle, wait=False):
            warnings.warn(
                "this system has no file locks that gracecl knows; do not start two commands on one folder at once",
                Caution,
                stacklevel=4,
            )
    except BlockingIOError:
        return False
    return True
