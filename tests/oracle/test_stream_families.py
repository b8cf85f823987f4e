"""Families of streams: each against its law, its worked numbers and a literal loop; laws that all of them obey."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gracecl
from gracecl import registry, rng, streams
from gracecl.core import NO_TASK
from gracecl.data import Data, from_arrays
from gracecl.data.dataset import channel_statistics
from gracecl.data.locations import placed
from gracecl.errors import UserError
from gracecl.registry.spec import Call
from gracecl.streams import Family, Stream
from gracecl.streams.gaussian import arrival_times, gaussian
from gracecl.streams.gradual import blended, fading_times, gradual, linear_shares, sigmoid_shares
from gracecl.streams.i_blurry import i_blurry
from gracecl.streams.iid import iid, shuffled
from gracecl.streams.longtail import tail_counts
from gracecl.streams.noisy import wrong_labels
from gracecl.streams.parts import deal, draws, in_one_order, reaching, smallest
from gracecl.streams.picture import classes_over_time
from gracecl.streams.repeat import first_experiences, repeat, sampled_table, slot_table
from gracecl.streams.si_blurry import cut, exchanged, si_blurry
from gracecl.streams.split import class_order, split
from gracecl.testing import check_stream


def dataset(per_class: list[int], tasks: int = 1, test_per_class: int = 2, seed: int = 0) -> Data:
    """Noise images of 3 × 3, classes mixed."""
    generator = np.random.default_rng(seed)
    y = generator.permutation(np.repeat(np.arange(len(per_class)), per_class))
    test_y = np.repeat(np.arange(len(per_class)), test_per_class)
    x, test_x = (generator.integers(0, 256, (len(labels), 1, 3, 3), dtype=np.uint8) for labels in (y, test_y))
    return from_arrays(torch.from_numpy(x), y, torch.from_numpy(test_x), test_y, tasks=tasks)


TEN = dataset([40] * 10, tasks=5)
LARGE = dataset([1000] * 10, tasks=5)

EVERY: dict[str, str] = {
    "split": "split(tasks=5)",
    "iid": "iid(tasks=5)",
    "i-blurry": "i-blurry(tasks=5)",
    "i-blurry, marked": "i-blurry(tasks=5, marked=True, order=3)",
    "si-blurry": "si-blurry(tasks=5)",
    "gaussian": "gaussian(tasks=5)",
    "gaussian, periods": "gaussian(tasks=5, periods=3, order=7)",
    "gradual": "gradual(tasks=5)",
    "gradual, dropping": "gradual(tasks=5, keep=False, width=1, marked=True)",
    "gradual, linear": "gradual(shape='linear', tasks=5)",
    "repeat": "repeat(tasks=5)",
    "repeat, sampled": "repeat(draw='sampled', tasks=8, first=0.4, again=0.3, images=30)",
    "domain": "domain(tasks=3)",
    "domain, once": "domain(kind='permute', tasks=3, again=False)",
    "domain, corrupted": "domain(kind='corrupt', corruptions='fog,jpeg')",
    "timed": "timed(tasks=5)",
    "longtail": "longtail(ratio=10, tasks=5)",
    "longtail, shuffled": "longtail(gaussian(tasks=5), 10, tail='shuffled')",
    "noisy": "noisy(0.3, tasks=5)",
    "delayed": "delayed(3, tasks=5)",
    "delayed, drained": "delayed(3, drain=True, tasks=5)",
    "task": "task(tasks=5)",
    "all at once": "delayed(noisy(longtail(i-blurry(tasks=5), 5), 0.2), 2)",
}
REPEATS_IMAGES = {"repeat, sampled"}
"""whose images come more than once"""
SAME_FOR_ALL_SEEDS = {"timed"}


def made(family: str, seed: int = 0, data: Data = TEN) -> Stream:
    return gracecl.stream(data, family=family, seed=seed)


# Laws of all.


def test_every_registered_family_is_among_those_below() -> None:
    named = {
        word for expression in EVERY.values() for word in registry.normal(expression.replace("(", " ").replace(",", " ")).split()
    }
    assert set(registry.streams.written) <= named


@pytest.mark.parametrize("kind", EVERY)
def test_laws_of_every_family(kind: str) -> None:
    """Equal arguments, equal streams; another seed, another order; no state; a cut is a prefix; no image comes twice."""
    before = np.random.get_state()[1].copy(), torch.random.get_rng_state()  # type: ignore[index]
    stream, again, other = made(EVERY[kind]), made(EVERY[kind]), made(EVERY[kind], seed=1)
    check_stream(stream)
    assert stream.hash == again.hash
    assert (stream.hash == other.hash) == np.array_equal(stream.order, other.order) == (kind in SAME_FOR_ALL_SEEDS)
    assert np.all(np.diff(stream.ends, prepend=0) > 0)
    assert stream.marks[-1] == len(stream) - 1
    if kind not in REPEATS_IMAGES:
        assert len(np.unique(stream.order)) == len(stream.order)
    assert stream.fresh.all()
    backwards = [stream.batch(step) for step in reversed(range(len(stream)))][::-1]
    for step, (x, y) in enumerate(stream):
        assert torch.equal(x, backwards[step].x)
        assert np.array_equal(y, backwards[step].labels)
    part = stream.cut(4)
    assert [batch.labels.tolist() for batch in part] == [batch.labels.tolist() for batch in backwards[:4]]
    assert np.array_equal(before[0], np.random.get_state()[1])  # type: ignore[index]
    assert torch.equal(before[1], torch.random.get_rng_state())


def test_the_bits_of_split_streams_are_what_they_were() -> None:
    """Recorded before other families came."""
    known = {
        ("split-digits", 0): "4db081ba3648ec9a",
        ("split-digits(tasks=5, batch=7)", 3): "1469aec8ea53ca9f",
        ("split-digits(order=1993, epochs=2, per_class=20)", 1): "36a85eb18306da75",
        ("split-digits(first=2, validation=0.2, marked=False)", 2): "ed93472b96c320b5",
    }
    for (expression, seed), digest in known.items():
        assert streams.build(expression, seed).hash.startswith(digest)
    assert shuffled(streams.build("split-digits", 0), 3).hash.startswith("c1a731251945a852")


@pytest.mark.parametrize(
    ("family", "rule"),
    [("iid(tasks=5)", "all"), ("i-blurry(tasks=5)", "classes met"), ("gradual(tasks=5)", "tasks so far"), ("split", "tasks met")],
)
def test_each_rule_picks_its_test_images(family: str, rule: str) -> None:
    stream = made(family)
    assert stream.rule == rule
    for step in range(0, len(stream), 7):
        seen = {0, 6}
        expected = []
        for label, task in zip(stream.data.test_y.tolist(), stream.test_task.tolist(), strict=True):
            with_it = {t for y, t in zip(stream.data.test_y.tolist(), stream.test_task.tolist(), strict=True) if y in seen}
            now = sum(1 for mark in stream.marks if mark < step)
            expected.append(
                {"all": True, "classes met": label in seen, "tasks so far": task <= now, "tasks met": task in with_it}[rule]
            )
        _, labels, tasks = stream.test_images(seen, step)
        assert labels.tolist() == stream.data.test_y[expected].tolist()
        assert tasks.tolist() == stream.test_task[expected].tolist()
    assert stream.test_images(range(10))[1].tolist() == stream.data.test_y.tolist()
    usual = dataclasses.replace(stream, rule="tasks met")
    assert (stream.hash == usual.hash) == (rule == "tasks met")


# What they are made of.


def test_marks_reach_every_so_many_images() -> None:
    """The worked example: batch 8, 60 images, every 20."""
    ends = streams.cut_into_batches(60, 8)
    assert reaching(ends, np.array([20, 40, 60])).tolist() == [2, 4, 7]
    assert ends[[2, 4, 7]].tolist() == [24, 40, 60]
    stream = in_one_order(TEN, 0, np.arange(60), 8, tasks=3, test_task=np.zeros(20, np.int64), rule="all")
    assert stream.marks.tolist() == [2, 4, 7]
    odd = in_one_order(TEN, 0, np.arange(61), 2, tasks=3, test_task=np.zeros(20, np.int64), rule="all")
    assert [2 * (mark + 1) >= 61 * k / 3 > 2 * mark for k, mark in enumerate(odd.marks, start=1)] == [True] * 3


def test_the_smallest_draws_are_nested_and_belong_to_images() -> None:
    images = np.arange(0, 300, 3)
    few, many = smallest(images, 10, 4, "x"), smallest(images, 25, 4, "x")
    assert few.tolist() == many[:10].tolist()
    chance = {image: rng.uniform(rng.key(4, "x"), np.array([image]), 1)[0, 0] for image in images.tolist()}
    assert many.tolist() == sorted(chance, key=chance.__getitem__)[:25]
    assert draws(4, "x", images[:5]).tolist() == draws(4, "x", images)[:5].tolist()


@pytest.mark.parametrize(
    ("total", "room"), [(10, [5, 5, 5]), (10, [1, 20, 2]), (7, [0, 3, 9]), (99, [3, 4]), (0, [3, 4]), (5, [2, 0, 1])]
)
def test_dealing_is_even_as_far_as_there_is_room(total: int, room: list[int]) -> None:
    given = deal(total, np.array(room)).tolist()
    assert sum(given) == min(total, sum(room))
    assert all(0 <= one <= most for one, most in zip(given, room, strict=True))
    open_places = [one for one, most in zip(given, room, strict=True) if one < most]
    assert not open_places or max(given) - min(open_places) <= 1


# i-Blurry.


@pytest.mark.parametrize(("blur", "home", "elsewhere"), [(10, 920, 20), (30, 760, 60)])
def test_i_blurry_strays(blur: int, home: int, elsewhere: int) -> None:
    """The shipped lists' law, n (1 - m + m/T) at home and n m/T elsewhere: 4600 and 100, 3800 and 300 of 5000."""
    stream = i_blurry(LARGE, 2, tasks=5, blur=blur)
    ends = stream.ends[stream.marks]
    assert np.diff(ends, prepend=0).tolist() == [2000] * 5
    counts = np.stack([np.bincount(part, minlength=10) for part in np.split(LARGE.train_y[stream.order], ends[:-1])])
    for task in range(5):
        assert counts[:, task].tolist() == [1000 * (t == task) for t in range(5)], "a disjoint class is in one task only"
        others = np.delete(counts[:, 5 + task], task)
        assert abs(counts[task, 5 + task] - home) < 5 * math.sqrt(elsewhere)
        assert np.all(np.abs(others - elsewhere) < 5 * math.sqrt(elsewhere))
        assert counts[:, 5 + task].sum() == 1000
    assert stream.test_task.tolist() == [label % 5 for label in LARGE.test_y.tolist()]
    assert (stream.task_of_step == NO_TASK).all()
    assert i_blurry(LARGE, 2, tasks=5, marked=True).batch(200).task == 1


