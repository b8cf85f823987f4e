"""Streams: every image once, in the right task, and the same order only for the same ingredients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gracecl import streams
from gracecl.core import NO_TASK
from gracecl.data import Data, from_arrays
from gracecl.data.dataset import channel_statistics
from gracecl.errors import UserError
from gracecl.streams import Stream, cut_into_batches
from gracecl.streams.iid import endless, offline, shuffled
from gracecl.streams.split import class_order, split
from gracecl.testing import check_stream


def dataset(per_class: list[int], seed: int = 0, tasks: int = 1, test_per_class: int = 2) -> Data:
    """Noise images, classes mixed; the class's training images carry its number in their first byte."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(len(per_class)), per_class))
    test_y = np.repeat(np.arange(len(per_class)), test_per_class)
    x = rng.integers(0, 256, (len(y), 3, 3, 3), dtype=np.uint8)
    x[:, 0, 0, 0] = y
    return from_arrays(x, y, rng.integers(0, 256, (len(test_y), 3, 3, 3), dtype=np.uint8), test_y, tasks=tasks)


EVEN = dataset([12] * 6)
UNEVEN = dataset([1, 9, 30, 4, 17, 2, 8])


def batches(stream: Stream) -> list[streams.StreamBatch]:
    return [stream.batch(step) for step in range(len(stream))]


def check_split(stream: Stream, tasks: int, batch: int, epochs: int, classes_of_task: list[list[int]]) -> None:
    """Every law of a split stream, by walking through its batches."""
    data = stream.data
    position, seen = 0, {(task, epoch): [] for task in range(tasks) for epoch in range(epochs)}
    last_task = 0
    for step, part in enumerate(batches(stream)):
        images = stream.order[part.sources]
        assert part.sources.tolist() == list(range(position, position + len(part.labels)))
        position += len(part.labels)
        assert torch.equal(part.x, data.train_x[torch.from_numpy(images)])
        np.testing.assert_array_equal(part.labels, data.train_y[images])
        assert set(part.labels.tolist()) <= set(classes_of_task[part.task])
        assert part.task in (last_task, last_task + 1)
        last_task = part.task
        done = seen[part.task, 0]
        count = sum(np.isin(data.train_y, classes_of_task[part.task]))
        epoch = next(number for number in range(epochs) if len(seen[part.task, number]) < count)
        assert part.fresh == (epoch == 0)
        seen[part.task, epoch] += images.tolist()
        left = count - len(seen[part.task, epoch])
        assert len(part.labels) == batch or left == 0
        assert stream.ends_task(step) == (left == 0 and epoch == epochs - 1) == (step in stream.marks)
        assert len(done) > 0
    for (task, _), images in seen.items():
        assert sorted(images) == np.flatnonzero(np.isin(data.train_y, classes_of_task[task])).tolist()
    for task, members in enumerate(classes_of_task):
        np.testing.assert_array_equal(stream.test_task == task, np.isin(data.test_y, members))
    assert stream.has_tasks
    assert stream.tasks == tasks == len(stream.marks)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [1, 5, 10, 100])
