"""Runs on a real Ray cluster of a head and nodes on this machine: whatever dies, nothing is lost."""

# ruff: noqa: F811 (fixtures are taken by name)
from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.nodes import Nodes, nodes
from commands import gracecl
from gracecl.lab.report.runs import CHECKPOINT
from gracecl.lab.runs import remote
from gracecl.lab.runs.cluster import Cluster
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from gracecl.lab.runs.watch import Board
from noted_runs import EVERY, hold, in_turn, meanwhile, nodes_noted, notes, plugin, slowly, steps_noted, wait_until, works  # noqa: F401
from test_jobs import OPTIONS, SETTINGS, STEPS, run_folders, same_files
from test_remote import s3  # noqa: F401
from test_run import assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.filterwarnings("ignore")]

SEARCH = """tune er --space n_recall=4,8 --sampler grid --tasks 2 --seeds 0-1 --threads 1 --net mlp(width=8) --memory 20
--device cpu --stream 'split-digits(size=8, tasks=5, per_class=20)'"""
SECONDS_FOR_THE_SIGNAL = 3.0


@pytest.fixture(scope="module")
def cluster(notes: Path) -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'gracecl[ray]'")
    with nodes("first", "second") as made:
        address = made.address
        yield made
    cmdlines = Path("/proc").glob
    wait_until(lambda: not any(of_cluster(file, address) for file in cmdlines("[0-9]*/cmdline")), "its processes are gone")


def of_cluster(cmdline: Path, address: str) -> bool:
    with contextlib.suppress(OSError):
        words = cmdline.read_text()
        return address in words and str(os.getpid()) != cmdline.parent.name
    return False


@pytest.fixture
def on_ray(cluster: Nodes) -> Cluster:
    return Cluster("ray", cluster.address)


def late(notes: Path) -> list[int]:
    """Processes that are past the first checkpoint of their run."""
    return list(dict.fromkeys(pid for step, pid in steps_noted(notes) if step > EVERY))


def assert_same_runs(out: Path, in_turn: Path) -> None:
    folders = run_folders(out)
    assert len(folders) == 2
    for folder in folders:
        same_files(folder, in_turn / folder.relative_to(out))
        assert json.loads((folder / "config.json").read_text())["threads"] == 1


