"""Where runs execute: on this machine, or on the nodes of a Ray or SLURM cluster.

Options of the command, written once; `docs/clusters.md` explains them. This file needs no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from gracecl.errors import UserError

if TYPE_CHECKING:
    from gracecl.lab.runs.jobs import Executor
    from gracecl.lab.runs.run import Work
    from gracecl.lab.runs.watch import Board

LIBRARIES = {"ray": "ray", "slurm": "submitit"}
"""the package that executes runs, by engine; its extra is named after the engine"""


@dataclass(frozen=True)
class Cluster:
    """Where runs execute, and what each asks for there."""

    engine: Literal["local", "ray", "slurm"] = "local"
    """where runs execute: local is this machine, ray and slurm are clusters (docs/clusters.md)"""
    address: str | None = None
    """HOST:PORT of the head of the Ray cluster (default: the cluster that this machine belongs to, else one of this machine
    alone); with --engine slurm, local executes the jobs on this machine, to try them out"""
    cpus: int | None = None
    """cores that each run asks for on a cluster (default: its threads, which are 1 unless --threads says more)"""
    gpus: float | None = None
    """GPUs that each run asks for on a cluster (default: 1 for runs on cuda, else 0); on Ray also a part of one, such as 0.25"""
    resources: tuple[str, ...] = ()
    """what else each run asks for, as NAME=VALUE: options of sbatch such as partition=gpu time=120, in minutes; amounts of Ray
    resources such as memory=8e9 big=1"""

    def check(self) -> None:
        """Refuse options that the engine does not have, before any run begins."""
        given = [field.name for field in fields(self) if field.name != "engine" and getattr(self, field.name) != field.default]
        if self.engine == "local" and given:
            raise UserError(f"--{given[0]} is for clusters; add --engine ray or slurm, or leave it out")
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if amount is not None and not amount >= 0:
                raise UserError(f"--{name} must be 0 or more, not {amount}")
        gpus = self.gpus or 0
        if gpus != int(gpus) and (self.engine == "slurm" or gpus > 1):
            parts = "parts of a GPU are for --engine ray" if self.engine == "slurm" else "more than one GPU are whole ones"
            raise UserError(f"--gpus must be a whole number here, not {gpus}; {parts}")
        if self.engine == "slurm" and self.address not in (None, "local"):
            raise UserError(f"--address of --engine slurm is local or left out, not '{self.address}'")
        if self.address and "://" in self.address:
            raise UserError(
                f"--address takes HOST:PORT of a Ray cluster's head, not '{self.address}'; "
                "start the command on a machine of the cluster"
            )
        self.named_resources  # noqa: B018 (what cannot be parsed is refused here)
        if self.engine == "ray":
            self.amounts  # noqa: B018
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

    @property
    def amounts(self) -> dict[str, float]:
        """`--resources` of Ray by name."""
        found = {}
        for name, text in self.named_resources.items():
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = math.nan
            if not 0 <= found[name] < math.inf:
                raise UserError(f"--resources {name}={text} is no amount; write a number of 0 or more, such as {name}=1")
            if name in ("CPU", "GPU"):
                raise UserError(f"--resources {name}={text} has an option of its own; write --{name.lower()}s {text}")
        return found

    def threads(self, asked: int | None) -> int:
        """Return the threads of a run that begins: a function of the command, not of the node."""
        return asked or self.cpus or 1

    def cpus_for(self, work: Work, threads: int) -> int:
        """Return the cores to ask for; a run that has begun keeps its threads."""
        return (work.threads or threads) if self.cpus is None else self.cpus

    def gpus_for(self, work: Work) -> float:
        return int(work.config.device.startswith("cuda")) if self.gpus is None else self.gpus

    def library(self) -> Any:
        """Import the engine's library, or say how to install it; None for this machine."""
        if self.engine == "local":
            return None
        package = LIBRARIES[self.engine]
        try:
            return importlib.import_module(package)
        except ImportError:
            raise UserError(
                f"--engine {self.engine} needs {package}; install it with: pip install 'gracecl[{self.engine}]'"
            ) from None

    def executor(self, at_once: int | None, threads: int | None, board: Board) -> Executor:
        """Return the executor of a cluster; `at_once` limits its runs, None leaves that to the cluster."""
        kind: Callable[[Cluster, int | None, int, Board], Executor]
        if self.engine == "ray":
            from gracecl.lab.runs.on_ray import RayExecutor as kind
        else:
            from gracecl.lab.runs.on_slurm import SlurmExecutor as kind
        return kind(self, at_once, self.threads(threads), board)


HERE = Cluster()
