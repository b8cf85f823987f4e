"""Show the progress of runs: bars with rate and time left on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from gracecl.lab.runs.trainer import Trainer
from gracecl.terminal import Screen, plain, print_err

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_LOOKS = 1.0
LAST_SHOWN = 5
"""most ended runs in the table of running ones"""


@dataclass(frozen=True)
class RunProgress:
    """Position and rate of a run."""

    title: str
    at: int
    total: int
    rate: float
    """steps a second since it was started or resumed"""
    state: Sequence[str]
    """accuracy and entropies, as words"""

    @property
    def seconds_left(self) -> float:
        return (self.total - self.at) / self.rate if self.rate else 0.0

    def __str__(self) -> str:
        step = f"{self.title}: step {self.at} of {self.total}"
        pace = [f"{self.rate:.1f}/s", f"{self.seconds_left:.0f} s left"] if self.rate else []
        return ", ".join([step, *pace, *self.state])


class Watch:
    """Observe a run; this base class shows nothing."""

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        yield

    def advance(self) -> None:
        """Update after a step."""


class Follower(Watch):
    """Track the progress of a run."""

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        self.trainer, self.title = trainer, title
        self.began = self.looked = time.monotonic()
        self.from_step = trainer.at
        self.fit_from: tuple[int, int, float] = (-1, 0, 0.0)
        self._note_fit(self.began)
        yield

    def due(self, seconds: float) -> bool:
        """Return whether `seconds` have passed since the last update; if so, restart the clock."""
        now = time.monotonic()
        self._note_fit(now)
        if now - self.looked < seconds:
            return False
        self.looked = now
        return True

    def progress(self) -> RunProgress:
        # Fetches the last tables from the device; once a second that costs nothing.
        self.trainer.recorder.flush()
        rate = (self.trainer.at - self.from_step) / max(time.monotonic() - self.began, 1e-9)
        return RunProgress(self.title, self.trainer.at, len(self.trainer.stream), rate, self._state())

    def _state(self) -> list[str]:
        """Describe the headline test accuracy, the running training accuracy and the entropies."""
        latest, evaluation = self.trainer.recorder.latest, self.trainer.evaluation
        parts = self._fit()
        rule = self.trainer.engine.chain.rule
        percents = [value for value in evaluation.accuracy.get(rule, []) if value is not None] if evaluation else []
        if percents:
            parts.append(f"test {sum(percents) / len(percents):.1f} %")
        if "log/accuracy" in latest:
            parts.append(f"batch {100 * latest['log/accuracy'][-1]:.0f} %")
        if "log/H" in latest:
            parts.append("H " + " ".join(f"{value:.2f}" for value in latest["log/H"]))
        return parts

    def _fit(self) -> list[str]:
        """Describe the fit that an evaluation waits for, and its rate since it began or was resumed."""
        fit, now = self.trainer.engine.unfinished_fit, time.monotonic()
        if fit is None:
            return []
        self._note_fit(now)
        _, at, began = self.fit_from
        return [f"fit {fit.at} of {fit.of}, {(fit.at - at) / max(now - began, 1e-9):.1f}/s"]

    def _note_fit(self, now: float) -> None:
        """Note the position and time at which a fit was first seen."""
        fit = self.trainer.engine.unfinished_fit
        if fit is not None and self.fit_from[0] != self.trainer.at:
            self.fit_from = self.trainer.at, fit.at, now


class LiveWatch(Follower):
    """Show a bar on a terminal, lines elsewhere: step, rate, time left, accuracy and the entropy of each layer."""

    def __init__(self) -> None:
        self._bar: Any = None

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        with super().following(trainer, title):
            if not Screen().isatty():
                self._bar = None
                yield
                print_err(str(self.progress()))
                return
            from rich.console import Console, Group
            from rich.live import Live
            from rich.text import Text

            self._bar = _bars()
            self._task = self._bar.add_task(title, total=len(trainer.stream), completed=trainer.at, rate="", left="-:--:--")
            self._line = Text()
            with Live(Group(self._bar, self._line), console=Console(file=cast(IO[str], Screen()))):
                yield
                self._refresh()

    def advance(self) -> None:
        if self._bar is None:
            if self.due(SECONDS_BETWEEN_LINES):
                print_err(str(self.progress()))
        elif self.due(SECONDS_BETWEEN_LOOKS):
            self._refresh()

    def _refresh(self) -> None:
        progress = self.progress()
        self._bar.update(self._task, **_of_bar(progress))
        self._line.plain = ", ".join(progress.state)


class Reporter(Follower):
    """Report the progress of a run to a callback, about once a second."""

    def __init__(self, tell: Callable[[RunProgress], None]) -> None:
        self.tell = tell

    @contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        with super().following(trainer, title):
            self.tell(self.progress())
            yield
            self.tell(self.progress())

    def advance(self) -> None:
        if self.due(SECONDS_BETWEEN_LOOKS):
            self.tell(self.progress())


class Board:
    """Show several runs: on a terminal a table of running and recently ended ones, elsewhere lines that name their
    run.
    """

    def __init__(self, total: int, ended: int) -> None:
        self.total, self.ended, self.failed = total, ended, 0
        self.began = time.monotonic()
        self._to_do = total - ended
        self._first: dict[Hashable, float] = {}
        """fraction of each run that was done at its first update"""
        self._part: dict[Hashable, float] = {}
        """fraction that is done now"""
        self._running: dict[Hashable, RunProgress] = {}
        self._last: deque[tuple[str, str]] = deque(maxlen=LAST_SHOWN)
        """titles of runs that ended, and how"""
        self._said: dict[Hashable, float] = {}
        self._live: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not Screen().isatty():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=cast(IO[str], Screen())), get_renderable=self._table) as self._live:
            yield

    def show(self, run: Hashable, progress: RunProgress) -> None:
        """Update the progress of a run."""
        self._part[run] = progress.at / max(progress.total, 1)
        self._first.setdefault(run, self._part[run])
        self._running[run] = progress
        now = time.monotonic()
        if self._live is None and now - self._said.setdefault(run, now) >= SECONDS_BETWEEN_LINES:
            self._said[run] = now
            self.say(str(progress))

    def end(self, run: Hashable, text: str, finished: bool) -> None:
        """Mark a run as ended."""
        self.ended += 1
        self.failed += not finished
        self._part[run] = 1.0
        self._first[run] = self._first.get(run, 0.0) if finished else 1.0  # how soon a run fails says nothing about the others
        progress = self._running.pop(run, None)
        state = progress.state if progress else ()
        self.say(", ".join([text, *state, self._so_far()]) if finished else text)
        if progress:
            self._last.append((progress.title, ", ".join(["finished", *state]) if finished else "did not finish"))

    def say(self, text: str) -> None:
        if self._live is None:
            print_err(text)
        else:  # through the display, which keeps it above the table
            self._live.console.print(plain(text), markup=False, highlight=False)

    def _table(self) -> Any:
        """Return the table of recently ended and running runs, with the overall progress."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        columns = [Column("run", overflow="fold"), Column("", width=16), Column("step", justify="right", no_wrap=True)]
        columns += [Column(name, justify="right", no_wrap=True) for name in ("rate", "left")]
        table = Table(*columns, Column("state", overflow="fold"), box=None, padding=(0, 1, 0, 0), caption_justify="left")
        for title, how in list(self._last):  # a copy, as another thread draws
            table.add_row(Text(title), "", "", "", "", Text(how))
        for progress in list(self._running.values()):
            bar = ProgressBar(max(progress.total, 1), progress.at)
            rate, left = f"{progress.rate:.1f}/s" if progress.rate else "", clock(progress)
            table.add_row(Text(progress.title), bar, f"{progress.at}/{progress.total}", rate, left, Text(", ".join(progress.state)))
        waiting = self.total - self.ended - len(self._running)
        table.caption = Text(", ".join([self._so_far(), f"{self.failed} failed", f"{waiting} waiting"]))
        return table

    def _so_far(self) -> str:
        """Return `3 of 10 runs, ~12 min left`, assuming that all runs take about the same time."""
        text = f"{self.ended} of {self.total} runs"
        found = sum(self._first.values())
        done = sum(self._part.values()) - found
        if done <= 0 or self.ended == self.total:
            return text
        seconds = (time.monotonic() - self.began) / done * (self._to_do - found - done)
        return f"{text}, ~{seconds:.0f} s left" if seconds < 100 else f"{text}, ~{seconds / 60:.0f} min left"


def _bars() -> Any:
    from rich import progress
    from rich.table import Column

    # In a narrow terminal a long title is folded; the numbers stay whole.
    return progress.Progress(
        progress.TextColumn("{task.description}", table_column=Column(overflow="fold"), markup=False),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
    )


def _of_bar(progress: RunProgress) -> dict[str, Any]:
    return {"completed": progress.at, "rate": f"{progress.rate:.1f}/s", "left": clock(progress)}


def clock(progress: RunProgress) -> str:
    """Format the time left as h:mm:ss."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if progress.rate else "-:--:--"
