"""A run from the first step to the report, through kills, signals, damaged files and full disks, as a user meets them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import random
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from commands import Said, gracecl, only_run, records
from gracecl import Learner, checkpoint
from gracecl.data import Data, from_arrays
from gracecl.files import write_text
from gracecl.lab.runs.run import Interrupted, RunConfig, learner_and_stream, run, stop_requests
from gracecl.registry import datasets
from gracecl.registry.options import ADDED_LATER, NO_EFFECT_ON_RESULTS
from stopping import StopAfter

STREAM = "split-digits(size=8, classes='0-3', tasks=2)"
STEPS = 58
TASK_ENDS = [28, 57]
NET = "mlp(width=16, depth=4)"
SMALL = ["--stream", STREAM, "--net", NET, "--memory", "40", "--device", "cpu", "--checkpoint-every", "5"]


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "from gracecl.lab.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def wait_for_lines(process: subprocess.Popen[str], out: Path, lines: int) -> None:
    """Returns when a run below `out` has recorded so many lines."""
    give_up = time.monotonic() + 120
    while sum(file.read_bytes().count(b"\n") for file in out.rglob("metrics.jsonl")) < lines:
        assert process.poll() is None, f"the run ended before it was stopped: {process.communicate()}"
        assert time.monotonic() < give_up, "the run does not get on"
        time.sleep(0.003)


def saved_step(folder: Path) -> int:
    return int(checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"]["progress"]["step"])


def assert_equal(one: Any, two: Any, where: str) -> None:
    """Bit for bit."""
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_equal(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for number, (first, second) in enumerate(zip(one, two, strict=True)):
            assert_equal(first, second, f"{where}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype, where
        assert torch.equal(one, two), f"{where} differs"
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype, where
        assert np.array_equal(one, two), f"{where} differs"
    else:
        assert one == two, f"{where} differs: {one} and {two}"


def assert_same_run(one: Path, two: Path) -> None:
    """The same record, the same accuracies, the same weights, optimizer, memory and method state."""
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    if (one / "summary.json").exists() or (two / "summary.json").exists():
        assert (one / "accuracy.json").read_bytes() == (two / "accuracy.json").read_bytes()
        metrics = [json.loads((folder / "summary.json").read_text())["metrics"] for folder in (one, two)]
        assert metrics[0] == metrics[1]
    states = [checkpoint.load(folder / "checkpoint.safetensors") for folder in (one, two)]
    assert_equal(states[0]["trainer"]["engine"], states[1]["trainer"]["engine"], "engine")
    assert states[0]["stream_hash"] == states[1]["stream_hash"]


def stopped_run(out: Path, step: int, **options: Any) -> Path:
    """A run that was interrupted after so many steps; called again, it goes on until the next."""
    settings: dict[str, Any] = {"stream": STREAM, "net": NET, "memory": 40, "device": "cpu", "checkpoint_every": 5}
    with pytest.raises(Interrupted):
        run(RunConfig(**settings | options), out, watch=StopAfter(step))
    return only_run(out)


# What a finished run leaves behind.


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """Two methods, two seeds, one command."""
    out = tmp_path_factory.mktemp("compared")
    return out, gracecl("run", "er", "grace", "--seeds", "0-1", "--eval-every", "20", *SMALL, "--out", out)


def runs_of(out: Path, method: str) -> list[Path]:
    found = [file.parent for file in out.rglob("config.json") if json.loads(file.read_text())["method"] == method]
    return sorted(found, key=lambda folder: int(folder.name))


@pytest.mark.slow
def test_one_command_runs_every_method_with_every_seed_and_prints_a_table(compared: tuple[Path, Said]) -> None:
    """The table on standard output has a row per method with mean ± std, and the folders are named below it."""
    out, said = compared
    assert said.code == 0, said.err
    assert "Traceback" not in said.err
    comparison = said.out[said.out.rindex("seconds") :]
    for method in ("er()", "grace(mose())"):
        row = next(line for line in comparison.splitlines() if line.strip().startswith(method))
        assert row.split()[1] == "2", f"{method} was not summarised over two seeds: {row}"
        assert row.count("±") >= 4
        folders = runs_of(out, method)
        assert [folder.name for folder in folders] == ["0", "1"]
        for folder in folders:
            assert str(folder) in said.out
    assert str(out / "report.md") in said.out


def test_a_run_leaves_its_settings_record_numbers_and_pictures(compared: tuple[Path, Said]) -> None:
    out, _ = compared
    for method in ("er()", "grace(mose())"):
        for folder in runs_of(out, method):
            for name in ("config.json", "accuracy.json", "summary.json", "timing.json"):
                assert isinstance(json.loads((folder / name).read_text()), dict)
            assert saved_step(folder) == STEPS
            assert (folder / "matrix.png").read_bytes().startswith(b"\x89PNG")
            assert not [file for file in folder.iterdir() if file.name.endswith(".part")]
            config = json.loads((folder / "config.json").read_text())
            assert (config["seed"], config["stream"], config["memory"]) == (int(folder.name), STREAM, 40)
            assert config["layers"] == (4 if "grace" in method else 1)
            timing = json.loads((folder / "timing.json").read_text())
            assert timing["steps"] == STEPS
            assert timing["train_seconds"] > 0
    assert (runs_of(out, "grace(mose())")[0] / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "`grace(mose())`" in (out / "report.md").read_text()


def test_the_record_has_every_step_every_task_and_every_evaluation_in_order(compared: tuple[Path, Said]) -> None:
    """`--eval-every 20` adds steps 19 and 39 to the ends of the tasks."""
    (folder, _) = runs_of(compared[0], "er()")
    lines = records(folder)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(STEPS))
    assert [line["step"] for line in lines if line["kind"] == "task"] == TASK_ENDS
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == sorted([*TASK_ENDS, 19, 39])
    assert [line["step"] for line in evaluations if line["task_end"]] == TASK_ENDS
    assert [len(line["accuracy"]["linear_last"]) for line in evaluations] == [1, 1, 2, 2], "tasks met by then"


def test_the_entropy_and_the_weights_of_each_layer_are_recorded_for_grace(compared: tuple[Path, Said]) -> None:
    (folder, _) = runs_of(compared[0], "grace(mose())")
    lines = records(folder)
    for row in ("log/H", "log/gamma", "entropy"):
        assert any(len(line["rows"].get(row, [])) == 4 for line in lines if line["kind"] == "step"), row
    assert all(len(line["values"]["alpha"]) == 4 for line in lines if line["kind"] == "task")


def test_the_summary_agrees_with_a_recomputation_from_the_record(compared: tuple[Path, Said]) -> None:
    for method in ("er()", "grace(mose())"):
        for folder in runs_of(compared[0], method):
            evaluations = [line for line in records(folder) if line["kind"] == "eval"]
            for rule, reported in json.loads((folder / "summary.json").read_text())["metrics"].items():
                first, last = (line["accuracy"][rule] for line in evaluations if line["task_end"])
                anytime = [float(np.mean(line["accuracy"][rule])) for line in evaluations]
                expected = {
                    "acc": (last[0] + last[1]) / 2,
                    "aia": (first[0] + (last[0] + last[1]) / 2) / 2,
                    "forgetting": first[0] - last[0],
                    "forgetting_mose": (max(first[0], last[0]) - last[0]) / 2,
                    "bwt": last[0] - first[0],
                    "learning_acc": (first[0] + last[1]) / 2,
                    "aaa": float(np.mean(anytime)),
                }
                assert {name: reported[name] for name in expected} == pytest.approx(expected), (method, rule)
                matrix = json.loads((folder / "accuracy.json").read_text())[rule]
                assert matrix == [[first[0], None], last]


def test_five_inference_rules_are_reported_for_mose(compared: tuple[Path, Said]) -> None:
    rules = {"linear_last", "linear_mean", "linear_votes", "ncm_last", "ncm_mean"}
    (folder, _) = runs_of(compared[0], "grace(mose())")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"].keys() == rules
    assert {f"{family}_{tap}" for family in ("linear", "ncm") for tap in (1, 2, 3, 4)} == summary["per_tap"].keys()
    for rule in rules:
        assert rule in compared[1].out


def test_two_methods_learn_the_same_stream_at_one_seed_and_another_at_another(compared: tuple[Path, Said]) -> None:
    hashes = {
        (method, folder.name): json.loads((folder / "config.json").read_text())["stream_hash"]
        for method in ("er()", "grace(mose())")
        for folder in runs_of(compared[0], method)
    }
    assert hashes["er()", "0"] == hashes["grace(mose())", "0"] != hashes["er()", "1"] == hashes["grace(mose())", "1"]


def test_the_same_command_again_shows_the_table_without_training(compared: tuple[Path, Said]) -> None:
    out, first = compared
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.name in ("metrics.jsonl", "checkpoint.safetensors")}
    assert len(before) == 8
    again = gracecl("run", "er", "GRACE", "--seeds", "0,1", "--eval-every", "20", *SMALL, "--out", out)
    assert (again.code, again.err) == (0, "")
    assert again.out == first.out
    assert before == {file: file.stat().st_mtime_ns for file in before}


def test_resume_of_finished_runs_shows_them_again(compared: tuple[Path, Said]) -> None:
    out, first = compared
    table = first.out[: first.out.index(str(out))]
    said = gracecl("resume", out)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(table)


def test_the_summary_which_marks_a_run_as_finished_is_written_after_everything_else(compared: tuple[Path, Said]) -> None:
    """A run that is killed while its pictures are drawn must not pass for a finished one: it would never get them."""
    for folder in runs_of(compared[0], "grace(mose())"):
        written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if file.name != ".lock"}
        assert max(written, key=lambda name: written[name]) == "summary.json"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """One method in two settings, both cut short."""
    out = tmp_path_factory.mktemp("short")
    assert gracecl("run", "er", "--steps", "3", *SMALL, "--memory", "10", "--out", out).code == 0
    return out, gracecl("run", "er", "--steps", "7", *SMALL, "--memory", "20", "--out", out)


def test_steps_cut_the_stream_and_the_last_one_is_evaluated(short: tuple[Path, Said]) -> None:
    out, said = short
    assert said.code == 0
    assert "er(), seed 0: step 7 of 7" in said.err
    (folder,) = (folder for folder in runs_of(out, "er()") if str(folder) in said.out)
    lines = records(folder)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(7))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [6]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, 7)


def test_another_setting_gets_a_folder_of_its_own_and_report_keeps_them_apart(short: tuple[Path, Said]) -> None:
    """One method in two settings is two rows, told apart by what differs."""
    said = gracecl("report", short[0])
    assert said.code == 0, said.err
    assert "memory=10" in said.out
    assert "memory=20" in said.out


# Killed, interrupted, resumed.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole")
    assert gracecl("run", "grace", "--seeds", "3", "--eval-every", "9", *SMALL, "--out", out).code == 0
    return only_run(out)


@pytest.mark.slow
def test_a_run_stopped_in_every_way_ends_bit_identical(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice at odd moments, ended, interrupted, each time started again, and resumed at last.

    `kill -9` loses nothing that was recorded up to the last save. SIGTERM and Ctrl-C finish the step, save, say how to go on and
    exit with 130. While a process works on the folder, another one is refused.
    """
    out = tmp_path / "a folder"
    command = ["run", "grace", "--seeds", "3", "--eval-every", "9", *SMALL, "--out", str(out)]
    reached = 0

    def check_what_is_there() -> tuple[Path, int]:
        """The record is a beginning of the uninterrupted run's, complete up to the save."""
        folder = only_run(out)
        saved = saved_step(folder)
        assert saved > reached, "the run did not go on from where it was stopped"
        recorded = (folder / "metrics.jsonl").read_bytes()
        recorded = recorded[: recorded.rindex(b"\n") + 1]
        assert (whole / "metrics.jsonl").read_bytes().startswith(recorded)
        steps = [json.loads(line)["step"] for line in recorded.splitlines()]
        wanted = [line["step"] for line in records(whole) if line["step"] < saved]
        assert steps[: len(wanted)] == wanted, "a line from before the save is lost"
        return folder, saved

    def check_what_is_said(said: Said) -> list[str]:
        """The exit code and how to go on; the save is where the record ends."""
        folder, saved = check_what_is_there()
        assert said.code == 130
        said = said._replace(err="".join(line for line in said.err.splitlines(True) if "too small for the crops" not in line))
        assert f"stopped after step {saved} of {STEPS}; continue with: " in said.sentence
        assert records(folder)[-1]["step"] == saved - 1
        program, *arguments = shlex.split(said.sentence.split("continue with: ")[1])
        assert (program, arguments) == ("gracecl", ["resume", str(folder)])
        return arguments

    for number, lines in ((signal.SIGKILL, 6), (signal.SIGKILL, 21), (signal.SIGTERM, 33)):
        process = start(*command)
        wait_for_lines(process, out, lines)
        time.sleep(random.uniform(0, 0.03))
        process.send_signal(signal.SIGSTOP)
        second = gracecl("resume", out)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate(timeout=120)
        assert second.code == 2
        assert "another process is working on" in second.sentence
        if number == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
            _, reached = check_what_is_there()
            assert reached % 5 == 0
        else:
            arguments = check_what_is_said(Said(process.returncode, output, errors))

    with monkeypatch.context() as patch:
        patch.setattr("gracecl.lab.runs.watch.LiveWatch", lambda: StopAfter(STEPS - 2))
        arguments = check_what_is_said(gracecl(*arguments))
    resumed = gracecl(*arguments)
    assert resumed.code == 0, resumed.err
    assert_same_run(only_run(out), whole)
    assert not list(out.rglob("*.part"))