def test_i_blurry_by_a_literal_loop() -> None:
    """Classes to tasks, strays of each class to a pool, the pool to tasks, each task shuffled."""
    order = class_order(10, 5).tolist()
    stream = i_blurry(TEN, 3, tasks=4, disjoint=30, blur=25, order=5)
    task_of, tasks = {}, 4
    for kind in (order[:3], order[3:]):
        for task, members in enumerate(np.array_split(kind, tasks)):
            task_of |= dict.fromkeys(members.tolist(), task)
    pool: list[int] = []
    for label in order[3:]:
        own = np.flatnonzero(TEN.train_y == label)
        chance = rng.uniform(rng.key(3, "strays"), own, 1)[:, 0]
        pool += own[np.argsort(chance)[:10]].tolist()
    pool.sort()
    mixed = [pool[place] for place in rng.generator(3, "stray images").permutation(len(pool))]
    dealt = [part.tolist() for part in np.array_split(mixed, tasks)]
    expected: list[int] = []
    for task in range(tasks):
        home = [i for i, label in enumerate(TEN.train_y.tolist()) if task_of[label] == task and i not in pool]
        images = sorted(home + dealt[task])
        expected += [images[place] for place in rng.generator(3, "stream order", task, 0).permutation(len(images))]
    assert stream.order.tolist() == expected


