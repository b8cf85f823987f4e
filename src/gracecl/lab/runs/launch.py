"""A setting of the process that makes steps of wide nets on a CPU cheaper. The command makes it before anything else.

A program that embeds the library may call `keep_freed_memory()` at its top, too.
"""

from __future__ import annotations

import ctypes
import os

MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -4, -1, -2
"""parameters of glibc's mallopt"""


def keep_freed_memory() -> None:
    """Freed memory is kept for the next step, so that the process stays at its largest size.

    By default glibc gives every large block back to the system, which hands out and clears each page anew at every step. What the
    user set in the environment stays as it is.
    """
    chosen_by_user = any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if set_option is not None and not chosen_by_user:
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, 2**31 - 1)
        set_option(TOP_PAD, 64 << 20)