@pytest.mark.slow
def test_a_terminal_that_is_closed_lets_the_run_save(tmp_path: Path, whole: Path) -> None:
    """The end of the terminal is a signal, and what is written to it from then on an error."""
    command = ["run", "grace", "--seeds", "3", "--eval-every", "9", *SMALL, "--out", str(tmp_path)]
    child, terminal = pty.fork()
    if child == 0:
        code = "import time, gracecl.lab.runs.trainer as t\nlearn = t.Trainer._learn\n"
        code += "t.Trainer._learn = lambda self: (time.sleep(0.05), learn(self))\nfrom gracecl.lab.cli import main; main()"
        os.execve(sys.executable, [sys.executable, "-c", code, *command], os.environ | {"OMP_NUM_THREADS": "1"})
    give_up = time.monotonic() + 120
    while not list(tmp_path.rglob("checkpoint.safetensors")):
        assert time.monotonic() < give_up
        select.select([terminal], [], [], 0.05)
        os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the signal ended the process"
    assert os.WEXITSTATUS(status) == 130
    folder = only_run(tmp_path)
    assert saved_step(folder) % 5, "saved where it was, not only at every fifth step"
    assert gracecl("resume", folder).code == 0
    assert_same_run(folder, whole)


def test_a_run_that_ignores_the_end_of_its_terminal_goes_on(tmp_path: Path) -> None:
    """nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stopped:
            signal.raise_signal(signal.SIGHUP)
            assert stopped == []
    finally:
        signal.signal(signal.SIGHUP, before)
    with stop_requests() as stopped:
        signal.raise_signal(signal.SIGHUP)
        assert stopped == [signal.SIGHUP]


def test_a_folder_of_images_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in "ab":
        for number in range(10):
            place = tmp_path / "pics" / label
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([ord(label), number]).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    config = RunConfig("er", NET, 10, stream="split-folder(path='pics', tasks=2, batch=2)", device="cpu")
    with pytest.raises(Interrupted):
        run(config, tmp_path / "out", tmp_path, watch=StopAfter(2))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert gracecl("resume", only_run(tmp_path / "out")).code == 0


def test_what_a_killed_process_left_beside_a_picture_is_swept(tmp_path: Path) -> None:
    for seconds, name in ((7200, "report.md.1.part"), (0, "report.md.2.part"), (7200, "other.md.1.part")):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - seconds,) * 2)
    write_text(tmp_path / "report.md", "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.md.1.part", "report.md", "report.md.2.part"]


def test_a_second_process_in_one_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path, 7, method="er")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for arguments in (["resume", folder], ["run", "er", *SMALL, "--out", tmp_path]):
            said = gracecl(*arguments)
            assert said.code == 2
            assert str(folder) in said.sentence
    assert before == {file: file.read_bytes() for file in folder.iterdir()}


# Files that are damaged, missing or somebody else's.


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after step 22."""
    return stopped_run(tmp_path_factory.mktemp("stopped"), 22, method="er", eval_every=9)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, interrupted after step 33."""
    return stopped_run(tmp_path_factory.mktemp("longer"), 33, method="er", eval_every=9)


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the interrupted run, in its place below an --out of its own."""
    root = stopped.parents[3]
    shutil.copytree(root, tmp_path / "out")
    return tmp_path / "out" / stopped.relative_to(root)


