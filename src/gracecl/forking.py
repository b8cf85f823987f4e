"""Locks for calls: one whose turns come in order, and one that lets a fork wait for calls in progress.

A child then gets their objects as they were between two calls.

A lock that another thread holds while the process is forked stays locked in the child for ever, and what it guards is half done.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
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


class Turns:
    """A re-entrant lock that threads get in the order in which they asked for it, so that none is kept out by another's loop."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        """notified when the lock is free, and by whoever changes what `unless` looks at"""
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0
        every_turns.add(self)

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner == threading.get_ident()

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the lock; return False, without it, if `unless` becomes true meanwhile."""
        with self.changed:
            if not self.mine:
                if (self._owner is not None or self._waiting) and not self._wait(unless):
                    return False
                self._owner = threading.get_ident()
            self._depth += 1
            return True

    def _wait(self, unless: Callable[[], bool]) -> bool:
        ticket = object()
        self._waiting.append(ticket)
        try:
            while self._owner is not None or self._waiting[0] is not ticket:
                if unless():
                    return False
                self.changed.wait()
            return True
        finally:
            self._waiting.remove(ticket)
            self.changed.notify_all()

    def give(self) -> None:
        """Give it to the next in line."""
        with self.changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                if self._waiting:
                    self.changed.notify_all()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.give()

    def after_in_child(self) -> None:
        """Forget the threads that a child does not have."""
        owner, depth = (self._owner, self._depth) if self.mine else (None, 0)
        self.__init__()  # type: ignore[misc]
        self._owner, self._depth = owner, depth


every_turns: weakref.WeakSet[Turns] = weakref.WeakSet()


def forget_other_threads() -> None:
    """In a child, locks are free that another thread of the parent had or waited for."""
    for turns in list(every_turns):
        turns.after_in_child()


calls = Calls()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=forget_other_threads)
    os.register_at_fork(before=calls.before_fork, after_in_parent=calls.after_in_parent, after_in_child=calls.after_in_child)
