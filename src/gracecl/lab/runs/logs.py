"""Show runs in experiment trackers while they go on: TensorBoard, Weights & Biases, MLflow.

A thread of the command reads what the runs append to their records and hands it to the trackers; the runs themselves do not know.
A resumed run writes its last steps again; a note in its folder says how far it was logged, and where.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.errors import UserError
from gracecl.files import read_sealed, write_json
from gracecl.lab.report.runs import RECORD, SUMMARY
from gracecl.lab.runs.run import Work
from gracecl.terminal import print_err

NEEDED = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
SECONDS_BETWEEN_LOOKS = 2.0
Scalars = dict[str, float]


class Tracker:
    """A run in an experiment tracker."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], known_as: str | None) -> None:
        """Open the run in the tracker; `place` holds all runs, `known_as` is its id there from an earlier attempt."""
        self.known_as = known_as

    def scalars(self, step: int, values: Scalars) -> None:
        raise NotImplementedError

    def image(self, name: str, step: int, file: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in `<out>/tensorboard`, for `tensorboard --logdir`."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], known_as: str | None) -> None:
        super().__init__(place, name, config, known_as)
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer = module.SummaryWriter(str(place / "tensorboard" / name))
        if known_as is None:
            rows = "\n".join(f"| {key} | `{value}` |" for key, value in config.items())
            self.writer.add_text("configuration", f"| option | value |\n|---|---|\n{rows}")
        self.known_as = name

    def scalars(self, step: int, values: Scalars) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def image(self, name: str, step: int, file: Path) -> None:
        from PIL import Image

        self.writer.add_image(name, np.asarray(Image.open(file).convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in `<out>/wandb` until `wandb sync`."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], known_as: str | None) -> None:
        super().__init__(place, name, config, known_as)
        self.module = importlib.import_module("wandb")
        place.mkdir(parents=True, exist_ok=True)
        self.run = self.module.init(
            project="gracecl", name=name, config=config, dir=str(place), id=known_as, resume="allow", reinit="create_new"
        )
        self.known_as = str(self.run.id)

    def scalars(self, step: int, values: Scalars) -> None:
        self.run.log(values, step=step)

    def image(self, name: str, step: int, file: Path) -> None:
        self.run.log({name: self.module.Image(str(file))}, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow(Tracker):
    """A run of MLflow, in the store that `MLFLOW_TRACKING_URI` names or else in `<out>/mlflow`."""

    def __init__(self, place: Path, name: str, config: dict[str, Any], known_as: str | None) -> None:
        super().__init__(place, name, config, known_as)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder that needs no data base
        store = os.environ.get("MLFLOW_TRACKING_URI") or (place / "mlflow").resolve().as_uri()
        self.client = importlib.import_module("mlflow").MlflowClient(tracking_uri=store)
        if known_as is None:
            found = self.client.get_experiment_by_name("gracecl")
            experiment = found.experiment_id if found else self.client.create_experiment("gracecl")
            known_as = self.client.create_run(experiment, run_name=name).info.run_id
            for key, value in config.items():
                self.client.log_param(known_as, key, value)
        self.known_as: str = known_as

    def scalars(self, step: int, values: Scalars) -> None:
        entities = importlib.import_module("mlflow.entities")
        metrics = [entities.Metric(_plain_name(name), value, 0, step) for name, value in values.items()]
        self.client.log_batch(self.known_as, metrics=metrics)

    def image(self, name: str, step: int, file: Path) -> None:
        self.client.log_artifact(self.known_as, str(file))

    def close(self) -> None:
        self.client.set_terminated(self.known_as)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check(kinds: Sequence[str]) -> None:
    """Refuse unknown trackers and those whose library is missing, before any run begins."""
    for kind in kinds:
        if kind not in TRACKERS:
            raise UserError(f"there is no --log {kind} (there are: {', '.join(TRACKERS)})")
        try:
            importlib.import_module(NEEDED[kind])
        except ImportError:
            raise UserError(f"--log {kind} needs {NEEDED[kind]}; install it with: pip install 'gracecl[{kind}]'") from None


@contextmanager
def logging(works: Sequence[Work], place: Path, kinds: Sequence[str]) -> Iterator[None]:
    """Hand what the runs record to the trackers while the block runs, and once more at its end."""
    if not kinds:
        yield
        return
    check(kinds)
    tails = [Tail(work, place, kind) for work in works for kind in kinds]
    tails = [tail for tail in tails if not tail.complete]
    over = threading.Event()

    def follow() -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            for tail in tails:
                tail.look()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for tail in tails:
            tail.look()
            tail.close()


class Tail:
    """Follow a run's record and hand new lines to one tracker. If the tracker fails, the run continues without it."""

    def __init__(self, work: Work, place: Path, kind: str) -> None:
        self.folder, self.title = work.folder, work.config.title
        self.place, self.kind = place, kind
        self.note = work.folder / f".log-{kind}.json"
        self.log: Tracker | None = None
        self.at, self.failed = 0, False
        self.logged = -1
        """the last step that the tracker has"""

    @property
    def complete(self) -> bool:
        """Whether an earlier command has handed on the whole record."""
        return self.note.is_file() and (self.folder / SUMMARY).is_file()

    def look(self) -> None:
        record = self.folder / RECORD
        if self.failed or not record.is_file() or not (self.folder / "config.json").is_file():
            return
        try:
            self._open()
            self._hand_on(record)
        except Exception as error:  # noqa: BLE001 (whatever somebody else's library raises)
            self.failed = True
            print_err(f"--log {self.kind} stopped for {self.title} ({error}); the run itself goes on")

    def close(self) -> None:
        if self.log is None:
            return
        try:
            self._finish()
            self.log.close()
        except Exception as error:  # noqa: BLE001
            print_err(f"--log {self.kind} could not be closed for {self.title} ({error}); the run itself is complete")

    def _open(self) -> None:
        if self.log is not None:
            return
        noted = json.loads(self.note.read_bytes()) if self.note.is_file() else {}
        self.logged = noted.get("step", -1)
        if (earlier := Path(noted.get("place", self.place))).is_dir():  # unless the folder was moved since
            self.place = earlier
        config = read_sealed(self.folder / "config.json")
        name = "-".join(self.folder.parts[-3:])
        self.log = TRACKERS[self.kind](self.place, name, config, noted.get("known_as"))

    def _hand_on(self, record: Path) -> None:
        assert self.log is not None
        if record.stat().st_size < self.at:  # a resumed run has dropped its last lines and writes them again
            self.at = 0
        with open(record, "rb") as file:
            file.seek(self.at)
            lines = file.read().rpartition(b"\n")[0]
        self.at += len(lines) + 1 if lines else 0
        by_step: dict[int, Scalars] = {}
        for line in lines.splitlines():
            entry = json.loads(line)
            if entry["step"] > self.logged:
                by_step.setdefault(entry["step"], {}).update(scalars_of(entry))
        for step, values in sorted(by_step.items()):
            if values:
                self.log.scalars(step, values)
        if by_step:
            # The last step's evaluation may not be there yet, so that a later attempt looks at this step again.
            note = {"step": max(by_step) - 1, "known_as": self.log.known_as, "place": str(self.place.resolve())}
            write_json(self.note, note)

    def _finish(self) -> None:
        """Tracker the accuracy matrix as a picture and the timing of a finished run."""
        if self.log is None or not (self.folder / SUMMARY).is_file():
            return
        timing = read_sealed(self.folder / "timing.json")
        step = int(timing.get("steps", 1))
        numbers = {f"system/{name}": float(value) for name, value in timing.items() if isinstance(value, (int, float))}
        seconds = float(timing.get("train_seconds") or math.nan)
        self.log.scalars(step, numbers | {"system/images_per_second": float(timing.get("images", math.nan)) / seconds})
        if (self.folder / "matrix.png").is_file():
            self.log.image("accuracy_matrix", step, self.folder / "matrix.png")


def scalars_of(entry: dict[str, Any]) -> Scalars:
    """Return the numbers of a record's line by name: terms per layer, accuracies per rule (mean over tasks seen)
    and per task.
    """
    if entry["kind"] == "step":
        return {
            f"{term}/{layer}" if len(values) > 1 else term: value
            for term, values in entry["rows"].items()
            for layer, value in enumerate(values, start=1)
            if value is not None and math.isfinite(value)
        }
    if entry["kind"] != "eval":
        return {}
    found: Scalars = {}
    for rule, row in entry["accuracy"].items():
        seen = [value for value in row[: entry["task"] + 1] if value is not None]
        if seen:
            found[f"accuracy/{rule}"] = sum(seen) / len(seen)
            found |= {f"accuracy_of_task/{rule}/{task}": value for task, value in enumerate(seen, start=1)}
    for name in ("ece", "nll"):
        found |= {f"{name}/{rule}": value for rule, value in entry.get(name, {}).items() if value is not None}
    return found


def _plain_name(name: str) -> str:
    """Replace characters that MLflow refuses."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)
