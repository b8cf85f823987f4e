"""The trials of a search, saved in a file with a digest.

The values of a trial depend only on the finished trials, so a stopped search continues as if it had not been stopped: a new Optuna
study receives the file's trials.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gracecl import rng
from gracecl.errors import UserError
from gracecl.files import read_sealed, sealed, write_sealed
from gracecl.functional.statistics import Summary, summarise
from gracecl.lab.tuning.space import Choice, Name, Range, Space

Sampler = Literal["tpe", "random", "grid"]
DIGITS = 4
"""of a number between two that a trial tries"""


@dataclass(frozen=True)
class Trial:
    """The values of a trial and their score with each seed."""

    place: int
    """1 is the first"""
    values: dict[Name, Any]
    scores: Sequence[float]

    @property
    def score(self) -> Summary:
        return summarise(self.scores)


class Trials:
    """Trials in sequence: `values = next()`, then `end(scores)`, which saves them."""

    def __init__(self, file: Path, about: str, higher_is_better: bool, space: Space, sampler: Sampler) -> None:
        """Continue the search in a file; `about` identifies it."""
        optuna = library()
        self.version = str(optuna.__version__)
        self._optuna, self._file, self._about, self._space, self._sampler = optuna, file, about, space, sampler
        self._study = optuna.create_study(direction="maximize" if higher_is_better else "minimize")
        self._in_hand: Any = None
        self._over = _read(file, about)
        for trial in self._over:
            self._study.add_trial(self._as_optuna_has_it(**trial))

    def __len__(self) -> int:
        """Count finished trials, with a score or without."""
        return len(self._over)

    @property
    def scored(self) -> int:
        return sum(bool(trial["scores"]) for trial in self._over)

    @property
    def best(self) -> Trial | None:
        """The best so far; None before any has a score."""
        if not self.scored:
            return None
        number = self._study.best_trial.number
        return Trial(number + 1, self._values(self._over[number]["params"]), self._over[number]["scores"])

    def next(self) -> dict[Name, Any]:
        """Return the next values to try. The sampler is rebuilt, so that it depends on finished trials alone."""
        number, samplers = len(self), self._optuna.samplers
        seed = rng.key("trial", number) % 2**32
        self._study.sampler = samplers.TPESampler(seed=seed) if self._sampler == "tpe" else samplers.RandomSampler(seed=seed)
        if self._sampler == "grid":
            self._study.enqueue_trial(grid(self._space)[number])
        self._in_hand = self._study.ask(self._distributions)
        return self._values(self._in_hand.params)

    def end(self, scores: Sequence[float]) -> None:
        """Record the scores of each seed; no scores count as the worst."""
        self._over.append({"params": self._in_hand.params, "scores": list(scores)})
        write_sealed(self._file, {"about": self._about, "trials": self._over})
        if scores:
            self._study.tell(self._in_hand, summarise(scores).mean)
        else:
            self._study.tell(self._in_hand, state=self._optuna.trial.TrialState.PRUNED)

    @property
    def _distributions(self) -> dict[str, Any]:
        return {".".join(name): self._distribution(values) for name, values in self._space.items()}

    def _as_optuna_has_it(self, params: dict[str, Any], scores: Sequence[float]) -> Any:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=states.COMPLETE if scores else states.PRUNED,
            value=summarise(scores).mean if scores else None,
            params=params,
            distributions=self._distributions,
        )

    def _values(self, params: dict[str, Any]) -> dict[Name, Any]:
        return {name: _value(params[".".join(name)], values) for name, values in self._space.items()}

    def _distribution(self, values: Range | Choice) -> Any:
        kinds = self._optuna.distributions
        if isinstance(values, Choice):
            return kinds.CategoricalDistribution(list(values.by_text))
        return (kinds.IntDistribution if values.whole else kinds.FloatDistribution)(values.low, values.high, log=values.log)


def _read(file: Path, about: str) -> list[dict[str, Any]]:
    """Read the finished trials from a file that `write_sealed` wrote; none if it does not exist."""
    try:
        content = read_sealed(file)
        if file.read_text(encoding="utf-8") != sealed(content) or content.keys() != {"about", "trials"}:
            raise UserError(f"{file} is damaged: it is not what a search wrote")
    except FileNotFoundError:
        return []
    except (UserError, UnicodeDecodeError, OSError) as error:
        reason = str(error).removesuffix("; put the old value back")
        raise UserError(f"{reason}; delete {file} to search anew, which reuses the runs that are finished") from None
    if content["about"] != about:
        raise UserError(f"{file.parent} holds another search; choose another --out, or continue that one with: {content['about']}")
    return list(content["trials"])


def library() -> Any:
    """Import Optuna, or say how to install it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError("gracecl tune needs optuna; install it with: pip install 'gracecl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def grid(space: Space) -> list[dict[str, str]]:
    """Return every combination of listed values, by their texts."""
    listed = {}
    for name, values in space.items():
        if isinstance(values, Range):
            raise UserError(f"--sampler grid needs a list of values for {'.'.join(name)}, not {values}; list them, or leave it out")
        listed[".".join(name)] = list(values.by_text)
    return [dict(zip(listed, chosen, strict=True)) for chosen in itertools.product(*listed.values())]


def _value(found: Any, values: Range | Choice) -> Any:
    """Convert to the option's type; round a sampled number to the digits that a person would write."""
    if isinstance(values, Choice):
        return values.by_text[found]
    return found if values.whole else min(max(float(f"{found:.{DIGITS}g}"), values.low), values.high)
