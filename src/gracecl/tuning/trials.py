"""The trials of a search: an Optuna study in a file, which outlives the process.

Which values a trial tries is a function of the trials that are finished before it, so that a search which was stopped goes on as if
it had not been.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gracecl import rng
from gracecl.errors import UserError
from gracecl.functional.statistics import Summary, summarise
from gracecl.tuning.space import Choice, Name, Range, Space

Sampler = Literal["tpe", "random", "grid"]
DIGITS = 4
"""of a number between two that a trial tries"""


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and what they scored with each seed."""

    place: int
    """1 is the first"""
    values: dict[Name, Any]
    scores: Sequence[float]

    @property
    def score(self) -> Summary:
        return summarise(self.scores)


class Trials:
    """Trials one after the other: `values = next()`, then `end(scores)`."""

    def __init__(self, optuna: Any, study: Any, space: Space, sampler: Sampler) -> None:
        self.version = str(optuna.__version__)
        self._optuna, self._study, self._space, self._sampler = optuna, study, space, sampler
        self._states = optuna.trial.TrialState
        self._in_hand: Any = None
        # What a stopped process left is tried again, with the same values.
        for _ in study.get_trials(states=(self._states.WAITING,)):
            study.ask()
        for trial in study.get_trials(states=(self._states.RUNNING,)):
            study.tell(trial.number, state=self._states.FAIL)

    def __len__(self) -> int:
        """Those that are over, with a score or without."""
        return len(self._over)

    @property
    def scored(self) -> int:
        return len(self._study.get_trials(states=(self._states.COMPLETE,)))

    @property
    def best(self) -> Trial | None:
        """The best so far; None before any has a score."""
        if not self.scored:
            return None
        found = self._study.best_trial
        place = [trial.number for trial in self._over].index(found.number) + 1
        return Trial(place, self._values(found), found.user_attrs["scores"])

    def next(self) -> dict[Name, Any]:
        """The values to try now. The sampler is made anew, as what it draws may depend on finished trials alone."""
        number, samplers = len(self), self._optuna.samplers
        seed = rng.key("trial", number) % 2**32
        self._study.sampler = samplers.TPESampler(seed=seed) if self._sampler == "tpe" else samplers.RandomSampler(seed=seed)
        if self._sampler == "grid":
            self._study.enqueue_trial(grid(self._space)[number])
        self._in_hand = self._study.ask({".".join(name): self._distribution(values) for name, values in self._space.items()})
        return self._values(self._in_hand)

    def end(self, scores: Sequence[float]) -> None:
        """What the values scored with each seed; nothing where they gave no score, which counts as the worst."""
        if scores:
            self._in_hand.set_user_attr("scores", list(scores))
            self._study.tell(self._in_hand, summarise(scores).mean)
        else:
            self._study.tell(self._in_hand, state=self._states.PRUNED)

    @property
    def _over(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE, self._states.PRUNED)))

    def _values(self, trial: Any) -> dict[Name, Any]:
        return {name: _value(trial.params[".".join(name)], values) for name, values in self._space.items()}

    def _distribution(self, values: Range | Choice) -> Any:
        kinds = self._optuna.distributions
        if isinstance(values, Choice):
            return kinds.CategoricalDistribution(list(values.by_text))
        return (kinds.IntDistribution if values.whole else kinds.FloatDistribution)(values.low, values.high, log=values.log)


@contextmanager
def opened(file: Path, about: str, higher_is_better: bool, space: Space, sampler: Sampler) -> Iterator[Trials]:
    """The trials in a file, which are those of one search: `about` says which."""
    optuna = library()
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
        direction = "maximize" if higher_is_better else "minimize"
        study = optuna.create_study(storage=storage, study_name="gracecl", direction=direction, load_if_exists=True)
        known = study.user_attrs.get("about")
    except Exception as error:  # noqa: BLE001 (whatever the data base raises)
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"cannot use {file} ({reason}); delete it to search anew, which reuses the runs that are finished"
        ) from None
    try:
        if known is None:
            study.set_user_attr("about", about)
        elif known != about:
            raise UserError(f"{file.parent} holds another search; choose another --out, or continue that one with: {known}")
        yield Trials(optuna, study, space, sampler)
    finally:
        storage.remove_session()
        storage.engine.dispose()


def library() -> Any:
    """Optuna, which need not be installed."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError("gracecl tune needs optuna; install it with: pip install 'gracecl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def grid(space: Space) -> list[dict[str, str]]:
    """Every combination of listed values, by their texts."""
    listed = {}
    for name, values in space.items():
        if isinstance(values, Range):
            raise UserError(f"--sampler grid needs a list of values for {'.'.join(name)}, not {values}; list them, or leave it out")
        listed[".".join(name)] = list(values.by_text)
    return [dict(zip(listed, chosen, strict=True)) for chosen in itertools.product(*listed.values())]


def _value(found: Any, values: Range | Choice) -> Any:
    """As the option takes it; a number between two has as many digits as a person would write."""
    if isinstance(values, Choice):
        return values.by_text[found]
    return found if values.whole else min(max(float(f"{found:.{DIGITS}g}"), values.low), values.high)
