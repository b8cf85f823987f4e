"""Search for hyperparameters and write the best as a file of defaults.

A trial is some ordinary runs, one per seed, on a stream that holds the first tasks alone and evaluates on a share of their training
images (`first` and `validation` of the split stream). Runs are named by their configuration, so a trial that was stopped continues
in its middle. The best values so far, with where they come from, are in `defaults.toml`, which `--defaults` reads.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gracecl import __version__, streams
from gracecl.data import Data
from gracecl.data.dataset import chunks
from gracecl.engine.finite import REMEDY
from gracecl.errors import UserError
from gracecl.files import make_folder, write_text
from gracecl.functional.metrics import HIGHER_IS_BETTER
from gracecl.functional.statistics import Summary, summarise
from gracecl.inputs import TensorTree
from gracecl.lab import report
from gracecl.lab.defaults import SETTINGS
from gracecl.lab.defaults.write import as_toml
from gracecl.lab.report.command import as_typed, option_words
from gracecl.lab.report.groups import value_of
from gracecl.lab.report.tables import DECIMALS, spread_text
from gracecl.lab.runs.cluster import HERE, Cluster
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.lock import locked
from gracecl.lab.runs.run import Interrupted, RunConfig, Work, commit
from gracecl.lab.tuning import trials
from gracecl.lab.tuning.space import Space, Values, shown, with_values
from gracecl.lab.tuning.trials import Sampler, Trial, Trials
from gracecl.registry import spec
from gracecl.registry.spec import parse_numbers

TRIALS, DEFAULTS = "trials.json", "defaults.toml"


@dataclass(frozen=True)
class Search:
    """A search: its space, its part of the data, and its metric."""

    config: RunConfig
    """of the runs that the values are for, on the whole stream"""
    space: Space
    tasks: int
    """first ones that are used"""
    validation: float
    """share of their training images that is evaluated on"""
    seeds: tuple[int, ...]
    metric: str
    sampler: Sampler
    data_root: str | Path | None = None
    plugins: tuple[str, ...] = ()
    tune_on: str | None = None
    """another stream that trials see, whole and with its test images; None is the first tasks of the runs' own"""

    @property
    def stream(self) -> str:
        """The stream that trials see: another one, or a part of the runs' own."""
        if self.tune_on is not None:
            return self.tune_on
        whole = self.config.stream
        if not streams.takes(whole, "first"):
            raise UserError(
                f"'{whole}' has no first tasks that a search could use alone; search on a stream of other images: --tune-on STREAM"
            )
        if taken := spec.parse_call(whole).kwargs.keys() & {"first", "validation"}:
            raise UserError(f"'{whole}' gives {min(taken)}, which a search sets by --tasks and --validation; leave it out")
        return spec.with_option(spec.with_option(whole, "first", self.tasks), "validation", self.validation)

    @property
    def command(self) -> str:
        """What makes this search, but for the number of trials."""
        space = [f"{owner}.{option}={values}" for (owner, option), values in self.space.items()]
        part = {"tasks": self.tasks, "validation": self.validation} if self.tune_on is None else {"tune-on": self.tune_on}
        own = {**part, "seeds": ",".join(map(str, self.seeds))}
        own |= {"metric": self.metric, "sampler": self.sampler}
        told = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        options = [*option_words(asdict(self.config)), *self._plugin_words]
        return as_typed(["gracecl", "tune", self.config.method, "--space", *space, *told, *options])

    def use(self, method: str, file: Path) -> str:
        """Return the command that runs a method with the options found."""
        setting = {name: value for name, value in asdict(self.config).items() if name not in SETTINGS}
        return as_typed(["gracecl", "run", method, *option_words(setting, str(file)), *self._plugin_words])

    def works(self, values: Values, out: Path) -> list[Work]:
        """Return the runs of a trial."""
        config = replace(with_values(self.config, values), stream=self.stream)
        return [Work.new(replace(config, seed=seed), out, self.data_root, self.plugins) for seed in self.seeds]

    @property
    def _plugin_words(self) -> list[str]:
        return [word for plugin in self.plugins for word in ("--plugin", plugin)]

    def text(self, score: Summary) -> str:
        """Format a score: `acc 71.23 ± 0.80`."""
        return f"{self.metric} {spread_text(score, DECIMALS.get(self.metric, 2))}"


