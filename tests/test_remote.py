"""Runs whose folder is an object store: a real S3 server on loopback (moto's), and a folder as `file://`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import gracecl, only_run
from gracecl.errors import UserError
from gracecl.lab.runs import remote
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from stopping import StopAfter
from test_run import assert_same_run, saved_step

SETTINGS = {"method": "er", "stream": "split-digits(tasks=2)", "net": "mlp(width=8)", "memory": 20, "device": "cpu", "steps": 20}
OPTIONS = ["--stream", "split-digits(tasks=2)", "--net", "mlp(width=8)", "--memory", "20", "--device", "cpu", "--steps", "20"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, as another machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    return tmp_path / "machine"


@pytest.fixture
def store(tmp_path: Path) -> str:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'gracecl[s3]'")
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path / 'store'}"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of a real server on this machine."""
    for needed in ("moto.server", "s3fs"):
        pytest.importorskip(needed, reason="moto and s3fs are not installed: pip install 'gracecl[s3]' 'moto[server,s3]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    log = tmp_path_factory.mktemp("s3") / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        try:
            give_up = time.monotonic() + 120
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < give_up
                time.sleep(0.1)
            import s3fs

            s3fs.S3FileSystem().mkdir("runs-of-a-test")
            yield "s3://runs-of-a-test/out"
        finally:
            server.kill()


def interrupted(out: str, step: int) -> Work:
    """A run at a URL that was stopped after so many steps."""
    with remote.copied(Path(out)) as folder:
        work = Work.new(RunConfig(**SETTINGS | {"checkpoint_every": 5}), folder)
        with pytest.raises(Interrupted):
            work.run(StopAfter(step), threads=1)
    return work


def test_a_path_is_a_url_also_where_two_slashes_became_one() -> None:
    assert remote.url_in(Path("s3://bucket/runs/")) == remote.url_in("s3://bucket/runs") == "s3://bucket/runs"
    assert remote.url_in(Path("file:///tmp/runs")) == "file:///tmp/runs"
    assert remote.url_in("runs/mine") is None
    assert remote.url_in(Path("c:/runs")) is None
    for url in ("s3://bucket/runs", "file:///tmp/runs"):
        assert remote.url_of(remote.copy_of(url)) == url
        assert remote.folder_at(remote.address(remote.copy_of(url))) == remote.copy_of(url)
    assert remote.url_of(Path("runs")) is None


@pytest.mark.slow
def test_another_machine_continues_from_what_was_uploaded(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first machine saves after step 7, and dies later without an upload; the second repeats nothing before step 7."""
    work = interrupted(store, 7)
    there = tmp_path / "store" / work.folder.relative_to(remote.copy_of(store))
    assert saved_step(there) == 7
    assert not (there / "lease").exists(), "whoever ends well gives the lease back"
    (work.folder / "metrics.jsonl").write_bytes(b"what was never uploaded")
    (work.folder / "notes").write_text("neither was this")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    said = gracecl("resume", store, "--jobs", "1")
    assert said.code == 0, said.err
    alone = tmp_path / "alone"
    Work.new(RunConfig(**SETTINGS | {"checkpoint_every": 5}), alone).run(threads=1)
    assert_same_run(there, only_run(alone))
    assert (tmp_path / "store" / "report.html").is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    work.run(threads=1)
    assert not (work.folder / "notes").exists()
    assert_same_run(work.folder, there)


def test_a_report_fetches_no_checkpoint(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = interrupted(store, 7)
    with remote.copied(Path(store)):
        work.run(threads=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    said = gracecl("report", store, "--formats", "md")
    assert said.code == 0, said.err
    fetched = {file.name for file in remote.copy_of(store).rglob("*") if file.is_file()}
    assert {"summary.json", "metrics.jsonl", "report.md"} <= fetched
    assert "checkpoint.safetensors" not in fetched
    assert (tmp_path / "store" / "report.md").is_file()


@pytest.mark.slow
def test_uploads_leave_a_state_to_continue_from_wherever_they_break_off(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails at its n-th upload, for every n up to the second checkpoint; another machine always goes on to the end."""
    whole = Work.new(RunConfig(**SETTINGS | {"checkpoint_every": 5}), tmp_path / "alone")
    whole.run(threads=1)
    put = remote.Store.put
    for failing in range(1, 9, 2):
        out = f"{store}/{failing}"
        uploads: list[str] = []

        def broken(self: remote.Store, file: Path, name: str, uploads: list[str] = uploads, failing: int = failing) -> None:
            uploads.append(name)
            if len(uploads) >= failing:
                raise UserError("the network is gone")
            put(self, file, name)

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"first-{failing}"))
        with monkeypatch.context() as patch, remote.copied(Path(out)) as folder:
            patch.setattr(remote.Store, "put", broken)
            with pytest.raises(UserError, match="the network is gone"):
                Work.new(RunConfig(**SETTINGS | {"checkpoint_every": 5}), folder).run(threads=1)
            patch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"second-{failing}"))
        with remote.copied(Path(out)) as folder:
            again = Work.new(RunConfig(**SETTINGS | {"checkpoint_every": 5}), folder)
            again.run(threads=1)
        assert_same_run(again.folder, whole.folder)


