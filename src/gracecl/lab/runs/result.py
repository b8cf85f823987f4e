"""A run from Python or a notebook: options by name in, results out."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gracecl.engine.live import Live
from gracecl.engine.loop import Callbacks
from gracecl.errors import UserError
from gracecl.files import as_path
from gracecl.functional.metrics import Array, Ints
from gracecl.functional.prequential import Prequential
from gracecl.lab import defaults as published
from gracecl.lab import report
from gracecl.lab.report.frames import evaluation_rows, frame, prediction_rows, step_rows
from gracecl.lab.report.measures import calibration_rows, gap_rows, retention_curve
from gracecl.lab.report.runs import measure
from gracecl.lab.report.tables import run_table
from gracecl.lab.runs import logs
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from gracecl.lab.runs.watch import LiveWatch, Watch
from gracecl.machine import check_threads
from gracecl.methods.base import Method
from gracecl.registry import nearest
from gracecl.registry.options import RunOptions, by_name, takes
from gracecl.registry.plugins import in_use
from gracecl.registry.spec import with_option
from gracecl.streams import Stream
from gracecl.terminal import print_err


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Results of a run under one inference rule: the method's own, or another by `under`."""

    config: RunConfig
    """what was asked for"""
    record: report.Run
    """everything that was recorded"""
    folder: Path | None
    """where it is; None if nothing was kept"""
    rule: str
    stopped: str | None = None
    """where and why a callback stopped the run; None if it came to its end"""

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """Read the result in a run's folder."""
        record = report.read_run(as_path(folder, "folder"))
        work = Work.begun(record.path)
        return cls(work.config, record, record.path, record.rule, work.stopped)

    def under(self, rule: str) -> Result:
        """Return the same run under another of its rules."""
        if not isinstance(rule, str) or rule not in self.rules:
            raise UserError(f"unknown rule '{rule}'{nearest(str(rule), self.rules)} (this run has: {', '.join(self.rules)})")
        return replace(self, rule=rule)

    @property
    def rules(self) -> list[str]:
        """Every rule that was evaluated."""
        return self.record.rules()

    @property
    def accuracy(self) -> Array:
        """Return a[t, j], the percentage right on task j after task t, NaN where it was not evaluated."""
        return self.record.matrix(self.rule)

    @property
    def metrics(self) -> dict[str, float]:
        """`acc`, `aia`, `forgetting` and the others, by name; `gracecl.functional.metrics` has their definitions.

        NaN is what cannot be computed: where tasks have no test images, all but `acc`, `aia` and `aaa`, which are of those that do.
        """
        return measure(self.record, self.rule)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A row for each evaluation, rule and task."""
        return evaluation_rows(self.record)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """A row for each step, recorded term and tapped layer, counted from 1."""
        return step_rows(self.record)

    @property
    def prequential(self) -> Prequential:
        """What was predicted for the stream's images before they were learned (`prequential=True`)."""
        return self.record.predicted

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """A row for each image that was predicted before it was learned, in its step or `ahead` of it."""
        return prediction_rows(self.record)

    @property
    def gaps(self) -> list[dict[str, Any]]:
        """The stability gap of each old task at each boundary, if there were evaluations in between."""
        return gap_rows(self.record, self.rule)

    @property
    def calibration(self) -> list[dict[str, Any]]:
        """ECE, NLL and Brier score of the method's own rule at each mark, by task and of all (`task` None)."""
        return calibration_rows(self.record)

    @property
    def retention(self) -> Array:
        """Percent right by the last model on the test images of the newest task, of the newest two, …, of all."""
        return retention_curve(self.record, self.rule)

    @property
    def confusion(self) -> Ints:
        """[classes, classes] how many test images of each class (row) were taken for each class at the end."""
        counts = np.zeros((self.record.config["classes"],) * 2, np.int64)
        for label, predicted, images in (row for found in self.record.confusion[-1:] for row in found["counts"]):
            counts[label, predicted] = images
        return counts

    def to_pandas(self, what: Literal["evaluations", "steps", "predictions", "gaps", "calibration"] = "evaluations") -> Any:
        """Return the evaluations, or one of the other tables, as a pandas DataFrame."""
        known = ("evaluations", "steps", "predictions", "gaps", "calibration")
        if what not in known:
            raise UserError(f"a result has the tables {', '.join(known)}, not '{what}'")
        return frame(getattr(self, what))

    def _repr_html_(self) -> str:
        return run_table(self.record).to_html()

    def __repr__(self) -> str:
        metrics = self.metrics
        parts = [
            f"{name} {metrics[name]:.1f}{unit}" if math.isfinite(metrics[name]) else f"no {name}"
            for name, unit in {"acc": " %", "forgetting": ""}.items()
        ]
        found = f"{', '.join(parts)} under {self.rule}, {len(self.accuracy)} tasks"
        stopped = f", stopped {self.stopped}" if self.stopped else ""
        return f"Result({self.record.title}: {found}{stopped})\n  {self.folder or 'no folder was kept'}"


