"""What the engines of clusters share: a run on its way through a cluster, and its execution on a node."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gracecl.errors import plain_cautions
from gracecl.files import make_folder
from gracecl.lab.runs import launch, remote, watch
from gracecl.lab.runs.jobs import Outcome, Status, attempt
from gracecl.lab.runs.run import Work

MOST_FRUITLESS_DEATHS = 4
"""deaths of a run's process in a row without a new checkpoint, after which the run is given up"""
SECONDS_FOR_THE_LOCK = 90.0
"""how long a run waits for its folder: the process that had it may be dying, and a network file system takes a while to notice"""
SECONDS_BETWEEN_REPORTS = 5.0
Ended = tuple[Status, str, str]
"""status and message of a run's outcome, and the name of its node"""
Told = dict[str, Any]
"""the step that an attempt continued from (`first`), its `node` and its `progress`, as plain values"""


def for_a_node(work: Work) -> Work:
    """Return the run with a place of its data that means the same on a node, which finds the folder above the run's own."""
    if remote.url_of(work.folder) is None:
        make_folder(work.folder.parent)
    return work if work.data_root is None else replace(work, data_root=str(Path(work.data_root).resolve()))


def execute(work: Work, address: str, threads: int, tell: Callable[[Told], None]) -> Ended:
    """Execute a run on this node, in the folder at an address, and tell its progress now and then."""
    node = socket.gethostname()
    work = replace(work, folder=remote.folder_at(address))
    launch.keep_freed_memory()
    plain_cautions()
    first: list[int] = []
    told_at = [-math.inf]

    def relay(progress: watch.RunProgress) -> None:
        first[:] = first or [progress.at]
        if time.monotonic() - told_at[0] > SECONDS_BETWEEN_REPORTS or progress.at == progress.total:
            told_at[0] = time.monotonic()
            tell({"first": first[0], "node": node, "progress": asdict(progress)})

    if remote.url_of(work.folder) is None and not work.folder.parent.is_dir():
        return "refused", f"this node has no folder {work.folder.parent}; nodes that share no folder need --out s3://…", node
    outcome = attempt(work, watch.Reporter(relay), threads, SECONDS_FOR_THE_LOCK)
    return outcome.status, outcome.message, node


@dataclass(eq=False)
class Task:
    """A run on its way through a cluster."""

    work: Work
    reference: Any = None
    """the cluster's own handle of it"""
    node: str = ""
    began_at: int | None = None
    """step that this attempt continued from, once it said so"""
    furthest: int = -1
    """largest step that an attempt continued from"""
    fruitless: int = 0
    """deaths in a row without a new checkpoint"""

    def heard(self, told: Told, board: watch.Board) -> None:
        """Show what the node told."""
        self.began_at, self.node = told["first"], told["node"]
        progress = watch.RunProgress(**told["progress"])
        board.show(self.work.folder, replace(progress, title=f"{progress.title}, on {self.node}"))

    def continues(self, outcome: Outcome, board: watch.Board) -> bool:
        """Return whether to submit the run again after an attempt: its process ended before the run did, and not in vain."""
        again = outcome.status == "stopped" and not self.died_in_vain()
        if again:
            board.say(f"{self.work.config.title}: {outcome.message}; it continues from its last checkpoint")
        return again

    def died_in_vain(self) -> bool:
        """Note that its process ended before the run did; return whether to give the run up."""
        began_at = -1 if self.began_at is None else self.began_at
        self.fruitless = 1 if began_at > self.furthest else self.fruitless + 1
        self.furthest = max(self.furthest, began_at)
        return self.fruitless >= MOST_FRUITLESS_DEATHS
