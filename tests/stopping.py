"""A run that is interrupted at a chosen step, for the tests of resuming."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from gracecl.lab.runs.trainer import Trainer
from gracecl.lab.runs.watch import Watch


class StopAfter(Watch):
    """Presses Ctrl-C when so many steps are done, or sends another signal."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.step, self.number = step, number

    @contextlib.contextmanager
    def following(self, trainer: Trainer, title: str) -> Iterator[None]:
        self.trainer = trainer
        yield

    def advance(self) -> None:
        if self.trainer.at == self.step:
            signal.raise_signal(self.number)
