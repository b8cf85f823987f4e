"""Several runs side by side: the same bits as one after the other, whatever happens to a child, to its parent or to the plugins."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import gracecl, records
from gracecl.files import read_sealed, write_sealed
from gracecl.lab.cli.output import conclude
from gracecl.lab.runs import jobs, watch
from gracecl.lab.runs.jobs import Outcome, run_all, share
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from gracecl.lab.runs.watch import RunProgress
from stopping import StopAfter
from terminal import terminal
from test_run import assert_same_run, saved_step

PLUGIN = '''from __future__ import annotations
import os
import signal
import time
import weakref
from dataclasses import dataclass
from typing import Literal
import numpy as np
from gracecl.data import from_arrays
from gracecl.errors import UserError
from gracecl.methods.er import ER
from gracecl.registry import datasets, methods


@datasets.register("dots")
def dots(root, size):
    """Random images, there in no time."""
    labels = np.repeat(np.arange(4), 100)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 6, 6, 1), dtype=np.uint8)
    return from_arrays(images, labels, images, labels, name="dots", tasks=2)


@methods.register("odd")
@dataclass(eq=False, repr=False)
class Odd(ER):
    """Experience replay that is slow, or worse."""

    trouble: Literal["none", "refuse", "crash", "die", "ended"] = "none"

    def attach(self, net, memories):
        super().attach(net, memories)
        if self.trouble == "ended":  # in a place where an exception would be printed and forgotten
            weakref.finalize(Odd.__new__(Odd), os.kill, os.getpid(), signal.SIGTERM)

    def losses(self, out, batch):
        time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
        if self.trouble == "refuse":
            print("a plugin that prints")
            raise UserError("there is no such thing; take another")
        if self.trouble == "crash":
            return {}["no such row"]
        if self.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().losses(out, batch)
'''
STEPS = 40
SETTINGS: dict[str, Any] = {
    "stream": "split-dots",
    "net": "mlp(width=8, depth=4)",
    "memory": 20,
    "steps": STEPS,
    "device": "cpu",
    "checkpoint_every": 1000,
}
OPTIONS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a method of the user's."""
    file = tmp_path_factory.mktemp("plugin") / "odd_methods.py"
    file.write_text(PLUGIN)
    return file


