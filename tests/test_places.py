"""What lies where a file is written or read and is no regular file: links, pipes, devices, folders. What is behind it stays."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commands import gracecl, only_run
from gracecl import Learner, UserError
from gracecl.data import download
from gracecl.exporting import load_net
from gracecl.files import open_own, read_file, write_text
from gracecl.lab.runs.lock import locked

SMALL = ("--stream", "split-digits(size=8)", "--net", "mlp(width=8)", "--memory", "20", "--steps", "2", "--device", "cpu")
WRITTEN = (".lock", "metrics.jsonl", "checkpoint.safetensors", "config.json", "summary.json")
"""files of a run"""
OLD = b"what somebody else wrote\n"


def small_run(out: Path, *more: str) -> tuple[int, str]:
    said = gracecl("run", "er", *SMALL, "--jobs", "1", "--out", out, *more)
    return said.code, said.err


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_bytes(OLD)
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    assert small_run(out)[0] == 0
    return out


def as_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def as_dangling_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim.with_name("nobody"))


def as_pipe(place: Path, victim: Path) -> None:
    os.mkfifo(place)


def as_socket(place: Path, victim: Path) -> None:
    os.chdir(place.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(place.name)


def as_folder(place: Path, victim: Path) -> None:
    place.mkdir()


THINGS = {
    "a symbolic link": as_link,
    "a symbolic link to nothing": as_dangling_link,
    "a pipe": as_pipe,
    "a socket": as_socket,
    "a folder": as_folder,
}


@pytest.mark.parametrize("kind", THINGS)
@pytest.mark.parametrize("write", [lambda path: write_text(path, "new"), open_own], ids=["replaced", "appended to"])
def test_nothing_but_a_regular_file_is_written_to(
    kind: str, write: Callable[[Path], object], tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "place"
    THINGS[kind](place, victim)
    before = place.lstat()
    with pytest.raises(UserError, match=f"cannot write .*place: it is {' '.join(kind.split()[:3])}.*, not a file; remove it"):
        write(place)
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert victim.read_bytes() == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "victim"]


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """One of our own, which may be lost."""
    try:
        os.mknod(tmp_path / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only the superuser makes devices")
    return tmp_path / "device"


def test_a_device_is_not_replaced(device: Path) -> None:
    with pytest.raises(UserError, match="it is a device"):
        write_text(device, "new")
    assert device.is_char_device()


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f"place.{os.getpid()}.part").symlink_to(victim)
    write_text(tmp_path / "place", "new")
    assert (tmp_path / "place").read_text() == "new"
    assert not (tmp_path / "place").is_symlink()
    assert victim.read_bytes() == OLD


def test_a_file_that_is_appended_to_keeps_what_it_holds_unless_it_is_to_be_empty(victim: Path) -> None:
    with open_own(victim) as file:
        file.write(b"more")
    assert victim.read_bytes() == OLD + b"more"
    with open_own(victim, empty=True) as file:
        file.write(b"more")
    assert victim.read_bytes() == b"more"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_a_runs_folder_stops_the_run_and_not_what_it_leads_to(
    name: str, finished: Path, tmp_path: Path, victim: Path
) -> None:
    place = tmp_path / "out" / only_run(finished).relative_to(finished)
    place.mkdir(parents=True)
    (place / name).symlink_to(victim)
    code, err = small_run(tmp_path / "out")
    assert code == 2, err
    assert name in err
    assert "Traceback" not in err
    assert victim.read_bytes() == OLD
    assert (place / name).is_symlink()


def test_the_folder_of_runs_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert small_run(tmp_path / "out")[0] == 0
    assert only_run(tmp_path / "elsewhere").is_dir()


def test_the_lock_keeps_what_its_file_holds(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(OLD)
    with locked(tmp_path):
        pass
    assert (tmp_path / ".lock").read_bytes() == OLD


@pytest.mark.parametrize("held", [b"", OLD])
def test_keep_follows_no_link(held: bytes, finished: Path, tmp_path: Path, victim: Path) -> None:
    victim.write_bytes(held)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "runs.jsonl").symlink_to(victim)
    said = gracecl("keep", finished, tmp_path / "kept")
    assert said.code == 2
    assert "runs.jsonl" in said.sentence
    assert victim.read_bytes() == held


@pytest.mark.parametrize("name", ["report.html", "comparison.png"])
def test_report_follows_no_link(name: str, finished: Path, tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "report"
    out.mkdir()
    (out / name).symlink_to(victim)
    said = gracecl("report", finished, "--out", out)
    assert said.code == 2
    assert f"{name}: it is a symbolic link" in said.sentence
    assert victim.read_bytes() == OLD


def test_a_download_follows_no_link(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set.tar.gz").symlink_to(tmp_path / "nobody")
    with pytest.raises(UserError, match="it is a symbolic link"):
        download.fetch("http://localhost/set.tar.gz", tmp_path / "set.tar.gz", None)


@pytest.mark.parametrize("place", ["", ".", "/"])
def test_a_learner_is_not_saved_without_a_name(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="names no file; give the name of the file to write"):
        small_learner().save(place)
    assert not [*tmp_path.iterdir()]


def test_a_learner_is_saved_neither_onto_a_device_nor_through_a_link(tmp_path: Path, victim: Path, device: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    for place in (device, tmp_path / "link", tmp_path):
        with pytest.raises(UserError, match=r"cannot write .*, not a file"):
            small_learner().save(place)
    assert device.is_char_device()
    assert victim.read_bytes() == OLD


def small_learner() -> Learner:
    learner = Learner("er", classes=2, shape=(1, 4, 4), net="mlp(width=4)", memory=4, device="cpu")
    learner.learn(np.zeros((2, 1, 4, 4), np.uint8), [0, 1])
    return learner


# Reading: a pipe may never end, and an open one waits for somebody who writes.


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.toml")
    return tmp_path / "pipe.toml"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [read_file, Learner.load, load_net])
def test_a_pipe_is_not_waited_for(read: Callable[[Path], object], pipe: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*pipe.toml: it is a pipe, not a file; write its content into a file"):
        read(pipe)


def test_a_link_is_read_through(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    assert read_file(tmp_path / "link") == OLD
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "command",
    [
        ["run", "er", *SMALL, "--defaults", "PIPE.toml"],
        ["run", "er", *SMALL, "--plugin", "PIPE.py"],
        ["import", "PIPE.json"],
        ["import", "/dev/zero"],
        ["study", "PIPE.toml"],
        ["tune", "er", *SMALL, "--defaults", "PIPE.toml"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_commands_refuse_pipes_in_a_sentence(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in command:
        if word.startswith("PIPE"):
            os.mkfifo(word)
    said = gracecl(*command)
    assert said.code == 2
    assert "cannot read" in said.sentence
    assert "not a file" in said.sentence


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint.safetensors"])
def test_a_pipe_in_a_runs_folder_is_not_waited_for(name: str, tmp_path: Path, finished: Path) -> None:
    place = tmp_path / "out" / only_run(finished).relative_to(finished)
    place.mkdir(parents=True)
    for file in only_run(finished).iterdir():
        if file.is_file() and file.name not in (name, "summary.json"):
            (place / file.name).write_bytes(file.read_bytes())
    os.mkfifo(place / name)
    os.mkfifo(tmp_path / "out" / "page.json")
    for verb in ("resume", "report"):
        said = gracecl(verb, tmp_path / "out")
        assert said.code in (0, 2)
        assert "Traceback" not in said.err
