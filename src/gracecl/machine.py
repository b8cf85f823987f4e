"""Limits of this machine, so that numbers too large for it are refused before anything is allocated; peak memory.

What a system cannot tell is left out: outside POSIX nothing is refused for its size, and the peak is 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gracecl.errors import UserError

try:
    import resource
except ImportError:  # outside POSIX
    resource = None  # type: ignore[assignment]

MOST_THREADS = 1024
"""thread pools of some systems end the process beyond it"""
COPIES, BYTES_OF_A_WEIGHT = 4, 4
"""of weights in training: values, gradients, and two moments of Adam"""


def memory() -> int | None:
    """Return the bytes of memory of this machine; None where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def c_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library of this process; None if it has none of that name (macOS, Windows)."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # Windows has no library without a name
        return None


def forget_peak() -> None:
    """Restart the measurement of `peak_memory` as far as the system allows, after freed memory is given back."""
    give_back = c_function("malloc_trim")
    if give_back is not None:
        give_back(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the most bytes that this process held."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(found[1])
    return 0 if resource is None else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def free_space(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder."""
    return shutil.disk_usage(folder).free


def check_room(needed: int, what: str, remedy: str, room: int | None = None) -> None:
    """Refuse what needs more bytes than there are: in memory, or `room` bytes elsewhere."""
    there = memory() if room is None else room
    if there is not None and needed > there:
        raise UserError(f"{what} would take {_in_words(needed)}, and there are {_in_words(there)}; {remedy}")


def check_training(weights: int, what: str, remedy: str) -> None:
    """Refuse weights that cannot be trained here."""
    check_room(COPIES * BYTES_OF_A_WEIGHT * weights, f"training the {weights:,} weights of {what}", remedy)


def check_threads(number: int) -> None:
    if not 1 <= number <= MOST_THREADS:
        raise UserError(f"threads must be between 1 and {MOST_THREADS}, not {number}; one for each core is enough")


def _in_words(amount: int) -> str:
    return f"{amount / 1e9:,.1f} GB" if amount < 1e15 else "more than a million GB"
