"""multi_update: which images and views each update gets, that all of them together are the inner step's, and what is stored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from gracecl.core import Batch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.images.augment import Mirror
from gracecl.testing import feed, toy_engine, toy_stream


def batches(engine: Engine, stream: Any, step: int) -> list[Batch]:
    """What the updates of a step train on."""
    piece = stream.batch(step)
    feed(engine, stream, until=step)
    new = engine.meet(piece)
    return [engine.assemble(plan, new, repeat) for repeat, plan in enumerate(engine.plans(new)) if plan]


def stream_images(batch: Batch) -> Counter[int]:
    """How often each image of the stream stands in the first block."""
    block = next(iter(batch.blocks.values()))
    rows = np.concatenate([block.view(number).start + np.arange(block.from_stream) for number in range(block.views)])
    return Counter(batch.sources[rows].tolist())


@pytest.mark.parametrize(
    ("inner", "updates", "views"),
    [
        ("mose(n_recall=8)", 4, 1),
        ("mose(n_recall=8)", 2, 2),
        ("mose(n_recall=8)", 8, 1),
        ("er(n_recall=8)", 3, 1),
        ("scr(n_recall=8)", 2, 1),
    ],
)
def test_the_updates_of_a_batch_are_the_inner_steps_images(inner: str, updates: int, views: int) -> None:
    stream = toy_stream(batch=6)
    whole = batches(toy_engine(inner), stream, 5)
    parts = batches(toy_engine(f"multi_update({inner}, updates={updates})"), stream, 5)
    assert (len(whole), len(parts)) == (1, updates)
    assert all(block.views == views for part in parts for block in part.blocks.values())
    assert sum((stream_images(part) for part in parts), Counter()) == stream_images(whole[0])
    assert sum(len(part) for part in parts) == len(whole[0])
    if updates > 1:
        memory = [frozenset(part.sources[part.sources >= 1 << 40].tolist()) for part in parts]
        assert len(set(memory)) > 1, "each update draws anew"


def test_views_are_dealt_to_groups_in_snake_order() -> None:
    """The update of each view, by its place: with two updates the first has the first and the last of four."""
    engine, stream = toy_engine("multi_update(mose(n_recall=8), updates=2)"), toy_stream(batch=6)
    feed(engine, stream, until=5)
    new = engine.meet(stream.batch(5))
    tau = engine.augmentation
    shown = ((), (Mirror(), *tau)), ((Mirror(),), tau)
    for plan, views in zip(engine.plans(new), shown, strict=True):
        assert {rows.views for rows in plan.blocks.values()} == {views}


def test_two_updates_share_four_views_first_with_last() -> None:
    one, two = batches(toy_engine("multi_update(mose(n_recall=8), updates=2)"), toy_stream(batch=6), 5)
    whole = batches(toy_engine("mose(n_recall=8)"), toy_stream(batch=6), 5)[0]
    n = whole.blocks["new"].from_stream
    raw, mirrored = (whole.x[whole.blocks["new"].view(view)][:n] for view in (0, 1))
    assert torch.equal(one.x[one.blocks["new"].view(0)][:n], raw)
    assert torch.equal(two.x[two.blocks["new"].view(0)][:n], mirrored)
    assert [part.blocks["new"].raw_views for part in (one, two)] == [(0,), (0,)]


def test_what_is_stored_beside_an_image_is_its_own_updates() -> None:
    """DER keeps the logits of each stream image: those of the update that held it, in the order of the batch."""
    engine, seen = toy_engine("multi_update(der(n_recall=6), updates=3)", memory=40), []
    inner, keep = engine.method.inner, engine.method.inner.after_step

    def spy(out: Any, batch: Batch) -> None:
        seen.append((batch.sources[batch.rows("new")], out.logits[:, batch.rows("new")].transpose(0, 1)))
        keep(out, batch)

    inner.after_step = spy
    feed(engine, toy_stream(batch=6), until=1)
    stored, expected = engine.memories.replay.attributes["logits"], torch.empty(6, 1, 6)
    first = toy_stream(batch=6).batch(0).sources.tolist()
    for sources, logits in seen:
        expected[[first.index(source) for source in sources.tolist()]] = logits
    assert len(seen) == 3
    assert torch.equal(stored[:6], expected)


def test_as_many_steps_as_updates_and_the_inner_methods_repeats() -> None:
    engine = toy_engine("multi_update(er(n_recall=8, mem_iters=2), updates=4)")
    steps = 0
    step = engine.optimizer.step

    def count(*args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(*args, **options)

    engine.optimizer.step = count  # type: ignore[method-assign]
    feed(engine, toy_stream(batch=6), until=1)
    assert steps == 8


def test_each_of_the_inner_methods_repeats_is_shared_out_before_the_next() -> None:
    engine, stream = toy_engine("multi_update(er(n_recall=8, mem_iters=2), updates=2)"), toy_stream(batch=6)
    taken = [plan["all"].stream.tolist() for plan in engine.plans(engine.meet(stream.batch(0)))]
    assert taken == [[0, 2, 4], [1, 3, 5]] * 2


def test_one_update_is_the_inner_method_to_the_bit() -> None:
    one, two = toy_engine("mose(n_recall=8)"), toy_engine("multi_update(mose(n_recall=8), updates=1)")
    for engine in (one, two):
        feed(engine, toy_stream(), until=12)
    for a, b in zip(one.net.state_dict().values(), two.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("inner", "updates", "blocks"), [("er(n_recall=8)", 4, {"all"}), ("er_ace(n_recall=8)", 8, {"new", "replay"})]
)
def test_a_batch_with_fewer_images_than_updates_makes_as_many_updates_as_images(inner: str, updates: int, blocks: set[str]) -> None:
    """Together they train on what the inner method's one step would, each image of the stream once."""
    parts = batches(toy_engine(f"multi_update({inner}, updates={updates})"), toy_stream(batch=3), 7)
    [whole] = batches(toy_engine(inner), toy_stream(batch=3), 7)
    assert len(parts) == 3
    assert all(part.blocks.keys() == blocks for part in parts)
    assert sum((stream_images(part) for part in parts), Counter()) == stream_images(whole)
    assert sum(len(part) for part in parts) == len(whole)


