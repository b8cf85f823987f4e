"""The record of a run: one line of JSON per event, appended and never rewritten while the run goes on.

Tables stay on the device until a flush, so that recording does not make a step wait. A checkpoint notes how far the record was
written by then, and its digest: a resumed run compares them, drops what follows and writes it again, the same. Times are kept
elsewhere, so two runs of one configuration give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from gracecl.engine.loop import Log
from gracecl.errors import UserError
from gracecl.files import Digest, Written, make_folder, open_own, open_to_read, sync_folder


class NoRecord(Log):
    """In the place of a recorder in processes whose group's first one records."""

    def sync(self) -> Written:
        self.flush()
        return Written(0, "")

    def close(self) -> None:
        self.flush()


class Recorder(Log):
    """Append events to a record file."""

    def __init__(self, path: Path, kept: Written | None = None) -> None:
        """Open the record, keeping of an earlier one what a checkpoint counts on (`kept`).

        The rest is dropped when something is written, so that a run which is refused leaves the record as it was.
        """
        super().__init__()
        make_folder(path.parent)
        if kept is not None:
            kept.check(path)
        self.path = path
        self._file = open_own(path)
        self._bytes, self._digest = 0, Digest()
        if kept is not None:
            with open_to_read(path) as file:
                self._note(file.read(kept.bytes))
        self._rest_dropped = False

    def sync(self) -> Written:
        """Write pending lines durably (fsync); return how far the record goes."""
        self.flush()
        try:
            self._drop_rest()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None
        return Written(self._bytes, str(self._digest))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            with contextlib.suppress(OSError):  # what a full disk did not take was told when it was written
                self._file.close()

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Hands lines to the system."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            self._drop_rest()
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None
        self._note(data)

    def _drop_rest(self) -> None:
        """Truncate what an earlier process wrote beyond the checkpoint, once."""
        if not self._rest_dropped:
            self._file.truncate(self._bytes)
            sync_folder(self.path.parent)
            self._rest_dropped = True

    def _note(self, data: bytes) -> None:
        self._bytes += len(data)
        self._digest.add(data)

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path} ({error}); free some space and resume, the last checkpoint is intact")
