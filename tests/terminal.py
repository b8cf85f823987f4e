"""A terminal that a test looks at."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator

import pytest


class Terminal:
    """What was shown on it, without the codes that move and colour."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(self.shown).decode())


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[Terminal]:
    """Standard error is a terminal of so many columns; when the block is left, everything shown has been read."""
    master, slave = pty.openpty()
    seen = Terminal()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while text := os.read(master, 4096):
                seen.shown.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w") as screen, monkeypatch.context() as patch:
        for name, value in (("TERM", "xterm"), ("COLUMNS", str(columns)), ("LINES", "40")):
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", screen)
        yield seen
    reader.join(timeout=30)
    os.close(master)