def test_a_small_batch_is_stored_beside_its_own_logits() -> None:
    """DER's, where fewer updates were made than were asked for."""
    engine = toy_engine("multi_update(der(n_recall=6), updates=8)", memory=40)
    [outcome] = feed(engine, toy_stream(batch=3), until=1)
    assert outcome.images == 3
    assert engine.memories.replay.attributes["logits"][:3].abs().sum(dim=(1, 2)).min() > 0


def test_updates_that_do_not_fit_are_told() -> None:
    with pytest.raises(UserError, match="updates must be between 1 and 1000, not 0"):
        toy_engine("multi_update(er(), updates=0)")
    with pytest.raises(UserError, match="3 updates cannot share out 4 views"):
        feed(toy_engine("multi_update(mose(), updates=3)"), toy_stream(), until=3)


@pytest.mark.parametrize("inner", ["dvc(n_recall=4)", "ocm(n_recall=4)"])
def test_a_method_that_compares_views_of_one_image_is_refused_in_a_sentence(inner: str) -> None:
    with pytest.raises(UserError, match="need more views or images in one update than 2 updates leave"):
        feed(toy_engine(f"multi_update({inner}, updates=2)"), toy_stream(batch=4))


def test_the_learning_rate_is_a_multiple_of_the_inner_methods() -> None:
    """As with a faster optimizer, and beside a method that lowers the rate itself."""
    factor, faster = (
        toy_engine(f"multi_update(er(n_recall=6), updates=1, {option})", optimizer=f"sgd(lr={rate})")
        for option, rate in (("lr_factor=4.0", 0.05), ("lr_factor=1.0", 0.2))
    )
    for engine in (factor, faster):
        feed(engine, toy_stream(), until=6)
    for one, other in zip(factor.net.parameters(), faster.net.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    slower = toy_engine("multi_update(ccil(n_recall=6, later_rate=0.5), updates=1, lr_factor=4.0)")
    feed(slower, toy_stream(), until=12)
    assert slower.plan(slower.meet(toy_stream().batch(12))).rate == 4.0 * 0.5
    with pytest.raises(UserError, match="multi_update: lr_factor must be above 0"):
        toy_engine("multi_update(er(), lr_factor=0.0)")
