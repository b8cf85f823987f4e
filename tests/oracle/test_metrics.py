"""Each metric against numbers computed by hand, and the statistics against scipy."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from gracecl.functional import metrics

# After task 1: 80.  After task 2: 70, 90.  After task 3: 60, 95, 40.  Task 2 improved at the end.
MATRIX = np.array([[80.0, np.nan, np.nan], [70.0, 90.0, np.nan], [60.0, 95.0, 40.0]])


def test_final_and_incremental_accuracy() -> None:
    assert metrics.acc(MATRIX) == pytest.approx((60 + 95 + 40) / 3)  # 65
    assert metrics.aia(MATRIX) == pytest.approx((80 + (70 + 90) / 2 + 65) / 3)  # 75
    assert metrics.learning_acc(MATRIX) == pytest.approx((80 + 90 + 40) / 3)  # 70


def test_the_forgettings_differ() -> None:
    # literature: task 1 max(80, 70) - 60 = 20; task 2 max(90) - 95 = -5; over two tasks
    assert metrics.forgetting(MATRIX) == pytest.approx((20 - 5) / 2)
    # MOSE: task 2's maximum includes the final 95, so its term is 0; task 3's is 0; over three tasks
    assert metrics.forgetting_mose(MATRIX) == pytest.approx(20 / 3)
    # transfer: (60 - 80) and (95 - 90), over two tasks
    assert metrics.bwt(MATRIX) == pytest.approx((-20 + 5) / 2)


def test_what_is_forgotten_is_the_best_that_ever_was() -> None:
    """Task 1 had 70 when it was learned, 85 later and 60 at last; task 2 had 90 and 50."""
    matrix = np.array([[70.0, np.nan, np.nan], [85.0, 90.0, np.nan], [60.0, 50.0, 40.0]])
    assert metrics.forgetting(matrix) == pytest.approx(((85 - 60) + (90 - 50)) / 2)
    assert metrics.forgetting_mose(matrix) == pytest.approx(((85 - 60) + (90 - 50)) / 3)
    assert metrics.bwt(matrix) == pytest.approx(((60 - 70) + (50 - 90)) / 2)


def test_minus_backward_transfer_never_exceeds_forgetting() -> None:
    for seed in range(20):
        matrix = np.random.default_rng(seed).uniform(0, 100, (5, 5))
        assert -metrics.bwt(matrix) <= metrics.forgetting(matrix) + 1e-9
        assert metrics.forgetting_mose(matrix) >= 0


@pytest.mark.parametrize("name", metrics.MATRIX_METRICS)
def test_tasks_not_trained_yet_are_ignored(name: str) -> None:
    filled = np.where(np.isnan(MATRIX), 99.0, MATRIX)
    assert metrics.MATRIX_METRICS[name](filled) == metrics.MATRIX_METRICS[name](MATRIX)


def test_one_task() -> None:
    values = {name: metric([[72.0]]) for name, metric in metrics.MATRIX_METRICS.items()}
    assert values == {
        "acc": 72.0,
        "aia": 72.0,
        "forgetting": 0.0,
        "forgetting_mose": 0.0,
        "bwt": 0.0,
        "learning_acc": 72.0,
        "relative_forgetting": 0.0,
    }
    assert {name: metric([[60.0], [72.0]]) for name, metric in metrics.ANYTIME_METRICS.items()} == {
        "aaa": 66.0,
        "min_acc": 72.0,
        "wc_acc": 72.0,
    }


def test_nothing_measured_yet_is_nan_and_a_gap_is_nan() -> None:
    for metric in metrics.MATRIX_METRICS.values():
        assert math.isnan(metric(np.zeros((0, 0))))
    for metric in metrics.ANYTIME_METRICS.values():
        assert math.isnan(metric([]))
    only_the_end = np.full((3, 3), np.nan)
    only_the_end[-1] = 50.0
    assert metrics.acc(only_the_end) == 50.0
    assert math.isnan(metrics.forgetting(only_the_end))
    assert math.isnan(metrics.aia(only_the_end))


def test_a_matrix_is_square() -> None:
    with pytest.raises(ValueError, match="square"):
        metrics.acc([[1.0, 2.0]])


def test_every_metric_has_a_direction() -> None:
    assert {*metrics.MATRIX_METRICS, *metrics.ANYTIME_METRICS, *metrics.ABOUT} == set(metrics.HIGHER_IS_BETTER)
    lower = {name for name, higher in metrics.HIGHER_IS_BETTER.items() if not higher}
    matrix = {"forgetting", "forgetting_mose", "relative_forgetting"}
    assert lower == matrix | {"gap_depth", "intransigence", "ece", "nll", "brier", "boundary_delay", "false_alarms"}


def test_any_time_average() -> None:
    # means over the seen tasks: 50, 80, 55, 80; their mean
    assert metrics.aaa([[50.0], [80.0], [20.0, 90.0], [70.0, 90.0]]) == pytest.approx((50 + 80 + 55 + 80) / 4)
    assert metrics.aaa(metrics.seen_rows(MATRIX)) == pytest.approx(metrics.aia(MATRIX))


def test_worst_case_accuracy() -> None:
    # Two evaluations per task. Task 1 counts from the third evaluation on, task 2 from the fifth.
    evaluations = [[10.0], [80.0], [20.0, 30.0], [70.0, 90.0], [40.0, 50.0, 5.0], [60.0, 95.0, 40.0]]
    assert metrics.min_acc(evaluations) == pytest.approx((20 + 50) / 2)
    assert metrics.wc_acc(evaluations) == pytest.approx(40 / 3 + (2 / 3) * 35)
    # at the task ends only: task 1 min(70, 60), task 2 its only later value
    assert metrics.min_acc(metrics.seen_rows(MATRIX)) == pytest.approx((60 + 95) / 2)
    assert metrics.wc_acc(metrics.seen_rows(MATRIX)) == pytest.approx(40 / 3 + (2 / 3) * 77.5)


def test_calibration_error_by_hand() -> None:
    # 0.9 and 0.92 share the bin (13/15, 14/15]: one right of two, 0.5 against 0.91; 0.6, alone, is right: 1 against 0.6
    probabilities = [[0.9, 0.1], [0.08, 0.92], [0.6, 0.4]]
    assert metrics.ece(probabilities, [0, 0, 0]) == pytest.approx((2 * abs(0.5 - 0.91) + abs(1 - 0.6)) / 3)
    assert metrics.ece([[1.0, 0.0], [0.0, 1.0]], [0, 1]) == 0.0
    assert metrics.ece([[1.0, 0.0], [1.0, 0.0]], [1, 1]) == 1.0


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin() -> None:
    # With two bins 0.5 lies in (0, 0.5], away from 0.8: |1 - 0.5| and |0 - 0.8|. In one bin they cancel: |1 - 1.3|.
    assert metrics.ece([[0.5, 0.3, 0.2], [0.8, 0.1, 0.1]], [0, 1], bins=2) == pytest.approx((0.5 + 0.8) / 2)


def test_calibration_error_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    p, y = rng.dirichlet(np.full(4, 0.5), size=300), rng.integers(0, 4, size=300)
    total = 0.0
    for m in range(15):
        inside = [i for i in range(300) if m / 15 < p[i].max() <= (m + 1) / 15]
        if inside:
            accuracy = sum(p[i].argmax() == y[i] for i in inside) / len(inside)
            total += len(inside) / 300 * abs(accuracy - sum(p[i].max() for i in inside) / len(inside))
    assert metrics.ece(p, y) == pytest.approx(total)


def test_negative_log_likelihood() -> None:
    assert metrics.nll([[0.5, 0.5], [0.25, 0.75]], [0, 0]) == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert metrics.nll([[1.0, 0.0]], [1]) == pytest.approx(87.3, abs=0.1)
    with pytest.raises(ValueError, match="labels"):
        metrics.nll([[0.5, 0.5]], [0, 1])


def test_metrics_need_neither_torch_nor_scipy_to_import() -> None:
    modules = "import sys, gracecl.functional.metrics, gracecl.functional.statistics"
    code = f"{modules}; print([m for m in ('torch', 'scipy', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