def test_split_in_natural_order(batch: int, epochs: int) -> None:
    """Every image once per epoch, tasks of consecutive classes, a smaller last batch, later epochs not fresh."""
    check_split(split(EVEN, 0, tasks=3, batch=batch, epochs=epochs), 3, batch, epochs, [[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize("batch", [4, 10])
def test_split_of_uneven_classes(batch: int) -> None:
    """Seven classes in three tasks: 3 + 2 + 2, whatever the number of images; a task may be smaller than a batch."""
    check_split(split(UNEVEN, 1, tasks=3, batch=batch), 3, batch, 1, [[0, 1, 2], [3, 4], [5, 6]])
    check_split(split(UNEVEN, 1, tasks=7, batch=batch), 7, batch, 1, [[c] for c in range(7)])
    check_split(split(UNEVEN, 1, tasks=1, batch=batch), 1, batch, 1, [list(range(7))])


def test_split_in_seeded_order() -> None:
    """The seed of the class order gives a permutation, the same whatever the stream's seed; other seeds give others."""
    order = class_order(6, 1993)
    assert sorted(order.tolist()) == list(range(6))
    members = [order[:2].tolist(), order[2:4].tolist(), order[4:].tolist()]
    for seed in (0, 1):
        check_split(split(EVEN, seed, tasks=3, order=1993), 3, 10, 1, members)
    assert len({tuple(class_order(6, seed).tolist()) for seed in range(20)}) > 10
    assert class_order(6, "natural").tolist() == list(range(6))


def test_a_hundred_tasks_of_two_classes() -> None:
    data = dataset([3] * 200, tasks=100, test_per_class=1)
    stream = split(data, 0, batch=4)
    check_split(stream, 100, 4, 1, [[2 * t, 2 * t + 1] for t in range(100)])
    assert len(stream) == 200
    check_split(split(data, 0, tasks=10), 10, 10, 1, [list(range(20 * t, 20 * t + 20)) for t in range(10)])


def test_the_images_of_a_task_are_shuffled_by_seed_and_by_epoch() -> None:
    a, again, b = (split(EVEN, seed, tasks=2, epochs=2) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a.order, again.order)
    assert not np.array_equal(a.order, b.order)
    first, second = a.order[:36], a.order[36:72]
    assert sorted(first) == sorted(second)
    assert not np.array_equal(first, second)
    assert not np.array_equal(np.sort(first), first)


def test_a_stream_has_no_state() -> None:
    stream = split(EVEN, 0, tasks=3)
    forwards = [part.labels.tolist() for part in batches(stream)]
    backwards = [stream.batch(step).labels.tolist() for step in reversed(range(len(stream)))]
    assert forwards == backwards[::-1]


def test_batch_ends() -> None:
    for length in range(1, 25):
        for size in range(1, 12):
            ends = [min(end, length) for end in range(size, length + size, size)]
            assert cut_into_batches(length, size, 7).tolist() == [7 + end for end in ends]


# Parts for a search.


@pytest.mark.parametrize("order", ["natural", 1993])
def test_the_first_tasks_with_a_share_held_out(order: str | int) -> None:
    """Nothing of later tasks and no test image is in it; what is held out is not trained on; the classes keep their numbers."""
    stream = split(EVEN, 3, tasks=3, order=order, batch=4, first=2, validation=0.25)
    classes = class_order(6, order)[:4]
    check_split(stream, 2, 4, 1, [classes[:2].tolist(), classes[2:].tolist()])
    data, allowed = stream.data, EVEN.train_x[torch.from_numpy(np.isin(EVEN.train_y, classes))]
    pixels = {image.numpy().tobytes() for image in allowed}
    train, held = ([image.numpy().tobytes() for image in part] for part in (data.train_x, data.test_x))
    assert {*train, *held} == pixels
    assert len(train) + len(held) == len(pixels) == 48
    assert np.bincount(data.test_y, minlength=6)[classes].tolist() == [3] * 4
    assert data.classes == 6
    assert (data.mean, data.std) == channel_statistics(data.train_x.numpy())
    assert stream.hash == split(EVEN, 3, tasks=3, order=order, batch=4, first=2, validation=0.25).hash
    other = split(EVEN, 4, tasks=3, order=order, batch=4, first=2, validation=0.25)
    assert {image.numpy().tobytes() for image in other.data.test_x} != set(held), "another seed holds out others"


def test_the_first_tasks_and_a_share_held_out_are_two_options() -> None:
    first, held = split(EVEN, 0, tasks=3, first=2), split(EVEN, 0, tasks=3, validation=0.25)
    check_split(first, 2, 10, 1, [[0, 1], [2, 3]])
    check_split(held, 3, 10, 1, [[0, 1], [2, 3], [4, 5]])
    assert (len(first.data.test_y), len(held.data.test_y)) == (8, 18)
    np.testing.assert_array_equal(first.data.test_x, EVEN.test_x[:8])
    assert split(EVEN, 0, tasks=3, validation=0.25, per_class=5).ends[-1] == 30
    assert shuffled(split(EVEN, 0, tasks=3, first=2), 0).marks.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"first": 4}, "there are no first 4 of 3 tasks; choose between 1 and 3"),
        ({"first": 0}, "first must be at least 1"),
        ({"validation": 0.0}, "validation must be above 0 and below 1"),
        ({"validation": 1}, "validation must be above 0 and below 1"),
    ],
)
def test_a_part_that_cannot_be(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        split(EVEN, 0, tasks=3, **options)
    with pytest.raises(UserError, match="too few images"):
        split(dataset([1, 1]), 0, tasks=2, validation=0.2)


# Without marks.


def test_without_marks_only_the_tasks_are_not_told() -> None:
    told, untold = split(EVEN, 0, tasks=3, batch=4), split(EVEN, 0, tasks=3, batch=4, marked=False)
    check_stream(untold)
    assert told.has_tasks
    assert not untold.has_tasks
    assert untold.tasks == told.tasks == 3
    assert untold.marks.tolist() == told.marks.tolist()
    assert untold.test_task.tolist() == told.test_task.tolist()
    for step in range(len(told)):
        one, two = told.batch(step), untold.batch(step)
        assert torch.equal(one.x, two.x)
        assert (one.labels.tolist(), one.sources.tolist()) == (two.labels.tolist(), two.sources.tolist())
        assert (two.task, two.last_of_task) == (NO_TASK, False)
    assert told.hash != untold.hash
    with pytest.raises(UserError, match="marked must be "):
        split(EVEN, 0, tasks=3, marked=1)  # type: ignore[arg-type]


# The hash.


def test_the_hash_says_what_is_learned_in_which_order() -> None:
    """It changes with the seed, the class order, the batches, the epochs, the tasks and any byte or label of the data."""
    touched_x, touched_y, touched_test = EVEN.train_x.clone(), EVEN.train_y.copy(), EVEN.test_x.clone()
    touched_x[5, 1, 1, 1] ^= 1
    touched_y[[0, np.flatnonzero(touched_y != touched_y[0])[0]]] = touched_y[[np.flatnonzero(touched_y != touched_y[0])[0], 0]]
    touched_test[0, 0, 0, 0] ^= 1
    different = [
        split(EVEN, 0, tasks=3),
        split(EVEN, 1, tasks=3),
        split(EVEN, 0, tasks=2),
        split(EVEN, 0, tasks=3, order=5),
        split(EVEN, 0, tasks=3, batch=9),
        split(EVEN, 0, tasks=3, epochs=2),
        split(dataclasses.replace(EVEN, train_x=touched_x), 0, tasks=3),
        split(dataclasses.replace(EVEN, train_y=touched_y), 0, tasks=3),
        split(dataclasses.replace(EVEN, test_x=touched_test), 0, tasks=3),
        split(EVEN, 0, tasks=3).cut(4),
        dataclasses.replace(split(EVEN, 0, tasks=3), test_task=split(EVEN, 0, tasks=3).test_task[::-1].copy()),
        shuffled(split(EVEN, 0, tasks=3), 0),
    ]
    assert len({stream.hash for stream in different}) == len(different)


def test_the_test_images_are_those_of_whole_tasks() -> None:
    """A task of which one class was met is tested on all of its classes."""
    stream = split(EVEN, 0, tasks=3)
    images, labels, tasks = stream.test_images({0})
    rows = np.flatnonzero(stream.test_task == stream.test_task[stream.data.test_y == 0][0])
    assert len(set(labels.tolist())) == 2
    np.testing.assert_array_equal(labels, stream.data.test_y[rows])
    np.testing.assert_array_equal(tasks, stream.test_task[rows])
    assert torch.equal(images, stream.data.test_x[torch.from_numpy(rows)])


def test_the_hash_changes_with_nothing_else() -> None:
    copied = dataset([12] * 6)
    assert copied.train_x.data_ptr() != EVEN.train_x.data_ptr()
    renamed = dataclasses.replace(copied, name="other", class_names=tuple("abcdef"))
    assert split(EVEN, 0, tasks=3).hash == split(copied, 0, tasks=3).hash == split(renamed, 0, tasks=3).hash
    assert split(EVEN, 0, tasks=3).hash == split(EVEN, 0, tasks=3, order="natural", batch=10, epochs=1).hash
    moved = split(EVEN, 0, tasks=3).to(torch.device("cpu"))
    assert moved.hash == split(EVEN, 0, tasks=3).hash
    assert split(EVEN, 0, tasks=3).cut(10**6).hash == split(EVEN, 0, tasks=3).hash


# Cut.


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 12])
def test_cut_keeps_the_first_steps(steps: int) -> None:
    """The same batches, marks before the cut, and a mark at the new end."""
    whole = split(EVEN, 0, tasks=3)  # 24 images a task: batches of 10, 10, 4
    part = whole.cut(steps)
    assert len(part) == min(steps, 9)
    for step in range(len(part)):
        for name in ("x", "labels", "sources"):
            np.testing.assert_array_equal(getattr(part.batch(step), name), getattr(whole.batch(step), name))
        assert part.batch(step).task == whole.batch(step).task
    assert part.marks.tolist() == sorted({mark for mark in (2, 5, 8) if mark < steps} | {len(part) - 1})
    assert part.ends_task(len(part) - 1)
    assert len(part.order) == sum(len(whole.batch(step).labels) for step in range(len(part)))


