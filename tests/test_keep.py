"""gracecl keep: what is committed of a run is enough for its tables, and a study does not make it again."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import gracecl
from gracecl.errors import UserError
from gracecl.files import finite, write_sealed
from gracecl.functional.metrics import MATRIX_METRICS
from gracecl.lab import report
from gracecl.lab.cli import call
from gracecl.lab.report.frames import load_runs
from gracecl.lab.report.keep import keep_runs
from gracecl.lab.report.kept import KEPT, KeptRun, find_lines, line_of, lines_in
from gracecl.lab.report.runs import SUMMARY, Run, is_tap, summary
from gracecl.lab.runs.result import Result
from gracecl.lab.runs.run import RunConfig, Work
from gracecl.lab.studies.reuse import reuse
from run_folders import write_run

COMMAND = ["study", "mini", "--quick", "--methods", "sgd()", "--seeds", "0-1", "--jobs", "1", "--threads", "1"]
RESULTS = Path("results")
PAGES = sorted(
    (
        page
        for page in RESULTS.glob("*/*.json")
        if "finished" in json.loads(page.read_text()) and page.parent.name != "record-inside"
    ),
    key=lambda page: page.stat().st_size,
)
"""of committed studies whose runs are committed too; that of record-inside needs weights"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a study, and the same runs kept: `made` and `kept` below the folder."""
    root = tmp_path_factory.mktemp("keep")
    assert call([*COMMAND, "--out", str(root / "made")]) == 0
    assert call(["keep", str(root / "made"), str(root / "kept"), "--every", "7"]) == 0
    return root


@pytest.fixture
def both(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def finished_run(root: Path, method: str, seed: int) -> None:
    """With made-up numbers, and without pictures."""
    folder = write_run(root, method, seed)
    write_sealed(folder / SUMMARY, summary(report.read_run(folder)))


def without_folder(run: Run) -> dict[str, Any]:
    return vars(run) | {"path": None}


def test_a_kept_run_is_the_run_without_most_of_its_steps(made: Path) -> None:
    assert [file.name for file in (made / "kept").iterdir()] == [KEPT]
    for whole, thin in zip(report.find_runs(made / "made"), report.find_runs(made / "kept"), strict=True):
        assert thin.path == made / "kept" / whole.path.relative_to(made / "made")
        thinned = [step for step in whole.steps if step["step"] % 7 == 0]
        assert without_folder(thin) == without_folder(whole) | {"steps": thinned}
        assert summary(thin) == summary(whole)
        by_path = report.read_run(thin.path)
        assert by_path == thin
        assert report.read_summary(thin.path) == report.read_summary(whole.path)
        assert Result.read(thin.path).config == Result.read(whole.path).config


def test_a_line_holds_every_value_of_the_files_of_a_run(made: Path) -> None:
    assert call(["keep", str(made / "made"), str(made / "whole"), "--every", "1"]) == 0
    for line in lines_in(made / "whole" / KEPT):
        folder, parts = made / "made" / line.folder, line.read()
        for part in ("config", "summary", "accuracy", "timing"):
            written = json.loads((folder / f"{part}.json").read_text())
            assert {name: value for name, value in written.items() if name != "digests"} == parts[part]
        assert list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())) == parts["record"]


def test_a_study_takes_kept_runs_for_its_own(both: Path) -> None:
    tables = []
    for folder in ("made", "kept"):
        assert call([*COMMAND, "--out", str(both / folder)]) == 0
        tables.append(json.loads((both / folder / "mini.json").read_text())["lines"])
    assert tables[0] == tables[1]
    assert not [entry for entry in (both / "kept").iterdir() if entry.is_dir()], "a run was made again"


def test_a_study_takes_kept_runs_of_other_studies(both: Path) -> None:
    configs = [Work.begun(run.path).config for run in report.find_runs(both / "made")]
    shutil.rmtree(both / "made")
    works = [Work.new(config, both / "mine") for config in (*configs, RunConfig("sgd", seed=5, device="cpu"))]
    found, taken = reuse(works, both / "mine")
    assert taken == {str(both / "kept"): 2}
    assert [work.folder.relative_to(both).parts[0] for work in found] == ["kept", "kept", "mine"]


def test_a_page_leads_to_the_runs_that_it_took_over(both: Path) -> None:
    places = [f"../kept/{line.folder}" for line in lines_in(both / "kept" / KEPT)]
    (both / "mine").mkdir()
    (both / "mine" / "mine.json").write_text(json.dumps({"study": "mine", "taken_over": places}))
    assert [run.path for run in report.find_runs(both / "mine")] == [run.path for run in report.find_runs(both / "kept")]


