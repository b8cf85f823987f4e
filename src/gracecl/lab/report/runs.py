"""Read runs from their folders, or from lines of a study's `runs.jsonl`.

The recorder appends to `metrics.jsonl` and may be killed at any byte, so a last line that is cut short is dropped;
anything else that cannot be read is an error, because a report over half the evidence would look like a result.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gracecl.engine.footprint import bytes_in
from gracecl.errors import UserError
from gracecl.files import Written, check_format, noted_in, parse_json, read_file, read_note, read_sealed, sizes_in
from gracecl.functional.metrics import ANYTIME_METRICS, BINS, MATRIX_METRICS, Array, aaa, seen_rows
from gracecl.functional.prequential import Prequential
from gracecl.lab.report import measures
from gracecl.lab.report.kept import KEPT, KeptRun, find_line, find_lines, in_order
from gracecl.registry.options import run_name

Record = dict[str, Any]

CONFIG, RECORD, SUMMARY, TIMING = "config.json", "metrics.jsonl", "summary.json", "timing.json"
MATRICES = "accuracy.json"
CHECKPOINT = "checkpoint.safetensors"
LEFT_BY_RUNS = (RECORD, SUMMARY, CHECKPOINT)
"""files that mark a folder as a run's even if its configuration is lost"""
RUN_FORMAT = 1
"""of a run's folder, noted in config.json; folders without a note are of format 1"""
IMPORTED = "imported"
"""the folder of imported results, in place of a configuration's hash"""
PUT_BACK = "put it back from a copy, or delete the run's folder and run it again"
Place = Path | KeptRun
"""where a run is: its folder, or a line of a file"""
REQUIRED_SETTINGS = ("method", "stream", "seed", "rule")
REQUIRED_FIELDS = {
    "step": ("step", "task", "rows"),
    "eval": ("step", "task", "task_end", "accuracy"),
    "task": ("step", "task", "values"),
    "prequential": ("step", "labels", "predictions"),
    "near_future": ("step", "shift", "labels", "predictions"),
    "confusion": ("step", "counts"),
}
"""required fields of each kind of record; other kinds are skipped"""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62)


def _or_nothing(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _are_numbers(value: Any) -> bool:
    """True for `{name: number or null}`."""
    return isinstance(value, dict) and all(map(_or_nothing(_is_number), value.values()))


def _are_rows(value: Any) -> bool:
    """True for `{name: [number or null, …]}`."""
    lists = list(value.values()) if isinstance(value, dict) else [None]
    return all(isinstance(row, list) and row and all(map(_or_nothing(_is_number), row)) for row in lists)


def _are_all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of `[value, …]`, one for each image."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_table(value: Any, fits: Callable[[Any], bool], *shape: int | None) -> bool:
    """True for nested lists of this shape, in which None is any length."""
    if not shape:
        return fits(value)
    fitting = isinstance(value, list) and shape[0] in (None, len(value))
    return fitting and all(_is_table(part, fits, *shape[1:]) for part in value)


def _is_calibration(value: Any) -> bool:
    """True for the sums of an evaluation: tables of bins, and two numbers, of each task."""
    if not isinstance(value, dict) or not {"bins", "nll", "brier"} <= value.keys():
        return False
    tasks = len(value["bins"]) if isinstance(value["bins"], list) else None
    return _is_table(value["bins"], _is_number, tasks, 3, BINS) and all(
        _is_table(value[name], _is_number, tasks) for name in ("nll", "brier")
    )


FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_whole,
    "task": _is_whole,
    "task_end": lambda value: isinstance(value, bool),
    "regular": lambda value: isinstance(value, bool),
    "rows": _are_rows,
    "accuracy": _are_rows,
    "values": _are_rows,
    "ece": _are_numbers,
    "nll": _are_numbers,
    "brier": _are_numbers,
    "next_task": _are_numbers,
    "task_found": _are_rows,
    "task_images": _are_all(_is_whole),
    "calibration": _is_calibration,
    "counts": lambda value: _is_table(value, _is_whole, None, 3),
    "shift": _is_whole,
    "labels": _are_all(_is_whole),
    "predictions": _are_all(_is_whole),
    "confidence": _are_all(_is_number),
    "probability": _are_all(_is_number),
}
"""checks of a record's fields"""
PER_IMAGE = {"labels": "label", "predictions": "prediction", "confidence": "confidence", "probability": "probability"}
"""fields with one value for each image of a batch, and what one of them is called"""
SETTINGS: dict[str, Callable[[Any], bool]] = {
    "method": _is_text,
    "stream": _is_text,
    "seed": _is_whole,
    "rule": _is_text,
    "tasks": _or_nothing(_is_whole),
    "memory": _or_nothing(_is_whole),
    "parameters": _or_nothing(_is_whole),
    "stream_hash": _or_nothing(_is_text),
}
"""types of the settings that a report reads"""


