"""The record of a run: one line of JSON per event, appended and never rewritten while the run goes on.

Tables stay on the device until a flush, so that recording does not make a step wait. A resumed run drops the lines after its
checkpoint and writes them again, the same; times are kept elsewhere, so two runs of one configuration give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from gracecl.core import LossTable, is_loss
from gracecl.engine.engine import StepResult
from gracecl.errors import UserError

FLUSH_EVERY = 50


def fetch(tables: Sequence[LossTable]) -> list[dict[str, list[float]]]:
    """The values of several tables, in one transfer from the device."""
    stacked = iter(torch.cat([value.float().flatten() for table in tables for value in table.values()]).tolist())
    return [{row: list(islice(stacked, value.numel())) for row, value in table.items()} for table in tables]


def check_losses(rows: dict[str, list[float]], step: int) -> None:
    """A loss that is not finite is an error: the weights are lost, and all that follows would mean nothing."""
    for row, values in rows.items():
        if is_loss(row) and not all(map(math.isfinite, values)):
            raise UserError(
                f"the loss row '{row}' became {values} at step {step}; "
                "use a smaller learning rate (optimizer, such as 'sgd(lr=0.01)') or precision fp32"
            )


class Recorder:
    """Appends to one file; `latest` is the last step's rows, for the progress line."""

    def __init__(self, path: Path, keep_until: int = 0, evaluating: bool = False) -> None:
        """Keeps the lines of steps before `keep_until`, as a resumed run writes the later ones again.

        `evaluating` says that the evaluation after the last of these steps is still to be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._truncate(path, keep_until, evaluating)
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close())
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self.latest: dict[str, list[float]] = {}

    def step(self, step: int, task: int, outcome: StepResult, kind: Literal["step", "fit"] = "step") -> None:
        """A step, or the end of the fit before its evaluation."""
        self._pending.append(({"kind": kind, "step": step, "task": task, "images": outcome.images}, outcome))
        if len(self._pending) >= FLUSH_EVERY:
            self.flush()

    def event(self, kind: str, step: int, **values: Any) -> None:
        """An evaluation or the end of a task: written at once, after the steps before it."""
        self.flush()
        self._write([{"kind": kind, "step": step, **values}])

    def flush(self) -> None:
        """Fetches the pending tables in one transfer and hands their lines to the system."""
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

    def close(self) -> None:
        try:
            self.flush()
        finally:
            with contextlib.suppress(OSError):  # what a full disk did not take was told when it was written
                self._file.close()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        try:
            self._file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error}); free some space and resume, the last checkpoint is intact"
            ) from None

    @staticmethod
    def _truncate(path: Path, keep_until: int, evaluating: bool) -> None:
        """Cuts the file before the first line that is damaged or belongs to a later step."""
        keep = 0
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    written = json.loads(line)
                    step, kind = written["step"], written["kind"]
                except (ValueError, KeyError):
                    break
                to_be_made = evaluating and step == keep_until - 1 and kind in ("fit", "eval")
                if step >= keep_until or to_be_made:
                    break
                keep += len(line)
        with open(path, "rb+") as file:
            file.truncate(keep)
