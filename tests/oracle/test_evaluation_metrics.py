"""Metrics of streams: each against its worked numbers, a literal loop, a library, or a law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score
from sklearn.metrics import confusion_matrix as confusion_of_sklearn

from gracecl.functional import metrics as m
from gracecl.functional.prequential import Prequential

LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 2, 2, 0, 1])
PREDICTIONS = np.array([0, 1, 1, 1, 0, 0, 1, 2, 2, 2, 2, 1])
CORRECT = m.right(LABELS, PREDICTIONS)
RIGHT_OF_4 = [
    [1, 0, 1, 1, 0, 1],
    [3, 2, 1, 1, 1, 1],
    [3, 3, 2, 1, 1, 0],
    [3, 3, 4, 3, 1, 1],
    [2, 3, 4, 4, 2, 1],
    [2, 2, 3, 4, 4, 3],
    [2, 2, 3, 3, 4, 4],
]
"""rows: the model after so many batches; columns: the batch"""
MATRIX = [[70, 12, 8, 10], [78, 85, 15, 9], [60, 50, 80, 20], [55, 62, 40, 88]]
EVALUATIONS = [[80], [90], [50, 40], [70, 60], [84, 70], [60, 45, 30], [75, 58, 55], [80, 66, 72]]


def drawn(seed: int, items: int = 300, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.repeat(generator.integers(0, classes, items // 5), 5)
    return labels, np.where(generator.random(items) < 0.6, labels, generator.integers(0, classes, items))


# Prequential.


def test_prequential_accuracy_by_the_worked_example() -> None:
    assert CORRECT.tolist() == [1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1]
    cumulative = [1, 0.5, 2 / 3, 0.75, 0.6, 2 / 3, 4 / 7, 0.625, 2 / 3, 0.7, 7 / 11, 2 / 3]
    assert m.prequential_acc(CORRECT) == pytest.approx(cumulative, rel=1e-12)
    fading = [1, 0.4736842105, 0.667896679, 0.7644664147, 0.5777880882, 0.667896679, 0.5398743078, 0.6206643344, 0.6825886493]
    fading += [0.7313220815, 0.6247447899, 0.6770400319]
    assert m.prequential_acc(CORRECT, 0.9) == pytest.approx(fading, rel=1e-9)
    sliding = [1, 0.5, 2 / 3, 0.75, 0.5, 0.75, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert m.sliding_acc(CORRECT, 4) == pytest.approx(sliding)
    assert m.tumbling_acc(CORRECT, 4) == pytest.approx([0.75, 0.5, 0.75])
    assert m.tumbling_acc(CORRECT, 5) == pytest.approx([0.6, 0.8, 0.5])


def test_laws_of_prequential_accuracy() -> None:
    correct = m.right(*drawn(1))
    assert m.sliding_acc(correct, 1000) == pytest.approx(m.prequential_acc(correct))
    assert m.prequential_acc(np.ones(50), 0.7) == pytest.approx(np.ones(50))
    assert np.mean(m.tumbling_acc(correct, 10)) == pytest.approx(m.prequential_acc(correct)[-1])
    weights = 0.8 ** np.arange(len(correct))[::-1]
    assert m.prequential_acc(correct, 0.8)[-1] == pytest.approx(weights @ correct / weights.sum())
    assert len(m.prequential_acc([])) == len(m.sliding_acc([], 3)) == len(m.tumbling_acc([], 3)) == 0
    with pytest.raises(ValueError, match="fading factor is above 0 and at most 1"):
        m.prequential_acc(correct, 1.1)
    with pytest.raises(ValueError, match="as many predictions as labels"):
        m.right([1, 2], [1])


def test_blind_baselines_by_the_worked_example() -> None:
    none = m.NO_PREDICTION
    assert m.no_change(LABELS).tolist() == [none, 0, 0, 1, 1, 1, 0, 2, 2, 2, 2, 0]
    assert m.right(LABELS, m.no_change(LABELS)).tolist() == [0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]
    assert m.running_majority(LABELS).tolist() == [none, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2, 0]
    assert m.window_mode(LABELS, 3).tolist() == [none, 0, 0, 0, 1, 1, 1, 0, 2, 2, 2, 2]
    assert m.right(LABELS, m.window_mode(LABELS, 3)).mean() == pytest.approx(4 / 12)
    assert m.oracle_majority(LABELS).tolist() == [0] * 12
    assert m.no_change(LABELS, batch=4).tolist() == [none] * 4 + [1] * 4 + [2] * 4
    labels, _ = drawn(2)
    assert m.window_mode(labels, 1).tolist() == m.no_change(labels).tolist()


def test_baselines_by_a_literal_loop() -> None:
    labels, _ = drawn(3)
    first = {label: labels.tolist().index(label) for label in set(labels.tolist())}
    for window in (2, 7, 1000):
        for i in range(1, 120):
            before = labels[max(0, i - window) : i].tolist()
            most = max(before.count(label) for label in before)
            expected = min((label for label in before if before.count(label) == most), key=first.__getitem__)
            assert m.window_mode(labels, window)[i] == expected


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_baselines_of_batches_and_of_later_batches_by_a_literal_loop(shift: int) -> None:
    labels, _ = drawn(4, items=120)
    sizes = [7, 1, 30, 2, 2, 40, 18, 20]
    assert sum(sizes) == len(labels)
    first = {label: labels.tolist().index(label) for label in set(labels.tolist())}
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    for window in (1, 3, 1000):
        found = m.window_mode(labels, window, sizes, shift)
        for number, size in enumerate(sizes):
            known = labels[: starts[number - shift] if number >= shift else 0].tolist()[-window:]
            most = max((known.count(label) for label in known), default=0)
            modes = [label for label in known if known.count(label) == most]
            expected = min(modes, key=first.__getitem__) if known else m.NO_PREDICTION
            assert found[starts[number] : starts[number] + size].tolist() == [expected] * size
    assert m.no_change(labels, sizes, shift).tolist() == m.window_mode(labels, 1, sizes, shift).tolist()
    assert m.running_majority(labels, sizes, shift).tolist() == m.window_mode(labels, 1000, sizes, shift).tolist()
    asked = sum(sizes[:shift])
    right = [
        (m.window_mode(labels, window, sizes, shift)[asked:] == labels[asked:]).mean() for window in (1, 10, 100, len(labels) + 1)
    ]
    assert m.blind_acc(labels, sizes, shift) == max(right)


def test_the_shift_from_which_labels_alone_say_nothing() -> None:
    blocks = np.repeat(np.arange(8), 40)  # each class comes in 4 batches of 10
    assert m.blind_acc(blocks, 10) > 1 / 8
    assert m.blind_acc(blocks, 10, 2) > 1 / 8 > m.blind_acc(blocks, 10, 4)
    assert m.blind_shift(blocks, 10) == 4
    assert m.blind_shift(blocks, [10] * 32) == 4
    assert m.blind_shift([0, 0, 0], 1) == 0
    assert m.blind_shift([], 1) is None


def test_numbers_of_predictions_are_those_of_single_functions() -> None:
    found = Prequential.of([{"labels": LABELS[at : at + 1], "predictions": PREDICTIONS[at : at + 1]} for at in range(12)])
    assert found.measures == pytest.approx(
        {
            "prequential": 100 * 8 / 12,
            "majority": 100 / 12,
            "no_change": 50,
            "kappa": 0.5,
            "kappa_majority": 0.6363636364,
            "kappa_temporal": 1 / 3,
        }
    )
    assert found.fading(0.9)[[0, 1, -1]] == pytest.approx([100, 47.37, 67.70], abs=0.01)
    assert found.fading(1.0)[-1] == found.sliding(12)[-1] == found.accuracy
    assert found.sliding(4)[-1] == 75
    assert found.tumbling(4).tolist() == [75, 50, 75]
    in_fours = Prequential.of([{"labels": LABELS[at : at + 4], "predictions": PREDICTIONS[at : at + 4]} for at in (0, 4, 8)])
    assert in_fours.accuracy == found.accuracy
    assert in_fours.measures["no_change"] == pytest.approx(100 * 3 / 12), "the last label of the batch before"
    assert in_fours.measures["kappa_temporal"] == pytest.approx(m.kappa_temporal(LABELS, PREDICTIONS, 4))
    assert in_fours.measures["kappa_majority"] == pytest.approx(m.kappa_majority(LABELS, PREDICTIONS, 4))
    nothing = Prequential.of([])
    assert (nothing.measures, len(nothing), repr(nothing)) == ({}, 0, "Prequential(nothing was predicted)")
    assert repr(found).startswith("Prequential(12 items: 66.7 % right; blind: majority 8.3 %, no_change 50.0 %; kappa 0.500")


def test_kappas_by_the_worked_example() -> None:
    assert m.kappa(LABELS, PREDICTIONS) == pytest.approx(0.5)
    assert m.kappa_temporal(LABELS, PREDICTIONS) == pytest.approx(1 / 3)
    assert m.kappa_majority(LABELS, PREDICTIONS) == pytest.approx(0.6363636364)
    assert m.better_than(CORRECT.mean(), m.right(LABELS, m.oracle_majority(LABELS)).mean()) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(3))
def test_laws_of_kappas(seed: int) -> None:
    labels, predictions = drawn(seed)
    assert m.kappa(labels, predictions) == pytest.approx(cohen_kappa_score(labels, predictions))
    assert m.kappa(labels, labels) == 1
    assert m.kappa_temporal(labels, m.no_change(labels)) == 0
    assert m.kappa_majority(labels, m.running_majority(labels)) == 0
    product = np.repeat([0, 0, 1], 4), np.tile([0, 1, 1, 1], 3)
    assert m.kappa(*product) == pytest.approx(0, abs=1e-12), "independent labels and predictions"
    assert math.isnan(m.kappa([1, 1], [1, 1]))
    assert math.isnan(m.kappa([], []))
    assert m.kappa_temporal(labels, predictions, batch=5) > m.kappa_temporal(labels, predictions), "late labels are harder to copy"


# Shifts in time.


def test_near_future_and_delay_by_the_worked_example() -> None:
    sizes = [4] * 6
    assert [m.near_future_acc(RIGHT_OF_4, sizes, s) for s in range(3)] == pytest.approx([0.5416666667, 0.2, 0.25])
    assert [m.delayed_acc(RIGHT_OF_4, sizes, d) for d in range(3)] == pytest.approx([0.5416666667, 0.2083333333, 0.2083333333])
    for late in (1, 2):
        start = sum(RIGHT_OF_4[0][:late])
        whole = m.delayed_acc(RIGHT_OF_4, sizes, late) * 24
        assert (whole - start) / (24 - 4 * late) == pytest.approx(m.near_future_acc(RIGHT_OF_4, sizes, late))
    uneven = [4, 4, 4, 4, 4, 3]
    assert m.near_future_acc(RIGHT_OF_4, uneven, 0) == pytest.approx(13 / 23), "over images, not over batches"


def test_information_retention_by_the_worked_example() -> None:
    assert m.information_retention([4, 5, 6, 8], [10] * 4) == pytest.approx([0.8, 0.7, 0.6333333333, 0.575])
    assert m.information_retention([1, 9], [10, 30])[-1] == 0.25


# Any-time.


def test_area_under_the_curve_by_the_worked_example() -> None:
    assert m.a_auc([0.3, 0.42, 0.5, 0.35, 0.44, 0.52, 0.4, 0.47]) == pytest.approx(0.425)
    assert m.accuracy_by_image([40, 30, 60], [50, 50, 200]) == pytest.approx(0.4333333333)
    assert math.isnan(m.a_auc([]))
    assert math.isnan(m.accuracy_by_image([], []))


def test_stability_gaps_by_the_worked_example() -> None:
    gaps = m.stability_gaps(EVALUATIONS)
    assert [(gap.boundary, gap.task) for gap in gaps] == [(1, 0), (2, 0), (2, 1)]
    assert [(gap.before, gap.low, gap.end) for gap in gaps] == [(90, 50, 84), (84, 60, 80), (70, 45, 66)]
    assert [(gap.depth, gap.regained) for gap in gaps] == [(40, 34), (24, 20), (25, 21)]
    assert [(gap.to_low, gap.to_recover) for gap in gaps] == [(1, None), (1, None), (1, None)]
    assert [gap.to_recover for gap in m.stability_gaps(EVALUATIONS, tolerance=10)] == [3, 2, 3]
    assert [gap.to_recover for gap in m.stability_gaps(EVALUATIONS, tolerance=5)] == [None, 3, 3]
    assert m.mean_depth(gaps) == pytest.approx(29.66666667)
    assert m.min_acc(EVALUATIONS) == 47.5
    assert m.wc_acc(EVALUATIONS) == pytest.approx(55.66666667)
    late = m.stability_gaps([[90], [88, 0], [70, 1], [91, 2]])
    assert (late[0].to_low, late[0].to_recover) == (2, 3)
    assert m.stability_gaps([[80], [90]]) == []
    assert math.isnan(m.mean_depth([]))


# From the matrix.


def test_forgetting_relative_to_the_best_by_the_worked_example() -> None:
    assert m.relative_forgetting(MATRIX) == pytest.approx(0.2663650075)
    assert m.relative_forgetting(MATRIX, per_old_task=True) == pytest.approx(0.3551533434)
    improved = [*MATRIX[:3], [82, 62, 40, 88]]
    assert m.relative_forgetting(improved, per_old_task=True) == pytest.approx((0.2705882353 + 0.5) / 3), "none is negative"
    assert m.relative_forgetting([[0, 5], [0, 9]]) == 0
    assert m.relative_forgetting([[3]]) == 0


def test_intransigence_and_forward_transfer_by_the_worked_example() -> None:
    assert m.intransigence(MATRIX, [75, 90, 88, 91]) == pytest.approx(5.25)
    assert m.forward_transfer(MATRIX, [10] * 4) == pytest.approx(5.666666667)
    assert m.learning_acc(MATRIX) == pytest.approx(80.75)
    unmet = np.tril(np.array(MATRIX, float))
    unmet[np.triu_indices(4, 1)] = math.nan
    assert math.isnan(m.forward_transfer(unmet, [10] * 4)), "NaN and not 0 where later tasks cannot be predicted"
    with pytest.raises(ValueError, match="joint is one accuracy for each of 4 tasks"):
        m.intransigence(MATRIX, [1, 2])


# Masked, confusion.


def test_masked_accuracy_by_the_worked_example() -> None:
    scores = [[2, 1, 3, 0], [0, 1, 0.5, 2], [1, 0, 0.2, 0.1], [0.1, 0.3, 0.9, 0.4], [0.2, 0.1, 0, 0.7]]
    labels, tasks, members = [0, 1, 0, 2, 2], [0, 0, 0, 1, 1], [[1, 1, 0, 0], [0, 0, 1, 1]]
    plain, masked = np.argmax(scores, axis=1), m.masked_predictions(scores, tasks, members)
    assert (plain.tolist(), masked.tolist()) == ([2, 3, 0, 2, 3], [0, 1, 0, 2, 3])
    values = m.right(labels, plain).mean(), m.right(labels, masked).mean(), m.task_found(plain, tasks, members)
    assert values == pytest.approx((0.4, 0.8, 0.6))


def test_masking_never_makes_an_image_wrong() -> None:
    generator = np.random.default_rng(0)
    members = np.repeat(np.eye(3, dtype=bool), 2, axis=1)
    labels = generator.integers(0, 6, 500)
    scores = generator.normal(size=(500, 6)) + 1.5 * np.eye(6)[labels]
    plain, masked = scores.argmax(axis=1), m.masked_predictions(scores, labels // 2, members)
    assert np.all(m.right(labels, masked) >= m.right(labels, plain))
    assert m.right(labels, plain).mean() <= m.task_found(plain, labels // 2, members) < 1


def test_confusion() -> None:
    labels, predictions = drawn(5)
    assert m.confusion_matrix(labels, predictions, 5).tolist() == confusion_of_sklearn(labels, predictions).tolist()
    assert m.confusion_matrix([0, 1, 1], [m.NO_PREDICTION, 1, 0], 3).tolist() == [[0, 0, 0], [1, 1, 0], [0, 0, 0]]


# Calibration.

CHANCES = np.array(
    [
        [0.7, 0.2, 0.1],
        [0.6, 0.3, 0.1],
        [0.5, 0.4, 0.1],
        [0.1, 0.8, 0.1],
        [0.2, 0.6, 0.2],
        [0.05, 0.05, 0.9],
        [0.3, 0.3, 0.4],
        [0.1, 0.0, 0.9],
    ]
)
TRUE = np.array([0, 1, 0, 1, 1, 2, 0, 1])


def test_calibration_by_the_worked_example() -> None:
    assert m.brier(CHANCES, TRUE) == pytest.approx(0.536875)
    assert [m.brier(CHANCES[rows], TRUE[rows]) for rows in (slice(0, 5), slice(5, 8))] == pytest.approx([0.344, 0.8583333333])
    assert [m.ece(CHANCES, TRUE, bins) for bins in (15, 10, 5, 1)] == pytest.approx([0.3, 0.3, 0.25, 0.05])
    per_task = [m.calibration_bins(CHANCES[rows], TRUE[rows]) for rows in (slice(0, 5), slice(5, 8))]
    assert [m.ece_of_bins(table) for table in per_task] == pytest.approx([0.24, 0.4])
    assert m.ece_of_bins(sum(per_task)) == pytest.approx(m.ece(CHANCES, TRUE)), "pooled bins are those of all images"
    assert math.isnan(m.ece_of_bins(np.zeros((3, 15))))


def test_laws_of_calibration() -> None:
    generator = np.random.default_rng(4)
    chances = generator.dirichlet(np.ones(4), 400)
    labels = generator.integers(0, 4, 400)
    for bins in (1, 7, 15):
        table = m.calibration_bins(chances, labels, bins)
        assert m.ece_of_bins(table) == pytest.approx(m.ece(chances, labels, bins))
        assert table[0].sum() == 400
        assert table[1].sum() == (chances.argmax(axis=1) == labels).sum()
    loop = np.mean([sum((p[c] - (c == y)) ** 2 for c in range(4)) for p, y in zip(chances, labels, strict=True)])
    assert m.brier(chances, labels) == pytest.approx(loop)
    assert m.brier(np.eye(4)[labels], labels) == 0
    assert m.brier(np.eye(4)[(labels + 1) % 4], labels) == 2
