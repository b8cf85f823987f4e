"""The parts of the benchmark that concern the memory, the start of the command, and Avalanche: that they measure what they say."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import avalanche, closed, gpus, memory, pages, serving, shrinkage, startup, tabular
from benchmarks.measure import Row
from gracecl.errors import UserError

IMPORTED_TORCH = """
import sys
try:
    from gracecl.lab.cli import main
    main()
except SystemExit:
    pass
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def check_rows(rows: list[Row]) -> None:
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.what
        assert row.against
        assert math.isfinite(row.ratio)
        assert row.low <= row.ratio <= row.high


@pytest.mark.slow
def test_memory_rows() -> None:
    rows = {row.name: row for row in memory.rows(quick=True)}
    check_rows(list(rows.values()))
    assert {"memory add + draw, 100,000", "memory add + draw, 1,000,000"} <= rows.keys()
    if memory.RESIDENT.exists():
        held = rows["memory held"]
        assert held.ratio >= 1, "the pixels alone take as much"
        assert held.met


def test_memory_stays_as_it_is_while_it_is_timed() -> None:
    steady = memory.SteadyMemory(memory.SMALL)
    for _ in range(500):
        steady.step()
    held = [steady.memory.count(task=task) for task in range(memory.TASKS)]
    assert sum(held) == len(steady.memory) == memory.SMALL
    assert steady.memory.offered == memory.AGE * memory.SMALL
    assert min(held) > memory.SMALL / memory.TASKS / 2, "a task that took over would leave nothing to draw"


@pytest.mark.slow
def test_startup_rows() -> None:
    rows = list(startup.rows(quick=True))
    check_rows(rows)
    assert [row.name for row in rows] == ["gracecl --help", "gracecl list methods"]
    assert all(row.details["seconds"] > 0 < row.details["seconds_against"] for row in rows)


@pytest.mark.parametrize("arguments", startup.ASKED, ids=" ".join)
def test_answers_come_without_torch(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED_TORCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_without_avalanche_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avalanche, "installed", lambda: False)
    with pytest.raises(UserError, match=r"pip install gracecl\[avalanche\]"):
        avalanche.rows(quick=True)


@pytest.mark.skipif(not avalanche.installed(), reason="Avalanche is not installed")
def test_avalanche_rows_compare_equal_steps() -> None:
    rows = list(avalanche.rows(quick=True))
    check_rows(rows)
    for slots, row in zip(avalanche.AIMS, rows, strict=True):
        assert row.sense == "at least"
        assert row.details["images_held"] == row.details["images_held_against"] == slots
        assert row.details["images_per_step"] == row.details["images_per_step_against"] == 2 * avalanche.BATCH


@pytest.mark.slow
def test_closed_rows() -> None:
    rows = list(closed.rows(quick=True))
    check_rows(rows)
    assert [row.name for row in rows] == [
        "prequential, ranpac(projections=50)",
        "prequential, closed()",
        "one row of 20 numbers, closed()",
    ]
    assert all(row.ratio > 1 for row in rows[:2]), "two passes of the trunk against one"


@pytest.mark.slow
def test_shrinkage_compares_rules_of_the_same_sums() -> None:
    lines = shrinkage.text(quick=True).splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    settings = [["100", "10"], ["400", "10"], ["50", "5"]]
    assert [row[:3] for row in rows] == [[*setting, of] for of in ("none", "relu 100") for setting in settings]
    for row in rows:
        found = dict(zip(header[3:], map(float, row[3:]), strict=True))
        assert 80 < found["LDA, OAS"] <= 100
        assert found["best λ"] >= found["ridge, evidence"] - 0.5, "the evidence's λ is in the grid, but for rounding"


def test_shrinkage_says_how_features_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="gracecl features efficientnet_lite0 cifar100"):
        shrinkage.text(quick=False)


@pytest.mark.slow
def test_serving_rows() -> None:
    rows = list(serving.rows(quick=True))
    assert len(rows) == 3 * len(serving.LEARNERS)
    assert [row.aim for row in rows] == [None, 2.0, None] * len(serving.LEARNERS)
    assert all(row.ratio > 0 for row in rows)


@pytest.mark.slow
def test_tabular_rows() -> None:
    """Each learner is better than chance on a stream that drifts, and what takes single rows is measured on these."""
    rows = list(tabular.rows(quick=True))
    names = [row.name.split(", batches")[0] for row in rows]
    assert names.count("Learner er, mlp") == 3
    assert names.count("river Hoeffding tree") == 1
    accuracy = {row.name.rsplit(":")[0]: row.details["accuracy"] for row in rows}
    assert accuracy["Learner slda, identity, batches of 1"] > 40
    one, other = (accuracy[f"{kind} er, identity, batches of 10"] for kind in ("Learner", "OnlineClassifier"))
    assert one == other


def test_the_longest_runs_begin_first_on_several_devices() -> None:
    assert gpus.makespan([1, 2, 3, 2], devices=2) == 4
    assert gpus.makespan([5, 1, 1], devices=512) == 5


@pytest.mark.slow
def test_rows_of_a_page_of_many_runs() -> None:
    """Each seed of the copies is a run of its own in the report."""
    rows = list(pages.rows(quick=True))
    check_rows(rows)
    assert rows[0].name == "report of 50 runs"