# Random order without tasks.


def test_one_shuffled_pass() -> None:
    """shuffled(extra=0): every image once, classes mixed, batches of the stream's size, no tasks."""
    whole = split(EVEN, 0, tasks=3)
    stream = shuffled(whole, 0)
    sizes = [len(part.labels) for part in batches(stream)]
    assert sizes == [10] * 7 + [2]
    assert sorted(stream.order.tolist()) == list(range(72))
    assert not stream.has_tasks
    assert all(part.task == NO_TASK and part.fresh for part in batches(stream))
    assert not any(stream.ends_task(step) for step in range(len(stream)))
    assert all(len(set(part.labels.tolist())) > 2 for part in batches(stream)[:-1])
    np.testing.assert_array_equal(stream.order, shuffled(split(EVEN, 0, tasks=6), 0).order)
    assert not np.array_equal(stream.order, shuffled(split(EVEN, 1, tasks=3), 0).order)


def test_evaluation_marks_stay_at_equal_distances() -> None:
    assert shuffled(split(EVEN, 0, tasks=3), 0).marks.tolist() == [2, 5, 7]  # ceil(8/3), ceil(16/3), 8
    assert shuffled(split(EVEN, 0, tasks=2), 0).marks.tolist() == [3, 7]
    assert offline(split(EVEN, 0, tasks=3), 5, 24).marks.tolist() == [4, 9, 14]