def test_tables_of_kept_runs_are_those_of_the_runs(both: Path) -> None:
    for what in ("runs", "evaluations"):
        first, second = (load_runs(both / folder, what).drop(columns="folder") for folder in ("made", "kept"))
        assert len(first) > 1
        assert first.equals(second)
    said = [gracecl("report", both / folder, "--formats", "csv,html,md") for folder in ("made", "kept")]
    assert [(one.code, "each folder has matrix.png" in one.out) for one in said] == [(0, True), (0, False)]
    assert (both / "made" / "report.csv").read_text() == (both / "kept" / "report.csv").read_text()
    assert gracecl("export", both / "kept", both / "kept.csv").out.startswith("2 rows")


def test_methods_among_kept_runs_can_be_compared(tmp_path: Path) -> None:
    for method in ("er()", "mose()"):
        for seed in range(3):
            finished_run(tmp_path / "made", method, seed)
    assert gracecl("keep", tmp_path / "made", tmp_path / "kept").code == 0
    said = [gracecl("compare", "er", "mose", "--runs", tmp_path / folder) for folder in ("made", "kept")]
    assert said[0].code == 0
    assert said[0].out == said[1].out


def test_a_run_in_its_folder_comes_before_its_line(both: Path) -> None:
    shutil.copytree(both / "made", both / "kept", dirs_exist_ok=True)
    runs = report.find_runs(both / "kept")
    assert [len(run.steps) for run in runs] == [len(run.steps) for run in report.find_runs(both / "made")]


def test_nothing_of_kept_runs_can_be_continued_or_exported(both: Path) -> None:
    before = (both / "kept" / KEPT).read_bytes()
    for words in (["resume", both / "kept"], ["export", both / "kept", both / "net.safetensors"]):
        said = gracecl(*words)
        assert (said.code, "without their weights" in said.sentence) == (2, True)
    assert [file.name for file in (both / "kept").iterdir()] == [KEPT]
    assert (both / "kept" / KEPT).read_bytes() == before


# --- the file ---------------------------------------------------------------------------------------------------------------


def test_more_runs_are_added_in_order_and_the_same_ones_replaced(tmp_path: Path) -> None:
    for seed in (10, 9):
        finished_run(tmp_path / str(seed), "er()", seed)
        keep_runs(tmp_path / str(seed), tmp_path / "kept", 50)
    file = tmp_path / "kept" / KEPT
    assert [line.folder for line in lines_in(file)] == ["er()/100/9", "er()/100/10"]
    before = file.read_bytes()
    keep_runs(tmp_path / "9", tmp_path / "kept", 50)
    assert file.read_bytes() == before
    keep_runs(tmp_path / "kept", tmp_path / "again", 50)
    assert (tmp_path / "again" / KEPT).read_bytes() == before
    keep_runs(tmp_path / "kept", tmp_path / "kept", 1000)
    assert [[step["step"] for step in run.steps] for run in report.find_runs(tmp_path / "kept")] == [[0], [0]]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a number": lambda line: line.replace(b'"memory":20', b'"memory":21', 1),
    "the folder": lambda line: line.replace(b"sgd/", b"er/", 1),
    "no folder": lambda line: line.replace(b"folder", b"fold", 1),
    "a folder above": lambda line: line.replace(b'"folder":"', b'"folder":"../', 1),
    "the digest": lambda line: line[:-4] + b'0"}' if not line.endswith(b'00"}') else line[:-4] + b'1"}',
    "no digest": lambda line: line[: line.rindex(b',"digest"')] + b"}",
    "the end": lambda line: line[:500],
    "all but its beginning": lambda line: line[:5],
    "not text": lambda line: b"\xff" + line,
    "a conflict": lambda line: b"<<<<<<< mine\n" + line,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_line_is_named_and_hides_no_other(what: str, both: Path) -> None:
    file = both / "kept" / KEPT
    first, second = file.read_bytes().splitlines()
    file.write_bytes(DAMAGE[what](first) + b"\n" + second + b"\n")
    runs, [sentence] = report.read_runs(report.find_places(both / "kept"))
    assert f"line 1 of {file} was changed by hand or damaged" in sentence
    assert [run.config["seed"] for run in runs][-1] == 1
    before = file.read_bytes()
    assert len(keep_runs(file.parent, both / "copy", 50)[1]) == 1
    with pytest.raises(UserError, match=f"line 1 of {file}"):
        keep_runs(both / "made", file.parent, 50)
    assert file.read_bytes() == before, "nothing is lost"


@pytest.mark.parametrize("what", ["a number", "no folder"])
def test_commands_name_a_damaged_line(what: str, both: Path) -> None:
    file = both / "kept" / KEPT
    first, second = file.read_bytes().splitlines()
    file.write_bytes(DAMAGE[what](first) + b"\n" + second + b"\n")
    for words in (
        ["report", file.parent, "--formats", "csv"],
        ["export", file.parent, both / "runs.csv"],
        ["keep", file.parent, both / "copy"],
        [*COMMAND, "--out", file.parent, "--as-is"],
    ):
        said = gracecl(*words)
        assert (said.code, f"line 1 of {file} was" in said.err, "Traceback" in said.err) == (2, True, False), words
    assert len(lines_in(both / "copy" / KEPT)) == 1