@dataclass(repr=False)
class Run:
    """A recorded run: its settings, and its records in the order of steps."""

    path: Path
    config: Record
    steps: list[Record]
    evals: list[Record]
    tasks: list[Record]
    timing: Record
    plugins: list[str] = field(default_factory=list)
    """modules and files that register what the run uses, as it noted them"""
    record: Written | None = None
    """what a finished run recorded"""
    finished: bool = False
    """whether it came to its end: see `is_finished`"""
    prequential: list[Record] = field(default_factory=list)
    """what was predicted for the batch of each step before it was learned"""
    near_future: list[Record] = field(default_factory=list)
    """what was predicted at each step for the batch `shift` steps later"""
    confusion: list[Record] = field(default_factory=list)
    """`counts` of the last evaluation: class, predicted class, number of images"""
    joint: Run | None = None
    """a joint run on the same stream, among those read together with this one"""

    def __repr__(self) -> str:
        return f"Run({self.title}: {len(self.steps)} steps and {len(self.evals)} evaluations in {self.path})"

    @property
    def rule(self) -> str:
        """The headline inference rule: the one the run's method predicts with."""
        return str(self.config["rule"])

    @property
    def title(self) -> str:
        return f"{self.config['method']} on {self.config['stream']}, seed {self.config['seed']}"

    def rules(self) -> list[str]:
        """List every evaluated rule, taps included, in the order recorded."""
        return list(dict.fromkeys(rule for record in self.evals for rule in record["accuracy"]))

    def matrix(self, rule: str) -> Array:
        """Return a[t, j]: accuracy on task j after task t, NaN where absent, for the tasks that have ended."""
        self._check(rule)
        ends = [record for record in self.evals if record["task_end"] and rule in record["accuracy"]]
        size = max((record["task"] + 1 for record in ends), default=0)
        a = np.full((size, size), np.nan)
        for record in ends:
            row = _numbers(record["accuracy"][rule])[:size]
            a[record["task"], : len(row)] = row
        return a

    def matrices(self) -> dict[str, list[list[float]]]:
        """Return the matrices of all rules as lists."""
        return {rule: self.matrix(rule).tolist() for rule in self.rules()}

    def seen(self, rule: str) -> tuple[list[int], list[Array]]:
        """Return steps, and at each the accuracies on the tasks seen by then (any-time and task-end evaluations)."""
        self._check(rule)
        chosen = [record for record in self.evals if rule in record["accuracy"]]
        rows = [_numbers(record["accuracy"][rule])[: record["task"] + 1] for record in chosen]
        return [record["step"] for record in chosen], rows

    def series(self, row: str) -> tuple[npt.NDArray[np.int64], Array, npt.NDArray[np.int64]]:
        """Return steps [S], values [S, layers] and tasks [S] of a recorded term; empty if the run lacks it."""
        chosen = [record for record in self.steps if row in record["rows"]]
        steps = np.array([record["step"] for record in chosen], dtype=np.int64)
        tasks = np.array([record["task"] for record in chosen], dtype=np.int64)
        width = max((len(record["rows"][row]) for record in chosen), default=0)
        values = np.full((len(chosen), width), np.nan)
        for index, record in enumerate(chosen):
            numbers = _numbers(record["rows"][row])
            values[index, : len(numbers)] = numbers
        return steps, values, tasks

    def term_names(self, *, observed: bool) -> list[str]:
        """List the recorded terms: observations (`log/…`), or else the losses."""
        names = dict.fromkeys(name for record in self.steps for name in record["rows"])
        return [name for name in names if name.startswith("log/") == observed]

    @property
    def task_ends(self) -> list[int]:
        """The last step of each task."""
        return [record["step"] for record in self.evals if record["task_end"]]

    @property
    def length(self) -> int:
        """Number of steps of the stream, or of those recorded if the run does not say."""
        recorded = max((record["step"] for record in [*self.steps, *self.evals]), default=-1) + 1
        return int(self.timing.get("steps") or recorded)

    @cached_property
    def predicted(self) -> Prequential:
        """Labels and predictions of the stream's images, each made before it was learned."""
        return Prequential.of(self.prequential)

    @cached_property
    def of_predictions(self) -> dict[str, float]:
        """Metrics of what was predicted before it was learned."""
        return measures.of_predictions(self)

    @property
    def dense(self) -> set[int]:
        """Steps with an evaluation that is there only to follow those after a mark."""
        return {record["step"] for record in self.evals if not (record["task_end"] or record.get("regular", True))}

    def _check(self, rule: str) -> None:
        if self.evals and rule not in self.rules():
            raise UserError(f"{self.path} was not evaluated with the rule '{rule}'; it has {', '.join(self.rules())}")


