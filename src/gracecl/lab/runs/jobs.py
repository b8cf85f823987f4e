"""Execute many runs: in child processes side by side, one after the other in this process, or on a cluster.

An `Executor` has two methods: `submit` queues a run, `outcomes` yields the outcome of each run as it ends. A finished run is in its
folder. `on_ray.py` and `on_slurm.py` have those of clusters. To execute runs elsewhere, write another executor.

A small network gains little from a second thread, so two runs with one thread each get further in an hour than one after
the other with two. Sums are split among threads, which shows in their last bits; a run therefore keeps the number it began with,
and that number depends on the whole command, not on how much of it is still to do. Equal threads, equal bits, however many
runs at once.

A child reads runs from its standard input, one per line; the end of the input tells it to save and stop. The input also ends when
this process dies, so no child outlives it. Children have their own session, where a terminal's Ctrl-C does not reach them. They
report on standard output, in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Literal, Protocol

from gracecl.engine.recipe import device_of
from gracecl.errors import Caution, UserError, is_sentence, plain_cautions, sentence
from gracecl.lab.runs import launch, remote, watch
from gracecl.lab.runs.cluster import HERE, Cluster
from gracecl.lab.runs.run import Interrupted, RunConfig, Work, resume_command, stop_requests
from gracecl.machine import MOST_THREADS

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SECONDS_BETWEEN_SIGNAL_CHECKS = 0.2
SECONDS_FOR_LAST_WORDS = 1.0
STOPPING = "stopping: every run ends its step and saves; a second Ctrl-C ends them at once"
Status = Literal["finished", "refused", "crashed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: finished, refused, crashed or stopped, with the error message."""

    work: Work
    status: Status = "finished"
    message: str = ""
    node: str = ""
    """name of the node of a cluster that the run ended on"""

    def __str__(self) -> str:
        title, place = self.work.config.title, f" on {self.node}" if self.node else ""
        return f"{title}: finished{place}" if self.status == "finished" else f"gracecl: {title}{place}: {self.message}"


def run_all(
    works: Sequence[Work], jobs: int | None = None, threads: int | None = None, cluster: Cluster = HERE, nproc: int = 1
) -> list[Outcome]:
    """Execute runs, `jobs` at once with `threads` each, and return their outcomes in the order given.

    With `nproc`, runs go one after the other, and so many processes learn each of them together.

    A run that fails does not stop the others; the error of a single run on this machine is raised. Child processes and nodes of a
    cluster know what a run's plugins register, not what the calling program registered itself.
    """
    works = list({work.folder: work for work in works}.values())
    unfinished = [work for work in works if not work.finished]
    if cluster.engine == "local":  # a node may have a device that this machine lacks
        for device in dict.fromkeys(work.config.device for work in unfinished):
            device_of(device)
    at_once, shared_threads = share(works, jobs, threads, cores())
    board = watch.Board(len(works), len(works) - len(unfinished))
    executor: Executor
    if nproc != 1:
        check_group(nproc, jobs, cluster)
        from gracecl.lab.runs.group import GroupExecutor

        executor = GroupExecutor(nproc, threads or threads_of_each(nproc, cores()), board)
    elif cluster.engine != "local":
        executor = cluster.executor(jobs, threads, board)
    elif len(works) == 1:
        works[0].run(watch.LiveWatch(), shared_threads)
        return [Outcome(works[0])]
    elif shared_threads is None or min(at_once, len(unfinished)) < 2:
        executor = SequentialExecutor(shared_threads, board)
    else:
        executor = ProcessExecutor(at_once, shared_threads, board)
    for work in unfinished:
        executor.submit(work)
    ended: dict[Path, Outcome] = {}
    with board.shown(), contextlib.closing(executor.outcomes()) as outcomes:
        for outcome in outcomes:
            ended[outcome.work.folder] = outcome
            if outcome.status == "finished" and not outcome.work.finished:
                remote.fetch_results(outcome.work.folder)
            board.end(outcome.work.folder, str(outcome), outcome.status == "finished")
    return [ended.get(work.folder, Outcome(work)) for work in works]


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_group(nproc: int, jobs: int | None, cluster: Cluster) -> None:
    """Refuse what does not go with several processes per run."""
    if not 1 <= nproc <= MOST_THREADS:
        raise UserError(f"--nproc must be between 1 and {MOST_THREADS}, not {nproc}; one for each core or GPU is enough")
    if cluster.engine != "local" or (jobs or 1) > 1:
        other = "--jobs" if cluster.engine == "local" else f"--engine {cluster.engine}"
        raise UserError(f"with --nproc runs go one after the other on this machine; leave {other} out")
    if not hasattr(os, "fork"):
        raise UserError("--nproc needs a POSIX system; leave it out")


