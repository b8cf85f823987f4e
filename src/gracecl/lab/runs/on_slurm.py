"""Execute runs as an array job of a SLURM cluster, through submitit.

Nodes and this machine share the folder of the runs. When a job's time is over or it is preempted, SLURM sends a signal; the run
saves between two steps, and submitit puts the job back into the queue, where it continues from its checkpoint. A folder `slurm`
beside the runs holds submitit's own files and logs, and the latest progress of each run; nothing there is needed to continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.files import as_name, make_folder, parse_json, write_text
from gracecl.lab.runs import remote, watch
from gracecl.lab.runs.cluster import Cluster
from gracecl.lab.runs.jobs import THREAD_VARIABLES, Outcome, stopped_by_user
from gracecl.lab.runs.on_node import Ended, Task, Told, execute, for_a_node
from gracecl.lab.runs.run import Interrupted, Work, stop_requests
from gracecl.registry.options import run_name

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_UNTIL_KILLED = 60.0
"""after SIGTERM; SLURM's own KillWait is 30"""
MINUTES = 60
"""of a job, unless --resources time=... says otherwise"""
MOST_TIMEOUTS = 10_000
"""a run goes on after each, so none is one too many"""


class SlurmExecutor:
    """Execute runs as jobs of SLURM, `at_once` at a time or as many as it admits."""

    def __init__(self, cluster: Cluster, at_once: int | None, threads: int, board: watch.Board) -> None:
        self.cluster, self.at_once, self.threads, self.board = cluster, at_once, threads, board
        self.submitit = cluster.library()
        self.submitted: list[Work] = []

    def submit(self, work: Work) -> None:
        self.submitted.append(work)

    def outcomes(self) -> Generator[Outcome, None, None]:
        if not self.submitted:
            return
        self.notes = Path(os.path.commonpath([work.folder.resolve().parent for work in self.submitted])) / "slurm"
        make_folder(self.notes)
        with stop_requests() as stopped:
            running = self._begin([Task(work) for work in self.submitted])
            try:
                while running and not stopped:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    self._show_progress(running)
                    ended = [task for task in running if task.reference.done()]
                    running = [task for task in running if task not in ended]
                    again = []
                    for task in ended:
                        outcome = self._outcome(task)
                        if task.continues(outcome, self.board):
                            again.append(task)
                        else:
                            yield outcome
                    running += self._begin(again)
            finally:
                if stopped:
                    self.board.say("stopping: the jobs are cancelled, and every run ends its step and saves")
                for task in running:
                    task.reference.cancel(check=False)
        if stopped:
            stopped_by_user(self.submitted)

    def _begin(self, tasks: list[Task]) -> list[Task]:
        """Submit runs as arrays, one for each number of threads."""
        by_threads: dict[int, list[Task]] = defaultdict(list)
        for task in tasks:
            task.began_at = None
            by_threads[task.work.threads or self.threads].append(task)
        for threads, alike in by_threads.items():
            works = [task.work for task in alike]
            executor = self._executor(
                max(self.cluster.cpus_for(work, threads) for work in works), int(max(map(self.cluster.gpus_for, works)))
            )
            with thread_variables(threads):
                jobs = executor.submit_array(
                    [Job(for_a_node(work), remote.address(work.folder), threads, self._note(work)) for work in works]
                )
            for task, job in zip(alike, jobs, strict=True):
                task.reference = job
        return tasks

    def _executor(self, cpus: int, gpus: int) -> Any:
        options = self.cluster.named_resources
        minutes = options.pop("time", str(MINUTES))
        if not minutes.isdecimal() or not int(minutes):
            raise UserError(f"--resources time={minutes} is no whole number of minutes; write for example time=120")
        at = "local" if self.cluster.address == "local" else "slurm"
        try:
            executor = self.submitit.AutoExecutor(self.notes / "%j", cluster=at, **{f"{at}_max_num_timeout": MOST_TIMEOUTS})
            executor.update_parameters(
                name="gracecl",
                timeout_min=int(minutes),
                cpus_per_task=cpus or 1,
                gpus_per_node=gpus,
                slurm_additional_parameters=options,
                **({"slurm_array_parallelism": self.at_once} if self.at_once else {}),
            )
        except RuntimeError as error:
            raise UserError(
                f"--engine slurm cannot submit jobs here ({error}); use it where sbatch works, or try it out with --address local"
            ) from None
        return executor

    def _note(self, work: Work) -> Path:
        """Return the file where a run notes its progress."""
        return self.notes / f"{as_name(f'{work.config.method[:60]}-{run_name(asdict(work.config))}')}.json"

    def _show_progress(self, tasks: list[Task]) -> None:
        for task in tasks:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # progress is for the eye
                task.heard(parse_json(self._note(task.work).read_bytes()), self.board)

    def _outcome(self, task: Task) -> Outcome:
        """Return the outcome of a job that ended; `stopped` where it left none."""
        try:
            status, message, node = task.reference.result()
        except (self.submitit.core.utils.UncompletedJobError, self.submitit.core.utils.FailedJobError) as error:
            if "ModuleNotFoundError" in str(error):
                return Outcome(task.work, "refused", "its node lacks a module; install gracecl there, or share the environment")
            return Outcome(
                task.work, "stopped", f"its job {task.reference.job_id} ended early; {task.reference.paths.stderr} says more"
            )
        return Outcome(task.work, status, message, node)


@contextlib.contextmanager
def thread_variables(threads: int) -> Iterator[None]:
    """Set the number of threads in the environment, which jobs inherit."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Job:
    """A run as submitit calls it on a node: `job()`, and `job.checkpoint()` when it is to go back into the queue."""

    work: Work
    address: str
    """of the run's folder, on any node"""
    threads: int
    note: Path

    def __call__(self) -> Ended:
        """Execute the run; return how it ended."""

        def tell(told: Told) -> None:
            write_text(self.note, json.dumps(told))

        try:
            return execute(self.work, self.address, self.threads, tell)
        except Interrupted as stop:
            if stop.number == signal.SIGUSR2:
                signal.raise_signal(signal.SIGUSR2)  # now that the run is saved, submitit's own handler puts the job back
            # A result would say that the job is over, and SLURM may still put back one that it preempts.
            time.sleep(SECONDS_UNTIL_KILLED)
            return "stopped", str(stop), socket.gethostname()

    def checkpoint(self) -> Any:
        """Return what to execute when the job comes to its turn again: the same, as the run continues by itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
