"""Rankings under several protocols: Kendall's τ, ranks, names, and the section of a study's page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau

from gracecl.functional.statistics import kendall
from gracecl.lab.report import Run
from gracecl.lab.report.groups import group_runs
from gracecl.lab.studies import accuracies
from gracecl.lab.studies.paired import settings
from gracecl.lab.studies.rankings import agreement, between_seeds, name_of, protocols, sections
from gracecl.lab.studies.results import Results

SPLIT = "split-digits(tasks=2)"


def run(method: str, seed: int, acc: float, stream: str = SPLIT, **settings: Any) -> Run:
    """A run of one task that ended with this accuracy."""
    config = {"method": method, "seed": seed, "stream": stream, "rule": "linear_last", **settings}
    evaluation = {"kind": "eval", "step": 9, "task": 0, "task_end": True, "accuracy": {"linear_last": [acc]}}
    return Run(Path(), config, [], [evaluation], [], {}, finished=True)


def several(accuracies: dict[str, list[float]], **settings: Any) -> list[Run]:
    """One run per method and seed."""
    return [run(method, seed, acc, **settings) for method, values in accuracies.items() for seed, acc in enumerate(values)]


def test_kendall_counts_pairs_in_the_same_order() -> None:
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert math.isnan(kendall([1, 1, 1], [1, 2, 3]))
    assert math.isnan(kendall([1], [2]))
    drawn = np.random.default_rng(0).integers(0, 6, (2, 12))
    assert kendall(*drawn) == pytest.approx(kendalltau(*drawn).statistic)


def test_protocols_are_named_by_limits_and_families() -> None:
    streams = [
        SPLIT,
        "si-blurry-digits(tasks=2)",
        "domain-digits(kind='rotate')",
        "longtail(split-digits(tasks=2), 20)",
        "iid-digits",
    ]
    assert [name_of(run("er()", 0, 1.0, stream)) for stream in streams] == [
        "class-incremental",
        "blurry",
        "domain",
        "long-tailed",
        "iid",
    ]
    assert name_of(run("er()", 0, 1.0, pace="er()")) == "real-time"
    assert name_of(run("er()", 0, 1.0, budget="er()")) == "budgeted"


def test_ranks_and_agreement_of_two_protocols(tmp_path: Path) -> None:
    """Four methods swap one pair with seed 0, none with seed 1 and two with seed 2; one method has no run under the second."""
    usual = several({"a()": [4, 4, 4], "b()": [3, 3, 3], "c()": [2, 2, 2], "d()": [1, 1, 1], "e()": [9, 9, 9]})
    fast = several({"a()": [3, 4, 3], "b()": [4, 3, 4], "c()": [2, 2, 1], "d()": [1, 1, 2]}, pace="er()")
    one, other = protocols([*usual, *fast])
    assert [one.rank(method, list(one.values)) for method in ["e()", "a()", "b()", "c()", "d()"]] == [1, 2, 3, 4, 5]
    assert other.rank("b()", list(other.values)) == 1
    found = agreement(one, other)
    assert (found.mean, found.n) == (pytest.approx((4 / 6 + 1 + 2 / 6) / 3), 3)
    assert between_seeds(other) == pytest.approx((4 / 6 + 4 / 6 + 2 / 6) / 3)
    [section] = sections(Results("mine", "mini", "", [*usual, *fast], [None] * 27, tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"mine-ranks.png", "mine-ranks.pdf"}
    assert "| `e()` | 1 (9.0) | – |" in section.text
    assert "| class-incremental | 1.00 | 0.67 ± " in section.text
    assert "- real-time: Same stream: yes; same seeds: 0, 1, 2, n = 3; " in section.text
    assert section.leads
    for sentence in (
        "Kendall's τ with the ranking under class-incremental: 0.67 (real-time). ",
        "Between two seeds of one protocol τ is 0.56 to 1.00. For 0 of 1 pairs of protocols it is lower than between",
        "between the seeds of either. First is `e()` under class-incremental; ",
        "`b()` under real-time. Against class-incremental, no method moves by 3 ranks or more.\n",
    ):
        assert sentence in section.text
    assert section.data["ranks"]["real-time"]["a()"] == 2


def test_methods_that_move_far_are_named_where_they_move_most(tmp_path: Path) -> None:
    """A long expression goes by its outermost name, if no other method begins with it."""
    long = "best(mkd(multi_update(mose()), strength=2.0))"
    usual = several({long: [5], "a()": [4], "b(long_option=1, another_option=2)": [3], "b()": [2], "c()": [1]})
    fast = several({long: [1], "a()": [5], "b(long_option=1, another_option=2)": [4], "b()": [3], "c()": [2]}, pace="er()")
    rich = several({long: [3], "a()": [5], "b(long_option=1, another_option=2)": [4], "b()": [2], "c()": [1]}, budget="er()")
    [section] = sections(Results("mine", "mini", "", [*usual, *fast, *rich], [None] * 15, tmp_path))
    assert "First is `best(…)` under class-incremental; `a()` under real-time, budgeted." in section.text
    assert "each where it moves most: `best(…)` from 1 to 5 (real-time)." in section.text
    assert "| `b(long_option=1, another_option=2)` | 3 (3.0) | 2 (4.0) | 2 (4.0) |" in section.text
    assert section.data["ranks"]["real-time"][long] == 5
    assert "two seeds" not in section.text.split("| method |")[0], "there is one"


def test_runs_of_earlier_versions_are_the_same_method(tmp_path: Path) -> None:
    """What an earlier version did not write has its default; who made a run does not tell methods apart."""
    made = {
        "boundaries": "auto",
        "store": "ram",
        "format": 1,
        "versions": {"gracecl": "0.3.0"},
        "commit": "new",
        "eval_images": None,
    }
    before = several({"a()": [2, 2], "b()": [1, 1]}, versions={"gracecl": "0.1.0"}, commit="old")
    after = several({"a()": [3, 3], "b()": [4, 4]}, stream="iid-digits", **made)
    assert [list(protocol.values) for protocol in protocols([*before, *after])] == [["a()", "b()"]] * 2
    [one, other] = group_runs([*before[:1], run("a()", 1, 3.0, **made), *several({"a()": [5]}, **made | {"boundaries": "adwin()"})])
    assert ([each.config["seed"] for each in one.runs], one.label) == ([0, 1], "a(), boundaries=auto")
    assert other.label == "a(), boundaries=adwin()"
    [group] = settings([*before[:1], run("a()", 1, 3.0, **made)]).values()
    assert len(group[0].runs) == 2, "they can be paired"


def test_settings_of_one_name_are_not_one_protocol() -> None:
    """Streams of one family, and streams that go by one name, have a protocol each; nothing is overwritten."""
    expressions = {
        "class-incremental (marked=False)": "split-digits(tasks=2, marked=False)",
        "class-incremental": SPLIT,
        "blurry (si-blurry-digits)": "si-blurry-digits(tasks=2)",
        "blurry (i-blurry-digits)": "i-blurry-digits(tasks=2)",
        "longtail(split-digits(), 20)": "longtail(split-digits(), 20)",
        "longtail(split-digits(), 5)": "longtail(split-digits(), 5)",
    }
    runs = [run("er()", 0, float(place), stream) for place, stream in enumerate(expressions.values())]
    assert [(one.name, one.values) for one in protocols(runs)] == [
        (name, {"er()": {0: float(place)}}) for place, name in enumerate(expressions)
    ]


def test_accuracies_of_methods_by_settings(tmp_path: Path) -> None:
    """Runs of one method that differ in an option are rows of their own; – stands where none was run."""
    runs = several({"a()": [10.0, 20.0], "b()": [5.0, 5.0]})
    runs += several({"a()": [30.0, 32.0]}, boundaries="adwin()")
    runs += several({"a()": [1.0]}, stream="iid-digits")
    [section] = accuracies.sections(Results("mine", "mini", "", runs, [None] * len(runs), tmp_path))
    assert "| method | class-incremental | iid |" in section.text
    assert "| `a()` | 15.0 ± 7.1 | 1.0 |" in section.text
    assert "| `b()` | 5.0 ± 0.0 | – |" in section.text
    assert "| `a(), boundaries=adwin()` | 31.0 ± 1.4 | – |" in section.text
    assert "Same stream: no, 2 different ones; same seeds: no, n = 1 to 2;" in section.text
    assert section.data["iid"] == {"a()": {0: 1.0}}
    assert accuracies.sections(Results("mine", "mini", "", [], [], tmp_path)) == []


def test_nothing_is_said_of_a_single_method(tmp_path: Path) -> None:
    assert sections(Results("mine", "mini", "", several({"a()": [1.0]}), [None], tmp_path)) == []
