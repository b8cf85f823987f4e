"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere (logs, notebooks, CI)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

from gracecl.terminal import Screen, print_err

Advance = Callable[[int], None]

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(title: str, total: int | None, unit: str = "images", *, done: int = 0, show: bool = True) -> Iterator[Advance]:
    """Yield a function to call with the amount of work just done; `done` is what an earlier attempt already did."""
    if not show:
        yield lambda amount: None
    elif Screen().isatty():
        with _bar(title, total, unit, done) as advance:
            yield advance
    else:
        lines = _Lines(title, total, unit, done)
        yield lines.advance
        lines.end()


@contextmanager
def _bar(title: str, total: int | None, unit: str, done: int) -> Iterator[Advance]:
    from rich import progress as rich_progress
    from rich.console import Console
    from rich.text import Text

    class Rate(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f}/s")

    amount: tuple[rich_progress.ProgressColumn, ...] = (
        (rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn())
        if unit == "bytes"
        else (rich_progress.MofNCompleteColumn(), rich_progress.TextColumn(unit), Rate())
    )
    columns: tuple[str | rich_progress.ProgressColumn, ...] = (
        "{task.description}",
        rich_progress.BarColumn(),
        *amount,
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(file=cast(IO[str], Screen()))) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda step: bar.advance(task, step)


class _Lines:
    def __init__(self, title: str, total: int | None, unit: str, done: int) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self.before = done
        self.began = self.last = time.monotonic()

    def advance(self, amount: int) -> None:
        self.done += amount
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say()

    def end(self) -> None:
        self.say()

    def say(self) -> None:
        seconds = max(time.monotonic() - self.began, 1e-3)
        rate = (self.done - self.before) / seconds
        unit = "" if self.unit == "bytes" else f" {self.unit}"
        open_end = self.total is None or self.done >= self.total
        text = f"{self.title}: {self._amount(self.done)}"
        text += unit if open_end else f" of {self._amount(self.total or 0)}{unit}"
        text += f", {self._amount(rate)}/s"
        if self.total is not None and not open_end and rate > 0:
            text += f", {(self.total - self.done) / rate:.0f} s left"
        print_err(text)

    def _amount(self, number: float) -> str:
        return f"{number / 1e6:,.1f} MB" if self.unit == "bytes" else f"{number:,.0f}"
