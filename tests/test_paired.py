"""Methods against a control on the same seeds: Holm's correction, the seeds that would be needed, the table and its picture."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from gracecl import cli
from gracecl.functional.statistics import Paired, Summary
from gracecl.report import Run, find_runs
from gracecl.report.compare import Comparison
from gracecl.runs.run import Work
from gracecl.studies import paired as comparison
from gracecl.studies import plan, readings, record, regimes


def line(mean: float, corrected: float, n: int = 4) -> Comparison:
    difference = Paired(mean, 1.0, mean - 1, mean + 1, 0.01, 0.1, mean, n)
    return Comparison("here", "er()", "sgd()", "acc", Summary(50.0, 1.0, 1.0, n), difference, corrected, 0.1)


def test_what_a_comparison_says() -> None:
    said = [line(2, 0.04).verdict, line(-2, 0.04).verdict, line(2, 0.06).verdict, line(2, math.nan, 1).verdict]
    assert said == ["above", "below", "cannot tell", "1 seed: no interval"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on three seeds, as a study makes them."""
    out = tmp_path_factory.mktemp("study")
    assert cli.call(["study", "record", "--quick", "--methods", "sgd()", "er()", "mose()", "--seeds", "0-2", "--jobs", "1",
                     "--threads", "1", "--out", str(out)]) == 0  # fmt: skip
    return out


@pytest.mark.slow
def test_a_study_compares_its_methods_with_the_control(made: Path) -> None:
    content = json.loads((made / "record.json").read_text(encoding="utf-8"))
    lines = {entry["method"]: entry for entry in content["paired"]}
    assert set(lines) == {"sgd()", "er()"}
    accuracy = {
        (run.config["method"], run.config["seed"]): run.evals[-1]["accuracy"][run.rule] for run in find_runs(made)
    }  # fmt: skip
    differences = [np.mean(accuracy["er()", seed]) - np.mean(accuracy["mose()", seed]) for seed in range(3)]
    assert lines["er()"]["difference"]["mean"] == pytest.approx(np.mean(differences))
    assert lines["er()"]["difference"]["n"] == 3
    assert lines["sgd()"]["images"] < lines["er()"]["images"] < 1
    assert lines["er()"]["corrected"] >= lines["er()"]["difference"]["p"]
    text = (made / "record.md").read_text(encoding="utf-8")
    assert "Against the control `mose()`" in text
    assert (made / "record.png").stat().st_size > 5000


def test_two_seeds_have_no_interval(made: Path) -> None:
    runs = [run for run in find_runs(made) if run.config["seed"] < 2]
    text = comparison.markdown(comparison.compare(runs, "mose()"))
    assert "2 seeds: no interval" in text
    assert " to " not in text.split("|---")[1]


def test_grace_is_compared_with_what_it_wraps_where_the_control_is_not_there(made: Path) -> None:
    def renamed(run: Run, method: str) -> Run:
        return dataclasses.replace(run, config=run.config | {"method": method})

    names = {"er()": "er()", "mose()": "grace(er())"}
    runs = [renamed(run, names[run.config["method"]]) for run in find_runs(made) if run.config["method"] in names]
    [found] = comparison.compare(runs, "mose()")
    assert found.comparison.method == "grace(er())"


@pytest.mark.parametrize("module", [readings, regimes, record])
def test_every_configuration_of_a_study_is_a_learner(module) -> None:  # type: ignore[no-untyped-def]
    configs = module.configs((), [0, 1], quick=False)
    assert len({(config, config.seed) for config in configs}) == len(configs), "no run twice"
    for config in configs:
        config.canonical()
    control = [config for config in configs if config.method == module.CONTROL]
    assert {config.seed for config in control} == {0, 1}


def test_readings_are_confirmed_on_other_classes() -> None:
    configs = readings.configs((), [0], quick=False)
    for stream in readings.CONFIRMATION:
        assert {config.method for config in configs if config.stream == stream} == set(readings.CONFIRMED)
        assert "'0-19'" not in stream or "tiny" in stream


def test_a_plan_counts_what_is_left(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "record", "--quick", "--methods", "sgd()", "er()", "--seeds", "0-3", "--jobs", "1", "--dry-run"]
    assert cli.call([*words, "--out", str(made)]) == 0
    printed = capsys.readouterr().out
    assert "1 × sgd()" in printed
    assert "2 runs are left" in printed
    assert not list(tmp_path.iterdir())


def test_an_estimate_is_of_the_second_task() -> None:
    [config] = record.configs(["mose()"], [0], quick=True)
    [found] = plan.estimates([Work.new(config, Path("nowhere"))])
    assert (found.left, found.steps) == (1, 30)
    assert found.images > 2 * 4 * 40, "MOSE's second block is in it"
    assert found.hours == pytest.approx(30 * found.seconds / 3600)


@pytest.mark.slow
def test_readings_show_what_happens_inside(tmp_path: Path) -> None:
    """One seed with and without feedback: a picture, the accuracy of each layer on training and test images, the sharpness."""
    words = ["study", "readings", "--quick", "--seeds", "0", "--jobs", "1", "--threads", "1", "--out", str(tmp_path)]
    assert cli.call(words) == 0
    content = json.loads((tmp_path / "readings.json").read_text(encoding="utf-8"))
    runs = {run.config["method"]: run for run in find_runs(tmp_path)}
    assert set(content["mechanism"]) == set(runs) == {"mose()", "grace(mose())"}
    for method, values in content["mechanism"].items():
        assert len(values["train"]) == len(values["test"]) == 4
        last = runs[method].evals[-1]["accuracy"]
        assert values["test"] == pytest.approx([np.mean(last[f"linear_{layer}"]) for layer in range(1, 5)])
        assert np.isfinite(values["sharpness"])
    assert (tmp_path / "readings-mechanism.png").stat().st_size > 5000