def test_a_worker_and_a_node_die_and_another_node_joins(
    cluster: Nodes,
    on_ray: Cluster,
    plugin: Path,
    in_turn: Path,
    hold: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    notes = hold.parent

    def kill_and_add() -> None:
        wait_until(lambda: len(late(notes)) == 2, "both runs are past their first checkpoint")
        os.kill(late(notes)[0], signal.SIGKILL)
        wait_until(lambda: len(late(notes)) == 3, "the run went on in another process")
        cluster.kill(nodes_noted(notes)[late(notes)[2]])
        cluster.add("late")
        wait_until(lambda: "late" in nodes_noted(notes).values(), "the new node is used")
        hold.unlink()

    with meanwhile(kill_and_add):
        outcomes = run_all(works(plugin, tmp_path), None, 1, on_ray)
    said = capfd.readouterr().err
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2, said
    assert all(outcome.node for outcome in outcomes)
    assert said.count("it continues from its last checkpoint") == 2, said
    assert_same_runs(tmp_path, in_turn)
    assert 0 < len(steps_noted(notes)) - 2 * STEPS <= 2 * EVERY


def test_a_command_that_is_killed_is_given_again(
    cluster: Nodes, on_ray: Cluster, plugin: Path, in_turn: Path, hold: Path, tmp_path: Path
) -> None:
    notes = hold.parent
    command = ["run", "noted", "--seeds", "0-1", "--plugin", str(plugin), "--threads", "1", "--out", str(tmp_path)]
    command += [str(EVERY) if before == "--checkpoint-every" else word for before, word in pairwise(["", *OPTIONS])]
    program = [sys.executable, "-c", "from gracecl.lab.cli import main; main()", *command, "--engine", "ray", "--address"]
    with subprocess.Popen([*program, cluster.address], stderr=subprocess.PIPE) as process:
        wait_until(lambda: process.poll() is not None or len(late(notes)) == 2, "both runs are past their first checkpoint")
        assert process.poll() is None, process.stderr and process.stderr.read()
        process.kill()
    hold.unlink()
    assert [outcome.status for outcome in run_all(works(plugin, tmp_path), None, 1, on_ray)] == ["finished"] * 2
    assert_same_runs(tmp_path, in_turn)
    assert 0 <= len(steps_noted(notes)) - 2 * STEPS <= 2 * EVERY


def test_ctrl_c_saves_every_run(cluster: Nodes, plugin: Path, in_turn: Path, slowly: Path, hold: Path, tmp_path: Path) -> None:
    """Also on a node that was started in the background, whose processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    cluster.add("deaf", cpus=2, ignores=2)
    signal.signal(signal.SIGINT, before)
    there = Cluster("ray", cluster.address, resources=("ignores=1",))

    def interrupt() -> None:
        wait_until(lambda: len(late(slowly)) == 2, "both runs are at their steps")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SECONDS_FOR_THE_SIGNAL)
        hold.unlink()

    with meanwhile(interrupt), pytest.raises(Interrupted, match="runs begun: 2, not begun: 0"):
        run_all(works(plugin, tmp_path), None, 1, there)
    (slowly / "slowly").unlink()
    assert [outcome.status for outcome in run_all(works(plugin, tmp_path), None, 1, there)] == ["finished"] * 2
    cluster.kill("deaf")
    assert_same_runs(tmp_path, in_turn)
    assert len(steps_noted(slowly)) == 2 * STEPS, "no step is made twice"


def test_a_failure_of_the_users_own_is_reported_once(
    on_ray: Cluster, plugin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither is tried again, and the other run goes on."""
    troubles = ["refuse", "none", "crash"]
    tried = [
        Work.new(RunConfig(method=f"odd(trouble='{trouble}')", seed=0, **SETTINGS), tmp_path, None, (str(plugin),))
        for trouble in troubles
    ]
    outcomes = run_all(tried, 2, 1, on_ray)
    said = capfd.readouterr().err
    assert [outcome.status for outcome in outcomes] == ["refused", "finished", "crashed"], said
    assert said.count("there is no such thing; take another") == said.count("KeyError: 'no such row'") == 1
    assert "a plugin that prints" in said
    assert "it continues" not in said


def test_runs_share_a_gpu(cluster: Nodes, plugin: Path, hold: Path, tmp_path: Path) -> None:
    """Each asks for half of the one GPU that Ray counts, so that both are at work at once, on its node."""
    notes = hold.parent
    cluster.add("gpu", cpus=3, gpus=1)

    def wait_for_both() -> None:
        wait_until(lambda: len(late(notes)) == 2, "both runs are at their steps")
        hold.unlink()

    with meanwhile(wait_for_both):
        outcomes = run_all(works(plugin, tmp_path), None, 1, Cluster("ray", cluster.address, gpus=0.5))
    cluster.kill("gpu")
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2
    assert set(nodes_noted(notes).values()) == {"gpu"}


def test_nodes_get_the_code_of_the_command(cluster: Nodes) -> None:
    """Not what is installed on them."""
    import ray

    import gracecl as library
    from gracecl.lab.runs.on_ray import connect

    def look() -> tuple[str, str]:
        import gracecl

        return gracecl.__file__, gracecl.__version__

    connect(cluster.address)
    place, version = ray.get(ray.remote(look).remote())
    assert "runtime_resources" in Path(place).parts
    assert version == library.__version__


def test_what_no_node_has_is_named(cluster: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Such a run waits, as a node may join that has it."""
    from gracecl.lab.runs import on_ray

    executor = on_ray.RayExecutor(Cluster("ray", cluster.address, resources=("absent=2",)), None, 1, Board(1, 0))
    executor.submit(Work.new(RunConfig(method="er", **SETTINGS | {"stream": "split-digits"}), tmp_path))
    on_ray.connect(cluster.address)
    executor._name_missing_resources()
    assert "no node of the cluster has CPU 1, absent 2; runs that ask for it wait until one joins" in capfd.readouterr().err


def test_nodes_that_share_no_folder_keep_runs_in_an_object_store(
    s3: str, cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search on two nodes with caches of their own, where the driver asks and tells, and trains nothing."""
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'gracecl[tune]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    for name in ("east", "west"):
        cluster.add(name, environment={**store, "XDG_CACHE_HOME": str(tmp_path / name)}, apart=1)
    words = shlex.split(SEARCH)
    said = gracecl(*words, "--out", s3, "--engine", "ray", "--address", cluster.address, "--resources", "apart=1")
    assert said.code == 0, said.err
    assert not list((tmp_path / "here").rglob(CHECKPOINT)), "the command trains nothing"
    assert gracecl(*words, "--jobs", "1", "--out", tmp_path / "alone").code == 0
    found = remote.copy_of(s3)
    assert len(run_folders(found)) == len(run_folders(tmp_path / "alone")) == 4
    for folder in run_folders(tmp_path / "alone"):
        there = found / folder.relative_to(tmp_path / "alone")
        remote.Store(remote.url_of(there) or "").fetch(there, large=True)
        assert_same_run(there, folder)