def test_two_lines_of_one_run_are_not_two_runs(both: Path) -> None:
    file = both / "kept" / KEPT
    file.write_bytes(file.read_bytes() + file.read_bytes().splitlines()[0] + b"\n")
    runs, [sentence] = report.read_runs(report.find_places(both / "kept"))
    assert len(runs) == 2
    assert f"line 3 of {file}" in sentence


@pytest.mark.parametrize("part", ["config", "summary", "accuracy", "timing", "record"])
@pytest.mark.parametrize("value", [None, 3, {}, [], [3], {"a": {}}, {"seed": "x"}], ids=repr)
def test_whatever_is_sealed_a_line_is_a_run_or_a_sentence(part: str, value: Any, both: Path) -> None:
    [line, _] = lines_in(both / "kept" / KEPT)
    data = line_of(Path(line.folder), line.read() | {part: value})
    (both / "kept" / KEPT).write_bytes(data)
    runs, damaged = report.read_runs(report.find_places(both / "kept"))
    assert len(runs) + len(damaged) == 1


def test_nothing_to_keep_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        keep_runs(tmp_path, tmp_path / "kept", 50)
    with pytest.raises(UserError, match="there is no folder"):
        keep_runs(tmp_path / "none", tmp_path / "kept", 50)
    with pytest.raises(UserError, match="--every must be at least 1"):
        keep_runs(tmp_path, tmp_path / "kept", 0)


def test_a_study_as_it_is_needs_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*COMMAND, "--out", str(tmp_path), "--as-is"]) == 2
    assert "holds no finished run of this study" in capsys.readouterr().err


# --- what is committed ------------------------------------------------------------------------------------------------------


def test_committed_runs_are_all_there() -> None:
    counts = {file.parent.name: len(lines_in(file)) for file in RESULTS.glob(f"*/{KEPT}")}
    assert counts == {
        "accuracy-mini": 12,
        "accuracy-small": 22,
        "birds": 3,
        "birds-vit": 3,
        "equal-cost": 30,
        "feedback": 24,
        "feedback-on-best": 32,
        "frontier": 88,
        "mini": 147,
        "mini-more": 6,
        "pretrained": 269,
        "protocols": 180,
        "readings": 98,
        "record": 106,
        "regimes": 30,
        "unmarked": 74,
    }
    assert sum(path.is_file() for path in RESULTS.rglob("*")) < 120


def check_numbers(line: KeptRun) -> None:
    """The metrics that the run wrote at its end are those of its matrices, and both those of its record, if that was kept."""
    parts, run = line.read(), report.read_run(line)
    told = parts["summary"]["metrics"] | parts["summary"]["per_tap"]
    assert told.keys() == parts["accuracy"].keys() != set()
    for rule, metrics in told.items():
        matrix = np.array(parts["accuracy"][rule], dtype=float)
        for name in MATRIX_METRICS.keys() & metrics.keys():  # runs before 0.3.0 lack some
            assert MATRIX_METRICS[name](matrix) == pytest.approx(metrics[name], abs=1e-9, nan_ok=True), (line, rule, name)
        assert is_tap(rule) == (rule in parts["summary"]["per_tap"])
    if run.evals:
        assert finite(run.matrices()) == parts["accuracy"]
        again = finite(summary(run))
        assert {name: again[name] for name in ("steps", "finished")} == {
            name: parts["summary"][name] for name in ("steps", "finished")
        }
        for rule, metrics in told.items():
            found = again["per_tap" if is_tap(rule) else "metrics"][rule]
            assert {name: found[name] for name in metrics} == metrics


@pytest.mark.slow
def test_committed_metrics_follow_from_committed_matrices_and_records() -> None:
    for line in find_lines(RESULTS):
        check_numbers(line)


def test_committed_metrics_follow_from_what_is_committed_for_a_run_of_each_study() -> None:
    for file in RESULTS.glob(f"*/{KEPT}"):
        check_numbers(lines_in(file)[0])


def when(place: int) -> list[Any]:
    """The smallest page is part of `make test`, two more of `make test-all`."""
    return [] if place == 0 else [pytest.mark.slow if place < 3 else pytest.mark.exhaustive]


@pytest.mark.parametrize("page", [pytest.param(page, marks=when(place), id=page.stem) for place, page in enumerate(PAGES)])
def test_committed_pages_follow_from_committed_runs(page: Path, tmp_path: Path) -> None:
    committed = json.loads(page.read_text())
    assert call([*shlex.split(committed["command"])[1:], "--as-is", "--out", str(tmp_path)]) == 0
    again = json.loads((tmp_path / page.name).read_text())
    assert [again[name] for name in ("finished", "planned", "seeds")] == [
        committed[name] for name in ("finished", "planned", "seeds")
    ]
    for new, old in zip(again["lines"], committed["lines"], strict=True):
        for name, value in old.items():
            # Sums of seconds over seeds were taken in another order.
            assert new[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), (old["method"], name)
