"""A study makes its runs and a table of them, continues where it was, and tells mistakes in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gracecl import registry, streams
from gracecl.lab import cli, paper
from gracecl.lab.catalogue import LEARNERS
from gracecl.lab.report import Run, figures, find_runs, style
from gracecl.lab.studies import against_paper, table
from gracecl.lab.studies.results import Results, Section
from gracecl.lab.studies.study import read
from gracecl.registry import spec

OURS = {"multi_update", "mkd", "best"}
"""which have a study of their own, record"""


def quick(out: Path, *words: str) -> int:
    return cli.call(["study", "mini", "--quick", "--jobs", "1", "--threads", "1", "--out", str(out), *words])


def test_a_study_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick(tmp_path) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "mini.md").read_text(encoding="utf-8")
    content = json.loads((tmp_path / "mini.json").read_text(encoding="utf-8"))
    lines = {line["method"]: line for line in content["lines"]}
    assert set(lines) == {"er()", "sgd()"}
    accuracies = [line["acc"] for line in content["lines"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert content["command"] == "gracecl study mini --seeds 0-1 --quick"
    assert content["seeds"] == [0, 1]
    for line in content["lines"]:
        assert f"| `{line['method']}` |" in text
        assert f"| `{line['method']}` |" in printed
        assert line["seeds"] == [0, 1]
        assert line["steps"] == 30
        assert line["seconds"] > 0
    steps_of_20 = lines["sgd()"]["forward"]
    assert 18 < steps_of_20 <= 20
    assert lines["er()"]["forward"] == lines["er()"]["backward"] > steps_of_20
    assert content["command"] in text
    assert content["commits"][0] in text

    runs = {run.path: (run.path / "timing.json").stat().st_mtime_ns for run in find_runs(tmp_path)}
    assert len(runs) == 4
    assert quick(tmp_path) == 0
    assert {run.path: (run.path / "timing.json").stat().st_mtime_ns for run in find_runs(tmp_path)} == runs, "nothing is done twice"
    assert json.loads((tmp_path / "mini.json").read_text(encoding="utf-8")) == content


def test_other_methods_and_seeds(tmp_path: Path) -> None:
    assert quick(tmp_path, "--methods", "er(n_recall=5)", "gdumb(epochs=2)", "--seeds", "3") == 0
    content = json.loads((tmp_path / "mini.json").read_text(encoding="utf-8"))
    assert content["command"] == "gracecl study mini --methods 'er(n_recall=5)' 'gdumb(epochs=2)' --seeds 3 --quick"
    [gdumb] = [line for line in content["lines"] if line["method"].startswith("gdumb")]
    assert gdumb["forward"] == gdumb["backward"] == 2 * 2 * 20 / 30, "two fits of two epochs over 20 images, over 30 steps"
    assert gdumb["acc_std"] is None, "one seed has no spread"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["minni"], "there is no study 'minni'; did you mean 'mini'?"),
        (["mini", "--methods", "ers"], "unknown method 'ers'; did you mean 'er'?"),
        (["mini", "--seeds", "x"], "cannot read --seeds 'x'"),
    ],
)
def test_mistakes_are_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.call(["study", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert told.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_mini_is_about_every_method_on_equal_terms() -> None:
    configs = [run.config for run in read("mini").plan(seeds=[0, 1])]
    methods = [config.method for config in configs if config.seed == 0]
    shortened = {"gdumb()": "gdumb(epochs=64)"}
    elsewhere = {"online_lora", "closed", "ncm", "acil", "gacl", "foal", "air", "klda", "randumb", "fecam", "votes"}
    """a transformer's, closed forms that are meant for pretrained features (slda and ranpac stand for them), and what the study
    equal-cost is about"""
    learners = [spec.parse_method(shortened.get(method, method)) for method in LEARNERS]
    assert methods == ["joint()", *(repr(learner) for learner in learners if learner.name not in elsewhere)]
    named = {part.name for method in methods for part in (spec.parse_method(method), *spec.parse_method(method).parts)}
    assert named - {"sum"} >= set(registry.methods.written) - {*elsewhere, *OURS}
    assert len(configs) == 2 * len(methods)
    assert len({(config.stream, config.net, config.memory, config.optimizer, config.augment) for config in configs}) == 1
    assert [config.seed for config in configs] == sorted(config.seed for config in configs)


@pytest.mark.real
@pytest.mark.skipif(
    not Path(os.environ.get("GRACECL_DATA", ""), "cifar-100-python").is_dir(), reason="GRACECL_DATA has no CIFAR-100"
)
def test_mini_has_500_steps_of_20_images() -> None:
    config = read("mini").plan(["er"], [0])[0].config
    stream = streams.build(config.stream, config.seed)
    assert len(stream) == 500
    assert stream.tasks == 5
    assert len(stream.batch(0).labels) == 20


def run_of(method: str, seed: int, accuracy: list[list[float]], **timing: float) -> Run:
    evals = [
        {"kind": "eval", "step": 9 * (task + 1), "task": task, "task_end": True, "accuracy": {"linear_last": row}}
        for task, row in enumerate(accuracy)
    ]
    config = {"method": method, "stream": "split-x(tasks=2)", "net": "n", "memory": 1, "optimizer": "o", "augment": "a"}
    costs = {"steps": 20, "forward": 0, "backward": 0, "fit_images": 0, "train_seconds": 0.0, "fit_seconds": 0.0} | timing
    return Run(Path(method), config | {"seed": seed, "rule": "linear_last", "commit": "c"}, [], evals, [], costs, finished=True)


def test_the_figures_of_a_line_are_means_over_seeds() -> None:
    runs = [
        run_of("a()", 0, [[80.0], [40.0, 60.0]], forward=400, backward=200, train_seconds=4.0),
        run_of("b()", 0, [[90.0], [90.0, 90.0]], fit_images=100, fit_seconds=1.0, train_seconds=1.0),
        run_of("a()", 1, [[60.0], [50.0, 90.0]], forward=800, backward=200, train_seconds=8.0),
    ]
    first, second = table.lines(runs)
    assert (first.method, first.acc, first.forward, first.backward, first.seconds) == ("b()", 90.0, 5.0, 5.0, 0.1)
    assert (second.acc, second.forgetting, second.forward, second.backward) == (60.0, 25.0, 30.0, 10.0)
    assert second.acc_std == pytest.approx(200**0.5)
    assert second.seconds == pytest.approx(0.3)
    assert "| `a()` | 60.0 ± 14.1 | 25.0 ± 21.2 | 30 | 10 | 0.300 | `linear_last` | 0, 1 |" in table.markdown([second])
    assert "| `b()` | 90.0 | 0.0 | 5 | 5 | 0.100 | `linear_last` | 0 |" in table.markdown([first])
    odd = table.lines([run_of("theirs | `x`", 0, [[90.0], [90.0, 90.0]])])
    assert r"| `` theirs \| `x` `` | 90.0 |" in table.markdown(odd), "somebody's name ends no cell"


@pytest.mark.slow
def test_feedback_compares_one_head_four_heads_and_feedback_on_them(tmp_path: Path) -> None:
    code = cli.call(["study", "feedback", "--quick", "--seeds", "0", "--jobs", "1", "--threads", "1", "--out", str(tmp_path)])
    assert code == 0
    content = json.loads((tmp_path / "feedback.json").read_text(encoding="utf-8"))
    assert {line["method"] for line in content["lines"]} == {"er(), taps=1", "er(), taps=4", "grace(er())"}
    assert len(read("feedback").plan()) == 2 * 12


# Beside the paper.


def final(method: str, accuracy: float, seed: int = 0) -> Run:
    return run_of(method, seed, [[accuracy], [accuracy, accuracy]])


def beside(runs: list[Run], out: Path, name: str) -> list[Section]:
    return against_paper.sections(Results(name, "mini", "", runs, [None] * len(runs), out))


def test_accuracies_stand_beside_the_paper_s_and_are_ranked() -> None:
    runs = [final("er()", 20.0), final("er()", 30.0, seed=1), final("agem()", 40.0), final("gdumb(epochs=64)", 25.0)]
    runs += [final("mose()", 50.0), final("grace(mose(), beta=0.1)", 60.0), final("sgd()", 1.0), final("grace(er())", 2.0)]
    found = {point.row: point for point in against_paper.points(runs)}
    assert list(found) == ["AGEM", "ER", "GDumb", "MOSE", "GRACE"], "those that the paper has, whatever their options"
    assert {row: (point.ours, point.paper) for row, point in found.items()} == {
        "AGEM": (40.0, 5.8),
        "ER": (25.0, 15.7),
        "GDumb": (25.0, 17.1),
        "MOSE": (50.0, 37.4),
        "GRACE": (60.0, 39.4),
    }
    assert [point.our_rank for point in found.values()] == [3, 4.5, 4.5, 2, 1]
    assert [point.paper_rank for point in found.values()] == [5, 4, 3, 2, 1]
    assert [row for row, point in found.items() if point.outlier] == ["AGEM"], "ranks 3 and 5 differ by more than 5/3"
    rho = against_paper.correlation(list(found.values()))
    assert rho is not None
    ours, theirs = [3, 4.5, 4.5, 2, 1], [5, 4, 3, 2, 1]
    by_hand = sum((a - 3) * (b - 3) for a, b in zip(ours, theirs, strict=True)) / (9.5 * 10) ** 0.5
    assert rho.rho == pytest.approx(by_hand)
    assert rho.p is None, "five methods are too few for it"


def test_the_order_of_all_rows_agrees_with_itself(tmp_path: Path) -> None:
    """Twenty methods with the paper's own accuracies, two of them exchanged, as a picture and a page."""
    exchanged = {"AGEM": paper.accuracies()["GRACE"], "GRACE": paper.accuracies()["AGEM"]}
    runs = [final(paper.EXPRESSIONS[row], value) for row, value in (paper.accuracies() | exchanged).items()]
    [section] = beside(runs, tmp_path, "x")
    assert section.data["outliers"] == ["AGEM", "GRACE"]
    assert section.data["spearman"]["rho"] == pytest.approx(1 - 6 * 2 * 19**2 / (20 * 399), abs=0.01)
    assert section.data["spearman"]["p"] < 0.5
    assert "Outliers, whose ranks differ by 6.7 or more: AGEM (ours 1, paper 20), GRACE (ours 20, paper 1)." in section.text
    assert "![Our accuracy against the paper's](x-against-paper.png)" in section.text
    assert (tmp_path / "x-against-paper.png").read_bytes().startswith(b"\x89PNG")
    assert not beside(runs[:1], tmp_path, "y")


def test_every_point_has_a_label(tmp_path: Path) -> None:
    figure = style.new_figure(4.0)
    axes = figure.subplots()
    crowd = [(1.0, 1.0, f"method {i}") for i in range(40)]
    figures.label_points(figure, axes, crowd, [style.INK] * 40)
    assert [text.get_text() for text in axes.texts if text.get_text()] == [name for _, _, name in crowd]
