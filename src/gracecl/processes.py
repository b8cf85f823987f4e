"""The processes of a `torch.distributed` group that learn as one: how many there are, which one this is, what they agree on."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
from torch import distributed

from gracecl.errors import Caution

PATIENCE = 60.0
"""seconds after which a process says what it waits for"""


def count() -> int:
    """Return the number of processes in the group of this one; 1 without a group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process in its group; 0 without a group."""
    return distributed.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Return whether this process writes what the group writes once."""
    return rank() == 0


def any_says(*flags: bool) -> list[bool]:
    """Return whether each of the flags is set in any process; all of them must ask."""
    return list(flags) if count() == 1 else list(map(bool, _largest([*flags], "cpu")))


def all_have(number: int, device: torch.device | str = "cpu", awaited: str = "") -> bool:
    """Return whether all processes give the same number; all of them must ask. The sentence `awaited`, if there is one, is said
    where the others let this process wait.
    """
    if count() == 1:
        return True
    largest, of_negative = _largest([number, -number], device, awaited)
    return largest == -of_negative


def wait_for_all() -> None:
    """Wait until every process is here."""
    any_says(False)


def _largest(numbers: list[int], device: torch.device | str, awaited: str = "") -> list[int]:
    """Return the largest of each number over the processes."""
    values = torch.tensor(numbers, device=device)
    work = distributed.all_reduce(values, distributed.ReduceOp.MAX, async_op=True)
    if awaited and values.device.type == "cpu":  # nccl would take a wait that ends early for the end of the group
        try:
            work.wait(timedelta(seconds=PATIENCE))
        except RuntimeError:
            if work.is_completed():
                raise
            warnings.warn(awaited, Caution, stacklevel=3)
    work.wait()
    largest: list[int] = values.tolist()
    return largest
