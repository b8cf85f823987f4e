"""What this machine can hold, so that a number which is too large is refused before anything is allocated for it; what was held."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from pathlib import Path

from gracecl.errors import UserError

MOST_THREADS = 1024
"""beyond it thread pools of some systems end the process"""
COPIES, BYTES_OF_A_WEIGHT = 4, 4
"""of weights while they are trained: themselves, gradients, and two moments of Adam"""


def memory() -> int:
    """Bytes of memory that are built in."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def forget_peak() -> None:
    """From here on `peak_memory` is of what follows, as far as the system can tell: freed memory is given back first."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if give_back is not None:
        give_back(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most bytes that this process held."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check_room(needed: int, what: str, remedy: str, room: int | None = None) -> None:
    """Refuses what needs more bytes than there are, in memory unless `room` says how many there are elsewhere."""
    there = memory() if room is None else room
    if needed > there:
        raise UserError(f"{what} would take {_in_words(needed)}, and there are {_in_words(there)}; {remedy}")


def check_training(weights: int, what: str, remedy: str) -> None:
    """Refuses weights that cannot be trained here."""
    check_room(COPIES * BYTES_OF_A_WEIGHT * weights, f"training the {weights:,} weights of {what}", remedy)


def check_threads(number: int) -> None:
    if not 1 <= number <= MOST_THREADS:
        raise UserError(f"threads must be between 1 and {MOST_THREADS}, not {number}; one for each core is enough")


def _in_words(amount: int) -> str:
    return f"{amount / 1e9:,.1f} GB" if amount < 1e15 else "more than a million GB"