@pytest.mark.parametrize("options", [{"disjoint": 100}, {"disjoint": 100, "blur": 50}, {"disjoint": 0, "blur": 0}])
def test_i_blurry_without_blur_is_split(options: dict[str, Any]) -> None:
    blurry, plain = i_blurry(TEN, 1, tasks=5, order=9, **options), split(TEN, 1, tasks=5, order=9, marked=False)
    for name in ("order", "ends", "task_of_step", "marks", "test_task"):
        assert getattr(blurry, name).tolist() == getattr(plain, name).tolist()


def test_everything_blurry_is_nearly_iid() -> None:
    stream = i_blurry(LARGE, 0, tasks=5, disjoint=0, blur=100)
    counts = [np.bincount(part, minlength=10) for part in np.split(LARGE.train_y[stream.order], stream.ends[stream.marks][:-1])]
    assert np.all(np.abs(np.stack(counts) - 200) < 5 * math.sqrt(200))


# Si-Blurry.


def test_si_blurry_cuts() -> None:
    """The worked example, and the law of the cuts: the first task has none with 1 - (49/50)^4 = 7.8 %, the last never."""

    class Drawn:
        def integers(self, low: int, high: int, number: int) -> np.ndarray:
            assert (low, high, number) == (0, 6, 4)
            return np.array([5, 1, 4, 1])

    assert [len(part) for part in cut(np.arange(6), 5, Drawn())] == [1, 0, 3, 1, 1]  # type: ignore[arg-type]
    sizes = np.array([[len(part) for part in cut(np.arange(50), 5, rng.generator("law", i))] for i in range(4000)])
    assert np.all(sizes.sum(axis=1) == 50)
    assert np.all(sizes[:, -1] > 0)
    exact, found = 0.07763184, np.mean(sizes[:, 0] == 0)
    assert abs(found - exact) < 5 * math.sqrt(exact * (1 - exact) / 4000)
    assert abs(np.mean((sizes == 0).any(axis=1)) - 0.1835) < 0.035
    assert abs(np.mean(sizes.max(axis=1) / 50) - 0.4555) < 0.02
    assert [len(part) for part in cut(np.arange(0), 3, rng.generator(0))] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_si_blurry_exchanges_and_keeps_sizes(seed: int) -> None:
    """Every image once; a task has as many blurry images after the exchange as before; as many as asked for may have moved."""
    images, task = np.arange(5, 305), np.sort(np.random.default_rng(seed).integers(0, 4, 300))
    after = exchanged(images, task, 5, 150, seed)
    assert np.bincount(after, minlength=5).tolist() == np.bincount(task, minlength=5).tolist()
    moved = np.sum(after != task)
    assert 30 < moved <= 150
    assert exchanged(images, task, 5, 0, seed).tolist() == task.tolist()
    stayed = exchanged(images, task, 5, 300, seed)
    assert np.bincount(stayed, minlength=5).tolist() == np.bincount(task, minlength=5).tolist()
    assert np.sum(stayed != task) > 190, "what is too much for one task leaves others: all 300 left, three of four to another"


@pytest.mark.parametrize("seed", range(6))
def test_si_blurry_by_a_literal_loop(seed: int) -> None:
    stream = si_blurry(TEN, seed, tasks=5, blur=20)
    task_of: dict[int, int] = {}
    for purpose, members in (("disjoint classes", range(5)), ("blurry classes", range(5, 10))):
        cuts = sorted(rng.generator(seed, purpose).integers(0, 5, 4).tolist())
        task_of |= {label: sum(place <= number for place in cuts) for number, label in enumerate(members)}
    there = sorted(set(task_of.values()))
    assert len(stream.marks) == len(there)
    assert sorted(stream.order.tolist()) == list(range(400))
    assert stream.test_task.tolist() == [there.index(task_of[label]) for label in TEN.test_y.tolist()]
    parts = np.split(stream.order, stream.ends[stream.marks][:-1])
    home = [[i for i, label in enumerate(TEN.train_y.tolist()) if task_of[label] == task] for task in there]
    for task, part in enumerate(parts):
        assert len(part) == len(home[task])
        disjoint = [i for i in home[task] if TEN.train_y[i] < 5]
        assert set(disjoint) <= set(part.tolist()), "disjoint images stay"
    strays = sum(image not in home[task] for task, part in enumerate(parts) for image in part.tolist())
    assert strays <= 40, "20 % of 200 blurry images at most"
    assert strays > 0 or len({task_of[label] for label in range(5, 10)}) == 1


# Gaussian.


def test_gaussian_arrivals_follow_the_bell() -> None:
    """Mean, deviation and shares at half time: 0.352, 0.352, 0.130, …; 3.55 classes in effect."""
    peaks = (np.arange(10) + 0.5) / 10
    times = arrival_times(np.repeat(peaks, 20_000), 0.1, 1, 0).reshape(10, -1)
    assert np.allclose(times.mean(axis=1), peaks, atol=0.004)
    assert np.allclose(times.std(axis=1), 0.1, atol=0.003)
    now = (np.abs(times - 0.5) < 0.01).sum(axis=1) / (np.abs(times - 0.5) < 0.01).sum()
    expected = [0.0000159837, 0.0008726829, 0.0175283044, 0.1295176243, 0.3520654047]
    assert np.allclose(now, expected + expected[::-1], atol=0.02)
    shares = np.exp(-((0.5 - peaks) ** 2) / 0.02)
    assert np.allclose(shares / shares.sum(), expected + expected[::-1], rtol=1e-8)
    assert 1 / np.sum((shares / shares.sum()) ** 2) > 3
    assert math.exp(-np.sum(shares / shares.sum() * np.log(shares / shares.sum()))) > 3.5


