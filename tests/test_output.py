"""Standard output and error that are closed, full, without a reader or of another encoding; names that a terminal would obey."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import gracecl
from gracecl import run
from gracecl.data.progress import progress
from gracecl.errors import is_sentence, sentence
from gracecl.lab import cli
from gracecl.lab.cli import VERBS
from gracecl.terminal import Lossy, Screen, plain, print_err, usable_width
from run_folders import write_run
from warm import OF_THIS_CHECKOUT, python

SMALL = ("--stream", "split-digits(size=8)", "--net", "mlp(width=8)", "--memory", "20", "--steps", "2", "--device", "cpu")
HOSTILE = "er\x1b[2J\x1b]0;owned\x07\x9b31m\u202ex"
"""clears the screen, names the window, colours, and turns the direction of writing"""
WRITTEN = {"report.html", "report.md"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Of somebody else."""
    for method in (HOSTILE, "mose ± →"):
        write_run(tmp_path / "runs", method, tasks=2)
    return tmp_path / "runs"


def report_after(setting: str, runs: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """`gracecl report` in a process whose streams are as a line of Python makes them."""
    words = ["gracecl", "report", str(runs), "--out", str(tmp_path / "report")]
    program = f"import os, sys; {setting}; sys.argv[:] = {words!r}; from gracecl.lab.cli import main; main()"
    return python(["-c", program], tmp_path, os.environ | {"OMP_NUM_THREADS": "1"})


SETTINGS = {
    "stderr closed": "os.close(2); sys.stderr = sys.__stderr__ = None",
    "stdout closed": "os.close(1); sys.stdout = sys.__stdout__ = None",
    "all closed": "os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None",
    "nobody reads": "r, w = os.pipe(); os.close(r); os.dup2(w, 1)",
    "nobody reads errors": "r, w = os.pipe(); os.close(r); os.dup2(w, 2)",
    "ascii": "[stream.reconfigure(encoding='ascii', errors='strict') for stream in (sys.stdout, sys.stderr)]",
    "latin-1": "sys.stdout.reconfigure(encoding='latin-1', errors='strict')",
    "C locale": "sys.stdout.reconfigure(encoding='ascii', errors='surrogateescape')",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_report_is_written_whatever_becomes_of_the_streams(setting: str, runs: Path, tmp_path: Path) -> None:
    said = report_after(SETTINGS[setting], runs, tmp_path)
    assert said.returncode == 0, said.stderr
    assert "Traceback" not in said.stderr
    assert {path.name for path in (tmp_path / "report").iterdir()} >= WRITTEN
    assert "mose ± →" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


def test_output_that_does_not_fit_is_told_of_after_the_work(runs: Path, tmp_path: Path) -> None:
    said = report_after("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", runs, tmp_path)
    assert said.returncode == 2
    assert said.stderr.startswith("gracecl: standard output could not be written ([Errno 28]")
    assert {path.name for path in (tmp_path / "report").iterdir()} >= WRITTEN


@pytest.mark.parametrize(
    "ending",
    [
        *(pytest.param(ending, marks=pytest.mark.exhaustive) for ending in ("2>&-", ">&-", "| head -1 && exit ${PIPESTATUS[0]}")),
        pytest.param("2>&- >&- <&-", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_a_shell(ending: str, tmp_path: Path) -> None:
    words = " ".join(f"'{word}'" for word in (*SMALL, "--out", str(tmp_path / "out")))
    command = f"'{sys.executable}' -c 'from gracecl.lab.cli import main; main()' run er {words} {ending}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(OF_THIS_CHECKOUT)}
    assert subprocess.run(["bash", "-c", command], env=environment, capture_output=True).returncode == 0
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_stream_that_takes_everything(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = Lossy(writer, "w")
    assert stream.write(b"abc") == 3
    assert isinstance(stream.lost, BrokenPipeError)
    assert stream.write(b"abcd") == 4
    stream.close()


def test_a_program_without_standard_error_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    print_err("nobody")
    assert not Screen().isatty()
    with progress("decoding", 3) as advance:
        advance(3)
    run("er", stream="split-digits(size=8)", net="mlp(width=8)", memory=20, steps=1, augment="none", device="cpu", progress=True)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    print_err("nobody")


# Control characters


def test_control_characters_are_written_out() -> None:
    assert plain(HOSTILE) == "er\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202ex"
    assert plain("a\tb\nc ± é 方") == "a\tb\nc ± é 方"


def test_names_from_files_do_not_reach_the_terminal_as_they_are(runs: Path, tmp_path: Path) -> None:
    said = [
        gracecl("report", runs, "--out", tmp_path / "report"),
        gracecl("compare", runs),
        gracecl("compare", HOSTILE, "sgd", "--runs", runs),
        gracecl("report", tmp_path / HOSTILE),
    ]
    shown = "".join(text for one in said for text in (one.out, one.err))
    assert "\\x1b[2J" in re.sub(r"\s", "", shown)
    assert not [sign for sign in shown if sign != "\n" and plain(sign) != sign]


# Help


@pytest.mark.timeout(60)
@pytest.mark.parametrize("columns", ["0", "1", "5", "100000000", "x", "²", "-3"])
def test_help_ends_in_any_width(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    said = gracecl("list", "--help")
    assert said.code == 0
    assert "modules" in said.out
    assert max(map(len, said.out.splitlines())) <= 1000
    assert os.environ["COLUMNS"] == columns


@pytest.mark.timeout(60)
def test_help_of_many_options_ends_in_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert gracecl("run", "--help").code == 0


def test_a_usable_width_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    with usable_width():
        assert os.environ["COLUMNS"] == "77"
    monkeypatch.delenv("COLUMNS")
    with usable_width():
        pass
    assert "COLUMNS" not in os.environ


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_has_one_default_in_its_help(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    lines = gracecl(verb, "--help").out.splitlines()
    assert [line for line in lines if "(default: " in line]
    assert not [line for line in lines if line.count("(default:") > 1 or "(default: )" in line]


@pytest.mark.parametrize(("verb", "said"), [("run", "images that may be kept"), ("tune", "sets of values that are tried")])
def test_help_explains_options(verb: str, said: str) -> None:
    """Those that a verb takes from elsewhere, and its own."""
    text = gracecl(verb, "--help").out
    assert said in text
    assert "evaluate every so many steps too" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "er", "--lr", "0.3"], '--optimizer "sgd(lr=0.3)"'),
        (["run", "er", "--lr=0.3"], '--optimizer "sgd(lr=0.3)"'),
        (["tune", "er", "--lr"], '--optimizer "sgd(lr=0.01)"'),
        (["run", "--model", "derpp"], "write gracecl run derpp"),
        (["run", "er", "--dataset", "seq-cifar100"], "--stream split-cifar100"),
        (["run", "er", "--batch_size", "5"], '--stream "split-cifar100(batch=5)"'),
        (["run", "er", "--minibatch-size", "32"], '"er(n_recall=32)"'),
        (["run", "er", "--n_epochs", "3"], "--epochs 3"),
    ],
)
def test_options_of_other_libraries_are_told_in_our_words(words: list[str], said: str) -> None:
    answer = gracecl(*words)
    assert answer.code == 2
    assert said in answer.sentence


def test_the_buffers_size_of_other_libraries_is_the_memory() -> None:
    assert "memory must be" in gracecl("run", "er", "--buffer_size", "-1").sentence


# Python and memory


@pytest.mark.exhaustive
def test_without_docstrings_the_command_works(tmp_path: Path) -> None:
    def under_oo(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(OF_THIS_CHECKOUT), "PYTHONOPTIMIZE": "2", "COLUMNS": "200"}
        program = [sys.executable, "-c", "from gracecl.lab.cli import main; main()", *words]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert under_oo("--help") == gracecl("--help").out
    text = under_oo("run", "--help")
    assert "such as 0-4 or 0,3,7" in text
    assert "images that may be kept" in text
    assert "folders of runs" in under_oo("report", "--help")
    under_oo("run", "er", *SMALL, "--out", "out")
    assert (tmp_path / "out" / "report.html").is_file()


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("can't start new thread"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    OSError(12, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_memory_that_ran_out_is_a_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert cli.exit_code("gracecl", fail) == 2
    said = capsys.readouterr().err
    assert said.startswith("gracecl: memory ran out")
    assert said.count("\n") == 1
    assert "take a smaller net, memory or batch" in said


def test_other_faults_are_none_of_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_sentence(RuntimeError("size mismatch"))
    assert "disk is not full" in sentence(OSError(28, "No space left on device"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        cli.exit_code("gracecl", lambda: (_ for _ in ()).throw(RuntimeError("size mismatch")))


@pytest.mark.slow
def test_a_limit_of_memory_is_told_of_in_a_sentence(tmp_path: Path) -> None:
    """Of a real process: what the limit leaves is too little for the net."""
    program = (
        "import resource, sys, torch; from gracecl.lab.cli import main; import gracecl.lab.runs.jobs, gracecl.learner\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)\n"
        "main()"
    )
    words = ["run", "er", *SMALL, "--net", "mlp(width=6000, depth=4)", "--out", str(tmp_path / "out"), "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(OF_THIS_CHECKOUT)}
    done = subprocess.run([sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "gracecl: memory ran out" in done.stderr
    assert "Traceback" not in done.stderr
