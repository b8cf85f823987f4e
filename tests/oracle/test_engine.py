"""What the engine knows of the stream at each batch, and how it makes the batch of an update."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from gracecl.core import Plan, Selection, StreamBatch
from gracecl.images.augment import augmentation
from gracecl.testing import TOY_SHAPE, toy_engine


def batch(labels: list[int], task: int) -> StreamBatch:
    return StreamBatch(torch.zeros(len(labels), *TOY_SHAPE, dtype=torch.uint8), np.array(labels), task=task)


def test_classes_are_known_in_the_order_in_which_they_came() -> None:
    engine = toy_engine("sgd()")
    for labels, task, seen, current in (
        ([3, 1, 3], 0, (3, 1), (3, 1)),
        ([1, 0], 0, (3, 1, 0), (3, 1, 0)),
        ([5, 0], 1, (3, 1, 0, 5), (5, 0)),
        ([2], 1, (3, 1, 0, 5, 2), (5, 0, 2)),
    ):
        engine.learn(batch(labels, task))
        assert engine.progress.seen == seen
        assert engine.progress.current == current


def test_the_first_batch_of_a_task_is_marked_as_such() -> None:
    engine = toy_engine("sgd()")
    assert engine.meet(batch([0], 0)).progress.first_of_task
    engine.learn(batch([0], 0))
    assert not engine.meet(batch([0], 0)).progress.first_of_task
    assert engine.meet(batch([1], 1)).progress.first_of_task


def test_views_of_an_image_differ_and_do_not_depend_on_its_company() -> None:
    engine = toy_engine("scr()", memory=6)
    engine.augmentation = augmentation("tau")
    noise = torch.randint(0, 256, (4, *TOY_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    new = engine.meet(StreamBatch(noise, np.array([0, 1, 0, 1]), task=0))
    twice = (engine.augmentation, engine.augmentation)
    whole = engine.assemble(Plan({"all": Selection(np.arange(4), views=twice)}), new)
    first, second = whole.x.chunk(2)
    assert not torch.equal(first, second)
    part = engine.assemble(Plan({"all": Selection(np.array([2]), views=twice)}), new)
    assert torch.equal(part.x[0], first[2])
    assert torch.equal(part.x[1], second[2])


def test_an_image_looks_different_at_each_step_and_repeat() -> None:
    engine = toy_engine("er()", memory=6)
    engine.augmentation = augmentation("tau")
    noise = torch.randint(0, 256, (2, *TOY_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    new = engine.meet(StreamBatch(noise, np.array([0, 1]), task=0))
    later = dataclasses.replace(new, progress=dataclasses.replace(new.progress, step=1))
    plan = Plan({"all": Selection(np.arange(2))})
    looks = [engine.assemble(plan, at, repeat).x for at in (new, later) for repeat in (0, 1)]
    assert len({look.numpy().tobytes() for look in looks}) == 4
    assert torch.equal(engine.assemble(plan, later, 1).x, looks[-1])


def test_every_tenth_step_records_the_entropy_and_the_accuracy_of_each_layer() -> None:
    engine = toy_engine("er()", taps=4, net="mlp(width=12, depth=4)")
    images = torch.randint(0, 256, (20, *TOY_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = np.arange(20) % 3
    for step in range(11):
        new = engine.meet(StreamBatch(images, labels, task=0))
        batch = engine.assemble(Plan({"all": Selection(np.arange(20))}), new)
        logits = engine.net(batch.x).logits.detach()
        table = engine.learn(StreamBatch(images, labels, task=0)).table  # type: ignore[union-attr]
        assert ("log/H" in table) == ("log/accuracy" in table) == (step % 10 == 0)
        if step:
            continue
        for layer in range(4):
            entropies, right = [], 0
            for row, label in zip(logits[layer].tolist(), labels.tolist(), strict=True):
                p = [math.exp(z) / sum(map(math.exp, row)) for z in row]
                entropies.append(-sum(chance * math.log(chance) for chance in p))
                right += row.index(max(row)) == label
            assert table["log/H"][layer].item() == pytest.approx(sum(entropies) / 20, rel=1e-5)
            assert table["log/accuracy"][layer].item() == pytest.approx(right / 20)
        assert 0 < table["log/accuracy"].max() < 1, "else it tells nothing"
