"""gracecl keep: what is committed of a run is enough for its tables, and a study does not make it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gracecl import report
from gracecl.cli import call
from gracecl.errors import UserError
from gracecl.report.keep import keep_runs
from gracecl.report.runs import summary

COMMAND = ["study", "mini", "--quick", "--methods", "sgd()", "--seeds", "0", "--jobs", "1", "--threads", "1"]


def test_a_kept_run_has_the_same_numbers_and_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*COMMAND, "--out", str(tmp_path / "made")]) == 0
    [made] = [file.parent for file in (tmp_path / "made").rglob("summary.json")]
    assert call(["keep", str(tmp_path / "made"), str(tmp_path / "kept"), "--every", "7"]) == 0
    kept = tmp_path / "kept" / made.relative_to(tmp_path / "made")
    assert {file.name for file in kept.iterdir()} == {
        "config.json",
        "summary.json",
        "accuracy.json",
        "timing.json",
        "metrics.jsonl",
    }
    whole, thin = report.read_run(made), report.read_run(kept)
    assert summary(thin)["metrics"] == summary(whole)["metrics"]
    assert (thin.evals, thin.tasks) == (whole.evals, whole.tasks)
    assert [step["step"] for step in thin.steps] == [step["step"] for step in whole.steps if step["step"] % 7 == 0]
    tables = []
    for folder in ("made", "kept"):
        capsys.readouterr()
        assert call([*COMMAND, "--out", str(tmp_path / folder), "--as-is"]) == 0
        tables.append(json.loads((tmp_path / folder / "mini.json").read_text())["lines"])
    assert tables[0] == tables[1]


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