def go_on(folder: Path, step: int = 33) -> Path:
    """The interrupted run's own command again, until a later step."""
    return stopped_run(folder.parents[3], step, method="er", eval_every=9)


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b'{"kind":"step","step":22,"task":0,"ima', id="half a line"),
        pytest.param(b'{"kind":"step","step":22,"task":0,"images":50,"rows":{"ce/all":[0.5]}}', id="a line without its end"),
        pytest.param(b'{"kind":"step","step":22,"task":0,"images":50,"rows":{"ce/all":[0.5]}}\n{"ki', id="a later line"),
        pytest.param(b"\x00\x00\x00\x00", id="zeros after a power cut"),
    ],
)
def test_whatever_a_killed_process_half_wrote_is_written_again(tail: bytes, copy: Path, longer: Path) -> None:
    with open(copy / "metrics.jsonl", "ab") as file:
        file.write(tail)
    (copy / "checkpoint.safetensors.12345.part").write_bytes(b"half a checkpoint")
    assert gracecl("report", copy, "--formats", "csv").code == 0
    go_on(copy)
    assert_same_run(copy, longer)
    assert not list(copy.glob("*.part")), "what the killed process left is still there"


@pytest.mark.slow
@pytest.mark.parametrize("kept", [None, 0, 1, 0.5, -1], ids=["deleted", "emptied", "a byte", "half", "all but a byte"])
def test_a_record_that_lacks_what_its_checkpoint_counts_on_is_refused(kept: float | None, copy: Path, longer: Path) -> None:
    """Resuming would end with results of half the evidence. With the record back in its place the run goes on."""
    record = copy / "metrics.jsonl"
    whole = record.read_bytes()
    record.unlink()
    if kept is not None:
        record.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    before = {file: file.read_bytes() for file in copy.iterdir()}
    again = ["run", "er", "--eval-every", "9", *SMALL, "--out", copy.parents[3]]
    for arguments in (["resume", copy], again, ["report", copy.parents[3]]):
        said = gracecl(*arguments)
        assert said.code == 2
        assert f"{record} is not the record that the checkpoint beside it was written with" in said.sentence
        assert "delete the checkpoint to start this run anew" in said.sentence
    assert before == {file: file.read_bytes() for file in copy.iterdir()}
    record.write_bytes(whole)
    go_on(copy)
    assert_same_run(copy, longer)


