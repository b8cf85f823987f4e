"""The record of a run: one line of JSON per event, appended and never rewritten while the run goes on.

Tables stay on the device until a flush, so that recording does not make a step wait. A checkpoint notes how far the record was
written by then, and its digest: a resumed run compares them, drops what follows and writes it again, the same. Times are kept
elsewhere, so two runs of one configuration give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from gracecl.core import LossTable
from gracecl.engine.engine import StepResult
from gracecl.engine.finite import check_losses
from gracecl.errors import UserError
from gracecl.files import Digest, Written, make_folder, open_own, open_to_read, sync_folder

FLUSH_EVERY = 50


def fetch(tables: Sequence[LossTable]) -> list[dict[str, list[float]]]:
    """Fetch the values of several tables in one transfer from the device."""
    stacked = iter(torch.cat([value.float().flatten() for table in tables for value in table.values()]).tolist())
    return [{row: list(islice(stacked, value.numel())) for row, value in table.items()} for table in tables]


class Recorder:
    """Append events to a record file; `latest` holds the last step's terms for the progress line."""

    def __init__(self, path: Path, kept: Written | None = None) -> None:
        """Open the record, keeping of an earlier one what a checkpoint counts on (`kept`).

        The rest is dropped when something is written, so that a run which is refused leaves the record as it was.
        """
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
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self.latest: dict[str, list[float]] = {}

    def step(self, step: int, task: int, outcome: StepResult, kind: Literal["step", "fit"] = "step") -> None:
        """Record a step, or the end of the fit before an evaluation."""
        self._pending.append(({"kind": kind, "step": step, "task": task, "images": outcome.images}, outcome))
        if len(self._pending) >= FLUSH_EVERY:
            self.flush()

    def event(self, kind: str, step: int, **values: Any) -> None:
        """Write an evaluation or the end of a task at once, after the steps before it."""
        self.flush()
        self._write([{"kind": kind, "step": step, **values}])

    def flush(self) -> None:
        """Fetch the pending tables in one transfer and write their lines."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        lines: list[dict[str, Any]] = []
        try:
            for (line, _), rows in zip(pending, fetch([outcome.table for _, outcome in pending]), strict=True):
                check_losses(rows, line["step"])
                lines.append(line | {"rows": rows})
                self.latest |= rows
        finally:
            self._write(lines)

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

    def _write(self, lines: list[dict[str, Any]]) -> None:
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