@pytest.mark.parametrize("extra", [1, 7, 64])
def test_the_second_batch_is_an_independent_endless_pass(extra: int) -> None:
    """Each step's own images are the single pass; behind them come `extra` images of other passes, each of which is complete."""
    plain, stream = (shuffled(split(EVEN, 0, tasks=3), n) for n in (0, extra))
    assert len(stream) == len(plain)
    own, second = [], []
    for step in range(len(stream)):
        images = stream.order[stream.batch(step).sources]
        b = len(plain.batch(step).labels)
        assert len(images) == b + extra
        own += images[:b].tolist()
        second += images[b:].tolist()
    assert own == plain.order.tolist()
    for start in range(0, len(second), 72):
        one = second[start : start + 72]
        assert len(set(one)) == len(one)
        assert one != own[: len(one)]
    if len(second) > 144:
        assert second[:72] != second[72:144]


def test_passes_do_not_repeat_each_other() -> None:
    images = np.array([3, 5, 8, 13])
    order = endless(images, 402, seed=0)
    assert len(order) == 402
    passes = [tuple(order[i : i + 4].tolist()) for i in range(0, 400, 4)]
    assert all(sorted(one) == [3, 5, 8, 13] for one in passes)
    assert len(set(passes)) >= 20  # of the 24 orders of four images, 0.3 are missing from a hundred passes on average
    assert len(endless(images, 0, seed=0)) == 0


