"""What the engine knows of the stream at each batch, and how it makes the batch of an update."""

from __future__ import annotations

import numpy as np
import torch

from gracecl.core import Selection, StreamBatch
from gracecl.functional.augment import augmentation
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
    engine.method.views = lambda block, augment: (augment, augment)  # type: ignore[method-assign]
    whole = engine.assemble({"all": Selection(np.arange(4))}, new)
    first, second = whole.x.chunk(2)
    assert not torch.equal(first, second)
    part = engine.assemble({"all": Selection(np.array([2]))}, new)
    assert torch.equal(part.x[0], first[2])
    assert torch.equal(part.x[1], second[2])
