"""Execute runs as tasks of a Ray cluster.

Each run is one plain task around the run that any other engine executes. Ray's own retries are off: when a worker or a node dies,
this executor submits the run again, and it continues from its last checkpoint. Workers get this program's code, so nodes need
gracecl's dependencies and not gracecl. Nothing that Ray keeps is needed to continue.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import gracecl
from gracecl.errors import UserError
from gracecl.lab.runs import remote, watch
from gracecl.lab.runs.cluster import Cluster
from gracecl.lab.runs.jobs import (
    SECONDS_BETWEEN_SIGNAL_CHECKS,
    SECONDS_FOR_LAST_WORDS,
    STOPPING,
    THREAD_VARIABLES,
    Outcome,
    stopped_by_user,
)
from gracecl.lab.runs.on_node import Ended, Task, execute, for_a_node
from gracecl.lab.runs.run import COMMIT_VARIABLE, Interrupted, Work, commit, stop_requests

MOST_IN_FLIGHT = 1000
"""tasks that Ray holds at once unless --jobs says otherwise, so that the memory of the command does not grow with the runs"""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_FOR_MAIL = 10.0
"""that the last progress may take to arrive; a busy machine starts the actor late"""
MOST_LINES = 1000
"""that runs printed and the command has not shown yet"""


class RayExecutor:
    """Execute runs as tasks of Ray, `at_once` at a time or as many as the cluster admits."""

    def __init__(self, cluster: Cluster, at_once: int | None, threads: int, board: watch.Board) -> None:
        self.cluster, self.threads, self.board = cluster, threads, board
        self.in_flight = at_once or MOST_IN_FLIGHT
        self.waiting: deque[Task] = deque()
        self.running: dict[str, Task] = {}
        """by the address of their folder"""
        self.submitted: list[Work] = []

    def submit(self, work: Work) -> None:
        self.waiting.append(Task(work))
        self.submitted.append(work)

    def outcomes(self) -> Generator[Outcome, None, None]:
        if not self.waiting:
            return
        connect(self.cluster.address)
        self._name_missing_resources()
        ended: SimpleQueue[tuple[Task, Future[Ended]]] = SimpleQueue()
        stopping = False
        with stop_requests() as stopped, self._mailbox() as mailbox:
            try:
                while self.running or self.waiting:
                    if stopped and not stopping:
                        stopping = True
                        self.board.say(STOPPING)
                        self.waiting.clear()
                        for task in self.running.values():
                            ray.cancel(task.reference)
                    while self.waiting and len(self.running) < self.in_flight:
                        self._begin(self.waiting.popleft(), mailbox, ended)
                    try:
                        task, future = ended.get(timeout=SECONDS_BETWEEN_SIGNAL_CHECKS)
                    except Empty:
                        continue
                    del self.running[remote.address(task.work.folder)]
                    outcome = self._outcome(task, future)
                    if not stopping and task.continues(outcome, self.board):
                        self.waiting.append(task)
                    elif not (stopping and outcome.status == "stopped"):
                        yield outcome
            finally:
                for task in self.running.values():
                    ray.cancel(task.reference, force=True)
        if stopping:
            stopped_by_user(self.submitted)

    def _begin(self, task: Task, mailbox: Any, ended: SimpleQueue[tuple[Task, Future[Ended]]]) -> None:
        address, threads = remote.address(task.work.folder), task.work.threads or self.threads
        task.began_at = None
        options = self._request(task.work) | {
            "max_retries": 0,
            # Ray would set them to the number of cores, and equal threads are what gives equal bits.
            "runtime_env": {"env_vars": dict.fromkeys(THREAD_VARIABLES, str(threads))},
        }
        task.reference = ray.remote(execute_and_tell).options(**options).remote(for_a_node(task.work), address, threads, mailbox)
        self.running[address] = task
        task.reference.future().add_done_callback(lambda future: ended.put((task, future)))

    def _request(self, work: Work) -> dict[str, Any]:
        """Return what a run asks for, as options of a task."""
        resources = self.cluster.amounts
        memory = {"memory": resources.pop("memory")} if "memory" in resources else {}
        cpus, gpus = self.cluster.cpus_for(work, self.threads), self.cluster.gpus_for(work)
        return {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, **memory}

    def _name_missing_resources(self) -> None:
        """Say so if no node has what a run asks for: such runs wait for a node that may never come."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        wanted = []
        for task in self.waiting:
            request = self._request(task.work)
            amounts = {name: request[option] for option, name in names.items() if option in request} | request["resources"]
            if amounts not in wanted:
                wanted.append(amounts)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for amounts in wanted:
            if not any(all(node.get(name, 0) >= amount for name, amount in amounts.items()) for node in nodes):
                text = ", ".join(f"{name} {amount:g}" for name, amount in amounts.items() if amount)
                self.board.say(f"no node of the cluster has {text}; runs that ask for it wait until one joins")

    @contextlib.contextmanager
    def _mailbox(self) -> Iterator[Any]:
        """Yield the actor that runs tell their progress, and show what it got while the block runs."""
        over = threading.Event()
        mailbox = start_mailbox()

        def show() -> None:
            last = False
            with contextlib.suppress(RayError):
                while not last:
                    last = over.wait(SECONDS_BETWEEN_LOOKS)
                    told, said = ray.get(mailbox.take.remote())
                    for line in said:
                        self.board.say(line)
                    for address, latest in told.items():
                        if task := self.running.get(address):
                            task.heard(latest, self.board)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield mailbox
        finally:
            over.set()
            thread.join(SECONDS_FOR_MAIL)
            ray.kill(mailbox)

    def _outcome(self, task: Task, future: Future[Ended]) -> Outcome:
        """Return the outcome of a task that ended; `stopped` where its process did before the run."""
        try:
            status, message, node = future.result()
        except RayTaskError as error:
            if "ModuleNotFoundError" in str(error):
                return Outcome(task.work, "refused", f"its node lacks a module; install gracecl's dependencies there\n{error}")
            return Outcome(task.work, "crashed", str(error))
        except RayError as error:
            return Outcome(task.work, "stopped", death_sentence(error, task.node))
        return Outcome(task.work, status, message, node)


