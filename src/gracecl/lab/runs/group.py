"""Runs that several processes of this machine learn as one (`--nproc`), started and watched by torch's elastic launcher.

Every process executes the run; the first of them holds the folder and writes to it. When one dies, the launcher ends the others,
and the run is left at its last checkpoint, from which any number of processes can go on.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from multiprocessing.connection import Connection

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gracecl.errors import UserError, plain_cautions
from gracecl.lab.runs import launch
from gracecl.lab.runs.jobs import Outcome, Status, attempt, continue_sentence, stopped_by_user
from gracecl.lab.runs.run import Interrupted, Work
from gracecl.lab.runs.watch import Board, Reporter, Watch

HERE = "127.0.0.1"
SECONDS_TO_SAVE = 300
"""that processes have to end their step and save when they are told to stop"""
SECONDS_BETWEEN_LOOKS = 1.0
LAUNCHER = ("torch.distributed.elastic", "torch.multiprocessing")
"""loggers of the launcher"""
Said = tuple[Status, str]
"""how a run ended in one process, and the error message"""


class GroupExecutor:
    """Execute runs one after the other, each in `processes` processes with `threads` threads each."""

    def __init__(self, processes: int, threads: int, board: Board) -> None:
        self.processes, self.threads, self.board = processes, threads, board
        self.waiting: deque[Work] = deque()
        self.submitted: list[Work] = []

    def submit(self, work: Work) -> None:
        check_device(work.config.device, self.processes)
        self.waiting.append(work)
        self.submitted.append(work)

    def outcomes(self) -> Generator[Outcome, None, None]:
        while self.waiting:
            work = self.waiting.popleft()
            try:
                with self._progress_of(work) as sender:
                    status, message = summary(self._launch(work, sender))
            except ChildFailedError as error:
                yield Outcome(work, "stopped", death_sentence(error, self.processes, work))
            except SignalException:
                stopped_by_user(self.submitted)
                yield Outcome(work)  # it came to its end all the same
            else:
                if status == "stopped":  # by a signal that only its processes got
                    raise Interrupted(message)
                yield Outcome(work, status, message)

    def _launch(self, work: Work, sender: Connection) -> Mapping[int, Said]:
        """Execute a run and return what each process said of it."""
        heard = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2") if is_heard(name)]
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{HERE}:0",
            local_addr=HERE,
            max_restarts=0,
            signals_to_handle=",".join(heard),
            shutdown_timeout=SECONDS_TO_SAVE,
        )
        with quiet_launcher(), handlers_kept(heard):
            said: Mapping[int, Said] = elastic_launch(config, take_part)(work, self.threads, sender, os.getpid())
        return said

    @contextlib.contextmanager
    def _progress_of(self, work: Work) -> Iterator[Connection]:
        """Show what the first process sends of its progress."""
        receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)

        def listen() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self.board.show(work.folder, receiver.recv())

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            yield sender
        finally:
            sender.close()
            listener.join(SECONDS_BETWEEN_LOOKS)


def take_part(work: Work, threads: int, sender: Connection, parent: int) -> Said:
    """Execute a run as one process of a group: the main function of each."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the launcher, which passes it on once
    launch.keep_freed_memory()
    first = os.environ["RANK"] == "0"
    if first:
        plain_cautions()
    else:
        warnings.simplefilter("ignore")
    threading.Thread(target=stop_without, args=(parent,), daemon=True).start()
    on_gpu = work.config.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        outcome = attempt(work, Reporter(sender.send) if first else Watch(), threads)
        return outcome.status, outcome.message
    except Interrupted as stop:
        return "stopped", str(stop)
    finally:
        distributed.destroy_process_group()


def stop_without(parent: int) -> None:
    """Save and stop when the launcher is gone, so that no process outlives it."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)


def summary(said: Mapping[int, Said]) -> Said:
    """Return what the processes together said: a refusal before a crash, and the cause of a crash before what it led to."""
    for status in ("refused", "stopped"):
        for of_process in said.values():
            if of_process[0] == status:
                return of_process
    crashed = [of_process for of_process in said.values() if of_process[0] == "crashed"]
    return min(crashed, key=lambda of_process: "all_reduce" in of_process[1], default=said[0])


def death_sentence(error: ChildFailedError, processes: int, work: Work) -> str:
    """Return the message of a run one of whose processes died."""
    rank, failure = error.get_first_failure()
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    return f"process {rank + 1} of {processes} {how}, and the others with it; {continue_sentence([work.folder])}"


def check_device(device: str, processes: int) -> None:
    """Refuse a device that the processes cannot have one each of."""
    if device == "cpu":
        return
    if device != "cuda":
        raise UserError(f"--nproc gives each process a GPU of its own, so --device is cuda or cpu, not {device}")
    if (found := torch.cuda.device_count()) < processes:
        raise UserError(f"--nproc {processes} needs as many GPUs, and this machine has {found}; use fewer processes")


def is_heard(name: str) -> bool:
    """Return whether this system has a signal, and this process does not ignore it."""
    return hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN


@contextlib.contextmanager
def handlers_kept(names: list[str]) -> Iterator[None]:
    """Put the handlers of signals back after the block: the launcher leaves its own."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def quiet_launcher() -> Iterator[None]:
    """Keep the launcher from logging what the run's outcome says in a sentence."""
    loggers, nowhere = [logging.getLogger(name) for name in LAUNCHER], logging.NullHandler()
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nowhere)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nowhere)