def test_gaussian_by_a_literal_loop_and_in_its_limits() -> None:
    from statistics import NormalDist

    stream, ordered = gaussian(TEN, 5, sigma=0.2, periods=2, order=3), class_order(10, 3).tolist()
    times = []
    for image, label in enumerate(TEN.train_y.tolist()):
        bell, period = rng.uniform(rng.key(5, "arrival"), np.array([image]), 2)[0]
        times.append(int(2 * period) + (ordered.index(label) + 0.5) / 10 + 0.2 * NormalDist().inv_cdf(bell))
    assert stream.order.tolist() == sorted(range(400), key=times.__getitem__)
    apart = gaussian(TEN, 0, sigma=0)
    assert TEN.train_y[apart.order].tolist() == [label for label in range(10) for _ in range(40)]
    assert apart.test_task.tolist() == [label // 2 for label in TEN.test_y.tolist()]
    mixed = TEN.train_y[gaussian(TEN, 0, sigma=1e6).order]
    assert np.all(np.abs(np.bincount(mixed[:200], minlength=10) - 20) < 5 * math.sqrt(10))


# Gradual.


def test_sigmoid_shares() -> None:
    """The worked example: 100 and 100 images, width 0.5; 12 % to 88 % spans width times the smaller task."""
    shares = sigmoid_shares(100, 100, 0.5)
    known = {0: 0.0003353501305, 50: 0.01798620996, 75: 0.119202922, 90: 0.3100255189, 100: 0.5, 125: 0.880797078, 150: 0.98201379}
    for place, share in known.items():
        assert shares[place] == pytest.approx(share, rel=1e-9)
    assert sigmoid_shares(300, 100, 0.5)[[275, 325]].tolist() == pytest.approx([0.119202922, 0.880797078])
    assert sigmoid_shares(3, 2, 0).tolist() == [0, 0, 0, 1, 1]


def test_blending_by_the_worked_example() -> None:
    left, right, mask = np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7]), np.array([0, 1, 0, 1, 1, 1, 1, 0], bool)
    one, two = blended(left, right, mask, keep=False)
    assert (one.tolist(), two.tolist()) == ([0, 4, 1], [5, 6, 7])
    one, two = blended(left, right, mask, keep=True)
    assert (one.tolist(), two.tolist()) == ([0, 4, 1, 5], [6, 7, 2, 3])
    one, two = blended(left, right[:2], np.zeros(6, bool), keep=False)
    assert (one.tolist(), two.tolist()) == ([0, 1, 2, 3], [4, 5]), "an exhausted left task yields"


def test_gradual_keeps_inner_orders_and_by_width_nothing_or_much_is_mixed() -> None:
    plain = split(LARGE, 4, tasks=5, marked=False)
    assert gradual(LARGE, 4, tasks=5, width=0).order.tolist() == plain.order.tolist()
    stream = gradual(LARGE, 4, tasks=5, width=0.3)
    assert sorted(stream.order.tolist()) == list(range(10_000))
    first = [image for image in stream.order.tolist() if LARGE.train_y[image] < 2]
    assert first == plain.order[:2000].tolist(), "tasks keep their inner order"
    from_second = LARGE.train_y[stream.order[:2000]] >= 2
    window = sigmoid_shares(2000, 2000, 0.3)[:2000]
    assert abs(from_second.sum() - window.sum()) < 5 * math.sqrt(window.sum())
    assert not from_second[:1000].any()
    dropped = [10_000 - len(gradual(LARGE, seed, tasks=2, width=1, keep=False).order) for seed in range(20)]
    assert 0 < np.mean(dropped) < 80
    assert gradual(LARGE, 4, tasks=5, width=0.3, marked=True).has_tasks


def test_gradual_by_a_literal_loop() -> None:
    stream = gradual(TEN, 6, tasks=3, width=0.8)
    tasks = split(TEN, 6, tasks=3)
    parts = [part.tolist() for part in np.split(tasks.order, tasks.ends[tasks.marks][:-1])]
    for boundary in range(2):
        left, right = list(parts[boundary]), list(parts[boundary + 1])
        n, m, out = len(left), len(right), []
        for t in range(n + m):
            p = 1 / (1 + math.exp(-4 * (t - n) / (0.8 * min(n, m))))
            u = rng.uniform(rng.key(6, f"boundary {boundary}"), np.array([t]), 1)[0, 0]
            if u < p or not left:
                if not right:
                    break
                out.append(right.pop(0))
            else:
                out.append(left.pop(0))
        out += left
        middle = n * len(out) // (n + m)
        parts[boundary], parts[boundary + 1] = out[:middle], out[middle:]
    assert stream.order.tolist() == [image for part in parts for image in part]
    assert stream.ends[stream.marks].tolist() == np.cumsum([len(part) for part in parts]).tolist()


