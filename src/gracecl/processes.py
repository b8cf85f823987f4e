"""The processes of a `torch.distributed` group that learn as one: how many there are, which one this is, what they agree on."""

from __future__ import annotations

import torch
from torch import distributed


def count() -> int:
    """Return the number of processes in the group of this one; 1 without a group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process in its group; 0 without a group."""
    return distributed.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Return whether this process writes what the group writes once."""
    return rank() == 0


def any_says(flag: bool, device: torch.device | str = "cpu") -> bool:
    """Return whether the flag is set in any process; all of them must ask."""
    return flag if count() == 1 else bool(_largest([flag], device)[0])


def all_have(number: int, device: torch.device | str = "cpu") -> bool:
    """Return whether all processes give the same number; all of them must ask."""
    if count() == 1:
        return True
    largest, of_negative = _largest([number, -number], device)
    return largest == -of_negative


def wait_for_all() -> None:
    """Wait until every process is here."""
    any_says(False)


def _largest(numbers: list[int], device: torch.device | str) -> list[int]:
    """Return the largest of each number over the processes."""
    values = torch.tensor(numbers, device=device)
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    largest: list[int] = values.tolist()
    return largest