def is_tap(rule: str) -> bool:
    """True for the rule of a single tap (`ncm_3`), False for `ncm_mean` and `linear_last`."""
    return rule.rpartition("_")[2].isdigit()


def measure(run: Run, rule: str) -> dict[str, float]:
    """Compute every metric of a run under one rule; those of predictions and of a joint run under the run's own."""
    matrix, (steps, rows) = run.matrix(rule), run.seen(rule)
    values = {name: metric(matrix) for name, metric in MATRIX_METRICS.items()}
    values |= {name: metric(rows) for name, metric in ANYTIME_METRICS.items()}
    if np.isnan(matrix).all(axis=0).any():
        values = dict.fromkeys(values, math.nan) | _averages_of_what_was_tested(matrix, rows)
    elif run.dense:  # its many evaluations after a mark would count for more than the time they are about
        values["aaa"] = aaa([row for step, row in zip(steps, rows, strict=True) if step not in run.dense])
    values |= measures.of_evaluations(run, rule)
    if rule == run.rule:
        values |= run.of_predictions | measures.of_boundaries(run)
        if run.joint is not None:
            values["intransigence"] = measures.intransigence(run, rule)
    return values


def _averages_of_what_was_tested(matrix: Array, rows: list[Array]) -> dict[str, float]:
    """Compute the metrics that average over tasks, on tasks with test images; the others need every task tested."""

    def tested(evaluations: Iterable[Array]) -> list[Array]:
        return [row[~np.isnan(row)] for row in evaluations if not np.isnan(row).all()]

    # `aia` first: an empty list of evaluations has no last row.
    after_tasks = tested(seen_rows(matrix))
    return {"aia": aaa(after_tasks), "aaa": aaa(tested(rows)), "acc": aaa(after_tasks[-1:])}


def summary(run: Run) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    rules = run.rules()
    return {
        "run": run_name(run.config),
        "method": run.config["method"],
        "stream": run.config["stream"],
        "seed": run.config["seed"],
        "rule": run.rule,
        "finished": run.finished,
        "steps": run.length,
        "metrics": {rule: measure(run, rule) for rule in rules if not is_tap(rule)},
        "per_tap": {rule: measure(run, rule) for rule in rules if is_tap(rule)},
        **({"gaps": gaps} if run.evals and (gaps := measures.gap_rows(run, run.rule)) else {}),
        **({"boundaries": rows} if (rows := measures.boundary_rows(run)) else {}),
    }


