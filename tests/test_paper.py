"""The paper's numbers as data: complete, and every row is a method of this library."""

from __future__ import annotations

from collections import Counter

import pytest

from gracecl.lab import defaults, paper
from gracecl.registry import spec

ROWS = [
    "AGEM",
    "ER",
    "MIR",
    "GSS",
    "ASER",
    "ER-AML",
    "GDumb",
    "SCR",
    "OCM",
    "OnPro",
    "GSA",
    "DER++",
    "IL2A",
    "Co2L",
    "LUCIR",
    "CCIL",
    "BiC",
    "SSIL",
    "MOSE",
    "GRACE",
    "EWC++",
    "PCR",
    "LODE (DER++)",
    "EMA (DER++)",
    "EMA (RAR)",
    "Online-LoRA",
    "CPR",
]


def test_every_number_is_there() -> None:
    counts = Counter(record["table"] for record in paper.records())
    assert counts == {
        "main_accuracy": 120,
        "main_forgetting": 120,
        "memory_efficiency": 20,
        "ablation": 3,
        "cub200": 24,
        "training_cost": 16,
        "batch_size": 8,
    }
    assert counts.keys() == paper.tables()["tables"].keys()
    assert all(record["mean"] is None or record["mean"] >= 0 for record in paper.records())
    assert "GRACE paper" in paper.tables()["source"]


def test_accuracies_are_those_of_the_main_table() -> None:
    found = paper.accuracies()
    assert list(found) == ROWS[:20]
    assert (found["AGEM"], found["ER"], found["BiC"], found["MOSE"], found["GRACE"]) == (5.8, 15.7, 21.2, 37.4, 39.4)
    assert [record["mean"] for record in paper.records(table="cub200", method="GRACE", metric="A_Final")] == [43.53]


def test_every_row_has_an_expression() -> None:
    assert list(paper.EXPRESSIONS) == ROWS
    assert {record["method"] for record in paper.records()} == set(ROWS) - {"CPR"}


@pytest.mark.parametrize("row", ROWS)
def test_every_expression_is_a_method_that_the_paper_s_defaults_know(row: str) -> None:
    expression = paper.EXPRESSIONS[row]
    assert repr(spec.parse_method(expression)).endswith(expression)
    taken = defaults.resolve(expression, "split-cifar100", 1000).taken
    assert taken.startswith("defaults grace-paper of split-cifar100, memory 1,000: ")
    assert "nothing for" not in taken
