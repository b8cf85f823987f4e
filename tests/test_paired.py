"""Methods against a control on the same seeds: Holm's correction, the seeds that would be needed, the table and its picture."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from gracecl.errors import UserError
from gracecl.functional.statistics import Paired, Summary
from gracecl.lab import cli
from gracecl.lab.report import Run, find_runs
from gracecl.lab.report.compare import Comparison
from gracecl.lab.report.groups import told_apart
from gracecl.lab.runs.run import Work, learner_and_stream
from gracecl.lab.studies import paired as comparison
from gracecl.lab.studies import plan
from gracecl.lab.studies.study import read


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
    assert cli.call(["study", "readings", "--quick", "--methods", "sgd()", "er()", "mose()", "--seeds", "0-2", "--jobs", "1",
                     "--threads", "1", "--out", str(out)]) == 0  # fmt: skip
    return out


@pytest.mark.slow
def test_a_study_compares_its_methods_with_the_control(made: Path) -> None:
    content = json.loads((made / "readings.json").read_text(encoding="utf-8"))
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
    text = (made / "readings.md").read_text(encoding="utf-8")
    assert "Against the control `mose()`" in text
    assert text.split("Against the control")[1].count("Same stream: yes; same seeds: 0, 1, 2, n = 3; ") == 1
    assert (made / "readings.png").stat().st_size > 5000


@pytest.mark.slow
def test_two_seeds_have_no_interval(made: Path) -> None:
    runs = [run for run in find_runs(made) if run.config["seed"] < 2]
    text = comparison.markdown(comparison.compare(runs, "mose()"), "mose()", runs)
    assert "2 seeds: no interval" in text
    assert " to " not in text.split("|---")[1]


@pytest.mark.slow
def test_grace_is_compared_with_what_it_wraps_and_others_with_the_control(made: Path) -> None:
    def renamed(run: Run, method: str) -> Run:
        return dataclasses.replace(run, config=run.config | {"method": method})

    names = {"mose()": "mose()", "er()": "er(n_recall=32)", "sgd()": "grace(er(n_recall=32), entropy_mode='none')"}
    runs = [renamed(run, names[run.config["method"]]) for run in find_runs(made)]
    with_control = {line.comparison.method: line.comparison.other for line in comparison.compare(runs, "mose()")}
    assert with_control == {"er(n_recall=32)": "mose()", names["sgd()"]: "er(n_recall=32)"}
    [alone] = comparison.compare([run for run in runs if run.config["method"] != "mose()"], "mose()")
    assert alone.comparison.other == "er(n_recall=32)"
    without = [run for run in runs if run.config["method"] != "er(n_recall=32)"]
    [found] = comparison.compare(without, "mose()")
    assert found.comparison.other == "mose()"
    assert f"`{names['sgd()']}` against `er(n_recall=32)` |" in comparison.markdown([alone], "mose()", runs)
    assert "against" not in comparison.markdown([found], "mose()", without)


@pytest.mark.slow
def test_runs_that_differ_in_any_option_are_compared_apart(made: Path) -> None:
    def changed(run: Run, option: str, value: str) -> Run:
        return dataclasses.replace(run, config=run.config | {option: value})

    runs = [run for run in find_runs(made) if run.config["method"] in ("er()", "mose()")]
    faster = [changed(run, "optimizer", "sgd(lr=0.1)") for run in runs]
    found = comparison.compare([*runs, *faster], "mose()")
    assert [line.comparison.method for line in found] == ["er()", "er()"]
    assert [line.comparison.setting.count("lr=0.1)") for line in found] == [0, 1]
    assert "lr=" not in comparison.compare(runs, "mose()")[0].comparison.setting
    alone = [changed(run, "taps", "4") if run.config["method"] == "er()" else run for run in runs]
    assert not comparison.compare(alone, "mose()"), "other taps are another setting, also where no method has both"


def test_settings_in_short_are_what_differs_between_them() -> None:
    def setting(stream: str, memory: int, net: str = "mlp(width=4)", taps: int | None = None, lr: float = 0.1) -> dict[str, object]:
        optimizer = f"sgd(lr={lr}, momentum=0.9)"
        return {"stream": stream, "net": net, "memory": memory, "taps": taps, "optimizer": optimizer, "seed": 0}

    keys = ("stream", "net", "memory", "taps", "optimizer")
    found = [
        setting("split-a(tasks=5, size=8)", 10),
        setting("split-a(size=8)", 20),
        setting("split-a(tasks=5, size=8)", 10, taps=4),
    ]
    assert told_apart(found, keys) == ["tasks=5, memory=10", "memory=20", "tasks=5, memory=10, taps=4"]
    assert told_apart([*found, setting("split-b(size=8)", 10, "vit(dim=8)")], keys)[1:] == [
        "split-a, mlp, width=4, memory=20",
        "split-a, tasks=5, mlp, width=4, memory=10, taps=4",
        "split-b, vit, dim=8, memory=10",
    ]
    assert told_apart([found[0], setting("split-a(tasks=5, size=8)", 10, "mlp(width=4)", lr=0.2)], keys) == ["lr=0.1", "lr=0.2"]
    assert told_apart(found[:1], keys) == [""]


@pytest.mark.parametrize("name", ["readings", "regimes", "record"])
def test_the_control_has_every_seed(name: str) -> None:
    study = read(name)
    configs = [run.config for run in study.plan(seeds=[0, 1])]
    assert {config.seed for config in configs if config.method == study.control} == {0, 1}


def test_readings_are_confirmed_on_other_classes() -> None:
    study = read("readings")
    configs = [run.config for run in study.plan(seeds=[0])]
    streams = list(dict.fromkeys(config.stream for config in configs))
    developed, *confirmed = [{config.method for config in configs if config.stream == stream} for stream in streams]
    chosen = {"mose()", "grace(mose())", "grace(mose(), alpha_on='entropy')"}
    assert confirmed == [chosen | {"grace(mose(), adaptive=False)"}, chosen]
    assert all(methods < developed for methods in confirmed)
    assert not [stream for stream in streams[1:] if "'0-19'" in stream and "tiny" not in stream]
    assert chosen == {run.config.method for run in study.plan(seeds=[11])}, "the others end before"


@pytest.mark.exhaustive
def test_a_plan_counts_what_is_left(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "readings", "--quick", "--methods", "sgd()", "er()", "--seeds", "0-3", "--jobs", "1", "--dry-run"]
    assert cli.call([*words, "--out", str(made)]) == 0
    printed = capsys.readouterr().out
    assert "1 × sgd()" in printed
    assert "2 runs are left" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_an_estimate_is_of_the_second_task() -> None:
    [run] = read("readings", quick=True).plan(["mose()"], [0])
    [found] = plan.estimates([Work.new(run.config, Path("nowhere"))])
    assert (found.left, found.probe.steps) == (1, 30)
    assert found.probe.images > 2 * 4 * 40, "MOSE's second block is in it"
    assert found.hours == pytest.approx(30 * found.probe.seconds / 3600)
    assert found.probe.peak_bytes > 50e6, "PyTorch alone takes that"
    assert " GFLOP and " in plan.line(found)
    assert "1 runs are left" in plan.total([found], 2)


def test_an_image_s_flops_are_two_for_each_weight_of_an_mlp() -> None:
    [run] = read("mini", quick=True).plan(["sgd()"], [0])
    engine, _ = learner_and_stream(run.config)
    weights = [part.weight.numel() for part in engine.net.modules() if isinstance(part, nn.Linear)]
    heads = engine.net.classifier.weight.numel()
    assert plan.forward_flops(engine) == 2 * (sum(weights) + heads)


@pytest.mark.slow
def test_a_probe_that_is_refused_is_a_sentence(tmp_path: Path) -> None:
    [run] = read("mini").plan(["er()"], [0])
    with pytest.raises(UserError, match=r"er\(\), seed 0: .*cifar100"):
        list(plan.estimates([Work.new(run.config, tmp_path, tmp_path)]))


@pytest.mark.slow
def test_readings_show_what_happens_inside(tmp_path: Path) -> None:
    """With and without feedback: a picture, each seed's accuracy of each layer on training and test images, the sharpness."""
    words = ["study", "readings", "--quick", "--seeds", "0-2", "--jobs", "1", "--threads", "1", "--out", str(tmp_path)]
    assert cli.call(words) == 0
    content = json.loads((tmp_path / "readings.json").read_text(encoding="utf-8"))
    runs = {(run.config["method"], run.config["seed"]): run for run in find_runs(tmp_path)}
    assert set(content["mechanism"]) == {"mose()", "grace(mose())"}
    for method, values in content["mechanism"].items():
        for seed in range(3):
            assert len(values["train"][seed]) == len(values["test"][seed]) == 4
            last = runs[method, seed].evals[-1]["accuracy"]
            assert values["test"][seed] == pytest.approx([np.mean(last[f"linear_{layer}"]) for layer in range(1, 5)])
            assert np.isfinite(values["sharpness"][seed])
    test = {method: np.mean(values["test"], axis=1) for method, values in content["mechanism"].items()}
    lost = np.mean(test["grace(mose())"] - test["mose()"])
    text = (tmp_path / "readings.md").read_text(encoding="utf-8")
    assert f"| accuracy on test images | {lost:+.1f} |" in text, "with feedback less without, on the same seeds"
    assert (tmp_path / "readings-mechanism.png").stat().st_size > 5000