def read_run(path: str | Place, record: Written | None = None) -> Run:
    """Read a run from its folder, whose files must belong together, or from a line of `runs.jsonl`.

    The configuration must be that of the folder, and every file must be of this configuration. The record must be the one that is
    given, or else the one that the run was finished with.
    """
    if isinstance(path, KeptRun):
        return _read_line(path)
    folder = Path(path)
    if line := line_for(folder):
        return _read_line(line)
    config = read_config(folder)
    if record is None:
        record = _record_of(folder, config)
    if record and record != Written.to(folder / RECORD):
        raise UserError(f"{folder / RECORD} is not the record that the run wrote; {PUT_BACK}")
    records = _read_records(folder / RECORD)
    timing = read_sealed(folder / TIMING) if (folder / TIMING).is_file() else {}
    plugins = read_note(folder / "plugins").splitlines()
    return _assembled(folder, folder / TIMING, config, records, timing, plugins, record, is_finished(folder))


def line_for(folder: Path) -> KeptRun | None:
    """Return the kept line of a folder's run; None where the folder itself holds files of it."""
    return None if any(_holds(folder / name) for name in (CONFIG, *LEFT_BY_RUNS)) else find_line(folder)


def _read_line(line: KeptRun) -> Run:
    parts = line.read()
    _check_config(line.path, line, parts["config"])
    _check_owner(line, parts["summary"], parts["config"])
    records = [record for entry in parts["record"] if (record := _checked_record(entry, f"an entry of {line}"))]
    written = Written.of(parts["summary"].get("record"))
    return _assembled(line.path, line, parts["config"], records, parts["timing"], [], written, finished=True)


def _assembled(
    path: Path,
    source: Path | KeptRun,
    config: Record,
    records: list[Record],
    timing: Record,
    plugins: list[str],
    record: Written | None,
    finished: bool,
) -> Run:
    """Assemble a run from its parts; `source` is where its timing comes from."""
    _check_owner(source, timing, config)
    timing.pop("run", None)
    if "bytes" not in timing and finished and (state := sizes_in(path / CHECKPOINT, "trainer")):
        timing = timing | bytes_in(state["engine"])
    if not _are_numbers(timing):
        raise UserError(f"{source} is damaged: it holds other things than numbers")

    def of_kind(kind: str) -> list[Record]:
        return _by_step(record for record in records if record["kind"] == kind)

    return Run(
        path=path,
        config=config,
        steps=of_kind("step"),
        evals=of_kind("eval"),
        tasks=of_kind("task"),
        prequential=of_kind("prequential"),
        near_future=of_kind("near_future"),
        confusion=of_kind("confusion"),
        timing=timing,
        plugins=plugins,
        record=record,
        finished=finished,
    )


def read_config(folder: Path) -> Record:
    """Read the configuration of the run in a folder, or kept under that folder's name."""
    if line := line_for(folder):
        return _read_line(line).config
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(without_config(folder))
    config = read_sealed(file)
    _check_config(folder, file, config)
    return config


def _check_config(folder: Path, file: Path | KeptRun, config: Record) -> None:
    if missing := [name for name in REQUIRED_SETTINGS if name not in config]:
        raise UserError(f"{file} is not a run's: it lacks {', '.join(missing)}")
    if wrong := [name for name, fits in SETTINGS.items() if name in config and not fits(config[name])]:
        raise UserError(f"{file} is damaged: its {wrong[0]} is {config[wrong[0]]!r}")
    check_format(config.get("format", 1), RUN_FORMAT, Path(str(file)), "leave this run out")
    check_folder_name(folder, config)