def test_linear_shares() -> None:
    """The worked example: 3 tasks, 36 steps, beta 4."""
    shares = linear_shares(36, 3, 4)
    assert np.allclose(shares.sum(axis=1), 1)
    assert shares[:, 0].tolist() == pytest.approx([1] * 10 + [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6] + [0] * 21)
    assert shares[:, 2].tolist() == pytest.approx([0] * 22 + [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6] + [1] * 9)
    assert shares.sum(axis=0).tolist() == pytest.approx([12.5, 12, 11.5])
    assert np.mean((shares > 0).sum(axis=1) > 1) == pytest.approx(0.2777777778)
    assert (linear_shares(60, 5, 2) > 0).sum(axis=1).max() == 2
    wide = linear_shares(30, 2, 1.5)
    assert wide[[2, 7, 15, 27], 0].tolist() == pytest.approx([1, 0.9, 0.5, 0]), "the first task does not rise, the last not fall"
    three = linear_shares(45, 3, 1.2)
    unit = 45 / 3.6
    for step in range(45):
        weights = []
        for task in range(3):
            rise = 1 if task == 0 else (step - (1.2 * task - 1) * unit) / (2 * unit)
            fall = 1 if task == 2 else ((1.2 * task + 2.2) * unit - step) / (2 * unit)
            weights.append(min(max(min(rise, fall), 0), 1))
        assert three[step].tolist() == pytest.approx([weight / sum(weights) for weight in weights])


def test_linear_times_by_a_literal_loop() -> None:
    stream = gradual(TEN, 2, shape="linear", tasks=2, beta=3)
    shares, task = linear_shares(40, 2, 3), (TEN.train_y >= 5).astype(int)
    times = []
    for image in range(400):
        u = rng.uniform(rng.key(2, "fading"), np.array([image]), 1)[0, 0] * shares[:, task[image]].sum()
        step = 0
        while u >= shares[step, task[image]]:
            u -= shares[step, task[image]]
            step += 1
        times.append(step + u / shares[step, task[image]])
    assert np.allclose(fading_times(task, shares, 2), times)
    assert stream.order.tolist() == sorted(range(400), key=times.__getitem__)
    early = task[stream.order[:100]]
    assert not early.any(), "pure before the mixing begins"
    with pytest.raises(UserError, match="no ends to mark"):
        gradual(TEN, 0, shape="linear", marked=True)


# Repetition.


@pytest.mark.parametrize(("slots", "each", "size", "lost"), [(10, 1, 500, 0), (30, 3, 166, 2), (50, 5, 100, 0), (80, 8, 62, 4)])
def test_slots_of_cifar100(slots: int, each: int, size: int, lost: int) -> None:
    """The worked example: 10 experiences of K slots, 100 classes of 500 images."""
    table = slot_table(10, slots, 100, 0)
    assert table.sum(axis=1).tolist() == [slots] * 10
    assert table.sum(axis=0).tolist() == [each] * 100
    assert 500 // each == size
    assert 500 - size * each == lost


