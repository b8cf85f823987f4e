"""The line under every table, costs in reports, and options that were chosen on other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import gracecl
from gracecl import streams
from gracecl.data import from_arrays
from gracecl.errors import UserError
from gracecl.lab.report import Run
from gracecl.lab.report.groups import cost_of, group_runs, setting_of
from gracecl.lab.report.tables import comparison_markdown, comparison_table
from gracecl.lab.report.terms import terms
from gracecl.lab.runs.result import configuration
from gracecl.lab.runs.run import RunConfig
from gracecl.lab.tuning.search import Search, check_apart
from gracecl.registry.options import run_name

SPLIT = "split-digits(tasks=2)"


def run(method: str, seed: int = 0, timing: dict[str, Any] | None = None, **settings: Any) -> Run:
    config = {"method": method, "seed": seed, "stream": SPLIT, "stream_hash": f"order {seed}", "rule": "linear_last", **settings}
    evaluation = {"kind": "eval", "step": 9, "task": 0, "task_end": True, "accuracy": {"linear_last": [50.0]}}
    return Run(Path(), config, [], [evaluation], [], timing or {}, finished=True)


def told(*runs: Run) -> str:
    return terms(group_runs(runs))


def test_equal_terms_are_told_in_a_line() -> None:
    one = [run("er()", seed, {"flops": 2e12, "bytes": 2_000_000}) for seed in (0, 1)]
    two = [run("mir()", seed, {"flops": 4e12, "bytes": 2_000_000}) for seed in (0, 1)]
    assert told(*one, *two) == (
        "Same stream: yes; same seeds: 0, 1, n = 2; per run er() 2 TFLOP and 2 MB, mir() 4 TFLOP and 2 MB kept; "
        "options as given or published, no search recorded."
    )
    assert "; per run 2 TFLOP and 2 MB kept; " in told(*one, run("mir()", 0, {"flops": 2e12, "bytes": 2_000_000}))
    many = [run(f"m{place}()", 0, {"flops": place * 1e9, "bytes": 2_000_000}) for place in range(1, 6)]
    assert "; per run 1 GFLOP to 5 GFLOP and 2 MB kept; " in told(*many)
    assert "; per run m1() 1 GFLOP and 2 MB, m2() 2 GFLOP" in told(*many[:4])
    assert told() == ""


def test_what_differs_is_named() -> None:
    assert "Same stream: no, 2 different ones" in told(run("er()"), run("mir()", stream="iid-digits"))
    assert "Same stream: no, other images or another order with seed 0" in told(run("er()"), run("mir()", stream_hash="another"))
    assert "same seeds: no, n = 1 to 2" in told(run("er()"), run("er()", 1), run("mir()"))
    assert "same seeds: no, n = 1;" in told(run("er()", 1), run("mir()", 0))
    assert "2 FLOP (1 of 2 methods) and bytes not recorded kept" in told(run("er()", timing={"flops": 2}), run("mir()"))


def test_where_options_were_chosen_is_told() -> None:
    chosen = run("er()", tuned_on="split-cifar10")
    assert told(chosen).endswith("options chosen on split-cifar10.")
    assert told(chosen, run("mir()")).endswith("options chosen on split-cifar10, not recorded for some.")


def test_every_table_of_methods_has_the_line() -> None:
    runs = [run("er()"), run("mir()")]
    assert told(*runs) in comparison_table(runs).caption
    assert told(*runs) in comparison_markdown(runs)


def test_a_limit_is_not_taken_for_a_cost() -> None:
    """`bytes` is an option and a count: the one is what was allowed, the other what is kept."""
    limited = run("er()", timing={"bytes": 77, "flops": 5}, bytes="er()", budget="er()")
    assert (cost_of(limited, "bytes"), cost_of(limited, "flops")) == (77, 5)
    assert np.isnan(cost_of(run("er()", bytes="4MB"), "bytes"))


def test_runs_under_two_limits_are_in_two_settings() -> None:
    """The same amount as a budget and as a speed is not one setting, and the labels of groups tell them apart."""
    runs = [run("er()", budget="er()"), run("er()", pace="er()"), run("er()")]
    assert [setting_of(one) for one in runs] == [f"{SPLIT}, budget er()", f"{SPLIT}, pace er()", SPLIT]
    assert [group.label for group in group_runs(runs)] == ["er(), budget=er()", "er(), pace=er()", "er()"]


# Tuning elsewhere.


def defaults_file(folder: Path) -> Path:
    file = folder / "mine.toml"
    file.write_text('streams = ["split-digits"]\n[[er]]\noptimizer = "sgd(lr=0.5)"\n[provenance.data]\nstream = "iid-mnist"\n')
    return file


def test_a_run_records_where_its_options_were_chosen(tmp_path: Path) -> None:
    """The field changes no folder's name; a run that takes nothing from the file records nothing."""
    file = str(defaults_file(tmp_path))
    config, _ = configuration("er()", file, stream=SPLIT)
    assert (config.optimizer, config.tuned_on) == ("sgd(lr=0.5)", "iid-mnist")
    assert run_name(vars(config)) == run_name(vars(config) | {"tuned_on": None})
    assert configuration("mir()", file, stream=SPLIT)[0].tuned_on is None
    assert configuration("er()", file, stream="iid-digits")[0].tuned_on is None
    assert configuration("er()", stream=SPLIT)[0].tuned_on is None


