"""Whatever fails, a run ends with the same results, or one sentence says what is wrong and nothing is lost."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import (
    CHECKPOINT,
    GOOD,
    REPORTED,
    RESUMED,
    Count,
    Damage,
    Damaged,
    Machine,
    cut,
    flipped,
    full_disks,
    header_flipped,
    kills,
    power_cuts,
)

from gracecl import Learner, UserError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EVERY = 3
"""of the calls, sizes and moments; `python tests/faults/machine.py` takes all of them"""
DAMAGES = st.one_of(st.builds(flipped, st.integers(0, 1 << 30), st.integers(0, 7)), st.builds(cut, st.integers(0, 1 << 30)))
HEADER_FLIPS = st.builds(header_flipped, st.integers(0, 1 << 30), st.integers(0, 7))
TRIES = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.exhaustive
def test_a_process_that_is_killed_at_any_call_that_writes(made: Machine, count: Count) -> None:
    for number, outcome in enumerate(kills(made, EVERY), start=1):
        count("kill -9 at a writing call", outcome)
        assert outcome == "identical", f"at the call of number {number}"


def test_a_disk_that_is_full_at_any_size(made: Machine, count: Count) -> None:
    for number, outcome in enumerate(full_disks(made, EVERY)):
        count("disk full", outcome)
        assert outcome == "identical", f"at the size of number {number}"


@pytest.mark.parametrize("kind", ["synced", "named"])
def test_a_power_cut_at_any_moment(kind: Literal["synced", "named"], made: Machine, count: Count) -> None:
    for number, outcome in enumerate(power_cuts(made, kind, EVERY), start=1):
        count(f"power cut, {'names and content' if kind == 'synced' else 'content'} as synced", outcome)
        assert outcome == "identical", f"at the moment of number {number}"


@pytest.mark.parametrize(("what", "name"), [*(("resume", name) for name in RESUMED), *(("report", name) for name in REPORTED)])
def test_a_damaged_file_of_a_run(what: Literal["resume", "report"], name: str, damaged: Damaged, count: Count) -> None:
    """Of one that is resumed, and of a finished one that is reported on."""

    @settings(TRIES, max_examples=40)
    @given(DAMAGES)
    def check(damage: Damage) -> None:
        outcome = getattr(damaged, what)(name, damage)
        count(f"{name} damaged, {what}", outcome)
        assert outcome in GOOD

    check()


@pytest.mark.exhaustive
def test_a_flipped_bit_in_the_header_of_a_checkpoint(damaged: Damaged, count: Count) -> None:
    @settings(TRIES, max_examples=200)
    @given(HEADER_FLIPS)
    def check(flip: Damage) -> None:
        outcome = damaged.resume(CHECKPOINT, flip)
        count(f"{CHECKPOINT} with a flipped bit in its header, resume", outcome)
        assert outcome in GOOD

    check()


@pytest.mark.parametrize(
    ("kind", "damages"),
    [("a learner's file damaged, load", DAMAGES), ("a learner's file with a flipped bit in its header, load", HEADER_FLIPS)],
    ids=["anywhere", "header"],
)
def test_a_damaged_file_of_a_learner(
    kind: str, damages: st.SearchStrategy[Damage], tmp_path_factory: pytest.TempPathFactory, count: Count
) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), dtype=np.uint8), np.arange(10) % 4
    ours = Learner("er", classes=4, shape=(1, 8, 8), memory=20, net="mlp(width=8)", device="cpu")
    ours.learn(x, y)
    file = tmp_path_factory.mktemp("learner") / "learner"
    ours.save(file)
    whole = file.read_bytes()

    @settings(TRIES, max_examples=400)
    @given(damages)
    def check(damage: Damage) -> None:
        file.write_bytes(damage(whole))
        try:
            back = Learner.load(file, device="cpu")
        except UserError:
            count(kind, "refused")
            return
        same = all(torch.equal(value, back.net.state_dict()[name]) for name, value in ours.net.state_dict().items())
        count(kind, "identical" if same else "silent")
        assert same

    check()
