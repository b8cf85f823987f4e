"""Randomness as a function: what it depends on, and that it is random enough."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import stats

from gracecl import rng


def test_key_depends_on_every_part_and_on_their_order() -> None:
    """All orders and all prefixes of the parts, with one of them changed or not, are different keys."""
    parts = (7, "plan", 3, "view")
    variants = {rng.key(*order) for order in itertools.permutations(parts)}
    variants |= {rng.key(*parts[:n]) for n in range(len(parts))}
    for position in range(len(parts)):
        changed = list(parts)
        changed[position] = "other"
        variants.add(rng.key(*changed))
    assert len(variants) == 24 + 4 + 4


def test_key_tells_neighbouring_steps_and_seeds_apart() -> None:
    keys = {rng.key(seed, "plan", step, repeat) for seed in range(20) for step in range(50) for repeat in range(4)}
    assert len(keys) == 20 * 50 * 4
    assert all(0 <= key < 1 << 64 for key in keys)


def test_key_tells_a_number_from_its_text_and_a_word_from_its_halves() -> None:
    assert len({rng.key(1), rng.key("1"), rng.key(-1), rng.key("ab"), rng.key("a", "b"), rng.key(0), rng.key(0, 0)}) == 7


def test_key_is_the_same_on_every_machine() -> None:
    """Numbers kept from an earlier run: if these move, so does every recorded result."""
    assert rng.key(0, "plan", 0, 0) == 10170504548940227972
    assert rng.generator(0, "plan", 0, 0).integers(0, 1000, 5).tolist() == [450, 459, 532, 12, 9]


def splitmix(value: int) -> int:
    """The finaliser of SplitMix64 in whole numbers, as published: shifts 30, 27, 31 and two odd constants."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_uniform_is_splitmix_in_whole_numbers() -> None:
    """Array arithmetic that wraps at 64 bits equals exact arithmetic modulo 2^64, for the largest stems and ids as well."""
    golden = 0x9E3779B97F4A7C15
    for stem in (0, 1, 2**63, 2**64 - 1):
        ids = np.array([0, 1, 12345, 1 << 40, 2**62])
        for i, row in zip(ids.tolist(), rng.uniform(stem, ids, 3).tolist(), strict=True):
            start = splitmix((i * golden + stem) % 2**64)
            assert row == [(splitmix((start + j * golden) % 2**64) >> 11) / 2**53 for j in (1, 2, 3)]


def test_generator_is_reproducible_and_purposes_are_independent() -> None:
    def numbers(*parts: int | str) -> np.ndarray:
        return rng.generator(*parts).random(1000)

    np.testing.assert_array_equal(numbers(3, "store", 5), numbers(3, "store", 5))
    other = numbers(3, "plan", 5)
    assert abs(np.corrcoef(numbers(3, "store", 5), other)[0, 1]) < 0.12
    assert abs(np.corrcoef(numbers(3, "plan", 6), other)[0, 1]) < 0.12


def test_uniform_rows_depend_on_their_id_alone() -> None:
    """Any subset, any order, any number of columns: an id's numbers are the same, also for ids of memory slots."""
    ids = np.array([5, 0, 17, (1 << 40) + 3, 4, 1 << 40])
    every = rng.uniform(99, ids, 7)
    for size in range(1, len(ids) + 1):
        for some in itertools.combinations(range(len(ids)), size):
            picked = np.array(some[::-1])
            np.testing.assert_array_equal(rng.uniform(99, ids[picked], 7), every[picked])
    np.testing.assert_array_equal(rng.uniform(99, ids, 3), every[:, :3])
    assert (rng.uniform(100, ids, 7) != every).all()
    assert len(np.unique(every)) == every.size


def test_uniform_of_nothing() -> None:
    assert rng.uniform(1, np.empty(0, np.int64), 4).shape == (0, 4)
    assert rng.uniform(1, np.arange(3), 0).shape == (3, 0)


@pytest.mark.parametrize("stem", [0, 1, (1 << 64) - 1])
def test_uniform_is_uniform(stem: int) -> None:
    """Rows, columns and the numbers as a whole pass Kolmogorov–Smirnov, and neighbours are uncorrelated."""
    values = rng.uniform(stem, np.arange(2000), 10)
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.08
    correlation = np.corrcoef(values.T) - np.eye(10)
    assert np.abs(correlation).max() < 0.1
    # The lowest bits that a step uses are fair as well: fifty-fifty coins, in pairs.
    coins = (values[:, :2] * 2**20).astype(np.int64) % 2
    assert stats.chisquare(np.bincount(2 * coins[:, 0] + coins[:, 1], minlength=4)).pvalue > 1e-3


def test_uniform_of_neighbouring_stems_is_unrelated() -> None:
    """Steps differ in their stem only; the same image must not get shifted copies of its numbers."""
    first, second = (rng.uniform(rng.key(0, "augment", step), np.arange(2000), 4) for step in (0, 1))
    for lag in range(4):
        for column in range(4):
            assert abs(np.corrcoef(first[:, column], second[:, lag])[0, 1]) < 0.09


def test_torch_seed_gives_the_same_numbers_and_restores_the_state() -> None:
    torch.manual_seed(1)
    expected = torch.rand(5)
    torch.manual_seed(1)
    drawn = []
    for parts in ((4, "net"), (4, "net"), (5, "net")):
        with rng.torch_seed(*parts):
            drawn.append(torch.rand(3))
    assert torch.equal(torch.rand(5), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_torch_seed_of_several_threads_gives_each_its_own_numbers() -> None:
    """Torch has one generator for all of them, so the blocks wait for one another."""

    def draw(seed: int) -> list[float]:
        numbers = []
        with rng.torch_seed(seed, "threads"):
            for _ in range(20):
                numbers.append(torch.rand(()).item())
                time.sleep(1e-4)  # another thread's turn
        return numbers

    expected, before = [draw(seed) for seed in range(4)], torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(4))) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_seed_restores_the_state_after_an_error() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), rng.torch_seed(3, "net"):
        torch.rand(3) @ torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_moves_a_global_random_state() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    rng.generator(1, "plan").random(10)
    rng.uniform(rng.key(1, "augment"), np.arange(5), 3)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)


def test_a_reseeded_generator_starts_where_a_new_one_would() -> None:
    """Also after it was used, and in the middle of a word that integers of 32 bits are taken from."""
    reseeded = rng.Reseeded()
    for step in range(5):
        again, new = reseeded(7, "plan", step), rng.generator(7, "plan", step)
        np.testing.assert_array_equal(again.integers(0, 1000, 3, dtype=np.uint32), new.integers(0, 1000, 3, dtype=np.uint32))
        np.testing.assert_array_equal(again.random(4), new.random(4))
