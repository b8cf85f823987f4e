"""The memory: the exact reservoir law, fair draws, and bookkeeping compared with brute force."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from gracecl.core import NO_TASK
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.memory import Memories, Memory
from gracecl.memory.reservoir import Buckets, distinct

SHAPE = (1, 1, 3)


def picture(ids: np.ndarray) -> Tensor:
    """Images that carry their number in their bytes."""
    return torch.from_numpy(np.stack([ids % 256, ids // 256, 255 - ids % 256], axis=1).astype(np.uint8)).view(-1, *SHAPE)


def number(images: Tensor) -> np.ndarray:
    """The numbers that `picture` wrote."""
    low, high, check = images.flatten(1).numpy().astype(np.int64).T
    assert (check == 255 - low).all()
    return low + 256 * high


def label_of(ids: np.ndarray) -> np.ndarray:
    return (ids * 7) % 5


def offer(memory: Memory, ids: np.ndarray, rng: np.random.Generator, task: int = NO_TASK, **notes: Tensor) -> np.ndarray:
    return memory.add(rng, picture(ids), label_of(ids), task, **notes)


def filled(capacity: int, offered: int, batch: int = 10, seed: int = 0, per_task: int = 20) -> Memory:
    """A memory after a stream of numbered images, task after task."""
    memory, rng = Memory(capacity, Images(SHAPE)), np.random.default_rng(seed)
    for start in range(0, offered, batch):
        offer(memory, np.arange(start, min(start + batch, offered)), rng, task=start // per_task)
    return memory


def held(memory: Memory) -> np.ndarray:
    return number(memory.images[: len(memory)])


# The law.


def inclusion_pvalue(kept: np.ndarray, size: int, offered: int) -> float:
    """Chi-square of how often each image was kept. `kept [repeats, size]` holds the numbers of the images kept in each repeat.

    Exactly `size` of `offered` are kept each time, so counts have covariance R p (1 - p) (I - 1/N) N / (N - 1).
    """
    repeats, p = len(kept), size / offered
    counts = np.bincount(kept.ravel(), minlength=offered)
    statistic = ((counts - repeats * p) ** 2).sum() / (repeats * p * (1 - p)) * (offered - 1) / offered
    return float(stats.chi2.sf(statistic, offered - 1))


def reservoirs(repeats: int, size: int, offered: int, batch: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    images, labels = picture(np.arange(offered)), np.zeros(offered, np.int64)
    kept = []
    for _ in range(repeats):
        memory = Memory(size, Images(SHAPE))
        for start in range(0, offered, batch):
            memory.add(rng, images[start : start + batch], labels[start : start + batch])
        kept.append(held(memory))
    return np.array(kept)


def biased_reservoirs(repeats: int, size: int, offered: int, below: Callable[[int], int]) -> np.ndarray:
    """One image at a time, with j drawn below `below(seen before)`, which should be seen + 1."""
    rng, kept = np.random.default_rng(5), np.tile(np.arange(size), (repeats, 1))
    for image in range(size, offered):
        slot = rng.integers(0, below(image), repeats)
        kept[slot < size, slot[slot < size]] = image
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 20])
def test_every_image_is_kept_equally_often(batch: int) -> None:
    """Inclusion counts of N = 20 images in M = 5 slots over many streams, whatever the batch size."""
    assert inclusion_pvalue(reservoirs(600 if batch == 1 else 1500, 5, 20, batch), 5, 20) > 1e-3


def test_the_same_test_rejects_reservoirs_that_are_off() -> None:
    """j below seen instead of seen + 1 (A-GEM's program), and j below the count before the batch (MOSE's): both are found out."""
    assert inclusion_pvalue(biased_reservoirs(1500, 5, 20, lambda seen: seen + 1), 5, 20) > 1e-3
    assert inclusion_pvalue(biased_reservoirs(1500, 5, 20, lambda seen: seen), 5, 20) < 1e-3
    assert inclusion_pvalue(biased_reservoirs(1500, 5, 20, lambda seen: seen // 5 * 5), 5, 20) < 1e-3


def test_every_set_of_images_is_equally_likely() -> None:
    """The joint law: each of the 15 pairs out of 6 images, in batches of 4 and 2."""
    pairs = Counter(tuple(sorted(kept)) for kept in reservoirs(1500, 2, 6, 4).tolist())
    counts = [pairs[pair] for pair in itertools.combinations(range(6), 2)]
    assert sum(counts) == 1500
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_long_stream_is_kept_evenly() -> None:
    """er.md section 8 in one run: 10,000 images, 1,000 slots, tenths of the stream (a draw without replacement of each tenth)."""
    counts = np.bincount(held(filled(1000, 10_000)) // 1000, minlength=10)
    statistic = ((counts - 100) ** 2).sum() / (100 * 0.9) * 9_999 / 10_000
    assert stats.chi2.sf(statistic, 9) > 1e-3


# What is in it.


@pytest.mark.parametrize("offered", [0, 1, 7, 30])
def test_the_first_images_are_kept_in_order(offered: int) -> None:
    memory = filled(30, offered, batch=7)
    assert len(memory) == offered
    np.testing.assert_array_equal(held(memory), np.arange(offered))
    np.testing.assert_array_equal(memory.labels[:offered], label_of(np.arange(offered)))


@pytest.mark.parametrize(("capacity", "batch"), [(30, 7), (30, 10), (5, 64), (1, 3)])
def test_afterwards_exactly_capacity_distinct_images_with_their_own_labels_and_tasks(capacity: int, batch: int) -> None:
    memory, rng = Memory(capacity, Images(SHAPE)), np.random.default_rng(1)
    for start in range(0, 420, batch):
        offer(memory, np.arange(start, start + batch), rng, task=start // batch // 3)
        ids = held(memory)
        assert len(memory) == min(capacity, start + batch) == len(np.unique(ids))
        assert ids.max() < start + batch
        np.testing.assert_array_equal(memory.labels[: len(memory)], label_of(ids))
        np.testing.assert_array_equal(memory.tasks[: len(memory)], ids // batch // 3)
    assert held(memory).max() >= capacity


def test_a_batch_equals_its_images_one_by_one() -> None:
    """Where two images of a batch fall on one slot, the later one stays: the same numbers give the same content as a plain loop."""
    memory, rng, oracle = Memory(6, Images(SHAPE)), np.random.default_rng(2), list[int]()
    same, offered = np.random.default_rng(2), 0
    for size in (4, 9, 1, 30, 30, 5):
        ids = np.arange(offered, offered + size)
        slots = offer(memory, ids, rng)
        drawn = same.integers(0, ids + 1)
        written = set()
        for image, slot in zip(ids.tolist(), drawn.tolist(), strict=True):
            if len(oracle) < 6:
                written.add(len(oracle))
                oracle.append(image)
            elif slot < 6:
                written.add(slot)
                oracle[slot] = image
        offered += size
        assert held(memory).tolist() == oracle
        assert sorted(slots.tolist()) == sorted(written)


def test_the_input_may_be_changed_afterwards() -> None:
    memory, ids = Memory(8, Images(SHAPE)), np.arange(8)
    x, labels, notes = picture(ids), label_of(ids), torch.arange(8.0)
    memory.add(np.random.default_rng(0), x, labels, 3, score=notes)
    x.zero_()
    labels[:] = 99
    notes.zero_()
    np.testing.assert_array_equal(held(memory), ids)
    np.testing.assert_array_equal(memory.labels, label_of(ids))
    np.testing.assert_array_equal(memory.attributes["score"].numpy(), ids)
    np.testing.assert_array_equal(np.sort(memory.draw(8, np.random.default_rng(0), labels=[0])), np.flatnonzero(memory.labels == 0))


def test_notes_follow_their_image() -> None:
    """Through hundreds of overwritten slots, each image keeps the notes it came with."""
    memory, rng = Memory(25, Images(SHAPE)), np.random.default_rng(3)
    for start in range(0, 400, 8):
        ids = np.arange(start, start + 8)
        vector = torch.from_numpy(np.stack([ids, ids**2], axis=1)).float()
        offer(memory, ids, rng, logits=vector, weight=torch.from_numpy(-ids))
        kept = held(memory)
        np.testing.assert_array_equal(memory.attributes["logits"][: len(memory), 1].numpy(), kept.astype(float) ** 2)
        np.testing.assert_array_equal(memory.attributes["weight"][: len(memory)].numpy(), -kept)


def test_an_image_without_notes_does_not_inherit_those_of_the_one_it_replaces() -> None:
    memory, rng = Memory(6, Images(SHAPE)), np.random.default_rng(3)
    offer(memory, np.arange(6), rng, score=torch.full((6,), 7.0))
    replaced = np.concatenate([offer(memory, np.arange(start, start + 6), rng) for start in range(6, 60, 6)])
    assert 0 < len(set(replaced.tolist())) <= 6
    expected = [0.0 if image >= 6 else 7.0 for image in held(memory).tolist()]
    assert memory.attributes["score"].tolist() == expected


def test_content_does_not_depend_on_what_was_drawn() -> None:
    quiet, busy = Memory(10, Images(SHAPE)), Memory(10, Images(SHAPE))
    a, b, other = np.random.default_rng(4), np.random.default_rng(4), np.random.default_rng(9)
    for start in range(0, 200, 5):
        ids = np.arange(start, start + 5)
        offer(quiet, ids, a, task=start // 50)
        offer(busy, ids, b, task=start // 50)
        for condition in ({}, {"task": 0}, {"except_task": 1}, {"labels": [1, 2]}):
            busy.draw(3, other, **condition)
    np.testing.assert_array_equal(held(quiet), held(busy))


def test_without_slots_nothing_is_kept_and_nothing_drawn() -> None:
    memory = filled(0, 50)
    assert len(memory) == 0
    assert memory.composition() == {}
    for condition in ({}, {"task": 0}, {"except_task": 0}, {"labels": [0]}, {"except_labels": [0]}):
        slots = memory.draw(5, np.random.default_rng(0), **condition)
        assert slots.shape == (0,)
        assert slots.dtype == np.int64
        assert memory[slots].shape == (0, *SHAPE)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(UserError, match="-1"):
        Memory(-1, Images(SHAPE))


# Draws.

CONDITIONS: list[dict[str, object]] = [
    {},
    {"task": 2},
    {"except_task": 2},
    {"labels": [1, 3]},
    {"except_labels": [1, 3]},
    {"task": 99},
    {"except_task": 99},
    {"labels": []},
    {"labels": [77]},
    {"except_labels": [0, 1, 2, 3, 4]},
]


def qualifying(memory: Memory, condition: dict[str, object]) -> list[int]:
    """By looking at every slot."""
    tests = {
        "task": lambda slot, value: memory.tasks[slot] == value,
        "except_task": lambda slot, value: memory.tasks[slot] != value,
        "labels": lambda slot, value: memory.labels[slot] in value,
        "except_labels": lambda slot, value: memory.labels[slot] not in value,
    }
    return [slot for slot in range(len(memory)) if all(tests[name](slot, value) for name, value in condition.items())]


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
@pytest.mark.parametrize("offered", [13, 60, 300])
def test_draws_are_distinct_slots_that_qualify(condition: dict[str, object], offered: int) -> None:
    """n of them, or all where fewer qualify, and never an empty slot."""
    memory, rng = filled(60, offered), np.random.default_rng(6)
    allowed = qualifying(memory, condition)
    for n in (0, 1, 3, len(allowed), len(allowed) + 5, 1000):
        slots = memory.draw(n, rng, **condition)
        assert len(slots) == min(n, len(allowed)) == len(set(slots.tolist()))
        assert set(slots.tolist()) <= set(allowed)


@pytest.mark.parametrize("condition", [{}, {"task": 2}, {"except_task": 2}, {"labels": [1, 3]}, {"except_labels": [1]}], ids=str)
@pytest.mark.parametrize("n", [2, 8])
def test_draws_are_uniform(condition: dict[str, object], n: int) -> None:
    """Every qualifying slot equally often; both ways of drawing (few of many, many of few) are covered."""
    memory, rng = filled(60, 300, per_task=60), np.random.default_rng(7)
    allowed = qualifying(memory, condition)
    assert len(allowed) > 8
    kept = np.array([memory.draw(n, rng, **condition) for _ in range(1500)])
    position = np.searchsorted(allowed, kept)
    assert inclusion_pvalue(position, n, len(allowed)) > 1e-3


@pytest.mark.parametrize(("n", "among"), [(2, 20), (5, 6), (6, 6)])
def test_distinct_is_in_random_order(n: int, among: int) -> None:
    """The first pick is uniform too: a caller may take a part of a draw."""
    rng = np.random.default_rng(8)
    first = np.bincount([distinct(n, among, rng)[0] for _ in range(2000)], minlength=among)
    assert stats.chisquare(first).pvalue > 1e-3


def test_draws_depend_on_their_generator_alone() -> None:
    memory = filled(60, 300)
    for condition in CONDITIONS:
        first, again, other = (memory.draw(5, np.random.default_rng(seed), **condition) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert len(first) < 2 or not np.array_equal(first, other)


# Bookkeeping.


def check_bookkeeping(memory: Memory) -> None:
    """Counts, composition and exhaustive filtered draws agree with the arrays."""
    labels, tasks = memory.labels[: len(memory)], memory.tasks[: len(memory)]
    assert memory.count() == len(memory)
    assert memory.composition() == dict(sorted(Counter(labels.tolist()).items()))
    for label in range(-1, 6):
        assert memory.count(label=label) == (labels == label).sum()
        everything = memory.draw(10**6, np.random.default_rng(0), labels=[label])
        assert sorted(everything.tolist()) == np.flatnonzero(labels == label).tolist()
    for task in {-1, *tasks.tolist()}:
        assert memory.count(task=task) == (tasks == task).sum()
        everything = memory.draw(10**6, np.random.default_rng(0), task=task)
        assert sorted(everything.tolist()) == np.flatnonzero(tasks == task).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_bookkeeping_after_many_random_adds(seed: int) -> None:
    """Random sizes, labels and tasks, reservoir adds and slots chosen by the caller, checked by brute force all along."""
    choice = np.random.default_rng(seed)
    memory, rng = Memory(int(choice.integers(1, 40)), Images(SHAPE)), np.random.default_rng(100 + seed)
    for _ in range(60):
        n, task = int(choice.integers(0, 12)), int(choice.integers(-1, 5))
        x, labels = picture(choice.integers(0, 1000, n)), choice.integers(0, 5, n)
        if n and len(memory) == memory.capacity and choice.random() < 0.3:
            slots = choice.permutation(memory.capacity)[:n]
            rows = choice.permutation(n)[: len(slots)]
            memory.put(slots, x, rows, labels, task, {})
            assert torch.equal(memory.images[torch.from_numpy(slots)], x[torch.from_numpy(rows)])
            np.testing.assert_array_equal(memory.labels[slots], labels[rows])
        else:
            memory.add(rng, x, labels, task)
        check_bookkeeping(memory)


def test_buckets_move_slots_between_keys() -> None:
    """Against a dictionary of sets, slot by slot."""
    rng, buckets, oracle = np.random.default_rng(0), Buckets(12), dict[int, int]()
    for _ in range(300):
        slots = rng.permutation(12)[: rng.integers(1, 6)].tolist()
        new = rng.integers(0, 4, len(slots)).tolist()
        old = [oracle.get(slot, -1) for slot in slots]
        buckets.move(slots, old, new, [key >= 0 for key in old])
        oracle |= dict(zip(slots, new, strict=True))
        for key in range(5):
            members = {slot for slot, at in oracle.items() if at == key}
            assert buckets.size(key) == len(members)
            assert set(buckets.draw(99, rng, {key}).tolist()) == members


# Checkpoints.


@pytest.mark.parametrize("offered", [0, 13, 40, 300], ids=["empty", "half full", "full", "overwritten"])
def test_a_restored_memory_goes_on_the_same(offered: int) -> None:
    """Content, counters and notes come back, and all later draws and additions are those of the memory that was saved."""
    memory, rng = Memory(40, Images(SHAPE)), np.random.default_rng(10)
    for start in range(0, offered, 10):
        ids = np.arange(start, min(start + 10, offered))
        offer(memory, ids, rng, task=start // 50, score=torch.from_numpy(ids).float())
    restored = Memory(40, Images(SHAPE))
    restored.load_state_dict(copy.deepcopy(memory.state_dict()))
    a, b = np.random.default_rng(11), np.random.default_rng(11)
    for start in range(offered, offered + 100, 10):
        for condition in CONDITIONS:
            np.testing.assert_array_equal(memory.draw(4, a, **condition), restored.draw(4, b, **condition))
        ids = np.arange(start, start + 10)
        notes = {"score": torch.from_numpy(ids).float()}
        np.testing.assert_array_equal(
            offer(memory, ids, a, task=start // 50, **notes), offer(restored, ids, b, task=start // 50, **notes)
        )
        np.testing.assert_array_equal(held(memory), held(restored))
        np.testing.assert_array_equal(memory.labels, restored.labels)
        np.testing.assert_array_equal(memory.tasks, restored.tasks)
        assert torch.equal(memory.attributes["score"], restored.attributes["score"])
        assert (memory.offered, memory.composition()) == (restored.offered, restored.composition())
        check_bookkeeping(restored)


def test_a_saved_memory_is_not_shared_with_the_restored_one() -> None:
    memory, restored = filled(10, 50), Memory(10, Images(SHAPE))
    restored.load_state_dict(memory.state_dict())
    before = held(memory).copy()
    offer(restored, np.arange(500, 600), np.random.default_rng(0))
    np.testing.assert_array_equal(held(memory), before)
    check_bookkeeping(memory)


def test_a_used_memory_can_be_taken_back_to_an_earlier_state() -> None:
    """Loading a state with fewer images leaves nothing of the later ones behind."""
    memory = filled(20, 6)
    early = copy.deepcopy(memory.state_dict())
    offer(memory, np.arange(6, 20), np.random.default_rng(0), task=5)
    memory.load_state_dict(early)
    check_bookkeeping(memory)
    offer(memory, np.arange(100, 110), np.random.default_rng(0), task=1)
    assert held(memory).tolist() == [*range(6), *range(100, 110)]
    check_bookkeeping(memory)


def test_a_saved_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="40 images"):
        Memory(10, Images(SHAPE)).load_state_dict(filled(40, 40).state_dict())


# Several stores.


def test_a_second_store_takes_its_slots_from_the_budget() -> None:
    memories = Memories(50, Images(SHAPE))
    aside = memories.reserve("heldout", 5)
    assert (memories.replay.capacity, aside.capacity, memories["heldout"]) == (45, 5, aside)
    with pytest.raises(UserError, match="46 slots"):
        memories.reserve("more", 46)


def test_all_stores_are_saved() -> None:
    memories, restored = Memories(50, Images(SHAPE)), Memories(50, Images(SHAPE))
    for each in (memories, restored):
        each.reserve("heldout", 5)
    offer(memories.replay, np.arange(60), np.random.default_rng(0))
    offer(memories["heldout"], np.arange(60, 80), np.random.default_rng(1))
    restored.load_state_dict(copy.deepcopy(memories.state_dict()))
    for name in ("replay", "heldout"):
        np.testing.assert_array_equal(held(memories[name]), held(restored[name]))