def test_offline_is_whole_epochs() -> None:
    stream = offline(split(UNEVEN, 0, tasks=3), 3, 20)
    sizes = [len(part.labels) for part in batches(stream)]
    assert sizes == [20, 20, 20, 11] * 3
    epochs = stream.order.reshape(3, 71)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(71))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not stream.has_tasks


def test_iid_order_uses_the_stream_images_once_even_with_epochs() -> None:
    assert sorted(shuffled(split(EVEN, 0, tasks=3, epochs=4), 0).order.tolist()) == list(range(72))
    part = split(EVEN, 0, tasks=3).cut(3)
    assert sorted(shuffled(part, 0).order.tolist()) == sorted(part.order.tolist())


def test_iid_batches_have_the_stream_size_when_the_first_task_is_small() -> None:
    stream = shuffled(split(UNEVEN, 0, tasks=7, batch=10), 0)  # the first class has one image
    assert [len(part.labels) for part in batches(stream)] == [10] * 7 + [1]


# Mistakes.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": 0}, "cannot make 0 tasks"),
        ({"tasks": 7}, "cannot make 7 tasks"),
        ({"tasks": -1}, "cannot make -1 tasks"),
        ({"tasks": 2, "batch": 0}, "at least 1"),
        ({"tasks": 2, "epochs": 0}, "at least 1"),
        ({"tasks": 2, "order": "random"}, "'natural' or the seed"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        split(EVEN, 0, **options)


def test_a_task_without_images_is_refused() -> None:
    with pytest.raises(UserError, match="task 1 has no training images"):
        split(dataset([5, 5, 0, 0, 5, 5]), 0, tasks=3)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("spilt-digits", "did you mean"),
        ("split", "unknown stream"),
        ("split-digits(task=5)", "did you mean 'tasks'"),
        ("split-digits(tasks=11)", "cannot make 11 tasks"),
        ("split-digit", "digits"),
        ("split-digits(tasks=", "cannot read"),
    ],
)
def test_wrong_expressions_are_refused_in_a_sentence(expression: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        streams.build(expression, 0)


@pytest.mark.parametrize("options", ["tasks='5'", "tasks=2.5", "batch=2.5", "epochs='x'", "seed=3", "data=3"])
def test_options_of_a_wrong_type_are_refused_in_a_sentence(options: str) -> None:
    with pytest.raises(UserError):
        streams.build(f"split-digits({options})", 0)


def test_a_stream_by_name() -> None:
    """Digits in five tasks of two; `seq` is another name of `split`; case and hyphens do not matter."""
    stream = streams.build("split-digits(batch=50)", 0)
    assert stream.tasks == stream.data.tasks == 5
    for step in range(len(stream)):
        part = stream.batch(step)
        assert set((part.labels // 2).tolist()) == {part.task}
    assert streams.build("SEQ_Digits(batch=50)", 0).hash == stream.hash


def test_some_images_of_each_class_are_chosen_by_the_seed() -> None:
    one, again, other = (split(UNEVEN, seed, tasks=3, batch=4, per_class=5) for seed in (0, 0, 1))
    counts = np.bincount(UNEVEN.train_y[one.order], minlength=7)
    assert counts.tolist() == [min(5, n) for n in (1, 9, 30, 4, 17, 2, 8)]
    assert len(set(one.order.tolist())) == len(one.order)
    assert one.order.tolist() == again.order.tolist()
    assert set(one.order.tolist()) != set(other.order.tolist())
    assert split(UNEVEN, 0, tasks=3, per_class=30).order.tolist() == split(UNEVEN, 0, tasks=3).order.tolist()
    with pytest.raises(UserError, match="per_class must be at least 1 or None, not 0"):
        split(UNEVEN, 0, per_class=0)