def test_streams_that_share_images_are_refused() -> None:
    ten = streams.build("split-digits(tasks=5)", 0).data
    with pytest.raises(UserError, match="share images of digits"):
        check_apart("split-digits", ten, "iid-digits", ten)
    with pytest.raises(UserError, match="share images of digits"):
        check_apart("split-digits(classes='0-4')", ten, "split-digits(classes='4-9')", ten)
    with pytest.raises(UserError, match="share images of digits"):
        check_apart("split-digits(classes='0-4', size=8)", ten, "split-digits", ten)
    halves = "split-digits(classes='0-4')", ten, "noisy(split-digits(classes='5-9'), 0.2)", ten
    assert check_apart(*halves) == "same source, other classes"
    x, y = np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 0, 1, 1])
    x[:, 0, 0, 0] = range(4)
    one, other = from_arrays(x, y, x, y), from_arrays(x + 100, y, x[:1], y[:1])
    assert check_apart("split-digits", ten, "split-mnist", one) == "another data set"
    with pytest.raises(UserError, match="share 1 images"):
        check_apart("split-digits", other, "split-mnist", one)


def test_a_stream_without_first_tasks_needs_another_to_search_on() -> None:
    """Families other than split have none; wrappers have those of what they are around."""
    assert streams.takes("noisy(split-digits(tasks=5), 0.2)", "first")
    search = Search(RunConfig("er()", stream="i-blurry-digits(tasks=5)"), {}, 3, 0.2, (0,), "acc", "tpe")
    with pytest.raises(UserError, match="--tune-on STREAM"):
        _ = search.stream


@pytest.mark.slow
def test_options_chosen_on_one_stream_are_used_on_another(tmp_path: Path) -> None:
    """The file names the stream that was searched on, the run records it, and the line below its table says it."""
    small = ["--net", "mlp(width=16, depth=2)", "--memory", "20", "--device", "cpu", "--steps", "10", "--augment", "none"]
    for_stream = ["--stream", "i-blurry-digits(size=8, classes='0-4', tasks=2)"]
    elsewhere = "i-blurry-digits(size=8, classes='5-9', tasks=2)"
    words = ["--space", "lr=0.01,0.1", "--sampler", "grid", "--seeds", "0", "--tune-on", elsewhere, "--out", tmp_path / "search"]
    said = gracecl("tune", "er()", *for_stream, *words, *small)
    assert said.code == 0, said.err
    text = (tmp_path / "search" / "defaults.toml").read_text()
    assert f'stream = "{elsewhere}"' in text
    assert "same source, other classes" in text
    found = ["--defaults", tmp_path / "search" / "defaults.toml"]
    said = gracecl("run", "er()", *for_stream, *small, *found, "--out", tmp_path / "runs")
    assert said.code == 0, said.err
    assert elsewhere in " ".join(said.out.split())
    refused = gracecl("tune", "er()", *for_stream, "--tune-on", for_stream[1], "--out", tmp_path / "other", *small)
    assert refused.code == 2
    assert "share images of digits" in refused.err
