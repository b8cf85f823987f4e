"""The package as it is released: built, installed in an environment of its own, and used where the repository is not."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import gracecl

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` builds, from a copy: building leaves folders behind."""
    place = tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "--exclude=results", "-C", place], input=tracked, check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", place], check=True, capture_output=True
    )
    return place / "dist"


def test_the_wheel_has_every_file_of_the_package_and_no_other(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    package = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert sorted(package) == sorted(line.removeprefix("src/") for line in listed.splitlines())


def test_the_source_archive_can_run_its_own_tests(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/warm.py", "tests/golden/mose.npz"} <= names
    assert not any(name.startswith("results/") for name in names)


def test_the_wheel_runs_the_demo_without_the_repository(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python, site = tmp_path / "venv" / "bin" / "python", next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel],
        env=environment,
        check=True,
        capture_output=True,
    )
    # The dependencies that are installed beside the tests; a folder named so brings no editable package along.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    told = "import gracecl; print(gracecl.__version__, gracecl.__file__)"
    where = subprocess.run([python, "-c", told], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert where.returncode == 0, where.stderr
    assert where.stdout.split() == [gracecl.__version__, str(site / "gracecl" / "__init__.py")]
    demo = shlex.split(
        "run er mose grace --stream split-digits --memory 20 --net 'resnet18(width=6)' --steps 4 --jobs 1 --out runs/demo"
    )
    ended = subprocess.run(
        [tmp_path / "venv" / "bin" / "gracecl", *demo],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
