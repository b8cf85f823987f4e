"""Images kept from training against the rule applied image by image."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from gracecl.core import Progress, StreamBatch
from gracecl.inputs import Images
from gracecl.memory import Memory
from gracecl.memory.class_balanced import place_in_class
from gracecl.memory.held_out import HeldOut

SHAPE = (1, 1, 2)


def batch(labels: list[int], start: int, seen: list[int], fresh: bool = True) -> StreamBatch:
    """Image number i of the stream shows the number i."""
    numbers = np.arange(start, start + len(labels))
    x = torch.from_numpy(np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8)).view(-1, *SHAPE)
    return StreamBatch(x, np.array(labels, np.int64), numbers, progress=Progress(seen=tuple(dict.fromkeys(seen))), fresh=fresh)


def feed(held_out: HeldOut, labels: list[int], size: int = 4) -> list[int]:
    """The positions in the stream of the images that were kept from training."""
    aside = []
    for start in range(0, len(labels), size):
        new = batch(labels[start : start + size], start, labels[: start + size])
        rows = held_out.rows(new)
        aside += new.sources[rows].tolist()
        held_out.add(new.select(rows), np.random.default_rng(start))
    return aside


def numbers_in(held_out: HeldOut) -> list[int]:
    images = held_out.memory.images[: len(held_out.memory)].flatten(1).long()
    return (256 * images[:, 0] + images[:, 1]).tolist()


def test_place_in_class() -> None:
    labels = np.array([3, 1, 3, 3, 0, 1])
    assert place_in_class(labels).tolist() == [0, 0, 1, 2, 0, 1]
    assert place_in_class(labels[:0]).tolist() == []


@pytest.mark.parametrize("capacity", [7, 12, 20])
@pytest.mark.parametrize("size", [1, 4, 10])
def test_the_first_images_of_each_class_up_to_its_share(capacity: int, size: int) -> None:
    """Image after image within a batch, with the share that follows from the classes met up to the batch's end."""
    generator = np.random.default_rng(capacity)
    labels = [int(label) for task in range(3) for label in generator.integers(2 * task, 2 * task + 2, 40)]
    held_out, held = HeldOut(Memory(capacity, Images(SHAPE))), Counter()
    for start in range(0, len(labels), size):
        seen = labels[: start + size]
        share = capacity // len(set(seen))
        new = batch(labels[start : start + size], start, seen)
        expected = []
        for row, label in enumerate(new.labels.tolist()):
            if held[label] < share:
                held[label] += 1
                expected.append(row)
        rows = held_out.rows(new)
        assert rows.tolist() == expected
        held_out.add(new.select(rows), generator)
        memory = held_out.memory
        assert len(memory) <= capacity
        wanted, held = held, Counter(memory.labels[: len(memory)].tolist())
        assert all(min(share, count) <= held[label] <= count for label, count in wanted.items())
        assert set(new.sources[rows].tolist()) <= set(numbers_in(held_out))
    final = capacity // 6
    balanced = held_out.balanced(6)
    assert Counter(memory.labels[balanced].tolist()) == dict.fromkeys(range(6), final)
    assert len(set(balanced.tolist())) == len(balanced)
    for slot, number in enumerate(numbers_in(held_out)):
        assert memory.labels[slot] == labels[number]


def test_what_gives_way_is_random() -> None:
    """Six images of one class, of which a second class takes three: each is as likely to go."""
    gone = Counter()
    for seed in range(600):
        held_out = HeldOut(Memory(6, Images(SHAPE)))
        feed(held_out, [5] * 6)
        new = batch([2] * 3, 6, [5, 2])
        assert held_out.rows(new).tolist() == [0, 1, 2]
        held_out.add(new, np.random.default_rng(seed))
        gone.update(set(range(6)) - set(numbers_in(held_out)))
    assert sum(gone.values()) == 1800
    assert all(240 < gone[number] < 360 for number in range(6))


def test_one_image_of_a_class_while_there_is_room() -> None:
    """Three slots, and four classes in the first batch: there is no share, and nothing that was kept gives way later."""
    held_out = HeldOut(Memory(3, Images(SHAPE)))
    assert feed(held_out, [0, 1, 2, 3, 3, 0, 4, 5, 5, 5], size=5) == [0, 1, 2]
    assert Counter(held_out.memory.labels.tolist()) == {0: 1, 1: 1, 2: 1}
    assert held_out.share(6) == 0
    assert len(held_out.balanced(6)) == 3


def test_later_epochs_know_the_images_again_by_their_pixels() -> None:
    labels = [0, 1] * 10
    held_out = HeldOut(Memory(6, Images(SHAPE)))
    aside = feed(held_out, labels)
    assert aside == [0, 1, 2, 3, 4, 5]
    kept = set(numbers_in(held_out))
    for start in range(0, 20, 5):
        again = batch(labels[start : start + 5], start, labels, fresh=False)
        assert again.sources[held_out.rows(again)].tolist() == [i for i in range(start, start + 5) if i in kept]


def test_no_slots_hold_nothing() -> None:
    held_out = HeldOut(Memory(0, Images(SHAPE)))
    assert feed(held_out, [0, 1, 2, 0]) == []
    assert len(held_out.balanced(3)) == 0
    assert held_out.rows(batch([0], 0, [0], fresh=False)).tolist() == []
