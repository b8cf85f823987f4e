"""Progress of a run: a bar with rate and time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gracecl.trainer import Trainer

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_LOOKS = 1.0


class Watch:
    """Shows nothing; the base of those that do."""

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        yield

    def advance(self) -> None:
        """Called after each step."""


class LiveWatch(Watch):
    """On a terminal a bar, elsewhere lines; both show step, rate, time left, accuracy and the entropy of each layer."""

    def __init__(self) -> None:
        self._bar: Any = None

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        self.trainer, self.title = trainer, title
        self.began = self.looked = self.said = time.monotonic()
        self.from_step = trainer.at
        if not sys.stderr.isatty():
            self._bar = None
            yield
            self._say()
            return
        from rich import progress
        from rich.console import Console, Group
        from rich.live import Live
        from rich.table import Column
        from rich.text import Text

        # In a narrow terminal a long title is folded; the numbers stay whole.
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", table_column=Column(overflow="fold"), markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )
        self._task = self._bar.add_task(title, total=len(trainer.stream), completed=trainer.at, rate="")
        self._line = Text()
        with Live(Group(self._bar, self._line), console=Console(stderr=True)):
            yield
            self._refresh()

    def advance(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            if now - self.looked >= SECONDS_BETWEEN_LOOKS:
                self.looked = now
                self._refresh()
        elif now - self.said >= SECONDS_BETWEEN_LINES:
            self.said = now
            self._say()

    @property
    def rate(self) -> float:
        return (self.trainer.at - self.from_step) / max(time.monotonic() - self.began, 1e-9)

    def _refresh(self) -> None:
        # Fetches the last tables from the device; once a second that costs nothing.
        self.trainer.recorder.flush()
        self._bar.update(self._task, completed=self.trainer.at, rate=f"{self.rate:.1f}/s")
        self._line.plain = ", ".join(self._state())

    def _say(self) -> None:
        self.trainer.recorder.flush()
        total = len(self.trainer.stream)
        left = (total - self.trainer.at) / self.rate if self.rate else 0.0
        parts = [f"{self.title}: step {self.trainer.at} of {total}", f"{self.rate:.1f}/s", f"{left:.0f} s left", *self._state()]
        sys.stderr.write(", ".join(parts) + "\n")
        sys.stderr.flush()

    def _state(self) -> list[str]:
        """The headline accuracy of the last evaluation, the running accuracy on the step's images, the entropies."""
        latest, evaluation = self.trainer.recorder.latest, self.trainer.evaluation
        parts = []
        if evaluation is not None:
            percents = [value for value in evaluation.accuracy[self.trainer.engine.method.rule] if value is not None]
            parts.append(f"test {sum(percents) / len(percents):.1f} %")
        if "log/accuracy" in latest:
            parts.append(f"batch {100 * latest['log/accuracy'][-1]:.0f} %")
        if "log/H" in latest:
            parts.append("H " + " ".join(f"{value:.2f}" for value in latest["log/H"]))
        return parts
