"""`--log`: what a run records arrives in the views people already use, once, also when the run was stopped in between."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gracecl
from gracecl import UserError
from gracecl.lab import cli
from gracecl.lab.report import Run, find_runs
from gracecl.lab.runs import jobs, logs
from gracecl.lab.runs.run import Interrupted, RunConfig
from gracecl.lab.runs.run import run as run_to_its_end
from stopping import StopAfter
from waiting import wait_until

WORDS = shlex.split("run 'grace(er())' --net 'mlp(width=8, depth=4)' --memory 20 --steps 12 --eval-every 5 --jobs 1 --threads 1")
STREAM = "split-digits(size=8, classes='0-3', tasks=2)"
OPTIONS: dict[str, Any] = {"stream": STREAM, "net": "mlp(width=8)", "memory": 20, "steps": 12, "device": "cpu"}


def run_logged(out: Path, kind: str) -> Run:
    assert cli.call([*WORDS, "--stream", STREAM, "--log", kind, "--out", str(out)]) == 0
    [run] = find_runs(out)
    return run


def entropies(run: Run) -> list[float]:
    return [float(value) for value in run.series("log/H")[1][:, 0]]


def tensorboard_events(out: Path) -> Any:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    [folder] = {file.parent for file in (out / "tensorboard").rglob("events*")}
    found = module.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_names_of_what_is_logged() -> None:
    step = {"kind": "step", "step": 3, "task": 0, "rows": {"ce/all": [1.0], "log/H": [0.5, None, math.inf, 2.0]}}
    assert logs.scalars_of(step) == {"ce/all": 1.0, "log/H/1": 0.5, "log/H/4": 2.0}
    evaluation = {"kind": "eval", "step": 3, "task": 1, "accuracy": {"ncm_mean": [80.0, 60.0, 7.0]}, "nll": {"ncm_mean": 0.3}}
    assert logs.scalars_of(evaluation) == {
        "accuracy/ncm_mean": 70.0,
        "accuracy_of_task/ncm_mean/1": 80.0,
        "accuracy_of_task/ncm_mean/2": 60.0,
        "nll/ncm_mean": 0.3,
    }
    assert logs.scalars_of({"kind": "task", "step": 3}) == {}


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = run_logged(tmp_path, "tensorboard")
    events = tensorboard_events(tmp_path)
    logged = events.Scalars("log/H/1")
    assert [event.step for event in logged] == list(range(12))
    assert [event.value for event in logged] == pytest.approx(entropies(run), rel=1e-6)
    steps, rows = run.seen(run.rule)
    assert [(event.step, event.value) for event in events.Scalars(f"accuracy/{run.rule}")] == [
        (step, pytest.approx(row.mean(), rel=1e-6)) for step, row in zip(steps, rows, strict=True)
    ]
    assert events.Images("accuracy_matrix")
    assert events.Scalars("system/train_seconds")[0].value > 0
    assert "configuration/text_summary" in events.Tags()["tensors"]
    assert cli.call([*WORDS, "--stream", STREAM, "--log", "tensorboard", "--out", str(tmp_path)]) == 0
    assert len(tensorboard_events(tmp_path).Scalars("log/H/1")) == 12, "a finished run is not logged again"


@pytest.mark.slow
def test_a_record_that_is_written_again_is_logged_once(tmp_path: Path) -> None:
    """A stopped run drops the lines after its checkpoint and writes them again; the note says how far the view had come."""
    pytest.importorskip("tensorboard")
    run = run_logged(tmp_path, "tensorboard")
    note = json.loads((run.path / ".log-tensorboard.json").read_text(encoding="utf-8"))
    assert note["step"] == 10
    (run.path / "summary.json").unlink()
    assert cli.call([*WORDS, "--stream", STREAM, "--log", "tensorboard", "--out", str(tmp_path)]) == 0
    steps = [event.step for event in tensorboard_events(tmp_path).Scalars("log/H/1")]
    assert sorted(set(steps)) == list(range(12))
    assert len(steps) <= 13, "only the last step may come twice"


def by_study(out: Path, kind: str) -> Run:
    words = ["--methods", "er", "--seeds", "0", "--jobs", "1", "--threads", "1", "--log", kind, "--out", str(out)]
    assert cli.call(["study", "mini", "--quick", *words]) == 0
    [run] = find_runs(out)
    return run


def by_resume(out: Path, kind: str) -> Run:
    with pytest.raises(Interrupted):
        run_to_its_end(RunConfig("er", **OPTIONS), out, watch=StopAfter(5))
    assert cli.call(["resume", str(out), "--log", kind]) == 0
    [run] = find_runs(out)
    return run


def from_python(out: Path, kind: str) -> Run:
    return gracecl.run("er", out=out, **OPTIONS, log=kind).record


@pytest.mark.parametrize("begin", [by_study, by_resume, from_python])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind != "tensorboard" else []) for kind in logs.TRACKERS]
)
def test_wherever_runs_are_begun(
    begin: Callable[[Path, str], Run], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(kind)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = begin(tmp_path, kind)
    if kind == "wandb":
        [kept] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
        wait_until(lambda: b"log/H" in kept.read_bytes())  # a process of wandb's own writes it
        return
    if kind == "mlflow":
        client, found = mlflow_run(tmp_path)
        logged = [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, "log/H")]
    else:
        logged = [(event.step, event.value) for event in tensorboard_events(tmp_path).Scalars("log/H")]
    steps, values, _ = run.series("log/H")
    assert sorted(logged) == [(step, pytest.approx(value, rel=1e-6)) for step, [value] in zip(steps, values, strict=True)]


def test_a_run_that_is_resumed_by_its_own_folder_goes_on_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(jobs.watch, "LiveWatch", lambda: StopAfter(5))
    assert cli.call([*WORDS, "--stream", STREAM, "--log", "tensorboard", "--out", str(tmp_path)]) == 130
    monkeypatch.undo()
    [config] = tmp_path.rglob("config.json")
    assert cli.call(["resume", str(config.parent), "--log", "tensorboard"]) == 0
    assert {event.step for event in tensorboard_events(tmp_path).Scalars("log/H/1")} == set(range(12))
    assert [path.name for path in tmp_path.rglob("tensorboard")] == ["tensorboard"], "one place for all"


def test_what_is_not_kept_is_not_logged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="log='tensorboard' shows a run that is kept; give out=FOLDER too"):
        gracecl.run("er", **OPTIONS, log="tensorboard")
    with pytest.raises(UserError, match="there is no --log tensorbord"):
        gracecl.run("er", out=tmp_path, **OPTIONS, log=["tensorbord"])


def mlflow_run(out: Path) -> tuple[Any, Any]:
    client = pytest.importorskip("mlflow").MlflowClient(tracking_uri=(out / "mlflow").resolve().as_uri())
    [found] = client.search_runs([client.get_experiment_by_name("gracecl").experiment_id])
    return client, found


@pytest.mark.slow
def test_mlflow_in_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = run_logged(tmp_path, "mlflow")
    client, found = mlflow_run(tmp_path)
    assert found.data.params["method"] == "grace(er())"
    history = sorted(client.get_metric_history(found.info.run_id, "log/H/1"), key=lambda metric: metric.step)
    assert [metric.value for metric in history] == pytest.approx(entropies(run))
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["matrix.png"]
    assert found.info.status == "FINISHED"


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_logged(tmp_path, "wandb")
    [kept] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = kept.read_bytes()
    assert b"log/H/1" in data
    assert b"accuracy_matrix" in data
    assert b"grace(er())" in data


def test_a_view_that_is_not_installed_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(logs.NEEDED, "wandb", "no_such_library")
    assert cli.call([*WORDS, "--stream", STREAM, "--log", "wandb", "--out", str(tmp_path)]) == 2
    assert "install it with: pip install 'gracecl[wandb]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_view_that_fails_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(logs.Tracker):
        def scalars(self, step: int, values: logs.Scalars) -> None:
            raise ConnectionError("the server is away")

        def close(self) -> None:
            pass

    pytest.importorskip("tensorboard")
    monkeypatch.setitem(logs.TRACKERS, "tensorboard", Broken)
    assert run_logged(tmp_path, "tensorboard").finished
    assert "stopped for grace(er()), seed 0 (the server is away); the run itself goes on" in capsys.readouterr().err