def test_a_lease_keeps_others_out_until_its_holder_is_dead(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SECONDS_BETWEEN_RENEWALS", 0.05)
    monkeypatch.setattr(remote, "SECONDS_OF_A_LEASE", 0.8)
    first, second = remote.Store(store), remote.Store(store)
    with (
        first.lease(0.0),
        pytest.raises(UserError, match=f"another process is working on {store}; wait for it"),
        second.lease(0.0),
    ):
        pass
    first._renew("a process that died", 3)
    with second.lease(0.0) as check:
        check()
        first._renew("somebody who took it over", 0)
        with pytest.raises(UserError, match="another process took over the run"):
            check()
    assert first._holder() == "somebody who took it over 0", "what is another's is not given back"


def test_stores_that_nobody_knows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = gracecl("run", "er", *OPTIONS, "--out", "nosuch://bucket/runs")
    assert said.code == 2
    assert "nosuch://bucket/runs cannot be opened" in said.sentence
    monkeypatch.setitem(sys.modules, "fsspec", None)
    said = gracecl("report", "s3://bucket/runs")
    assert (said.code, said.sentence) == (2, "gracecl: s3://bucket/runs needs fsspec; install it with: pip install 'gracecl[s3]'")


def test_a_memory_on_disk_is_refused(store: str) -> None:
    """Its file changes in place, so a broken upload would leave one that does not belong to the checkpoint."""
    said = gracecl("run", "er", *OPTIONS, "--store", "disk", "--out", store)
    assert said.code == 2
    assert f"a memory on disk cannot lie at {store}/" in said.sentence


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")
def test_a_command_that_is_killed_continues_elsewhere_from_s3(
    s3: str, tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9` on one machine; the same command on another fetches what is in the bucket, and ends with the same bits."""
    words = ["run", "er", "--seeds", "0-1", *OPTIONS, "--checkpoint-every", "2", "--jobs", "1", "--threads", "1"]
    monkeypatch.setattr(remote, "SECONDS_OF_A_LEASE", 6.0)
    with subprocess.Popen(
        [sys.executable, "-c", "from gracecl.lab.cli import main; main()", *words, "--out", s3],
        env=os.environ | {"XDG_CACHE_HOME": str(machine)},
        stderr=subprocess.PIPE,
    ) as process:
        folder = remote.copy_of(s3)
        give_up = time.monotonic() + 500
        while not any(folder.rglob("checkpoint.safetensors")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < give_up
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    said = gracecl(*words, "--out", s3)
    assert said.code == 0, said.err
    assert gracecl(*words, "--out", tmp_path / "alone").code == 0
    for one in (tmp_path / "alone").rglob("config.json"):
        assert_same_run(remote.copy_of(s3) / one.parent.relative_to(tmp_path / "alone"), one.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    assert gracecl("report", s3, "--formats", "md").code == 0
    assert json.loads(only_first(remote.copy_of(s3)).read_text())["finished"]
    assert threading.active_count() < 50


def only_first(folder: Path) -> Path:
    return sorted(folder.rglob("summary.json"))[0]