def tune(
    search: Search,
    out: Path,
    number: int,
    jobs: int | None = None,
    threads: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    cluster: Cluster = HERE,
) -> Trial:
    """Search until `number` trials are done, earlier attempts included, and return the best."""
    trials.library()
    if search.sampler == "grid":
        number = min(number, len(trials.grid(search.space)))
    data = data_of(search)
    make_folder(out)
    higher = HIGHER_IS_BETTER.get(search.metric, False)
    with locked(out):
        found = Trials(out / TRIALS, search.command, higher, search.space, search.sampler)
        began, before = time.monotonic(), len(found)
        while len(found) < number:
            values = found.next()
            works = search.works(values, out)
            try:
                finite = execute(works, jobs, threads, cluster)
            except Interrupted:
                raise Interrupted(f"stopped in trial {len(found) + 1} of {number}; continue with the same command") from None
            scores = [score_of(work, search.metric) for work in works] if finite else []
            found.end(scores)
            came_of_it = search.text(summarise(scores)) if scores else "its numbers did not stay finite"
            best = f"; best {search.text(found.best.score)} in trial {found.best.place}" if found.best else ""
            minutes = (time.monotonic() - began) / (len(found) - before) * (number - len(found)) / 60
            left = f"; ~{minutes:.0f} min left" if minutes >= 1 else ""
            say(f"trial {len(found)} of {number}: {shown(values)}: {came_of_it}{best}{left}")
            if found.best:
                write_text(out / DEFAULTS, result(search, found, found.best, data))
        if found.best is None:
            raise UserError("the numbers of no trial stayed finite; search smaller learning rates, or other options")
        write_text(out / DEFAULTS, result(search, found, found.best, data))
        return found.best


def execute(works: Sequence[Work], jobs: int | None, threads: int | None, cluster: Cluster) -> bool:
    """Execute the runs of a trial; return whether all values stayed finite. Raise any other error of a run."""
    try:
        reasons = [outcome.message for outcome in run_all(works, jobs, threads, cluster) if outcome.status != "finished"]
    except UserError as error:  # of a single run
        reasons = [str(error)]
    if others := [reason for reason in reasons if REMEDY not in reason]:
        raise UserError(others[0])
    return not reasons


def score_of(work: Work, metric: str) -> float:
    run = report.read_run(work.folder)
    value = value_of(run, metric, run.rule)
    if math.isnan(value):
        raise UserError(f"{run.title} has no {metric}; use more --tasks or another --metric")
    return value


def data_of(search: Search) -> dict[str, Any]:
    """Describe the part of the data that the search uses."""
    whole, part = (streams.build(stream, search.seeds[0], search.data_root) for stream in (search.config.stream, search.stream))
    if search.tune_on is not None:
        return {
            "stream": search.stream,
            "images": check_apart(search.config.stream, whole.data, search.tune_on, part.data),
            "training_images": len(part.data.train_y),
            "validation_images": len(part.data.test_y),
            "test_images": 0,
        }
    if search.tasks >= whole.tasks:
        raise UserError(
            f"--tasks {search.tasks} leaves none of the {whole.tasks} tasks of {search.config.stream} out; "
            f"a search uses the first ones alone, so choose at most {whole.tasks - 1}"
        )
    return {
        "stream": search.stream,
        "tasks_used": search.tasks,
        "tasks": whole.tasks,
        "training_images": len(part.data.train_y),
        "validation_images": len(part.data.test_y),
        "test_images": 0,
    }


def check_apart(use: str, of_use: Data, tune_on: str, of_tuning: Data) -> str:
    """Refuse streams that share images; return how they are related: another data set, or other classes of the same one."""
    (name, picked), (other, others) = streams.source_of(use), streams.source_of(tune_on)
    if name == other:
        if picked is None or others is None or _numbers(picked) & _numbers(others):
            raise UserError(
                f"--tune-on {tune_on} and {use} share images of {name}; tune on another data set, or on classes that the runs do "
                "not have: classes='0-9' for one and classes='10-19' for the other"
            )
        return "same source, other classes"
    if shared := digests(of_use) & digests(of_tuning):
        raise UserError(f"--tune-on {tune_on} and {use} share {len(shared):,} images; tune on another data set")
    return "another data set"


def _numbers(classes: str | Sequence[int]) -> set[int]:
    return set(parse_numbers(classes, "classes") if isinstance(classes, str) else classes)


def digests(data: Data) -> set[bytes]:
    """Return a digest of each training and test example; of the whole where an example has several parts."""
    if isinstance(data.train_x, TensorTree):
        return {data.fingerprint.encode()}
    return {
        hashlib.blake2b(repr(example.shape).encode() + np.ascontiguousarray(example).tobytes(), digest_size=16).digest()
        for images in (data.train_x, data.test_x)
        for part in chunks(images)
        for example in part
    }


def result(search: Search, found: Trials, best: Trial, data: dict[str, Any]) -> str:
    """Return the file of defaults: an entry for each method in the expression, with the provenance of the values."""
    config = with_values(search.config, best.values)
    where = (
        f"the held-out {search.validation:.0%} of the training images of the first {data['tasks_used']} of {data['tasks']} tasks"
        if search.tune_on is None
        else f"{search.tune_on} ({data['images']})"
    )
    source = f"gracecl tune: the best of {len(found)} trials, {search.text(best.score)} on {where}"
    provenance = {
        "command": search.command,
        "commit": commit() or "none",
        "versions": {"gracecl": __version__, "optuna": found.version},
        "trials": len(found),
        "trials_without_score": len(found) - found.scored,
        "best_trial": best.place,
        "metric": search.metric,
        "score": best.score.mean,
        "scores": list(best.scores),
        "values": {".".join(name): value for name, value in best.values.items()},
        "data": data,
    }
    return as_toml(
        config.method, config.stream, config.memory, {"optimizer": config.optimizer, "augment": config.augment}, source, provenance
    )
