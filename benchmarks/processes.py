"""What a second process gives one learner: two of one thread that share its passes, against one process of two threads; and what it
costs to spread the memory over the two.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, row
from benchmarks.scene import Scene
from benchmarks.workers import Setting, seconds_in_turns, workers

PROCESSES = 2


def rows(quick: bool) -> Iterator[Row]:
    subjects = (("er()", 4, 2, 2),) if quick else (("er()", 20, 9, 10), ("mose()", 20, 7, 2), ("mose()", 64, 3, 1))
    for method, width, repeats, steps in subjects:
        for sharing in ("exact", "local_norm"):
            yield shared(method, width, sharing, repeats, steps)
        yield spread(method, width, repeats, steps)


def shared(method: str, width: int, sharing: str, repeats: int, steps: int) -> Row:
    """Images per second of two processes with one thread each, against one process with two threads."""
    net = f"resnet18(width={width})"
    alone = Setting(method, net, PROCESSES, {"device": "cpu"})
    with workers([*members(method, net, sharing=sharing), alone]) as found:
        both, single = seconds_in_turns([found[:-1], found[-1:]], repeats, steps)
    images = Scene(method, net, device="cpu").images_per_step()
    together = np.max(both, axis=0)
    return row(
        f"two processes, {method}, width {width}, {sharing}",
        f"images per second of {method} in two processes of one thread that share each pass (sharing={sharing!r})",
        "in one process of two threads",
        single[0] / together,
        aim=None,
        sense="at least",
        images_per_second=images / float(np.median(together)),
        images_per_second_against=images / float(np.median(single)),
    )


def spread(method: str, width: int, repeats: int, steps: int) -> Row:
    """Seconds per step of two processes with a part of the memory in each, against two that hold all of it."""
    net = f"resnet18(width={width})"
    with workers([*members(method, net, store="sharded"), *members(method, net, store="ram")]) as found:
        parts, whole = seconds_in_turns([found[:PROCESSES], found[PROCESSES:]], repeats, steps)
    of_parts, of_whole = np.max(parts, axis=0), np.max(whole, axis=0)
    return row(
        f"a memory spread over two processes, {method}, width {width}",
        f"a step of {method} in two processes of one thread that hold a part of the memory each (store='sharded')",
        "with the whole memory in each process",
        of_parts / of_whole,
        aim=None,
        milliseconds=1e3 * float(np.median(of_parts)),
        milliseconds_against=1e3 * float(np.median(of_whole)),
    )


def members(method: str, net: str, **recipe: str) -> list[Setting]:
    """Processes of one thread that learn as one."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(PROCESSES)}
    return [
        Setting(method, net, 1, recipe | {"device": "cpu"}, environment=group | {"RANK": str(rank)}) for rank in range(PROCESSES)
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
