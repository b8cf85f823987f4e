"""Every command and every program in the README and in the manual runs."""

from __future__ import annotations

import atexit
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

import gracecl
import warm
from data import layouts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [page for folder in ("start", "reference", "tutorials") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
NEED_FILES = {"features.md", "large_data.md", "reports.md", "studies.md"}
"""whose code is about files that are not there: data/test_features, data/test_shards, test_export and test_study_files have some"""
EXTRAS = {"interfaces.md": "river", "pretrained.md": "efficientnet_lite_pytorch", "table_with_statistics.md": "pandas"}
"""pages whose code needs a package that not everybody has"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """The kind and the text of a page's blocks of code. The cells of a notebook are one program."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+|\{code-cell\})\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    cells = "\n".join(block for kind, block in found if kind == "{code-cell}")
    return [(kind, block) for kind, block in found if kind != "{code-cell}"] + ([("python", cells)] if cells else [])


BLOCKS = [(page.name, kind, block) for page in PAGES if page.name not in NEED_FILES for kind, block in blocks(page)]
COMMANDS = list(dict.fromkeys(line for _, kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if line))
PROGRAMS = [pytest.param(page, block, id=f"{page}-{place}") for place, (page, kind, block) in enumerate(BLOCKS) if kind == "python"]


def made_by(command: str) -> list[str]:
    """The command before it whose folder a command works on, if there is one."""
    before = COMMANDS[: COMMANDS.index(command)]
    folders = {shlex.split(other)[-1]: other for other in before if "--out" in other}
    return [folders[word] for word in shlex.split(command) if word in folders]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    """In a folder of its own, with a tiny CIFAR-100 in its official layout, after the command whose runs it needs."""
    if any(command in made_by(other) for other in COMMANDS):
        after(command)
        return
    for before in made_by(command):
        shutil.copytree(after(before), tmp_path, dirs_exist_ok=True)
    layouts.cifar100(tmp_path)
    check_command(command, tmp_path)


@cache
def after(command: str) -> Path:
    """A folder in which a command has run, for all that need its runs."""
    workplace = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, workplace)
    check_command(command, workplace)
    return workplace


def test_commands_find_what_they_need() -> None:
    assert [command for command in COMMANDS if made_by(command)], "some commands work on the runs of others"
    for command in COMMANDS:
        assert "--out" not in command or shlex.split(command)[-2] == "--out", f"--out must stand last, for made_by: {command}"


def check_command(command: str, workplace: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        # CI calls the targets themselves; here it is enough that they exist.
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        return
    if arguments[:2] == ["-m", "benchmarks"]:
        assert program == ".venv/bin/python"
        done = python([*arguments, "--quick"], workplace)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return
    assert program == "gracecl"
    if arguments[:2] == ["data", "check"]:
        assert call(arguments, workplace).returncode == 2, "a tiny set is not the complete one"
        return
    if arguments[0] == "theory":
        arguments += ["--draws", "2", "--points", "3", "--images", "20"]
    if arguments[0] == "run" and "split-cifar100" in arguments:
        arguments = [word.replace("width=64", "width=8") for word in arguments] + ["--steps", "2", "--seeds", "0"]
    elif arguments[0] == "run" and "--steps" not in arguments:
        arguments += ["--steps", "20"]
    if arguments[0] in ("run", "study"):
        arguments += ["--jobs", "1"]  # each of several processes would load everything anew
    done = call(arguments, workplace)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def call(arguments: list[str], workplace: Path) -> subprocess.CompletedProcess[str]:
    return python(["-c", "from gracecl.lab.cli import main; main()", *arguments], workplace)


def python(arguments: list[str], workplace: Path) -> subprocess.CompletedProcess[str]:
    """With a user's environment that knows of nothing but the data."""
    environment = {"GRACECL_DATA": str(workplace), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(workplace)}
    return warm.python(arguments, workplace, environment)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_program(page: str, program: str, tmp_path: Path) -> None:
    if page in EXTRAS:
        pytest.importorskip(EXTRAS[page])
    file = tmp_path / "mine.py"
    file.write_text(program, encoding="utf-8")
    done = python([str(file)], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_method_of_the_readme_is_a_plugin(tmp_path: Path) -> None:
    """What the text below the program says: the file works with --plugin."""
    [program] = [block for page, _, block in BLOCKS if page == "README.md" and "methods.register" in block]
    (tmp_path / "mine.py").write_text(program.replace('check_method("er_seen()")', ""), encoding="utf-8")
    arguments = [
        "run",
        "grace(er_seen())",
        "--plugin",
        "mine.py",
        "--stream",
        "split-digits",
        "--steps",
        "3",
        "--net",
        "mlp(depth=4)",
    ]
    done = call(arguments, tmp_path)
    assert done.returncode == 0, done.stderr


def test_one_version_everywhere() -> None:
    project, citation, changes = ((ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"))
    assert f'\nversion = "{gracecl.__version__}"\n' in project
    assert f"\nversion: {gracecl.__version__}\n" in citation
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == gracecl.__version__


def test_nouns_folders_and_the_import_contract_are_the_same() -> None:
    """Every module of the library and of the laboratory has its place in ARCHITECTURE's table of its group and in .importlinter."""
    text, contract = (ROOT / "ARCHITECTURE.md").read_text(), (ROOT / ".importlinter").read_text()
    library, laboratory = text.split("The **library** is")[1].split("The **laboratory**")
    for folder, table, prefix in (
        (ROOT / "src/gracecl", library, "gracecl."),
        (ROOT / "src/gracecl/lab", laboratory.split("Beside both")[0], "gracecl.lab."),
    ):
        found = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
        names = {path.stem for path in found if not path.stem.startswith("__")} - {"lab"}
        assert {name for name in names if not re.search(rf"`(lab/)?{name}(/|\.py)", table)} == set()
        layers = {name for line in contract.splitlines() for name in re.findall(rf"{re.escape(prefix)}(\w+)(?=$| )", line)}
        assert names <= layers