def without_config(folder: Path) -> str:
    """Return the error for a folder without config.json: a run whose configuration is lost, or no run."""
    if left := [name for name in LEFT_BY_RUNS if _holds(folder / name)]:
        return f"{folder} has no {CONFIG} beside its {left[0]}; {remedy_for_config(folder)}"
    if line_for(folder) or find_lines(folder):
        return f"the runs in {folder} are finished and kept in {KEPT} without their weights: nothing can be continued or exported"
    return f"{folder} holds no run (no {CONFIG}); give the folder that 'gracecl run' printed"


def remedy_for_config(folder: Path) -> str:
    """Return how to restore config.json: an unfinished run writes it again, a finished one does not."""
    return PUT_BACK if _holds(folder / SUMMARY) else "the run's own 'gracecl run' command, given again, writes it anew"


def check_folder_name(folder: Path, config: Record) -> None:
    """Refuse a configuration in a folder that is named after another one.

    A run's folder is `<hash>/<seed>`, an imported one `imported/<seed>`. Whoever moves it to a folder of another kind of name gives
    this up; what the run's files say of themselves is compared all the same.
    """
    place = folder.resolve()
    digest, _, seed = run_name(config).partition("/")
    named = IMPORTED if "imported_from" in config and place.parent.name == IMPORTED else digest
    promised = place.parent.name == named or re.fullmatch("[0-9a-f]{8}", place.parent.name)
    if promised and (place.parent.name, place.name) != (named, seed):
        raise UserError(
            f"{folder / CONFIG} is not the configuration of its folder, which would be called {named}/{seed}: a setting was "
            "changed by hand, or the file is another run's; put the run's own back"
        )


def _record_of(folder: Path, config: Record) -> Written | None:
    """What a run's record must be: as `summary.json` says, or of a run without one as its checkpoint does. None if neither can."""
    if (folder / SUMMARY).is_file():
        told = read_sealed(folder / SUMMARY)
        if "metrics" not in told:
            raise UserError(f"{folder / SUMMARY} is damaged: it holds no metrics")
        _check_owner(folder / SUMMARY, told, config)
        if not (folder / TIMING).is_file():
            raise UserError(f"{folder} has no {TIMING} beside its {SUMMARY}; {PUT_BACK}")
        return Written.of(told.get("record"))
    noted = noted_in(folder / CHECKPOINT)
    if noted:
        _check_owner(folder / CHECKPOINT, noted["config"] | {"run": run_name(noted["config"])}, config)
    if kept := Written.of(noted.get("record")):
        kept.check(folder / RECORD)  # it may have gone on since
    return None


def _check_owner(file: Path | KeptRun, told: Record, config: Record) -> None:
    """Refuse a file that names another run. Older files name none."""
    own = {**{name: config[name] for name in REQUIRED_SETTINGS}, "run": run_name(config)}
    for name, value in own.items():
        if told.get(name, value) != value:
            raise UserError(
                f"{file} is another run's: its {name} is {told[name]!r}, and that of the {CONFIG} beside it {value!r}; {PUT_BACK}"
            )


def read_runs(places: Iterable[Place]) -> tuple[list[Run], list[str]]:
    """Read runs, which then know their joint run; return those that can be read and a sentence about each of the others."""
    runs, damaged = [], []
    for place in places:
        try:
            runs.append(read_run(place))
        except UserError as error:
            damaged.append(str(error))
    measures.link_joint(runs)
    return runs, damaged


def find_places(root: str | Path) -> list[Place]:
    """The runs in `root` and below that have something to report, and those that a study in `root` took over from others; by
    configuration and seed."""
    begun = [*find_begun(root), *taken_over(Path(root))]
    folders = [folder for folder in begun if any((folder / name).is_file() for name in LEFT_BY_RUNS)]
    lines = [*find_lines(Path(root)), *(line for folder in begun if (line := line_for(folder)))]
    return _each_once(folders, lines)


def find_any(root: str | Path) -> list[Place]:
    """Find every run in `root` and below, reportable or not."""
    return _each_once(find_begun(root), find_lines(Path(root)))