def threads_of_each(at_once: int, cores: int) -> int:
    """Return the threads of each of several processes: $OMP_NUM_THREADS, else the cores, shared out."""
    users = re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", ""))
    return int(users[0]) if users else max(1, cores // at_once)


def share(works: Sequence[Work], jobs: int | None, threads: int | None, cores: int) -> tuple[int, int | None]:
    """Return how many runs execute at once and the threads of each; None leaves the threads to torch.

    Threads are shared among all runs of a command, finished ones included, so that the same command gives the same bits however
    often it was interrupted. $OMP_NUM_THREADS is respected.
    """
    for option, number in (("--jobs", jobs), ("--threads", threads)):
        if number is not None and not 1 <= number <= MOST_THREADS:
            raise UserError(f"{option} must be between 1 and {MOST_THREADS}, not {number}; one for each core is enough")
    on_cpu = all(work.config.device == "cpu" for work in works)
    at_once = min(jobs or (cores if on_cpu else 1), len(works))
    if at_once > 1 and not hasattr(os, "fork"):
        warnings.warn("this system cannot stop child processes gently, so runs go one after the other", Caution, stacklevel=2)
        at_once = 1
    if at_once < 2:
        return 1, threads
    threads = threads or threads_of_each(at_once, cores)
    if jobs is None:
        most = max([threads, *(work.threads or 1 for work in works if not work.finished)])
        at_once = max(1, min(at_once, cores // most))
    return at_once, threads


class Executor(Protocol):
    """Execute runs."""

    def submit(self, work: Work) -> None:
        """Queue a run."""

    def outcomes(self) -> Generator[Outcome, None, None]:
        """Yield the outcome of each run as it ends, until none is left."""


class SequentialExecutor:
    """Execute runs in this process, one after the other."""

    def __init__(self, threads: int | None, board: watch.Board) -> None:
        self.threads, self.board = threads, board
        self.waiting: deque[Work] = deque()

    def submit(self, work: Work) -> None:
        self.waiting.append(work)

    def outcomes(self) -> Generator[Outcome, None, None]:
        while self.waiting:
            work = self.waiting.popleft()
            yield attempt(work, watch.Reporter(partial(self.board.show, work.folder)), self.threads)


def attempt(work: Work, watching: watch.Watch, threads: int | None, patience: float = 0.0) -> Outcome:
    """Execute a run here; an error is an outcome. `patience` is how many seconds it waits for its folder."""
    try:
        work.run(watching, threads, patience=patience)
    except Exception as error:  # noqa: BLE001 (whatever it is, the other runs go on)
        if is_sentence(error):
            return Outcome(work, "refused", sentence(error))
        return Outcome(work, "crashed", traceback.format_exc().rstrip())
    return Outcome(work)


class ProcessExecutor:
    """Execute runs in child processes, `at_once` at a time with `threads` each."""

    def __init__(self, at_once: int, threads: int, board: watch.Board) -> None:
        self.at_once, self.threads, self.board = at_once, threads, board
        self.waiting: deque[Work] = deque()
        self.submitted: list[Work] = []

    def submit(self, work: Work) -> None:
        self.waiting.append(work)
        self.submitted.append(work)

    def outcomes(self) -> Generator[Outcome, None, None]:
        inbox: _Inbox = SimpleQueue()
        children: list[_Child] = []
        stopping = False
        with stop_requests() as stopped:
            try:
                while children or self.waiting:
                    if stopped and not stopping:
                        stopping = True
                        self.board.say(STOPPING)
                        self.waiting.clear()
                        for child in children:
                            child.dismiss()
                    while self.waiting and len(children) < self.at_once:
                        children.append(_Child(self.threads, inbox, self.waiting.popleft()))
                    try:
                        child, message = inbox.get(timeout=SECONDS_BETWEEN_SIGNAL_CHECKS)
                    except Empty:
                        continue
                    if "progress" in message:
                        self.board.show(child.work.folder, watch.RunProgress(**message["progress"]))
                    elif "said" in message:
                        self.board.say(f"{child.work.config.title}: {message['said']}")
                    elif "gone" in message:
                        children.remove(child)
                    if outcome := child.outcome(message):
                        if not (stopping and outcome.status == "stopped"):
                            yield outcome
                        if self.waiting and outcome.status != "stopped":
                            child.begin(self.waiting.popleft())
                        else:
                            child.dismiss()
            finally:
                for child in children:
                    child.dismiss()
                    child.process.kill()
                    child.process.wait()
        if stopping:
            stopped_by_user(self.submitted)


def stopped_by_user(works: Sequence[Work]) -> None:
    """Raise `Interrupted` if one of the runs that were stopped did not finish all the same."""
    if left := [work.folder for work in works if not work.finished]:
        begun = sum((folder / "config.json").exists() for folder in left)
        raise Interrupted(f"stopped (runs begun: {begun}, not begun: {len(left) - begun}); {continue_sentence(left)}")


def continue_sentence(folders: Sequence[Path]) -> str:
    begun = [folder for folder in folders if (folder / "config.json").exists()]
    only_those = f", or only what is begun with: {resume_command(Path(os.path.commonpath(begun)))}" if begun else ""
    return f"continue with the same command{only_those}"


class _Child:
    """A child process that executes one run after the other, as the parent sees it."""

    def __init__(self, threads: int, inbox: _Inbox, work: Work) -> None:
        self.threads, self.inbox = threads, inbox
        self.process = subprocess.Popen(
            launch.child_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)),
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.orders = self.process.stdin
        self.begin(work)
        threading.Thread(target=self._listen, args=(self.process.stdout, self.process.stderr), daemon=True).start()

    def begin(self, work: Work) -> None:
        self.work, self.busy = work, True
        with contextlib.suppress(BrokenPipeError):  # `_listen` reports that the child is gone
            self.orders.write(json.dumps(asdict(work) | {"threads": self.threads}, default=str) + "\n")
            self.orders.flush()

    def dismiss(self) -> None:
        """Tell the child to save and stop."""
        with contextlib.suppress(BrokenPipeError):
            self.orders.close()

    def outcome(self, message: dict[str, Any]) -> Outcome | None:
        """Return the outcome of the current run if the message reports it, else None."""
        if "status" in message:
            self.busy = False
            return Outcome(self.work, message["status"], message["text"])
        if "gone" not in message or not self.busy:
            return None
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if how.endswith("SIGKILL"):
            how += " (when memory runs out the system does that: then take fewer --jobs)"
        return Outcome(self.work, "stopped", f"its process {how}; {continue_sentence([self.work.folder])}")

    def _listen(self, reports: IO[str], words: IO[str]) -> None:
        relay = threading.Thread(target=self._relay, args=(words,), daemon=True)
        relay.start()
        with reports:
            for line in reports:
                if line.endswith("\n"):  # a child that is killed may leave half a line
                    # Python itself may print before `serve` takes over, where a site is set up so.
                    self.inbox.put((self, json.loads(line) if line.startswith("{") else {"said": line.rstrip("\n")}))
        self.process.wait()
        relay.join(SECONDS_FOR_LAST_WORDS)  # not for ever: what a run itself started may hold the other end
        self.inbox.put((self, {"gone": True}))

    def _relay(self, words: IO[str]) -> None:
        with words:
            for line in words:
                self.inbox.put((self, {"said": line.rstrip("\n")}))


_Inbox = SimpleQueue[tuple[_Child, dict[str, Any]]]


def serve() -> None:
    """Execute the runs that arrive on standard input: the main function of a child process."""
    reports = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    os.dup2(2, 1)  # whatever else is printed must not be taken for a report
    plain_cautions()
    orders: SimpleQueue[bytes] = SimpleQueue()

    def tell(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, and the end of the input follows
            reports.write(json.dumps(message) + "\n")
            reports.flush()

    def listen() -> None:
        # Unbuffered, as a buffer has a lock that the end of the process would wait for.
        for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115
            orders.put(line)
        orders.put(b"")
        os.kill(os.getpid(), signal.SIGTERM)

    # A run that is at its steps saves on SIGTERM; anything else is left as it is. Without an exception, as one that is raised
    # wherever the process happens to be may be printed, or lost.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    threading.Thread(target=listen, daemon=True).start()
    for line in iter(orders.get, b""):
        order = json.loads(line)
        work = Work(RunConfig(**order["config"]), Path(order["folder"]), order["data_root"], tuple(order["plugins"]))
        try:
            outcome = attempt(work, watch.Reporter(lambda progress: tell(progress=asdict(progress))), order["threads"])
        except Interrupted as stop:
            tell(status="stopped", text=str(stop))
            return
        tell(status=outcome.status, text=outcome.message)
