"""ADWIN: the same detections as river's at the same items, and what prediction errors of a learner do to it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gracecl.detectors.adwin import Adwin

drift = pytest.importorskip("river.drift")
Floats = npt.NDArray[np.float64]


def alarms(values: Floats, **options: Any) -> list[int]:
    """The items at which our detector says that there is a change."""
    detector = Adwin(**options)
    return [item for item, value in enumerate(values) if detector.add(float(value))]


def of_river(values: Floats, **options: Any) -> list[int]:
    detector, found = drift.ADWIN(**options), []
    for item, value in enumerate(values):
        detector.update(float(value))
        if detector.drift_detected:
            found.append(item)
    return found


def coins(rng: np.random.Generator, *phases: tuple[int, float]) -> Floats:
    """Errors of 0 and 1, at a rate in each phase."""
    return np.concatenate([rng.random(items) < rate for items, rate in phases]).astype(float)


def falling(rng: np.random.Generator, items: int, start: float = 0.9, end: float = 0.2, over: float = 500) -> Floats:
    """Errors of a learner that gets better."""
    rate = end + (start - end) * np.exp(-np.arange(items) / over)
    return (rng.random(items) < rate).astype(float)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"delta": 0.3},
    {"delta": 0.05, "clock": 1, "min_window_length": 1, "grace_period": 0},
    {"delta": 0.3, "clock": 7, "max_buckets": 2, "min_window_length": 3, "grace_period": 100},
    {"max_buckets": 8, "min_window_length": 10},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_detections_are_river_s_at_the_same_items(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    streams = [
        coins(rng, (600, 0.1), (600, 0.6), (600, 0.2)),
        coins(rng, (400, 0.9), (400, 0.2), (400, 0.8)),
        falling(rng, 1500),
        rng.normal(size=1200) + (np.arange(1200) > 600),
        np.repeat([0.0, 100.0, 0.0, 100.0], [40, 60, 300, 60]),
    ]
    expected = [of_river(values, **options) for values in streams]
    assert [alarms(values, rising=False, **options) for values in streams] == expected
    assert sum(map(len, expected)) >= 4


def test_what_is_left_of_a_window_is_what_river_leaves() -> None:
    """Width, sum and variance at every item up to the first change, and after the oldest buckets were dropped there."""
    ours, other = Adwin(), drift.ADWIN()
    for value in coins(np.random.default_rng(8), (900, 0.1), (200, 0.7)):
        ours.insert(float(value))
        ours.ticks += 1
        while ours.ticks % ours.clock == 0 and ours.width > ours.grace_period and ours.has_cut():
            ours.drop_oldest()
        other.update(float(value))
        assert (ours.width, ours.total) == (other.width, other.total)
        assert ours.variance == pytest.approx(other.variance, rel=1e-9)
        if other.drift_detected:
            break
    assert other.drift_detected
    assert ours.width < ours.ticks


@pytest.mark.slow
def test_detections_are_river_s_on_many_streams() -> None:
    rng, found = np.random.default_rng(1), 0
    for number in range(40):
        values = coins(rng, *((1000, float(rng.random())) for _ in range(3)))
        options = OPTIONS[number % len(OPTIONS)]
        expected = of_river(values, **options)
        assert alarms(values, rising=False, **options) == expected
        found += len(expected)
    assert found > 60


def test_a_learner_that_gets_better_begins_no_task() -> None:
    """ADWIN looks both ways; a task begins where the error rises alone."""
    rng = np.random.default_rng(2)
    curves = [falling(rng, 4000) for _ in range(3)]
    assert all(alarms(curve, rising=False) for curve in curves)
    assert not any(alarms(curve) for curve in curves)


@pytest.mark.parametrize(("after", "median", "largest"), [(0.3, 407, 855), (0.4, 151, 247), (0.6, 55, 119), (0.9, 23, 55)])
@pytest.mark.slow
def test_jumps_are_found_with_the_delays_that_were_measured(after: float, median: int, largest: int) -> None:
    """From 0.2 at item 1,500; the figures are those of river's detector in 60 streams with a jump at item 5,000."""
    rng = np.random.default_rng(3)
    found = [alarms(coins(rng, (1500, 0.2), (2000, after))) for _ in range(20)]
    delays = [next(item for item in items if item >= 1500) - 1500 for items in found]
    assert all(items[0] >= 1500 for items in found), "no alarm before the jump"
    assert 0.5 * median <= np.median(delays) <= 1.6 * median
    assert max(delays) <= 1.8 * largest


@pytest.mark.slow
def test_every_task_is_found_and_nothing_else() -> None:
    """Five tasks of 2,000 items, each from an error of 0.9 to 0.2."""
    rng, delays = np.random.default_rng(4), []
    for _ in range(8):
        errors = np.concatenate([falling(rng, 2000) for _ in range(5)])
        found = alarms(errors)
        assert [item // 2000 for item in found] == [1, 2, 3, 4]
        delays += [item % 2000 for item in found]
    assert np.median(delays) < 100


@pytest.mark.slow
def test_without_a_change_there_is_no_alarm() -> None:
    rng = np.random.default_rng(5)
    assert not any(alarms(coins(rng, (10_000, rate))) for rate in (0.1, 0.5) for _ in range(5))


def test_the_state_is_plain_and_goes_on_exactly() -> None:
    """Through JSON, as a checkpoint writes it, at every hundredth item."""
    rng = np.random.default_rng(6)
    values = coins(rng, (700, 0.2), (500, 0.8))
    whole, parts, found = alarms(values), Adwin(), []
    for item, value in enumerate(values):
        if item % 100 == 0:
            parts, state = Adwin(), json.loads(json.dumps(parts.state_dict()))
            parts.load_state_dict(state)
        if parts.add(float(value)):
            found.append(item)
    assert found == whole
    assert whole


def test_a_batch_is_its_items() -> None:
    """Any alarm inside the batch counts, also one that later items of the batch follow."""
    values = coins(np.random.default_rng(7), (600, 0.1), (200, 0.9))
    [item] = alarms(values)
    batches = Adwin()
    found = [start for start in range(0, len(values), 50) if batches.update(values[start : start + 50].astype(bool))]
    assert found == [item // 50 * 50]
    assert item % 50 != 49
