"""Runs as jobs of SLURM, with submitit's local executor in place of a cluster: time-outs, deaths and preemption lose nothing."""

# ruff: noqa: F811 (fixtures are taken by name)
from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import gracecl
from gracecl.errors import UserError
from gracecl.lab.runs.cluster import Cluster
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.on_node import Task
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from noted_runs import EVERY, in_turn, meanwhile, notes, plugin, slowly, steps_noted, wait_until, works  # noqa: F401
from stopping import StopAfter
from test_jobs import STEPS, run_folders, same_files
from test_run import saved_step

LOCAL = Cluster(engine="slurm", address="local")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_jobs_that_time_out_or_die_continue_from_their_checkpoint(
    plugin: Path,
    in_turn: Path,
    slowly: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One job gets SLURM's signal and is put back after it saved; another is killed and submitted again."""
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'gracecl[slurm]'")

    def send_signals() -> None:
        wait_until(lambda: len(set(late())) == 2, "two jobs are past their first checkpoint")
        first, second = dict.fromkeys(late())
        os.kill(first, signal.SIGUSR2)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: len({pid for _, pid in steps_noted(slowly)}) == 4, "both went on")
        (slowly / "slowly").unlink()

    def late() -> list[int]:
        return [pid for step, pid in steps_noted(slowly) if step > EVERY]

    with meanwhile(send_signals):
        outcomes = run_all(works(plugin, tmp_path), None, 1, LOCAL)
    said = capfd.readouterr().err
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2, said
    assert all(outcome.node for outcome in outcomes)
    assert said.count("ended early") == said.count("it continues from its last checkpoint") == 1, said
    folders = run_folders(tmp_path)
    assert len(folders) == 2
    for folder in folders:
        same_files(folder, in_turn / folder.relative_to(tmp_path))
        assert json.loads((folder / "config.json").read_text())["threads"] == 1
    assert 0 <= len(steps_noted(slowly)) - 2 * STEPS <= EVERY, "the job with a signal saved, and repeats nothing"


def test_the_signal_before_a_time_out_saves_a_run(tmp_path: Path) -> None:
    class Timeout(StopAfter):
        def advance(self) -> None:
            if self.trainer.at == self.step:
                signal.raise_signal(signal.SIGUSR2)

    config = RunConfig(method="er", stream="split-digits", net="mlp(width=8)", memory=20, device="cpu", checkpoint_every=1000)
    work = Work.new(config, tmp_path)
    with pytest.raises(Interrupted) as stop:
        work.run(Timeout(3))
    assert (stop.value.number, saved_step(work.folder)) == (signal.SIGUSR2, 3)


def test_deaths_without_a_new_checkpoint_end_a_run() -> None:
    """Three attempts from the same step are forgiven, and a step further begins the count anew."""
    task = Task(None)  # type: ignore[arg-type]
    told = []
    for began_at in (0, 0, 0, 8, 8, None, 8, 16):
        task.began_at = began_at
        told.append(task.died_in_vain())
    assert told == [False, False, False, False, False, False, True, False]


def test_where_there_is_no_slurm_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'gracecl[slurm]'")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = gracecl("run", "er", "--stream", "split-digits", "--engine", "slurm", "--out", tmp_path / "runs")
    assert said.code == 2
    assert "use it where sbatch works, or try it out with --address local" in said.sentence
    with pytest.raises(UserError, match="time=2h is no whole number of minutes"):
        run_all(
            [Work.new(RunConfig(method="er", stream="split-digits"), tmp_path)], None, 1, Cluster("slurm", resources=("time=2h",))
        )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cpus": 2}, "--cpus is for clusters; add --engine ray or slurm, or leave it out"),
        ({"engine": "slurm", "resources": ("big",)}, "--resources takes NAME=VALUE, such as partition=gpu, not 'big'"),
        ({"engine": "slurm", "gpus": -1}, "--gpus must be 0 or more, not -1"),
        ({"engine": "slurm", "gpus": 0.5}, "--gpus must be a whole number here, not 0.5; parts of a GPU are for --engine ray"),
        ({"engine": "slurm", "address": "head:6379"}, "--address of --engine slurm is local or left out, not 'head:6379'"),
        ({"engine": "ray", "gpus": 1.5}, "--gpus must be a whole number here, not 1.5; more than one GPU are whole ones"),
        ({"engine": "ray", "address": "ray://head:1"}, "--address takes HOST:PORT of a Ray cluster's head, not 'ray://head:1'"),
        ({"engine": "ray", "resources": ("big=x",)}, "--resources big=x is no amount; write a number of 0 or more, such as big=1"),
        ({"engine": "ray", "resources": ("GPU=1",)}, "--resources GPU=1 has an option of its own; write --gpus 1"),
    ],
)
def test_options_that_an_engine_does_not_have(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Cluster(**options).check()


def test_threads_follow_from_the_command() -> None:
    assert Cluster(engine="slurm").threads(None) == 1
    assert Cluster(engine="slurm", cpus=4).threads(None) == 4
    assert Cluster(engine="slurm", cpus=4).threads(2) == 2


@pytest.mark.parametrize(("engine", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_a_missing_package_is_named(engine: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = gracecl("run", "er", "--engine", engine, "--out", tmp_path)
    sentence = f"gracecl: --engine {engine} needs {package}; install it with: pip install 'gracecl[{engine}]'"
    assert (said.code, said.sentence) == (2, sentence)


def test_a_folder_that_is_busy_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """The process that had it may be dying."""
    from gracecl.files import lock, open_own
    from gracecl.lab.runs.lock import locked

    def release() -> None:
        time.sleep(0.3)
        held.close()

    held = open_own(tmp_path / ".lock")
    lock(held.fileno(), wait=False)
    with pytest.raises(UserError, match="another process is working on"), locked(tmp_path):
        pass
    with meanwhile(release), locked(tmp_path, patience=20):
        assert held.closed