def test_a_record_with_one_other_digit_is_refused(copy: Path) -> None:
    record = copy / "metrics.jsonl"
    whole = record.read_bytes()
    at = whole.index(b'"ce/all":[') + len(b'"ce/all":[')
    record.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for verb in ("resume", "report"):
        said = gracecl(verb, copy)
        assert said.code == 2
        assert "(it was changed)" in said.sentence


def test_a_refused_run_keeps_what_was_recorded_after_its_checkpoint(copy: Path) -> None:
    with open(copy / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"step","step":22,"task":0,"images":50,"rows":{"ce/all":[0.5]}}\n')
    state = checkpoint.load(copy / "checkpoint.safetensors")
    checkpoint.save(copy / "checkpoint.safetensors", state | {"stream_hash": "of other data"})
    before = {file: file.read_bytes() for file in copy.iterdir()}
    assert "the data changed" in gracecl("resume", copy).sentence
    assert before == {file: file.read_bytes() for file in copy.iterdir()}


def test_a_checkpoint_of_an_earlier_version_is_told_apart(copy: Path) -> None:
    state = checkpoint.load(copy / "checkpoint.safetensors")
    del state["record"]
    checkpoint.save(copy / "checkpoint.safetensors", state)
    said = gracecl("resume", copy)
    assert said.code == 2
    assert "was written by an earlier version of gracecl" in said.sentence


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut", "longer"])
def test_the_record_of_a_finished_run_is_compared_before_it_is_reported(
    damage: str, short: tuple[Path, Said], tmp_path: Path
) -> None:
    shutil.copytree(short[0], tmp_path / "out")
    record = min((tmp_path / "out").rglob("metrics.jsonl"))
    whole = record.read_bytes()
    record.unlink()
    if damage != "deleted":
        record.write_bytes({"emptied": b"", "cut": whole[: whole.index(b"\n") + 1], "longer": whole + whole}[damage])
    for verb in ("report", "keep"):
        said = gracecl(verb, tmp_path / "out", *([tmp_path / "kept"] if verb == "keep" else []))
        assert said.code == 2
        assert f"{record} is not the record that the run wrote" in said.err


