"""The page that a report writes: what is in it, how large it is, and that its command makes the run again."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from gracecl.lab import cli
from gracecl.lab.report import find_runs, page, read_run
from gracecl.lab.report.command import OPTIONS, _quoted, command
from gracecl.lab.report.measures import gap_rows
from gracecl.lab.runs.run import RunConfig
from run_folders import write_run

MAILABLE = 2_000_000


def data_of(text: str) -> dict:  # type: ignore[type-arg]
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_page_holds_the_runs(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, "mose()", seed)
    assert cli.call(["report", str(tmp_path)]) == 0
    data = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [group["label"] for group in data["groups"]] == ["mose()"]
    run = read_run(tmp_path / "mose()" / "100" / "1")
    shown = data["runs"][1]
    assert shown["folder"] == "mose()/100/1"
    assert data["groups"][0]["config"] | shown["config"] == run.config
    assert "seed" in shown["config"]
    assert "net" not in shown["config"], "written once for all seeds"
    assert shown["rules"]["ncm_mean"]["values"]["acc"] == pytest.approx(run.matrix("ncm_mean")[-1].mean(), abs=1e-5)
    assert data["quantiles"] == {}, "two seeds have no interval"


@pytest.mark.slow
def test_twenty_long_runs_fit_into_a_mail(tmp_path: Path) -> None:
    for seed in range(20):
        write_run(tmp_path, "grace(mose())", seed, tasks=20)
    runs = find_runs(tmp_path)
    page.write(tmp_path / "page.html", runs, "twenty")
    assert (tmp_path / "page.html").stat().st_size < MAILABLE
    data = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert all(sum(run["evals"]["ends"]) == 20 for run in data["runs"]), "the end of every task is kept"
    assert data["quantiles"]["20"] == pytest.approx(2.093024, abs=1e-6)  # Student t, 19 degrees of freedom


def test_curves_are_thinned_to_means_within_tasks(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, "er()", tasks=2))
    thinned = page._thinned(run, "ce/all", 10)
    steps, values, _ = run.series("ce/all")
    assert len(thinned["steps"]) == 10
    assert thinned["values"][0][0] == pytest.approx(values[:8].mean(), rel=1e-4)
    assert thinned["steps"][4] < 40 <= thinned["steps"][5], "no mean reaches over the end of a task"
    assert page._thinned(run, "ce/all", 500)["steps"] == steps.tolist()


def test_the_page_holds_what_was_predicted_and_evaluated(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "er()")
    bins = [[0.0] * 15, [0.0] * 15, [0.0] * 15]
    for row, value in zip(bins, (4.0, 2.0, 3.0), strict=True):
        row[11] = value
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines += [{"kind": "prequential", "step": step, "labels": [0, 1], "predictions": [0, 0]} for step in range(120)]
    lines += [{"kind": "confusion", "step": 119, "rule": "linear_last", "counts": [[0, 0, 5], [1, 0, 2]]}]
    marks = [line for line in lines if line["kind"] == "eval" and line["task_end"]]
    marks[-1]["calibration"] = {"bins": [bins], "nll": [2.0], "brier": [1.0]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = data_of(page.html(page.content(find_runs(tmp_path), "page")))
    [shown] = data["runs"]
    assert set(shown["prequential"]["curves"]) == {"window", "fading", "most frequent label so far", "last label"}
    assert shown["prequential"]["curves"]["window"][-1] == 50
    assert shown["prequential"]["steps"][-1] == pytest.approx(119.5)
    assert shown["calibration"] == [{"step": 119, "task": None, "images": 4, "ece": 0.25, "nll": 0.5, "brier": 0.25}]
    assert shown["confusion"] == [[0, 0, 5], [1, 0, 2]]
    depths = [row["depth"] for row in gap_rows(read_run(folder), "linear_last")]
    told = [dict(zip(data["gap"], row, strict=True)) for row in shown["gaps"]]
    assert [gap["before"] - gap["low"] for gap in told] == pytest.approx(depths, abs=0.01)
    assert {"prequential", "kappa_temporal", "majority", "gap_depth"} <= {metric["name"] for metric in data["metrics"]}


def test_nothing_is_fetched_and_no_text_ends_the_data(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "er()")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"net": "</script><script>alert(1)</script>"}))
    text = page.html(page.content(find_runs(tmp_path), "<title>"))
    assert data_of(text)["groups"][0]["config"]["net"] == "</script><script>alert(1)</script>"
    assert "alert(1)</script>" not in text
    own = text.replace(page._vendored("d3.min.js", "d3"), "").split("<script>/*\nplot")[0]
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', own)
    assert "default-src 'none'" in text, "and the browser would refuse to"
    assert text.count("Permission to use, copy, modify, and/or distribute") == 3, "the licences of d3, plot and isoformat"
    assert text.count("The MIT License") == 2


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "er()")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["rows"]["ce/all"] = [float("nan")]
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    text = page.html(page.content(find_runs(tmp_path), "page"))
    assert data_of(text)["runs"][0]["series"]["ce/all"]["values"][0][0] is None


def test_the_command_makes_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(
        "run 'er(n_recall=8)' --net 'mlp(width=8)' --memory 20 --steps 6 --eval-every 4 --optimizer 'sgd(lr=0.05)' --seeds 3 "
        "--normalise half --jobs 1 --stream"
    )
    words.append("split-digits(size=8, classes='0-3', tasks=2)")
    assert cli.call([*words, "--out", str(tmp_path / "first")]) == 0
    [run] = find_runs(tmp_path / "first")
    assert """--stream "split-digits(size=8, classes='0-3', tasks=2)" """ in command(run)
    program, *arguments = shlex.split(command(run))
    assert program == "gracecl"
    assert cli.call([*arguments, "--jobs", "1", "--out", str(tmp_path / "second")]) == 0
    [again] = find_runs(tmp_path / "second")
    assert again.path.relative_to(tmp_path / "second") == run.path.relative_to(tmp_path / "first"), "the same configuration"
    np.testing.assert_array_equal(again.matrix(again.rule), run.matrix(run.rule))
    assert f"Open {tmp_path / 'second' / 'report.html'}" in capsys.readouterr().out.splitlines()[-1]


def test_every_option_of_a_run_is_in_its_command() -> None:
    told_otherwise = {
        "method",
        "seed",
        "plugin_code",
        "tuned_on",
    }  # a digest of what --plugin names; what --defaults says of itself
    assert {*OPTIONS, *told_otherwise} == {field.name for field in fields(RunConfig)}


@pytest.mark.parametrize("word", ["er()", "it's", """both ' and \"""", "a'$HOME`x`\\!", "plain"])
def test_words_come_back_from_a_shell(word: str) -> None:
    assert shlex.split(_quoted(word)) == [word]