@pytest.fixture(scope="module")
def in_turn(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that nobody interrupts, one after the other in one process, with one thread."""
    out = tmp_path_factory.mktemp("in_turn")
    said = gracecl("run", "odd", "--seeds", "0-2", "--plugin", plugin, "--jobs", "1", "--threads", "1", *OPTIONS, "--out", out)
    assert said.code == 0, said.err
    return out


@contextlib.contextmanager
def started(out: Path, plugin: Path) -> Iterator[subprocess.Popen[str]]:
    """The same three runs, two at a time, slowly, in a process and a session of its own."""
    command = ["run", "odd", "--seeds", "0-2", "--plugin", plugin, "--jobs", "2", "--threads", "1", *OPTIONS, "--out", out]
    with subprocess.Popen(
        [sys.executable, "-c", "from gracecl.lab.cli import main; main()", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SECONDS_PER_STEP": "0.5"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run_folders(out: Path) -> list[Path]:
    return sorted(file.parent for file in out.rglob("config.json"))


def state_of(pid: int) -> list[str]:
    """What the system says of a process: its state, its parent, and so on; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """A process that ended but that nobody has asked about is not."""
    return state_of(pid)[:1] not in ([], ["Z"])


def children_of(pid: int) -> list[int]:
    processes = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [child for child in processes if state_of(child)[1:2] == [str(pid)] and alive(child)]


def wait_until(happens: Callable[[], bool], what: str, seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < give_up, f"waited in vain until {what}"
        time.sleep(0.02)


def wait_for_two_runs(process: subprocess.Popen[str], out: Path, reached: dict[Path, int]) -> list[int]:
    """Returns the two child processes when both are at their steps, and beyond those that they reached earlier."""

    def both_step() -> bool:
        assert process.poll() is None, f"it ended before it was stopped: {process.communicate()}"
        files = [file for file in out.rglob("metrics.jsonl") if file.stat().st_size]
        return sum(records(file.parent)[-1]["step"] >= reached.get(file.parent, 0) for file in files) == 2

    wait_until(both_step, "two runs are at their steps")
    return children_of(process.pid)


# The same bits.


def same_files(one: Path, two: Path) -> None:
    """Every file of the results to the byte, apart from times and commits."""
    assert_same_run(one, two)
    assert (one / "summary.json").read_bytes() == (two / "summary.json").read_bytes()
    assert [json.loads((folder / "timing.json").read_text())["steps"] for folder in (one, two)] == [STEPS, STEPS]
    assert (one / "matrix.png").read_bytes() == (two / "matrix.png").read_bytes()


@pytest.mark.slow
def test_killed_stopped_and_resumed_side_by_side_three_runs_end_as_one_after_the_other(
    in_turn: Path, plugin: Path, tmp_path: Path
) -> None:
    """`kill -9` of the parent: its children save and go. Ctrl-C: they save, and the third run never begins.

    What was begun with one thread goes on with one, also in a process that has two.
    """
    with started(tmp_path, plugin) as process:
        children = wait_for_two_runs(process, tmp_path, {})
        assert [os.getsid(child) for child in children] == children, "the Ctrl-C of a terminal would reach a child"
        assert len(children) == 2
    wait_until(lambda: not any(map(alive, children)), "the children of a killed process are gone", seconds=20)
    folders = run_folders(tmp_path)
    assert len(folders) == 2
    reached = {folder: saved_step(folder) for folder in folders}
    for folder, step in reached.items():
        assert 0 < step < STEPS, "a save that nothing but the stop can have made"
        assert records(folder)[-1]["step"] == step - 1

    with started(tmp_path, plugin) as process:
        children = wait_for_two_runs(process, tmp_path, reached)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not any(map(alive, children))
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("gracecl: stopped (runs begun: 2, not begun: 1); continue with the same command, or")
    assert run_folders(tmp_path) == folders
    assert all(before < saved_step(folder) < STEPS for folder, before in reached.items())

    command = errors.splitlines()[-1].split("with: gracecl ")[1].split()
    torch.set_num_threads(2)
    try:
        said = gracecl(*command, "--jobs", "1")
    finally:
        torch.set_num_threads(1)
    assert said.code == 0, said.err
    for folder in folders:
        assert json.loads((folder / "config.json").read_text())["threads"] == 1
        same_files(folder, in_turn / folder.relative_to(tmp_path))


@dataclass(frozen=True)
class Seen:
    """What `run_all` returned and wrote, and what the command made of it."""

    out: Path
    outcomes: list[Outcome]
    err: str
    code: int
    table: str
    verdict: str


@pytest.fixture(scope="module")
def side_by_side(in_turn: Path, plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The three good runs and three that fail, two at a time."""
    out = tmp_path_factory.mktemp("side_by_side")
    kinds = [("none", 0), ("refuse", 0), ("die", 0), ("none", 1), ("crash", 0), ("none", 2), ("none", 0)]
    names = {kind: "odd" if kind == "none" else f"odd(trouble='{kind}')" for kind, _ in kinds}
    works = [Work.new(RunConfig(method=names[kind], seed=seed, **SETTINGS), out, plugins=(str(plugin),)) for kind, seed in kinds]
    err, table, verdict = io.StringIO(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err):
        outcomes = run_all(works, jobs=2, threads=1)
    with contextlib.redirect_stdout(table), contextlib.redirect_stderr(verdict):
        code = conclude(out, outcomes)
    return Seen(out, outcomes, err.getvalue(), code, table.getvalue(), verdict.getvalue())


@pytest.mark.slow
def test_two_at_a_time_give_the_same_bytes_as_one_after_the_other(side_by_side: Seen, in_turn: Path) -> None:
    finished = [outcome.work.folder for outcome in side_by_side.outcomes if outcome.status == "finished"]
    assert [folder.name for folder in finished] == ["0", "1", "2"]
    for folder in finished:
        same_files(folder, in_turn / folder.relative_to(side_by_side.out))
        assert json.loads((folder / "config.json").read_text())["threads"] == 1


@pytest.mark.slow
def test_outcomes_come_in_the_order_of_the_runs_and_each_run_once(side_by_side: Seen) -> None:
    ends = [(outcome.status, outcome.work.config.seed) for outcome in side_by_side.outcomes]
    wanted = [("finished", 0), ("refused", 0), ("stopped", 0), ("finished", 1), ("crashed", 0), ("finished", 2)]
    assert ends == wanted


@pytest.mark.slow
def test_every_finished_run_is_told_with_its_number(side_by_side: Seen) -> None:
    told = re.findall(r"^odd\(\), seed (\d): finished, test \d+\.\d %, .*(\d) of 6 runs", side_by_side.err, flags=re.MULTILINE)
    assert {seed for seed, _ in told} == {"0", "1", "2"}
    assert len({count for _, count in told}) == 3
    assert "\x1b" not in side_by_side.err


def line_about(err: str, trouble: str) -> str:
    """The one sentence about a run."""
    (line,) = (line for line in err.splitlines() if line.startswith(f"gracecl: odd(trouble='{trouble}'), seed 0: "))
    return line


@pytest.mark.slow
def test_a_refused_run_is_one_sentence_that_names_it(side_by_side: Seen) -> None:
    assert line_about(side_by_side.err, "refuse").endswith(": there is no such thing; take another")


@pytest.mark.slow
def test_a_killed_process_is_one_sentence_with_its_signal_and_the_way_on(side_by_side: Seen) -> None:
    line = line_about(side_by_side.err, "die")
    assert "was ended by SIGKILL" in line
    folder = Path(line.split("gracecl resume ")[1])
    assert Work.begun(folder).config.method == "odd(trouble='die')"


@pytest.mark.slow
def test_an_unexpected_error_shows_its_traceback_once(side_by_side: Seen) -> None:
    assert side_by_side.err.count("Traceback") == 1
    assert side_by_side.err.count("KeyError: 'no such row'") == 1
    assert line_about(side_by_side.err, "crash")


@pytest.mark.slow
def test_what_a_run_prints_is_passed_on_with_its_name(side_by_side: Seen) -> None:
    """The name may already be that of the child's next run: the words come through a pipe of their own."""
    assert re.search(r"^odd\(.*\), seed \d: a plugin that prints$", side_by_side.err, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_finished_runs_are_shown_and_the_others_named(side_by_side: Seen) -> None:
    assert side_by_side.code == 1
    assert re.search(r"odd\(\) +3 ", side_by_side.table), "no row over three seeds"
    assert "trouble" not in side_by_side.table
    (verdict,) = side_by_side.verdict.splitlines()
    assert verdict.startswith("gracecl: 3 of 6 runs did not finish")
    for trouble in ("refuse", "die", "crash"):
        assert f"odd(trouble='{trouble}'), seed 0" in verdict


def test_one_after_the_other_a_refused_run_does_not_keep_the_next_from_its_end(plugin: Path, tmp_path: Path) -> None:
    said = gracecl("run", "odd(trouble='refuse')", "er", "--jobs", "1", "--plugin", plugin, *OPTIONS, "--out", tmp_path)
    assert said.code == 2
    assert line_about(said.err, "refuse").endswith("take another")
    assert "1 of 2 runs did not finish" in said.err
    assert re.search(r"er\(\) +1 ", said.out)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_everything_at_once(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While both runs are in a step that takes ten minutes."""
    monkeypatch.setenv("SECONDS_PER_STEP", "600")
    others, children = children_of(os.getpid()), list[int]()  # others are servers of other tests
    err = io.StringIO()

    def press_twice() -> None:
        wait_until(lambda: len(run_folders(tmp_path)) == 2, "two runs are at their first step")
        children.extend(child for child in children_of(os.getpid()) if child not in others)
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: "stopping: " in err.getvalue(), "the first Ctrl-C is heard")
        children.extend(child for child in children_of(os.getpid()) if child not in (*others, *children))
        os.kill(os.getpid(), signal.SIGINT)

    fingers = threading.Thread(target=press_twice)
    fingers.start()
    works = [Work.new(RunConfig(method="odd", seed=seed, **SETTINGS), tmp_path, plugins=(str(plugin),)) for seed in range(3)]
    with contextlib.redirect_stderr(err), pytest.raises(KeyboardInterrupt) as stop:
        run_all(works, jobs=2, threads=1)
    fingers.join()
    assert not isinstance(stop.value, Interrupted), "it waited for the runs to save"
    assert len(children) == 2
    assert not any(map(alive, children))


# How many at once.


@pytest.fixture
def works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Five runs that nobody began, on a machine where nobody set a number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return [Work.new(RunConfig(method="er", seed=seed, **SETTINGS), tmp_path) for seed in range(5)]


def note(work: Work, name: str, text: str) -> None:
    work.folder.mkdir(parents=True, exist_ok=True)
    (work.folder / name).write_text(text)


@pytest.mark.slow
def test_a_child_that_is_ended_before_its_steps_says_nothing_of_its_own(plugin: Path, tmp_path: Path) -> None:
    command = ["run", "odd(trouble='ended')", "odd", "--plugin", plugin, "--jobs", "2", "--threads", "1", *OPTIONS]
    said = gracecl(*command, "--out", tmp_path)
    assert said.code == 2
    assert "its process ended with exit code 0; continue with" in said.err
    assert "SystemExit" not in said.err
    assert "Traceback" not in said.err


def test_by_itself_it_takes_as_many_runs_as_there_are_cores_and_shares_out_the_rest(works: list[Work]) -> None:
    assert [share(works, None, None, cores) for cores in (2, 4, 5, 8, 16)] == [(2, 1), (4, 1), (5, 1), (5, 1), (5, 3)]
    assert share(works, None, None, 1) == (1, None), "one core has nothing to share"
    assert share(works[:1], None, None, 8) == (1, None), "a single run takes what torch takes"


def test_a_number_of_jobs_or_threads_that_is_asked_for_is_kept(works: list[Work]) -> None:
    assert share(works, 2, None, 8) == (2, 4)
    assert share(works, 1, None, 8) == (1, None)
    assert share(works, 9, None, 2) == (5, 1)
    assert share(works, None, 4, 8) == (2, 4)
    assert share(works, None, 16, 8) == (1, 16)
    assert share(works, 3, 2, 4) == (3, 2)


def test_threads_that_the_user_set_for_all_programs_are_kept(works: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (("2", (4, 2)), ("4,2", (2, 4)), ("many", (5, 1)), ("0", (5, 1))):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert share(works, None, None, 8) == wanted, text
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert share(works, None, 1, 8) == (5, 1)


def test_a_gpu_takes_one_run_at_a_time_unless_more_are_asked_for(works: list[Work]) -> None:
    on_gpu = [replace(work, config=replace(work.config, device="cuda")) for work in works]
    assert share(on_gpu, None, None, 8) == (1, None)
    assert share(on_gpu, 2, None, 8) == (2, 4)


def test_runs_that_were_begun_with_more_threads_leave_room_for_fewer(works: list[Work]) -> None:
    note(works[3], "config.json", '{"threads": 4}')
    assert share(works, None, None, 8) == (2, 1)
    note(works[3], "summary.json", '{"metrics": {}}')
    assert share(works, None, None, 8) == (5, 1)


def test_the_same_command_gives_a_run_the_same_threads_however_many_are_left(works: list[Work]) -> None:
    before = share(works, None, None, 4)
    for work in works[:4]:
        note(work, "summary.json", '{"metrics": {}}')
    assert share(works, None, None, 4) == before


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--jobs", "-1"], ["--jobs", "two"], ["--jobs", "1.5"], ["--threads", "0"]])
def test_impossible_numbers_are_one_sentence(words: list[str], tmp_path: Path) -> None:
    said = gracecl("run", "er", *OPTIONS, *words, "--out", tmp_path)
    assert said.code == 2
    assert words[0] in said.sentence
    assert f"not {words[1]}" in said.sentence.replace("'", "")
    assert not list(tmp_path.iterdir())


# What needs no process.


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(jobs, "_Child", refuse)


@pytest.mark.slow
@pytest.mark.usefixtures("no_children")
def test_finished_runs_and_a_single_one_start_no_child(in_turn: Path, plugin: Path, tmp_path: Path) -> None:
    shutil.copytree(in_turn, tmp_path / "out")
    command = ["odd", "--seeds", "0-2", "--plugin", plugin, "--jobs", "2", "--threads", "1", *OPTIONS, "--out", tmp_path / "out"]
    folders = run_folders(tmp_path)
    before = [(folder / "checkpoint.safetensors").stat().st_mtime_ns for folder in folders]
    again = gracecl("run", *command)
    assert (again.code, again.err) == (0, "")
    assert [(folder / "checkpoint.safetensors").stat().st_mtime_ns for folder in folders] == before
    shutil.rmtree(folders[1])
    assert gracecl("run", *command).code == 0
    same_files(folders[1], in_turn / folders[1].relative_to(tmp_path / "out"))


@pytest.mark.slow
def test_a_child_is_started_when_two_are_to_do(in_turn: Path, no_children: None, tmp_path: Path) -> None:
    """That the test above can fail."""
    with pytest.raises(AssertionError, match="a child was started"):
        run_all([Work.new(RunConfig(method="er", seed=seed, **SETTINGS), tmp_path) for seed in (0, 1)], jobs=2, threads=1)


def test_threads_are_those_asked_for_and_a_run_keeps_those_it_began_with(plugin: Path, tmp_path: Path) -> None:
    """Also a run that was killed before its first checkpoint."""
    work = Work.new(RunConfig(method="er", **SETTINGS | {"steps": 5}), tmp_path, plugins=(str(plugin),))
    with pytest.raises(Interrupted):
        work.run(StopAfter(3), threads=2)
    assert work.threads == 2
    (work.folder / "checkpoint.safetensors").unlink()
    work.run(threads=3)
    assert work.threads == 2
    assert torch.get_num_threads() == 1, "the process has its own number again"


@pytest.mark.slow
def test_seeds_with_other_numbers_of_threads_are_still_one_row(in_turn: Path, tmp_path: Path) -> None:
    shutil.copytree(in_turn, tmp_path / "out")
    file = run_folders(tmp_path)[0] / "config.json"
    write_sealed(file, read_sealed(file) | {"threads": 4})
    said = gracecl("report", tmp_path / "out")
    assert re.search(r"odd\(\) +3 ", said.out), said.out


# Plugins.


def test_a_run_remembers_its_plugins(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed command works as it stands, from any folder; a plugin that is not there any more is named."""
    mine = tmp_path / "odd_methods.py"
    mine.write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("gracecl.lab.runs.watch.LiveWatch", lambda: StopAfter(5))
        said = gracecl("run", "odd", "--plugin", "odd_methods.py", *OPTIONS, "--out", tmp_path / "out")
    assert said.code == 130
    command = said.sentence.split("continue with: gracecl ")[1].split()
    monkeypatch.chdir("/")

    mine.rename(tmp_path / "moved.py")
    lost = gracecl(*command)
    assert lost.code == 2
    assert f"cannot import the plugin '{mine}'" in lost.sentence

    (tmp_path / "moved.py").rename(mine)
    resumed = gracecl(*command)
    assert resumed.code == 0, resumed.err
    (folder,) = run_folders(tmp_path / "out")
    assert saved_step(folder) == STEPS


def test_a_plugin_from_another_place_replaces_the_one_that_was_noted(tmp_path: Path) -> None:
    mine = tmp_path / "odd_methods.py"
    mine.write_text(PLUGIN)
    work = Work.new(RunConfig(method="er", **SETTINGS), tmp_path / "out", plugins=(str(mine),))
    with pytest.raises(Interrupted):
        work.run(StopAfter(5))
    moved = mine.rename(tmp_path / "moved.py")
    assert gracecl("resume", work.folder, "--plugin", moved).code == 0
    assert Work.begun(work.folder).plugins == (str(moved),)


# What is shown meanwhile.


def at(step: int, rate: float = 2.0, total: int = 100) -> RunProgress:
    return RunProgress("er(), seed 0", step, total, rate, ["test 50.0 %"])


def test_lines_name_their_run_and_come_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = watch.Board(total=4, ended=1)
    with board.shown():
        for second in range(26):
            now = 1000.0 + second
            board.show("a run", at(2 * second))
        board.end("a run", "er(), seed 0: finished", finished=True)
        now = 1030.0
        board.end("another", "gracecl: er(), seed 1: no", finished=False)
        board.end("a third", "er(), seed 2: finished", finished=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "er(), seed 0: step 20 of 100, 2.0/s, 40 s left, test 50.0 %",
        "er(), seed 0: step 40 of 100, 2.0/s, 30 s left, test 50.0 %",
        "er(), seed 0: finished, test 50.0 %, 2 of 4 runs, ~50 s left",
        "gracecl: er(), seed 1: no",
        "er(), seed 2: finished, 4 of 4 runs",
    ]


def test_a_resumed_run_counts_only_for_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a run in 600 s, and two and a half are left."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = watch.Board(total=3, ended=0)
    board.show("a run", at(50))
    now = 600.0
    board.show("a run", at(100))
    assert board._so_far() == "0 of 3 runs, ~40 min left"


def test_on_a_terminal_a_table_shows_what_runs_what_is_done_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns=110) as seen:
        board = watch.Board(total=4, ended=1)
        with board.shown():
            board.show("a run", at(0, rate=0.0))
            board.show("another", replace(at(7), title="mose(), seed 1"))
            board.show("a run", at(40))
            board.say("something [to] say")
            board.end("another", "mose(), seed 1: finished", finished=True)
    text = seen.text
    lines = [line.strip() for line in re.split(r"[\r\n]+", text.strip())]
    assert re.fullmatch(r"run +step +rate +left +state", lines[-4]), text
    assert re.fullmatch(r"mose\(\), seed 1 +finished, test 50\.0 %", lines[-3]), text
    assert re.fullmatch(r"er\(\), seed 0 +[━╸╺ ]+ +40/100 +2\.0/s +0:00:30 +test 50\.0 %", lines[-2]), text
    assert re.fullmatch(r"2 of 4 runs, ~\d+ (s|min) left, 0 failed, 1 waiting", lines[-1]), text
    assert "something [to] say" in text
    assert "mose(), seed 1: finished, test 50.0 %, 2 of 4 runs" in text


def test_a_carrier_takes_runs_on_and_tells_how_they_ended(plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    works = [
        Work.new(RunConfig(method=name, **SETTINGS), tmp_path, plugins=(str(plugin),)) for name in ("odd(trouble='refuse')", "er")
    ]
    executor: jobs.Executor = jobs.SequentialExecutor(1, watch.Board(2, 0))
    for work in works:
        executor.submit(work)
    outcomes = list(executor.outcomes())
    assert [(outcome.work.folder, outcome.status) for outcome in outcomes] == [
        (works[0].folder, "refused"),
        (works[1].folder, "finished"),
    ]
    assert works[1].finished
    assert read_sealed(works[1].folder / "timing.json")["peak_bytes"] > 50e6