def test_without_its_checkpoint_a_run_starts_anew_to_the_same_end(copy: Path, longer: Path) -> None:
    (copy / "checkpoint.safetensors").unlink()
    go_on(copy)
    assert_same_run(copy, longer)


def test_a_folder_without_a_run_is_told_apart(tmp_path: Path) -> None:
    for folder, why in ((tmp_path, "holds no run (no config.json)"), (tmp_path / "nowhere", "there is no folder")):
        said = gracecl("resume", folder)
        assert said.code == 2
        assert why in said.sentence


def test_a_run_without_config_cannot_be_resumed(copy: Path) -> None:
    (copy / "config.json").unlink()
    said = gracecl("resume", copy)
    assert said.code == 2
    assert "no config.json" in said.sentence


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"method": "er"}', "\x00\xff"])
def test_a_damaged_config_is_one_sentence(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text, encoding="latin-1")
    said = gracecl("resume", copy)
    assert said.code == 2
    assert f"{copy / 'config.json'} is damaged" in said.sentence


EDITS: dict[str, Any] = {
    "net": "mlp(width=8, depth=4)",
    "method": "mose()",
    "memory": 10,
    "optimizer": "sgd(lr=0.2)",
    "augment": "none",
    "precision": "bf16",
    "normalise": "half",
    "stream": "split-digits(size=8, classes='0-3', tasks=2, batch=5)",
    "seed": 1,
    "steps": 9,
    "checkpoint_every": "often",
    "threads": 2,
    "layout_used": "channels_last",
    "rule": "linear_mean",
}


@pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "before the first one"])
@pytest.mark.parametrize("field", EDITS)
def test_a_config_that_was_edited_by_hand_is_refused_and_the_field_named(field: str, saved: bool, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    assert config[field] != EDITS[field]
    (copy / "config.json").write_text(json.dumps(config | {field: EDITS[field]}))
    if not saved:
        (copy / "checkpoint.safetensors").unlink()
    before = {file: file.read_bytes() for file in copy.iterdir()}
    said = gracecl("resume", copy)
    assert said.code == 2
    assert f"{copy / 'config.json'}: {field} was changed by hand" in said.sentence
    assert before == {file: file.read_bytes() for file in copy.iterdir()}


def test_the_run_s_own_command_mends_an_edited_config(copy: Path, longer: Path) -> None:
    """Threads and layout, which the command does not name, are those of the checkpoint."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"threads": 2, "layout_used": "channels_last", "optimizer": "sgd()"}))
    go_on(copy)
    assert_same_run(copy, longer)
    after = json.loads((copy / "config.json").read_text())
    assert {name: after[name] for name in config if name != "commit"} == {name: config[name] for name in config if name != "commit"}


def test_another_run_s_config_is_not_taken_for_the_folder_s_own(copy: Path) -> None:
    """Its digests fit; the name of the folder does not, nor does the checkpoint where a folder was renamed."""
    other = stopped_run(copy.parents[3] / "other", 7, method="er", eval_every=9, optimizer="sgd(lr=0.2)")
    shutil.copyfile(other / "config.json", copy / "config.json")
    said = gracecl("resume", copy)
    assert said.code == 2
    assert "is not the configuration of its folder" in said.sentence
    moved = copy.rename(copy.parents[3] / "moved")
    said = gracecl("resume", moved)
    assert said.code == 2
    assert "was written with optimizer 'adam(" in said.sentence


def test_a_config_from_before_digests_is_compared_with_its_folder_s_name(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["digests"]
    (copy / "config.json").write_text(json.dumps(config | {"augment": "none"}))
    said = gracecl("resume", copy)
    assert said.code == 2
    assert "is not the configuration of its folder" in said.sentence
    (copy / "config.json").write_text(json.dumps(config))
    assert gracecl("resume", copy).code == 0


def damaged(kind: str, good: bytes, folder: Path) -> None:
    file = folder / "checkpoint.safetensors"
    if kind == "cut short":
        file.write_bytes(good[: len(good) // 2])
    elif kind == "cut by one byte":
        file.write_bytes(good[:-1])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "random bytes":
        file.write_bytes(np.random.default_rng(0).bytes(len(good)))
    elif kind == "somebody else's safetensors":
        save_file({"weight": torch.ones(3, 3)}, file, metadata={"format": "pt"})
    elif kind == "a learner's":
        Learner("er", classes=4, shape=(1, 8, 8), net=NET, memory=5, device="cpu").save(file)


@pytest.mark.parametrize(
    "kind", ["cut short", "cut by one byte", "empty", "random bytes", "somebody else's safetensors", "a learner's"]
)
def test_a_damaged_or_foreign_checkpoint_is_one_sentence_and_is_left_alone(kind: str, copy: Path) -> None:
    damaged(kind, (copy / "checkpoint.safetensors").read_bytes(), copy)
    before = {file: file.read_bytes() for file in copy.iterdir()}
    for arguments in (["resume", copy], ["run", "er", "--eval-every", "9", *SMALL, "--out", copy.parents[3]]):
        said = gracecl(*arguments)
        assert said.code == 2
        assert str(copy / "checkpoint.safetensors") in said.sentence
    assert before == {file: file.read_bytes() for file in copy.iterdir()}


@pytest.fixture
def own_data(tmp_path: Path) -> Iterator[Path]:
    """A data set of the user's, read from a file."""
    root = tmp_path / "data"
    root.mkdir()
    labels = np.repeat(np.arange(4), 30)
    np.save(root / "images.npy", np.random.default_rng(0).integers(0, 256, (len(labels), 6, 6, 1), dtype=np.uint8))

    @datasets.register("own")
    def own(root: Path, size: int | None) -> Data:
        """Read from images.npy."""
        images = np.load(root / "images.npy")
        return from_arrays(images, labels, images, labels, name="own", tasks=2)

    yield root
    del datasets.loaded["own"], datasets._name_of[own]


def test_resume_finds_the_data_again_and_refuses_if_it_changed(own_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = RunConfig(method="er", stream="split-own", net=NET, memory=10, device="cpu")
    with pytest.raises(Interrupted):
        run(config, out, own_data, watch=StopAfter(5))
    folder = only_run(out)
    saved = (folder / "checkpoint.safetensors").read_bytes()
    images = np.load(own_data / "images.npy")
    images[0, 3, 3, 0] ^= 1
    np.save(own_data / "images.npy", images)
    said = gracecl("resume", folder)
    assert said.code == 2
    assert "the data changed since" in said.sentence
    assert (folder / "checkpoint.safetensors").read_bytes() == saved
    images[0, 3, 3, 0] ^= 1
    np.save(own_data / "images.npy", images)
    assert gracecl("resume", folder).code == 0
    assert saved_step(folder) == 12


# One damaged run among several.


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Three interrupted runs."""
    for seed in range(3):
        with pytest.raises(Interrupted):
            run(RunConfig("er", NET, 40, seed, stream=STREAM, steps=6, device="cpu"), tmp_path, watch=StopAfter(4))
    return sorted(config.parent for config in tmp_path.rglob("config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "checkpoint.safetensors"])
def test_resume_names_a_damaged_run_and_finishes_the_others(file: str, three: list[Path], tmp_path: Path) -> None:
    first, broken, last = three
    (broken / file).write_bytes(b"{")
    before = {path: path.read_bytes() for path in broken.iterdir()}
    said = gracecl("resume", tmp_path, "--jobs", "1")
    assert said.code == 2
    assert str(broken / file) in said.err
    assert "Traceback" not in said.err
    assert before == {path: path.read_bytes() for path in broken.iterdir()}
    for folder in (first, last):
        assert json.loads((folder / "summary.json").read_text())["finished"]
        assert str(folder) in said.out


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "timing.json"])
def test_report_names_a_damaged_run_and_shows_the_others(file: str, three: list[Path], tmp_path: Path) -> None:
    assert gracecl("resume", tmp_path, "--jobs", "1").code == 0
    first, broken, last = three
    (broken / file).write_bytes(b"{")
    said = gracecl("report", tmp_path)
    assert said.code == 2
    assert str(broken / file) in said.sentence
    assert str(first) in said.out
    assert str(last) in said.out
    assert str(broken) not in said.out


def test_keep_compare_and_export_name_a_damaged_run_and_go_on_with_the_others(compared: tuple[Path, Said], tmp_path: Path) -> None:
    shutil.copytree(compared[0], tmp_path / "out")
    broken = runs_of(tmp_path / "out", "er()")[0]
    (broken / "metrics.jsonl").write_bytes(b"{")
    for words in (["keep", tmp_path / "out", tmp_path / "kept"], ["export", tmp_path / "out", tmp_path / "runs.csv"]):
        said = gracecl(*words)
        assert (said.code, said.out.split()[0]) == (2, "3"), "of four"
        assert str(broken / "metrics.jsonl") in said.sentence
    said = gracecl("compare", tmp_path / "out")
    assert said.code == 2
    assert str(broken / "metrics.jsonl") in said.sentence
    assert "Nothing can be said about `grace(mose())` and `er()` from 1 seed" in said.out


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "{}", "null"])
def test_a_run_without_a_whole_summary_is_not_finished(text: str, short: tuple[Path, Said], tmp_path: Path) -> None:
    """As a power cut may leave it; resume makes the summary again, to the byte."""
    shutil.copytree(short[0], tmp_path / "out")
    summary = min((tmp_path / "out").rglob("summary.json"))
    whole = summary.read_bytes()
    summary.write_text(text)
    assert gracecl("resume", tmp_path / "out").code == 0
    assert summary.read_bytes() == whole


# Disks that are full.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("only a superuser can mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("kilobytes", [0, 8, 16])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_space(
    kilobytes: int, small_disk: Path, stopped: Path, longer: Path
) -> None:
    """Whichever file does not fit any more, the last checkpoint stays whole."""
    root = stopped.parents[3]
    shutil.copytree(root, small_disk / "out")
    folder = small_disk / "out" / stopped.relative_to(root)
    saved = (folder / "checkpoint.safetensors").read_bytes()
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(bytes(free - 1024 * kilobytes))
    for arguments in (["resume", folder], ["run", "er", "--eval-every", "9", *SMALL, "--out", small_disk / "out"]):
        said = gracecl(*arguments)
        assert said.code == 2
        assert "No space left on device" in said.sentence
        assert (folder / "checkpoint.safetensors").read_bytes() == saved
        assert not list(folder.glob("*.part"))
    (small_disk / "filler").unlink()
    go_on(folder)
    assert_same_run(folder, longer)


@pytest.mark.parametrize("limit", ["checkpoint", "record"])
def test_a_file_that_may_not_grow_is_one_sentence_and_the_run_goes_on_when_it_may(limit: str, copy: Path, longer: Path) -> None:
    """The same with a limit on the size of a file, which needs no superuser."""
    saved = (copy / "checkpoint.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(saved) // 2 if limit == "checkpoint" else (copy / "metrics.jsonl").stat().st_size + 100
    assert size > 2048, "settings must still be writable"
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        said = gracecl("resume", copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said.code == 2
    assert str(copy / ("checkpoint.safetensors" if limit == "checkpoint" else "metrics.jsonl")) in said.sentence
    assert (copy / "checkpoint.safetensors").read_bytes() == saved
    go_on(copy)
    assert_same_run(copy, longer)


# Arithmetic that fails.


def test_a_loss_that_is_not_finite_is_named_with_its_row_and_step_and_the_record_is_kept(tmp_path: Path) -> None:
    command = ["run", "er", "--optimizer", "sgd(lr=1e9)", *SMALL, "--checkpoint-every", "1000", "--out", tmp_path]
    said = gracecl(*command)
    assert said.code == 2
    folder = only_run(tmp_path)
    lines = records(folder)
    assert lines, "nothing is left of the steps before"
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(np.isfinite(line["rows"]["ce/all"]).all() for line in lines)
    assert "the loss row 'ce/all' became [" in said.sentence
    assert f"at step {len(lines)};" in said.sentence
    assert "smaller learning rate" in said.sentence
    assert not (folder / "summary.json").exists()
    assert gracecl(*command).sentence == said.sentence, "the same command fails in the same way"


@pytest.mark.slow
def test_images_kept_beyond_the_memory_are_in_the_configuration(tmp_path: Path) -> None:
    """EWC looks at a sample of its task once more; the budget of the memory does not cover it."""
    said = gracecl("run", "er() + ewc(n_fisher=7)", "er", "--steps", "2", *SMALL, "--out", tmp_path)
    assert said.code == 0, said.err
    configs = [json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.rglob("config.json")]
    assert {config["method"]: config["images_beyond_memory"] for config in configs} == {"er() + ewc(n_fisher=7)": 7, "er()": 0}


def test_normalisation_is_the_run_s_and_the_data_s_own_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    """The net's pixels, the configuration and the folder tell; a run from before the option is found under its old name."""
    said = gracecl("run", "sgd", "--normalise", "half", "--steps", "2", *SMALL, "--out", tmp_path)
    assert said.code == 0, said.err
    folder = only_run(tmp_path)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["normalise"] == "half"
    half, own = (RunConfig("sgd()", NET, 40, stream=STREAM, device="cpu", normalise=name) for name in ("half", "data"))
    pixels = [learner_and_stream(config)[0].net.inputs for config in (half, own)]
    assert [pixels[0].mean.flatten().tolist(), pixels[0].std.flatten().tolist()] == [[0.5], [0.5]]
    assert pixels[1].mean.flatten().tolist() != [0.5]
    before = {name: value for name, value in asdict(own).items() if name not in ("seed", *NO_EFFECT_ON_RESULTS, *ADDED_LATER)}
    digest = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:8]
    assert own.folder(tmp_path).parent.name == digest
    assert half.folder(tmp_path).parent.name != digest
