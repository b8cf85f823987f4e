"""`gracecl compare`: which runs a name means, what is compared with what, and what is said about it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gracecl.errors import UserError
from gracecl.functional.statistics import Paired, Summary, paired, summarise
from gracecl.lab import cli
from gracecl.lab.report import find_runs
from gracecl.lab.report.compare import Comparison, over_settings
from gracecl.lab.report.figures import alike
from gracecl.lab.report.groups import group_runs
from gracecl.lab.report.select import select
from gracecl.lab.report.terms import terms
from run_folders import write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods with five seeds each, of which one has only four."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("er()", "mose()", "grace(mose())"):
        for seed in range(4 if method == "mose()" else 5):
            write_run(folder, method, seed)
    return folder


def final(root: Path, method: str) -> dict[int, float]:
    return {run.config["seed"]: float(run.matrix(run.rule)[-1].mean()) for run in find_runs(root / method)}


def test_methods_are_compared_on_the_seeds_they_share(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare", "er", "mose", "grace", "--runs", str(root), "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    lines = {line["method"]: line for line in data["comparisons"]}
    assert set(lines) == {"mose()", "grace(mose())"}
    er, mose = final(root, "er()"), final(root, "mose()")
    test = stats.ttest_rel([mose[seed] for seed in range(4)], [er[seed] for seed in range(4)])
    found = lines["mose()"]
    assert (found["other"], found["difference"]["n"], found["value"]["n"]) == ("er()", 4, 4)
    assert found["difference"]["p"] == pytest.approx(test.pvalue)
    corrected = sorted(line["corrected"] / line["difference"]["p"] for line in lines.values())
    assert corrected[1] == pytest.approx(2.0) or lines["mose()"]["corrected"] == lines["grace(mose())"]["corrected"]
    first, second = sorted(lines.values(), key=lambda line: line["difference"]["wilcoxon"])
    assert first["corrected_wilcoxon"] == pytest.approx(min(1.0, 2 * first["difference"]["wilcoxon"]))
    assert second["corrected_wilcoxon"] == max(first["corrected_wilcoxon"], second["difference"]["wilcoxon"])
    assert first["corrected_wilcoxon"] > first["difference"]["wilcoxon"]
    text = (tmp_path / "compare.md").read_text(encoding="utf-8")
    assert f"- {found['sentence']}" in text
    assert (tmp_path / "compare.png").read_bytes().startswith(PNG)
    assert not (tmp_path / "ranks.png").exists(), "one setting has no ranks over settings"
    printed = capsys.readouterr().out
    assert found["sentence"] in printed
    assert max(map(len, printed.split("Same stream")[0].splitlines())) <= 80
    line = terms(group_runs(find_runs(root)))
    assert "same seeds: no, n = 4 to 5; " in line
    assert line in text
    assert line in " ".join(printed.split())


def test_folders_are_compared_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare", str(root / "er()"), str(root / "grace(mose())"), "--metric", "bwt"]) == 0
    assert "in bwt" in capsys.readouterr().out
    assert cli.call(["compare", str(root)]) == 0
    assert capsys.readouterr().out.count("between") + 2 >= 2


def test_the_same_configuration_in_two_folders_is_two_things(tmp_path: Path) -> None:
    for name in ("before", "after"):
        for seed in range(3):
            write_run(tmp_path / name, "er()", seed)
    first, second = select([str(tmp_path / "before"), str(tmp_path / "after")], tmp_path)
    assert [group.label for group in (*first, *second)] == [f"er() in {tmp_path / name}" for name in ("before", "after")]


def test_what_cannot_be_compared_is_told(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        assert cli.call(["compare", *words]) == 2
        return capsys.readouterr().err

    assert "has no run of 'derpp'" in told("er", "derpp", "--runs", str(root))
    assert "did you mean 'acc'" in told("er", "mose", "--runs", str(root), "--metric", "ac")
    assert "no folder nowhere" in told("er", "mose", "--runs", "nowhere")
    assert "name another" in told("er", "--runs", str(root))
    assert "name what to compare" in told()
    write_run(tmp_path, "mose()", 9)
    assert "no seed of the first is shared" in told(str(root / "er()"), str(tmp_path))
    assert "was not evaluated with the rule" in told("er", "mose", "--runs", str(root), "--rule", "ncm_9")


def made(mean: float, std: float, n: int, corrected: float, metric: str = "acc") -> Comparison:
    values = np.full(n, mean) + std * stats.zscore(np.arange(n), ddof=1) if n > 1 else np.array([mean])
    return Comparison("", "a", "b", metric, summarise(values + 50), paired(values, np.zeros(n)), corrected, math.nan)


def test_sentences_in_plain_words() -> None:
    assert made(1.0, 4.0, 5, 0.6).sentence.startswith(
        "No evidence of a difference in acc between `a` and `b` at 5 seeds: +1.00, 95 % "
    )
    assert made(1.0, 4.0, 5, 0.6).sentence.endswith("If it is as large as it looks, 128 seeds would show it.")
    assert made(3.0, 1.0, 5, 0.01).sentence.startswith("`a` is better than `b` in acc at 5 seeds: +3.00")
    assert made(3.0, 1.0, 5, 0.01, "forgetting").sentence.startswith("`a` is worse than `b` in forgetting")
    assert made(-3.0, 1.0, 5, 0.01, "forgetting").sentence.startswith("`a` is better")
    assert made(3.0, 1.0, 2, math.nan).sentence == "Nothing can be said about `a` and `b` from 2 seeds; run 3 or more."


def test_a_difference_of_nothing_needs_no_number_of_seeds() -> None:
    line = Comparison("", "a", "b", "acc", Summary(1, 1, 1, 3), Paired(0.0, 1.0, -2.5, 2.5, 1.0, 1.0, 0.0, 3), 1.0, 1.0)
    assert line.sentence.endswith("after Holm's correction.")


def test_methods_are_ranked_over_settings(tmp_path: Path) -> None:
    for memory in (50, 100, 200):
        for method in ("er()", "mose()", "grace(mose())"):
            write_run(tmp_path, method, 0, memory=memory)
    write_run(tmp_path, "sgd()", 0, memory=50)
    out = tmp_path / "out"
    words = ["compare", "er()", "mose()", "grace(mose())", "sgd()", "--runs", str(tmp_path), "--out", str(out)]
    assert cli.call(words) == 0
    data = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert data["ranks"]["methods"] == ["er()", "mose()", "grace(mose())"], "sgd is not in every setting"
    assert data["ranks"]["settings"] == 3
    assert sum(data["ranks"]["ranks"]) == pytest.approx(6.0)
    assert (out / "ranks.png").read_bytes().startswith(PNG)
    assert all(line["setting"] for line in data["comparisons"])
    assert {(line["method"], line["other"]) for line in data["comparisons"]} == {
        (method, "er()") for method in ("mose()", "grace(mose())", "sgd()")
    }


@pytest.mark.parametrize(("metric", "ranks"), [("seconds", [2.0, 1.0]), ("acc", [2.0, 1.0]), ("forgetting", [2.0, 1.0])])
def test_the_first_rank_is_the_best_whatever_the_metric(tmp_path: Path, metric: str, ranks: list[float]) -> None:
    """mose() is the faster, has the higher accuracy and forgets less in these runs."""
    for memory in (50, 100, 200):
        for method, seconds in (("er()", 30.0), ("mose()", 20.0)):
            folder = write_run(tmp_path, method, 0, memory=memory)
            timing = json.loads((folder / "timing.json").read_text())
            (folder / "timing.json").write_text(json.dumps(timing | {"train_seconds": seconds}))
    groups = group_runs(find_runs(tmp_path))
    methods, found = over_settings(groups, metric)
    er, mose = (next(group for group in groups if group.method == method).summarise(metric).mean for method in ("er()", "mose()"))
    assert methods == ["er()", "mose()"]
    assert (er < mose) == (metric == "acc")
    assert found.ranks == ranks


def test_seeds_of_a_stream_of_drawn_length_are_one_group(tmp_path: Path) -> None:
    for seed, steps in ((0, 10), (1, 12)):
        file = write_run(tmp_path, "er()", seed) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"stream_steps": steps}))
    [group] = group_runs(find_runs(tmp_path))
    assert len(group.runs) == 2


def test_one_setting_has_no_ranks(root: Path) -> None:
    assert over_settings(group_runs(find_runs(root)), "acc") is None


def test_stretches_of_ranks_that_cannot_be_told_apart() -> None:
    assert alike([1.0, 1.5, 3.0, 3.2], 1.0) == [(0, 1), (2, 3)]
    assert alike([1.0, 2.0, 3.0], 1.5) == [(0, 1), (1, 2)]
    assert alike([1.0, 2.0, 3.0], 5.0) == [(0, 2)]
    assert alike([1.0, 2.0, 3.0], 0.5) == []


def test_runs_of_two_settings_say_what_differs(tmp_path: Path) -> None:
    for memory in (50, 100):
        for seed in range(3):
            write_run(tmp_path / str(memory), "er()", seed, memory=memory)
    out = tmp_path / "out"
    assert cli.call(["compare", str(tmp_path / "50"), str(tmp_path / "100"), "--out", str(out)]) == 0
    [line] = json.loads((out / "compare.json").read_text(encoding="utf-8"))["comparisons"]
    assert (line["method"], line["other"]) == ("er(), memory=100", "er(), memory=50")


def test_an_unknown_method_name_is_not_an_expression(tmp_path: Path) -> None:
    write_run(tmp_path, "Some Paper's Method", 0)
    with pytest.raises(UserError, match="name another"):
        select(["Some Paper's Method"], tmp_path)
