"""Set up a process before torch is loaded, and start child processes with the same setup.

`keep_freed_memory()` makes steps of wide nets cheaper on a CPU. A program that embeds the library may call it at its top too.
"""

from __future__ import annotations

import os
import sys

from gracecl.machine import c_function

MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -4, -1, -2
"""parameters of glibc's mallopt"""
CHILD = (
    "import importlib, sys; module, *sys.path[:] = sys.argv[1:]; from gracecl.lab.runs import launch; "
    "launch.keep_freed_memory(); importlib.import_module(module).serve()"
)
"""program of a child process"""


def child_command(module: str) -> list[str]:
    """Return the command line of a child process that calls `serve()` of a module, with this process's import path."""
    return [sys.executable, "-c", CHILD, module, *sys.path]


def keep_freed_memory() -> None:
    """Keep freed memory for the next step; the process then stays at its largest size.

    By default glibc returns every large block to the system, which clears each page again at every step. Settings in the user's
    environment take precedence.
    """
    chosen_by_user = any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ)
    set_option = c_function("mallopt")
    if set_option is not None and not chosen_by_user:
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, 2**31 - 1)
        set_option(TOP_PAD, 64 << 20)
