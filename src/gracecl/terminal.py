"""Standard output and error as a command needs them: what cannot be shown is dropped, and the work goes on.

A reader that left (`| head -1`), a closed stream (`2>&-`), an encoding without some sign or a terminal that is gone ends nothing.
Text is printed without control characters, which a terminal would obey: names and paths may come from somebody else's files.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

NARROWEST, WIDEST = 20, 1000
"""columns in which help and tables can be laid out"""
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""all but tab and newline, and the signs that turn the direction of writing"""
NOBODY_READS = (errno.EPIPE, errno.EIO)


def plain(text: str) -> str:
    """Escape control characters in a text: `\x1b` for an escape."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_out(text: object, end: str = "\n") -> None:
    """Print to standard output, unbuffered."""
    print(plain(str(text)), end=end, flush=True)  # noqa: T201


def print_err(text: object) -> None:
    """Print to standard error, if it is still open."""
    screen = Screen()
    screen.write(plain(str(text)) + "\n")
    screen.flush()


def print_table(table: Any) -> None:
    """Print a table of rich to standard output."""
    from rich.console import Console

    Console().print(Escaped(table))


class Escaped:
    """Wrap something that rich draws and escape its control characters."""

    def __init__(self, drawn: Any) -> None:
        self.drawn = drawn

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self.drawn, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


class Screen:
    """Standard error as it is now. If the terminal is gone, output is dropped."""

    def __init__(self) -> None:
        self._file = sys.stderr or io.StringIO()  # None where it was closed

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Lossy(io.FileIO):
    """A stream that never raises; the first error is in `lost`."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        if self.lost is None:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = error
        return memoryview(data).nbytes


def guard_streams() -> None:
    """Replace the standard streams by ones that never raise; call it once, before anything is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed: a file that is opened later would get its number, and what is printed
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, number)
            if nothing != number:
                os.close(nothing)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lossy(1, sys.stdout, "replace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(2, sys.stderr, "backslashreplace")


def _lossy(number: int, before: Any, errors: str) -> io.TextIOWrapper:
    if before is not None:
        before.flush()
    raw = Lossy(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", "utf-8"),
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
        write_through=getattr(before, "write_through", False),
    )


def lost_output() -> str:
    """Return why standard output could not be written (a full disk, say); empty if it could or nobody reads it."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, Lossy):
        return ""
    sys.stdout.flush()
    return str(raw.lost) if raw.lost is not None and raw.lost.errno not in NOBODY_READS else ""


@contextmanager
def usable_width() -> Iterator[None]:
    """Set a width of text that rich can lay out, whatever the terminal or COLUMNS says."""
    before = os.environ.get("COLUMNS")
    found = shutil.get_terminal_size().columns
    usable = min(max(found, NARROWEST), WIDEST)
    if usable == found and before in (None, str(found)):
        yield
        return
    os.environ["COLUMNS"] = str(usable)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
