"""Settings of the process that make small steps on a CPU cheaper. They act before torch is loaded, so the command makes them first.

A program that embeds the library may call `prepare()` at its top, too. Whatever the user set in the environment stays as it is.
"""

from __future__ import annotations

import ctypes
import os

SPINS = "10000"
"""how long a thread without work spins before it sleeps, in rounds: some microseconds"""

MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -4, -1, -2
"""parameters of glibc's mallopt"""


def prepare() -> None:
    sleep_when_idle()
    keep_freed_memory()


def sleep_when_idle() -> None:
    """Threads without work sleep soon instead of spinning: on a busy machine, spinning can cost ten times the step."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def keep_freed_memory() -> None:
    """Freed memory is kept for the next step, so that the process stays at its largest size.

    By default glibc gives every large block back to the system, which hands out and clears each page anew at every step.
    """
    chosen_by_user = any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if set_option is not None and not chosen_by_user:
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, 2**31 - 1)
        set_option(TOP_PAD, 64 << 20)