def _each_once(folders: Iterable[Path], lines: Iterable[KeptRun]) -> list[Place]:
    """Read a run from its folder where that exists, else from its line. A line without a run's name stands for
    itself.
    """
    places: dict[Path, Place] = {line.path if line.folder else line.file / str(line.number): line for line in lines}
    places |= {folder: folder for folder in folders}
    return [places[path] for path in in_order(places)]


def find_begun(root: str | Path) -> list[Path]:
    """Find folders in `root` and below with a run's configuration, or with files of a run whose configuration is
    lost.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    places = [Path(at) for at, _, names in os.walk(folder) if not {CONFIG, *LEFT_BY_RUNS}.isdisjoint(names)]
    # What an import that was killed had written by then is no run.
    places = [at for at in places if not any(part.endswith(".part") for part in at.relative_to(folder).parts)]
    # A run that is just beginning has an empty record before it has a configuration.
    return in_order(at for at in places if (at / CONFIG).is_file() or any(_holds(at / name) for name in LEFT_BY_RUNS))


def _holds(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def taken_over(folder: Path) -> set[Path]:
    """Find runs elsewhere that the page of a study in this folder uses."""
    found = set()
    for file in folder.glob("*.json"):
        with suppress(OSError, ValueError, UserError):
            match parse_json(read_file(file)):
                case {"study": _, "taken_over": list(places)}:
                    found |= {Path(os.path.normpath(folder / place)) for place in places if isinstance(place, str)}
    return found


def find_runs(root: str | Path, damaged: list[str] | None = None) -> list[Run]:
    """Read every run in `root` and below, by folder and seed; collect errors in `damaged`, or raise them without it.

    Runs know the joint run on the same stream, if there is one.
    """
    if damaged is None:
        runs = list(map(read_run, find_places(root)))
        measures.link_joint(runs)
        return runs
    runs, sentences = read_runs(find_places(root))
    damaged += sentences
    return runs


def is_finished(folder: Path) -> bool:
    """Whether a run came to its end: the last thing that it writes is its summary."""
    return read_summary(folder) is not None


def read_summary(folder: Path) -> Record | None:
    """Read a finished run's summary.json; None if the run is unfinished or stopped while writing it."""
    try:
        line = line_for(folder)
        found = line.read()["summary"] if line else read_sealed(folder / SUMMARY)
    except (OSError, UserError):
        return None
    return found if "metrics" in found else None


def _by_step(records: Iterable[Record]) -> list[Record]:
    """One record per step. A later line replaces an earlier one (a resumed run writes its steps again), except that an
    any-time evaluation does not replace the evaluation at the end of a task."""
    kept: dict[int, Record] = {}
    for record in records:
        earlier = kept.get(record["step"], {})
        if record.get("task_end", True) or not earlier.get("task_end", False):
            kept[record["step"]] = record
    return [kept[step] for step in sorted(kept)]


def _read_records(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            if number == len(lines):  # no newline after it: the writer was killed here
                break
            raise UserError(f"line {number} of {path} is damaged; put it back from a copy, or delete the run's folder") from None
        if checked := _checked_record(record, f"line {number} of {path}"):
            records.append(checked)
    return records


def _checked_record(record: Any, source: str) -> Record | None:
    """Return a record with all fields of its kind; None if the kind is unknown."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if not (isinstance(kind, str) and kind in REQUIRED_FIELDS):
        return None
    whole = all(name in record for name in REQUIRED_FIELDS[kind]) and all(
        fits(record[name]) for name, fits in FIELDS.items() if name in record
    )
    sizes = {len(record[name]) for name in PER_IMAGE if name in record} if whole else set()
    if not whole or len(sizes) > 1 or (kind == "eval" and record["task"] < 0):
        raise UserError(
            f"{source} is no {kind} record: it needs {', '.join(REQUIRED_FIELDS[kind])}; resume the run or delete its folder"
        )
    return dict(record)


def _numbers(values: list[float | None]) -> Array:
    """Convert a JSON list to numbers, null to NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
