"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)
