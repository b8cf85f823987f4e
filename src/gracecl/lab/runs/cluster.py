"""Where runs execute: on this machine, or on the nodes of a SLURM cluster.

Options of the command, written once; `docs/clusters.md` explains them. This file needs no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gracecl.errors import UserError

if TYPE_CHECKING:
    from gracecl.lab.runs.jobs import Executor
    from gracecl.lab.runs.run import Work
    from gracecl.lab.runs.watch import Board

MOST_FRUITLESS_DEATHS = 4
"""deaths of a run's process in a row without a new checkpoint, after which the run is given up"""
SECONDS_FOR_THE_LOCK = 90.0
"""how long a run waits for its folder: the process that had it may be dying, and a network file system takes a while to notice"""


@dataclass(frozen=True)
class Cluster:
    """Where runs execute, and what each asks for there."""

    engine: Literal["local", "slurm"] = "local"
    """where runs execute: local is this machine, slurm a SLURM cluster (docs/clusters.md)"""
    address: Literal["local"] | None = None
    """local executes the jobs of --engine slurm on this machine, to try them out"""
    cpus: int | None = None
    """cores that each run asks for on a cluster (default: its threads, which are 1 unless --threads says more)"""
    gpus: int | None = None
    """GPUs that each run asks for on a cluster (default: 1 for runs on cuda, else 0)"""
    resources: tuple[str, ...] = ()
    """what else each run asks for, as NAME=VALUE: options of sbatch such as partition=gpu time=120, in minutes"""

    def check(self) -> None:
        """Refuse options that the engine does not have, before any run begins."""
        given = [field.name for field in fields(self) if field.name != "engine" and getattr(self, field.name) != field.default]
        if self.engine == "local" and given:
            raise UserError(f"--{given[0]} is for clusters; add --engine slurm, or leave it out")
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if amount is not None and amount < 0:
                raise UserError(f"--{name} must be 0 or more, not {amount}")
        self.named_resources  # noqa: B018 (what cannot be parsed is refused here)
        self.library()

    @property
    def named_resources(self) -> dict[str, str]:
        """`--resources` by name."""
        found = {}
        for text in self.resources:
            name, equals, value = text.partition("=")
            if not (name and equals and value):
                raise UserError(f"--resources takes NAME=VALUE, such as partition=gpu, not '{text}'")
            found[name] = value
        return found

    def threads(self, asked: int | None) -> int:
        """Return the threads of a run that begins: a function of the command, not of the node."""
        return asked or self.cpus or 1

    def cpus_for(self, work: Work, threads: int) -> int:
        """Return the cores to ask for; a run that has begun keeps its threads."""
        return (work.threads or threads) if self.cpus is None else self.cpus

    def gpus_for(self, work: Work) -> int:
        return int(work.config.device.startswith("cuda")) if self.gpus is None else self.gpus

    def library(self) -> Any:
        """Import the engine's library, or say how to install it; None for this machine."""
        if self.engine == "local":
            return None
        try:
            return importlib.import_module("submitit")
        except ImportError:
            raise UserError("--engine slurm needs submitit; install it with: pip install 'gracecl[slurm]'") from None

    def executor(self, at_once: int | None, threads: int | None, board: Board) -> Executor:
        """Return the executor of a cluster; `at_once` limits its runs, None leaves that to the cluster."""
        from gracecl.lab.runs.on_slurm import SlurmExecutor

        return SlurmExecutor(self, at_once, self.threads(threads), board)


HERE = Cluster()


def for_a_node(work: Work) -> Work:
    """Return the run with a place of its data that means the same on a node."""
    return work if work.data_root is None else replace(work, data_root=str(Path(work.data_root).resolve()))


@dataclass
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

    @property
    def key(self) -> str:
        return str(self.work.folder)

    def died_in_vain(self) -> bool:
        """Note that its process ended before the run did; return whether to give the run up."""
        began_at = -1 if self.began_at is None else self.began_at
        self.fruitless = 1 if began_at > self.furthest else self.fruitless + 1
        self.furthest = max(self.furthest, began_at)
        return self.fruitless >= MOST_FRUITLESS_DEATHS
