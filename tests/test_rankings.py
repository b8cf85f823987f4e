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
from gracecl.lab.studies import accuracies
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
    assert section.data["ranks"]["real-time"]["a()"] == 2


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