def death_sentence(error: RayError, node: str) -> str:
    """Return what happened to a run whose process ended before it did."""
    place = f" on {node}" if node else ""
    if isinstance(error, OutOfMemoryError):
        return f"Ray ended its process{place}, as the node ran out of memory (ask for it: --resources memory=BYTES)"
    if isinstance(error, NodeDiedError):
        return f"its node{place and f' {node}'} died"
    if isinstance(error, WorkerCrashedError):
        return f"its process{place} died, or its node did"
    return f"its process{place} ended early ({type(error).__name__}: {str(error).strip().splitlines()[0]})"


def connect(address: str | None) -> None:
    """Join a Ray cluster unless this program has; workers get the code of this gracecl."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    shipped = {
        "py_modules": [str(Path(gracecl.__file__).parent)],
        "excludes": ["__pycache__"],
        "env_vars": {COMMIT_VARIABLE: commit() or ""},
    }
    for place in [address] if address else ["auto", "local"]:
        started_here = {"include_dashboard": False} if place == "local" else {}
        try:
            ray.init(address=place, runtime_env=shipped, log_to_driver=False, logging_level=logging.ERROR, **started_here)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
    raise UserError(f"cannot join the Ray cluster at {place} ({reason}); give the HOST:PORT of its head as --address")


def start_mailbox() -> Any:
    """Start an actor on this machine that keeps the latest progress of each run, and what runs print, until it is fetched."""

    class Mailbox:  # here, so that the actor's process loads nothing of gracecl
        def __init__(self) -> None:
            self.told: dict[str, Any] = {}
            self.said: deque[str] = deque(maxlen=MOST_LINES)

        def tell(self, address: str, told: Any) -> None:
            self.told[address] = told

        def say(self, line: str) -> None:
            self.said.append(line)

        def take(self) -> tuple[dict[str, Any], list[str]]:
            told, said = self.told, list(self.said)
            self.told = {}
            self.said.clear()
            return told, said

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()


def execute_and_tell(work: Work, address: str, threads: int, mailbox: Any) -> Ended:
    """Execute a run on a node and tell the command what it prints and how far it is: the task of Ray."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray cancels by it, and a node started in the background ignores it
    lines = Lines(lambda line: mailbox.say.remote(f"{work.config.title}: {line}"))
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        try:
            ended = execute(work, address, threads, lambda told: mailbox.tell.remote(address, told))
        except Interrupted as stop:  # by the command, or as the node is shut down
            ended = "stopped", str(stop), socket.gethostname()
    if lines.sent:
        ray.wait([*lines.sent], timeout=SECONDS_FOR_LAST_WORDS)
    return ended


class Lines(io.TextIOBase):
    """A file that sends off each whole line."""

    def __init__(self, send: Callable[[str], Any]) -> None:
        self.send, self.rest = send, ""
        self.sent: deque[Any] = deque(maxlen=1)

    def write(self, text: str) -> int:
        *whole, self.rest = (self.rest + text).split("\n")
        self.sent.extend(self.send(line) for line in whole if line)
        return len(text)