@pytest.mark.parametrize("seed", range(4))
def test_experiences_have_different_classes_and_slots_of_equal_size(seed: int) -> None:
    stream = repeat(TEN, seed, tasks=5, slots=7)
    table = slot_table(5, 7, 10, seed)
    assert sorted(table.sum(axis=0).tolist()) == [3] * 5 + [4] * 5
    assert table[1:].max() == 1, "repeats in the first experience alone, which is filled last"
    counts = [np.bincount(TEN.train_y[part], minlength=10) for part in np.split(stream.order, stream.ends[stream.marks][:-1])]
    assert np.array_equal(np.stack(counts), table * (40 // table.sum(axis=0)))
    assert stream.has_tasks
    first = [next(number for number in range(5) if table[number, label]) for label in range(10)]
    assert stream.test_task.tolist() == [first[label] for label in TEN.test_y.tolist()]
    incremental = repeat(TEN, seed, tasks=5, slots=2)
    assert np.all(slot_table(5, 2, 10, seed).sum(axis=0) == 1)
    assert sorted(incremental.order.tolist()) == list(range(400)), "as many slots as classes: every image, each class once"


def test_sampled_experiences() -> None:
    """The worked numbers: 500 experiences, p = 0.01, comes back with 0.2."""
    pmf = first_experiences(500, 0.01)
    assert pmf[[0, -1]].tolist() == pytest.approx([0.0100661394, 6.680747295e-05], rel=1e-9)
    assert pmf @ np.arange(500) == pytest.approx(95.69303009, rel=1e-8)
    assert 100 * pmf[:101].sum() == pytest.approx(63.81606827, rel=0.02)
    assert (1 - pmf[0]) ** 100 == pytest.approx(0.3635950408, rel=1e-8)
    table = sampled_table(400, 200, 0.05, 0.2, 1)
    assert table.any(axis=1).all()
    assert table.any(axis=0).all()
    begin = table.argmax(axis=0)
    after = [table[begin[label] + 1 :, label].mean() for label in range(200) if begin[label] < 200]
    assert np.mean(after) == pytest.approx(0.2, abs=0.01)
    assert np.mean(begin) == pytest.approx(first_experiences(400, 0.05) @ np.arange(400), abs=4)


def test_sampled_experiences_by_a_literal_loop() -> None:
    generator = rng.generator(5, "classes of experiences")
    begin = generator.choice(40, 3, p=first_experiences(40, 0.1))
    again = generator.random((40, 3)) < 0.7
    rows = [[int(e == begin[c] or (e > begin[c] and again[e, c])) for c in range(3)] for e in range(40)]
    assert [0, 0, 0] in rows
    assert sampled_table(40, 3, 0.1, 0.7, 5).tolist() == [row for row in rows if any(row)]


def test_sampled_images_are_shared_evenly_and_drawn_anew() -> None:
    stream = repeat(TEN, 3, draw="sampled", tasks=30, first=0.3, again=0.5, images=35)
    parts = np.split(stream.order, stream.ends[stream.marks][:-1])
    for part in parts:
        counts = np.bincount(TEN.train_y[part], minlength=10)
        assert len(part) == len(set(part.tolist())) == 35
        assert np.ptp(counts[counts > 0]) <= 1
    of_class = [frozenset(part[TEN.train_y[part] == 0].tolist()) for part in parts]
    assert any(not one <= two and not two <= one for one in of_class for two in of_class), "another draw each time"
    small = repeat(dataset([4, 40, 40]), 1, draw="sampled", tasks=4, first=0.9, again=1.0, images=50)
    sizes = np.diff(small.ends[small.marks], prepend=0)
    assert sizes[-1] == 50, "a class with few images leaves the rest to others"
    with pytest.raises(UserError, match="class 0 has 2 images for 3 slots; use fewer"):
        repeat(dataset([2, 40]), 0, tasks=3, slots=2)


# Long tail.


@pytest.mark.parametrize(
    ("classes", "largest", "ratio", "head", "tail", "total"),
    [
        (100, 500, 100, [500, 477, 455, 434, 415], [6, 5, 5, 5, 5], 10847),
        (10, 5000, 100, [5000, 2997, 1796, 1077, 645], [387, 232, 139, 83, 50], 12406),
        (100, 500, 50, [500, 480, 462, 444, 426], [11, 11, 10, 10, 10], 12608),
        (100, 500, 10, [500, 488, 477, 466, 455], [54, 53, 52, 51, 50], 19573),
    ],
)
def test_counts_of_the_tail(classes: int, largest: int, ratio: float, head: list[int], tail: list[int], total: int) -> None:
    counts = tail_counts(largest, classes, ratio)
    assert (counts[:5].tolist(), counts[-5:].tolist(), counts.sum()) == (head, tail, total)
    if classes == 100 and ratio == 100:
        assert counts.reshape(10, 10).sum(axis=1).tolist() == [4088, 2565, 1609, 1008, 631, 394, 247, 152, 95, 58]
    assert tail_counts(largest, classes, 1).tolist() == [largest] * classes
    assert tail_counts(100, 5, 10, "step").tolist() == [100, 100, 100, 10, 10]
    assert tail_counts(3, 4, 100).tolist() == [3, 1, 1, 1]


def test_longtail_keeps_drawn_images_of_each_class() -> None:
    stream = made("longtail(split(tasks=5, order=9), 8)", seed=3)
    counts, ordered = np.bincount(stream.data.train_y, minlength=10), class_order(10, 9)
    assert counts[ordered].tolist() == tail_counts(40, 10, 8).tolist(), "the first classes of the stream are the large ones"
    kept: list[int] = []
    for label in range(10):
        own = np.flatnonzero(TEN.train_y == label)
        chance = rng.uniform(rng.key(3, "long tail images"), own, 1)[:, 0]
        kept += own[np.argsort(chance)][: counts[label]].tolist()
    kept.sort()
    assert torch.equal(stream.data.train_x, TEN.train_x[torch.tensor(kept)])
    assert stream.data.train_y.tolist() == TEN.train_y[kept].tolist()
    assert (stream.data.mean, stream.data.std) == channel_statistics(stream.data.train_x.numpy())
    assert torch.equal(stream.data.test_x, TEN.test_x)
    other = made("longtail(gaussian(order=9), 8)", seed=3)
    assert torch.equal(other.data.train_x, stream.data.train_x), "the same images under every family"
    assert made("longtail(split, 1)").hash == made("split").hash


def test_a_shuffled_tail_deals_the_same_sizes() -> None:
    counts = [np.bincount(made("longtail(split, 8, tail='shuffled')", seed=seed).data.train_y, minlength=10) for seed in range(3)]
    for one in counts:
        assert sorted(one.tolist(), reverse=True) == tail_counts(40, 10, 8).tolist()
        assert one.tolist() != sorted(one.tolist(), reverse=True)
    assert counts[0].tolist() != counts[1].tolist()


# Noise.


def test_symmetric_noise_has_its_rate_and_spreads_evenly() -> None:
    stream = made("noisy(split(tasks=5), 0.4, across=True)", seed=2, data=LARGE)
    clean, labels = LARGE.train_y, stream.data.train_y
    assert stream.clean_y is not None
    assert stream.clean_y.tolist() == clean.tolist()
    for label in range(10):
        turned = np.bincount(labels[clean == label], minlength=10)
        assert turned[label] == 600
        others = np.delete(turned, label)
        assert np.all(np.abs(others - 0.0444444444 * 1000) < 5 * math.sqrt(44))
    assert stream.order.tolist() == split(LARGE, 2, tasks=5).order.tolist(), "no image moves"
    assert stream.data.test_y.tolist() == LARGE.test_y.tolist()
    assert stream.hash != split(LARGE, 2, tasks=5).hash


def test_noise_stays_inside_tasks_and_is_nested() -> None:
    some, more = (made(f"noisy(split(tasks=2), {rate})", seed=2) for rate in (0.2, 0.5))
    clean = TEN.train_y
    for stream in (some, more):
        assert np.array_equal(stream.data.train_y // 5, clean // 5)
    wrong = some.data.train_y != clean
    assert wrong.sum() == 80
    assert np.array_equal(some.data.train_y[wrong], more.data.train_y[wrong])
    assert made("noisy(split, 0)").data.train_y.tolist() == clean.tolist()


def test_noise_by_a_literal_loop() -> None:
    possible = np.zeros((10, 10), bool)
    possible[:4, :4] = possible[4:, 4:] = True
    labels = wrong_labels(TEN.train_y, possible, 0.25, "symmetric", 7)
    pairs = wrong_labels(TEN.train_y, possible, 0.25, "pairs", 7)
    for label in range(10):
        own = np.flatnonzero(TEN.train_y == label).tolist()
        first = {i: rng.uniform(rng.key(7, "which labels are wrong"), np.array([i]), 1)[0, 0] for i in own}
        group = list(range(4)) if label < 4 else list(range(4, 10))
        others = [other for other in group if other != label]
        for place, image in enumerate(sorted(own, key=first.__getitem__)):
            if place < 10:
                pick = int(rng.uniform(rng.key(7, "wrong labels"), np.array([image]), 1)[0, 0] * len(others))
                assert labels[image] == others[pick]
                assert pairs[image] == group[(group.index(label) + 1) % len(group)]
            else:
                assert labels[image] == pairs[image] == label


# Delay.


def test_delay_by_the_worked_example() -> None:
    """Delay 2 of 6 steps: batches 0 to 3 are learned; the evaluation after step t sees what was learned up to t - 2."""
    data = dataset([12] * 2)
    plain = split(data, 0, tasks=2, batch=4)
    late, drained = (made(f"delayed(split(tasks=2, batch=4), 2, drain={drain})", data=data) for drain in (False, True))
    assert len(plain) == len(drained) == 6
    assert len(late) == 4
    assert plain.marks.tolist() == [2, 5]
    assert late.marks.tolist() == [0, 3]
    assert drained.marks.tolist() == [0, 5]
    for step in range(4):
        assert late.batch(step).labels.tolist() == plain.batch(step).labels.tolist()
    assert made("delayed(split(tasks=2, batch=4), 0)", data=data).hash == split(data, 0, tasks=2, batch=4).hash
    with pytest.raises(UserError, match="comes after 3 steps, before any label that is 3 steps late; use a smaller delay"):
        made("delayed(split(tasks=2, batch=4), 3)", data=data)


# Task-incremental.


def test_task_masks_the_same_run() -> None:
    """The same class-incremental numbers, and beside them masked ones, which are never lower."""
    options = {"memory": 20, "net": "mlp(width=16)", "augment": "none", "threads": 1}
    size = "size=8, tasks=5, per_class=20"
    plain = gracecl.run("er", stream=f"split-digits({size})", **options)
    both = gracecl.run("er", stream=f"task-digits({size})", **options)
    assert {name: both.metrics[name] for name in plain.metrics} == plain.metrics
    masked = both.under("linear_last_masked")
    lower = np.tril(np.ones((5, 5), bool))
    assert np.all(masked.accuracy[lower] >= both.accuracy[lower])
    assert masked.metrics["acc"] > both.metrics["acc"]
    with pytest.raises(UserError, match="tasks of i-blurry have no classes of their own"):
        made("task(i-blurry)")


# i.i.d.


def test_iid_is_one_permutation() -> None:
    stream = iid(TEN, 4, tasks=5, batch=7)
    assert stream.order.tolist() == rng.generator(4, "iid order").permutation(400).tolist()
    assert stream.order.tolist() == shuffled(split(TEN, 4, tasks=5), 0).order.tolist()
    assert not stream.has_tasks
    assert stream.test_task.tolist() == [label // 2 for label in TEN.test_y.tolist()]
    assert len(stream.marks) == 5


# Names.


def test_names_with_hyphens_and_compositions() -> None:
    nested = streams.build("noisy(longtail(i-blurry-digits(tasks=5, size=8), 10), 0.2)", 0)
    assert repr(nested).startswith("Stream(noisy(longtail(i-blurry)) of digits: no task marks, 10 classes")
    for other in (
        "noisy(longtail(i_blurry_digits(tasks=5, size=8), ratio=10), rate=0.2)",
        "Noisy(LongTail(I-Blurry-Digits(tasks=5), 10, size=8), 0.2)",
        "longtail(noisy(i-blurry-digits(tasks=5, size=8), 0.2), 10)",
    ):
        assert streams.build(other, 0).hash == nested.hash
    assert (
        streams.build("noisy-digits(0.2, tasks=2, size=8)", 0).hash
        == streams.build("noisy(split-digits(size=8), 0.2, tasks=2)", 0).hash
    )
    assert gracecl.stream(TEN, tasks=2).hash == gracecl.stream(TEN, family="split", tasks=2).hash == split(TEN, 0, tasks=2).hash


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("i-blury-digits", "unknown stream 'i_blury_digits'; did you mean 'i-blurry-digits'"),
        ("i-blurry", "data set is missing, as in i-blurry-cifar100"),
        ("noisy(0.2)", "noisy is around another stream: write noisy"),
        ("noisy(5, 0.2)", "noisy is around another stream"),
        ("noisy(split-digits(tasks=5), 0.2, tasks=2)", "'tasks' is given twice, inside and outside"),
        ("noisy-digits(rte=0.2)", "no option 'rte'"),
        ("noisy-digits(1.2)", "rate must be between 0 and 1"),
        ("longtail-digits(0.1)", "ratio must be at least 1"),
        ("gradual-digits(shape='cubic')", "shape must be one of sigmoid, linear"),
        ("i-blurry-digits(tasks=11)", "i-blurry: 10 classes cannot make 11 tasks"),
        ("gaussian-digits(sigma=-1)", "sigma must be at least 0"),
        ("noisy(split-digits(tasks=2), split-digits(), 0.2)", "rate must be a number"),
        ("iid-digits(batch=1000, tasks=5)", "makes 2 batches of 1000 images, too few"),
    ],
)
def test_wrong_expressions_are_refused_in_a_sentence(expression: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        streams.build(expression, 0)


def test_expressions_are_checked_without_data() -> None:
    streams.check("noisy(longtail(i-blurry-cifar100(tasks=5), 100), 0.2)")
    for wrong in ("noisy(longtail(i-blurry-cifar100(tsks=5), 100), 0.2)", "noisy-cifar1000", "noisy(split-cifar100, rate=2)"):
        with pytest.raises(UserError):
            streams.check(wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"family": "noisy(split(tasks=2), 0.1)", "tasks": 3}, "given twice"),
        ({"family": "noisy(tasks=2)", "tasks": 3}, "given twice, in family and as an option"),
        ({"family": "split-digits"}, "names the data set digits, and another one is given; write split"),
        ({"classes": "0-3"}, "classes is an option of named data sets"),
        ({"family": 3}, "family must be a word in quotes"),
    ],
)
def test_families_of_own_data(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        gracecl.stream(TEN, **options)
    with pytest.raises(UserError, match="says its family itself"):
        gracecl.stream("split-digits", family="noisy")


def test_paths_inside_compositions_are_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    whole = streams.from_anywhere("noisy(split-folder(path='pictures', size = 32), 0.2)")
    assert whole == f"noisy(split-folder(path='{tmp_path}/pictures', size=32), 0.2)"
    assert streams.from_anywhere(whole) == whole
    assert streams.from_anywhere("noisy( split-digits(), 0.2)") == "noisy( split-digits(), 0.2)"
    below_data = "noisy(split-folder(path='birds', size=32), 0.2)"
    assert streams.from_anywhere(below_data) == below_data, "it means the same on every machine"


def test_paths_lead_from_the_working_folder_or_else_from_that_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, data = tmp_path / "here", tmp_path / "data"
    (here / "both").mkdir(parents=True)
    for name in ("both", "below"):
        (data / name).mkdir(parents=True)
    monkeypatch.chdir(here)
    assert placed("both", data) == here / "both"
    assert placed("below", data) == data / "below"
    assert placed("nowhere", data) == here / "nowhere", "so that an error names the place that its reader has in mind"
    assert placed(data / "both", here) == data / "both"


def test_a_family_of_ones_own_is_wrapped_too() -> None:
    @registry.streams.register("backwards")
    def backwards(inner: Family, data: Data, seed: int) -> Stream:
        """Around a stream: the last batch first."""
        stream = inner(data, seed)
        return dataclasses.replace(stream, order=stream.order[::-1].copy())

    try:
        stream = made("backwards(noisy(split(tasks=2), 0.1))")
        assert stream.order.tolist() == split(TEN, 0, tasks=2).order[::-1].tolist()
        assert stream.family == "backwards(noisy(split))"
        assert Family(Call("split", (), {"tasks": 2})).options == {"tasks": 2}
    finally:
        registry.streams.loaded.pop("backwards")


# Pictures.


def test_the_picture_shows_shares_of_classes_over_time(tmp_path: Path) -> None:
    stream = split(TEN, 0, tasks=5)
    shares, totals = classes_over_time(stream, 10)
    assert totals.tolist() == [40] * 10
    labels = TEN.train_y[stream.order].tolist()
    for column in range(10):
        piece = labels[column * 40 : (column + 1) * 40]
        assert shares[:, column].tolist() == [piece.count(label) / 40 for label in range(10)]
    figure = stream.plot(tmp_path / "one.svg")
    stream.plot(tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    over_time, per_class = figure.axes
    assert [line.get_xdata()[0] for line in over_time.lines] == [80, 160, 240, 320]
    assert [bar.get_width() for bar in per_class.patches] == [40] * 10
    [cells] = over_time.images
    largest = cells.get_array().max()
    assert [float(cells.norm(share * largest)) for share in (0, 1 / 4, 1)] == [0, 0.5, 1], "a quarter of the share is half as dark"
    with pytest.raises(UserError, match="ends in none of them"):
        stream.plot(tmp_path / "stream.jpg")


# The page.


def test_the_page_shows_every_family_and_option_and_its_programs_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    for family in registry.streams.written:
        row = rows[family.replace("_", "-")]
        parameters = list(inspect.signature(registry.streams.get(family)).parameters)
        shown = page if family == "si_blurry" else row  # which says "as i-blurry"
        for option in parameters[3 if parameters[0] == "inner" else 2 :]:
            assert f"`{option}" in shown or f"{option}=" in shown or option in ("batch", "marked"), f"{option} of {family}"
    monkeypatch.chdir(tmp_path)
    try:
        for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(program, {"__name__": __name__})
    finally:
        registry.streams.loaded.pop("backwards", None)
        registry.detectors.loaded.pop("surprise", None)
    for name in re.findall(r"\]\((streams/[^)]+)\)", page):
        assert (Path(__file__).parents[2] / "docs" / name).is_file()


# Runs.


@pytest.mark.parametrize(
    "family",
    ["i-blurry", *(pytest.param(name, marks=pytest.mark.slow) for name in ("iid", "si-blurry", "gaussian", "gradual", "noisy"))]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("longtail", "delayed", "repeat")],
)
def test_runs_on_every_family_have_an_accuracy(family: str) -> None:
    options = {"memory": 20, "net": "mlp(width=8)", "augment": "none", "threads": 1}
    extra = {"longtail": ", ratio=4", "delayed": ", delay=2"}.get(family, "")
    result = gracecl.run("er", stream=f"{family}-digits(size=8, classes='0-3', tasks=2, batch=50{extra})", **options)
    assert 0 <= result.metrics["acc"] <= 100
    assert math.isfinite(result.metrics["aia"])


# Inputs of other kinds.


def test_families_do_not_care_what_an_input_is() -> None:
    """Orders are over numbers of examples; only views of domains need images."""
    generator = np.random.default_rng(0)
    y, test_y = np.repeat(np.arange(4), 25), np.repeat(np.arange(4), 2)
    rows, test_rows = (generator.normal(size=(len(labels), 5)).astype(np.float32) for labels in (y, test_y))
    vectors = from_arrays(rows, y, test_rows, test_y, tasks=2)
    pairs = from_arrays({"a": rows, "b": rows}, y, {"a": test_rows, "b": test_rows}, test_y, tasks=2)
    for family in (
        "i-blurry(tasks=2)",
        "gaussian(tasks=2)",
        "noisy(longtail(gradual(tasks=2), 5), 0.2)",
        "repeat(tasks=3)",
        "timed",
    ):
        stream = made(family, data=vectors)
        check_stream(stream)
        assert tuple(stream.batch(0).x.shape[1:]) == (5,)
        assert made(family, data=pairs).order.tolist() == stream.order.tolist()
    for data in (vectors, pairs):
        with pytest.raises(UserError, match="holds no images of bytes, which rotations, permutations and corruptions need"):
            made("domain", data=data)
