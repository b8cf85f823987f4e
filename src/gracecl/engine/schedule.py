"""Learning-rate schedules: any `torch.optim.lr_scheduler`, advanced after each batch or at the end of each task."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gracecl.errors import UserError
from gracecl.registry.options import SchedulerStep

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class Schedule:
    """A scheduler and when it advances. Plans of a method scale the rates that it sets."""

    def __init__(self, make: SchedulerFactory, optimizer: torch.optim.Optimizer, per: SchedulerStep) -> None:
        self.optimizer, self.per = optimizer, per
        made: Any = make(optimizer)
        if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
            why = ", which waits for a metric" if isinstance(made, ReduceLROnPlateau) else ""
            raise UserError(
                f"scheduler is a function of the optimizer that returns a torch.optim.lr_scheduler, not a "
                f"{type(made).__name__}{why}; write scheduler=lambda optimizer: StepLR(optimizer, 100)"
            )
        if made.optimizer is not optimizer:
            raise UserError("the scheduler was made for another optimizer; make it of the one that the function receives")
        self.scheduler = made

    def advance(self, rates: list[float]) -> list[float]:
        """The learning rates of the parameter groups from here on, given those until now."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # schedulers compute the next rate from this one, which a plan may have scaled
        with warnings.catch_warnings():
            # That no optimizer step came before the first advance is a method's choice (one that only stores, at first).
            # A copied optimizer has not been told of the scheduler, which only counts its steps for the same warning.
            warnings.filterwarnings("ignore", "(Detected call of `lr_scheduler.step|Seems like `optimizer.step)", UserWarning)
            self.scheduler.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = vars(self.scheduler)
        self.scheduler.load_state_dict(
            {name: Counter(value) if isinstance(now.get(name), Counter) else value for name, value in state.items()}
        )
