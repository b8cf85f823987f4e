"""Let a fork wait for calls in progress, so that a child gets their objects as they were between two calls.

A lock that another thread holds while the process is forked stays locked in the child for ever, and what it guards is half done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Calls:
    """Calls in progress, by thread. New ones wait while a fork waits for the others to end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depth: dict[int, int] = {}
        """depth of nested calls of each thread that is in one"""
        self._forking = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Enter a call; a nested one of the same thread waits for nothing."""
        me = threading.get_ident()
        with self._changed:
            while self._forking and me not in self._depth:
                self._changed.wait()
            self._depth[me] = self._depth.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._depth[me] -= 1
                if not self._depth[me]:
                    del self._depth[me]
                    self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        if threading.get_ident() in self._depth:  # whoever forks within a call may be waited for by the others
            return
        while self._forking:
            self._changed.wait()
        self._forking = True
        while self._depth:
            self._changed.wait()

    def after_in_parent(self) -> None:
        if threading.get_ident() not in self._depth:
            self._forking = False
            self._changed.notify_all()
        self._changed.release()

    def after_in_child(self) -> None:
        me = threading.get_ident()
        depth = self._depth.get(me, 0)
        self.__init__()  # type: ignore[misc]
        if depth:
            self._depth[me] = depth


calls = Calls()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=calls.before_fork, after_in_parent=calls.after_in_parent, after_in_child=calls.after_in_child)