@takes(RunOptions)
def run(
    method: str | Method = "grace",
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    defaults: str = published.DEFAULT,
    epochs: int | None = None,
    plugins: Sequence[str] = (),
    threads: int | None = None,
    progress: bool = False,
    log: str | Sequence[str] = (),
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Result:
    """Train a method on a stream to its end, as the command `gracecl run` does, and return what it found.

    >>> result = gracecl.run("er", stream="split-digits(tasks=5)", memory=100, net="mlp", seed=1)
    >>> result.accuracy, result.metrics["acc"]

    A run in the folder `out` continues where it was when it is called again; without one nothing is kept but the result. `data` is
    the folder of the data sets, `defaults` the set of published values for options left open, `epochs` the passes over each task,
    `plugins` are modules or files that register what the run uses. With `progress` it shows what the command shows, else nothing.
    `log` is "tensorboard", "wandb", "mlflow" or some of them: views that show the run while it goes on, with files in `out`.
    `callbacks` are called between steps and may stop the run (see `gracecl.Callback`): the result is then that of the steps made,
    `result.stopped` says where and why, and a run in `out` continues when it is called again or resumed.
    """
    listening = Callbacks(callbacks)
    views = _words(log, "log", 'one of "tensorboard", "wandb", "mlflow" or a list of them')
    modules = _words(plugins, "plugins", "a list of modules or files")
    for name, place in {"out": out, "data": data}.items():
        if place is not None:
            as_path(place, name)
    if not isinstance(defaults, str):
        raise UserError(f"defaults is the name of a set of values or a file, not a {type(defaults).__name__}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise UserError(f"threads is a whole number, not {threads!r}")
    if threads is not None:
        check_threads(threads)
    if views and out is None:
        raise UserError(f"log={log!r} shows a run that is kept; give out=FOLDER too")
    with in_use(modules) as code:
        texts, live = Live.take({"method": method, **options}, weights=True)
        config, taken = configuration(texts.pop("method"), defaults, epochs, **texts)
    if progress and taken:
        print_err(taken)
    with tempfile.TemporaryDirectory(prefix="gracecl-") if out is None else nullcontext(out) as place:
        root = Path(place).expanduser()
        work = Work.new(config, root, data, code.names, live)
        try:
            with logs.logging([work], root, views):
                folder = work.run(LiveWatch() if progress else Watch(), threads, listening)
        except Interrupted:
            if out is not None:
                raise
            raise Interrupted("stopped, and nothing was kept; with out=FOLDER a run continues when it is called again") from None
        result = Result.read(folder)
    return replace(result, folder=None) if out is None else result


def _words(given: Any, name: str, what: str) -> list[str]:
    """Return one word or several as a list."""
    words = [given] if isinstance(given, str | Path) else given
    if not isinstance(words, Sequence) or not all(isinstance(word, str | Path) for word in words):
        raise UserError(f"{name} is {what}, not a {type(given).__name__}")
    return list(map(str, words))


def configuration(
    method: str, defaults: str = published.DEFAULT, epochs: int | None = None, **options: Any
) -> tuple[RunConfig, str]:
    """Build a configuration from options by name, completed from a set of published values; also return what was
    taken, in a line.

    An option that is None is one not given.
    """
    given = by_name(RunOptions, not_none(options), list(inspect.signature(run).parameters), "a run")
    if isinstance(given.get("stream"), Stream):
        raise UserError("a run takes the expression of a stream, such as 'split-digits(tasks=5)'; Learner.fit learns from a Stream")
    config = RunConfig(method, **given)
    if epochs is not None:
        config = replace(config, stream=with_option(config.stream, "epochs", epochs))
    settings = {name: options.get(name) for name in published.SETTINGS}
    found = published.resolve(config.method, config.stream, config.memory, **settings, defaults=defaults)
    settings = {name: getattr(found, name) for name in published.SETTINGS}
    return replace(config, method=found.method, tuned_on=found.tuned_on, **not_none(settings)), found.taken


def not_none(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
