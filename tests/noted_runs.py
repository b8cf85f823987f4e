"""Runs that note their steps and processes, for the tests of clusters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.run import RunConfig, Work
from test_jobs import PLUGIN, SETTINGS
from test_jobs import wait_until as wait

wait_until = partial(wait, seconds=500)
EVERY = 8
"""steps between checkpoints"""
NOTING = '''

@methods.register("noted")
@dataclass(eq=False, repr=False)
class Noted(Odd):
    """A method that notes each step, the process and the node, and waits while files say so."""

    def losses(self, out, batch):
        with open(os.environ["NOTES"] + "/steps", "a") as file:
            file.write(f"{batch.progress.step} {os.getpid()} {os.environ.get('NODE', '')}\\n")
        if os.path.exists(os.environ["NOTES"] + "/slowly"):
            time.sleep(0.1)
        while os.path.exists(os.environ["NOTES"] + "/hold") and batch.progress.step > 12:
            time.sleep(0.05)
        return super().losses(out, batch)
'''


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where runs note their steps; `slowly` in it makes them wait."""
    folder = tmp_path_factory.mktemp("notes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES", str(folder))
        yield folder


@pytest.fixture(scope="module")
def plugin(notes: Path) -> Path:
    file = notes / "noted_methods.py"
    file.write_text(PLUGIN + NOTING)
    return file


@pytest.fixture(scope="module")
def in_turn(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs, one after the other in this process, with one thread."""
    out = tmp_path_factory.mktemp("in_turn")
    assert [outcome.status for outcome in run_all(works(plugin, out), 1, 1)] == ["finished"] * 2
    return out


@pytest.fixture
def slowly(notes: Path) -> Iterator[Path]:
    """Runs take their time, and their notes begin anew."""
    (notes / "steps").unlink(missing_ok=True)
    (notes / "slowly").touch()
    yield notes
    (notes / "slowly").unlink(missing_ok=True)


@pytest.fixture
def hold(notes: Path) -> Iterator[Path]:
    """Runs stay at a step after their first checkpoint while this file is there, and their notes begin anew."""
    (notes / "steps").unlink(missing_ok=True)
    (notes / "hold").touch()
    yield notes / "hold"
    (notes / "hold").unlink(missing_ok=True)


def steps_noted(notes: Path) -> list[tuple[int, int]]:
    """Step and process of each step of all runs."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line.split(" ") for line in (notes / "steps").read_text().splitlines()]
        return [(int(step), int(pid)) for step, pid, _ in lines]
    return []


def nodes_noted(notes: Path) -> dict[int, str]:
    """The node of each process."""
    lines = [line.split(" ") for line in (notes / "steps").read_text().splitlines()]
    return {int(pid): node for _, pid, node in lines}


@contextlib.contextmanager
def meanwhile(happens: Callable[[], None]) -> Iterator[None]:
    """Let something happen while the block runs; what goes wrong there is raised at its end."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            happens()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]


def works(plugin: Path, out: Path) -> list[Work]:
    """Two runs that note their steps."""
    settings = SETTINGS | {"checkpoint_every": EVERY}
    return [Work.new(RunConfig(method="noted", seed=seed, **settings), out, None, (str(plugin),)) for seed in range(2)]
