"""Guessed boundaries beside true ones, by hand and against a literal loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gracecl.functional.boundaries import matched
from gracecl.lab.report import Run
from gracecl.lab.report.measures import boundary_rows
from gracecl.lab.report.runs import measure


def test_the_first_guess_after_a_boundary_is_of_that_one() -> None:
    found = matched([3, 10, 14, 15, 31], [10, 20, 30])
    assert found.first == (10, None, 31)
    assert found.false == (3, 14, 15)
    assert found.delays([10, 20, 30]) == [0, 1]


def test_against_a_literal_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        guessed, true = (sorted(rng.choice(40, rng.integers(0, 9), replace=False).tolist()) for _ in range(2))
        first: list[int | None] = [None] * len(true)
        false = []
        for guess in guessed:
            before = [number for number, boundary in enumerate(true) if boundary <= guess]
            if before and first[before[-1]] is None:
                first[before[-1]] = guess
            else:
                false.append(guess)
        found = matched(guessed, true)
        assert (list(found.first), list(found.false)) == (first, false)


def recorded(ends: list[int], boundaries: str = "adwin()") -> Run:
    """A run that was evaluated after the steps 9, 19 and 29 and began a task after each of `ends`."""
    evals = [
        {"step": step, "task": task, "task_end": step % 10 == 9, "accuracy": {"linear_last": [50.0] * (task + 1)}}
        for step, task in ((4, 0), (9, 0), (19, 1), (29, 2))
    ]
    tasks = [{"step": step, "task": number, "values": {}} for number, step in enumerate(ends)]
    config = {"rule": "linear_last", "method": "er()", "stream": "toy", "seed": 0, "boundaries": boundaries}
    return Run(Path("none"), config, [], evals, tasks, {})


def test_a_run_says_what_was_found_missed_and_false() -> None:
    run = recorded([2, 12, 14])
    values = measure(run, "linear_last")
    assert values["boundaries_found"] == 50
    assert values["boundary_delay"] == 3
    assert values["false_alarms"] == 2
    assert boundary_rows(run) == [
        {"step": 10, "began": 13, "delay": 3},
        {"step": 20, "began": None, "delay": None},
        {"step": None, "began": 3, "delay": None},
        {"step": None, "began": 15, "delay": None},
    ]


def test_without_any_guess_there_is_no_delay() -> None:
    values = measure(recorded([]), "linear_last")
    assert (values["boundaries_found"], values["false_alarms"]) == (0, 0)
    assert "boundary_delay" not in values


@pytest.mark.parametrize("change", [{"boundaries": "auto"}, {}])
def test_a_run_that_goes_by_marks_guesses_nothing(change: dict[str, str]) -> None:
    run = recorded([9, 19, 29])
    run.config.pop("boundaries")
    run.config.update(change)
    assert boundary_rows(run) == []
    assert not {"boundaries_found", "false_alarms"} & measure(run, "linear_last").keys()
