"""Repeated augmented rehearsal: its step against plain replay, its draws, its memory and its cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from gracecl.core import Batch, Plan, Planning, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.images.rand_augment import RandAugment
from gracecl.memory import Memories
from gracecl.methods.rar import RAR
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, feed, prepared, toy_engine, toy_stream

SGD = "sgd(lr=0.05)"
PLAIN = "mlp(width=12, depth=3)"


def test_rar_alone_is_around_replay() -> None:
    assert repr(parse_method("rar")) == "rar(er(reduction='sum_of_means'))"
    assert repr(parse_method("ema(rar)")) == "ema(rar(er(reduction='sum_of_means')))"
    [outcome] = feed(toy_engine("rar(er(mem_iters=2), iterations=3)"), toy_stream(), until=1)
    assert outcome is not None
    assert outcome.updates == 6


def test_one_iteration_without_augmentation_is_replay_in_one_forward() -> None:
    """Without BatchNorm it makes no difference how many forwards there are."""
    one, two = (
        toy_engine(method, optimizer=SGD, net=PLAIN)
        for method in ("rar(er(reduction='sum_of_means', n_recall=5), iterations=1, operations=0)", "er(5, 'sum_of_means')")
    )
    two.augmentation = ()
    for engine in (one, two):
        feed(engine, toy_stream())
    for name, value in one.net.state_dict().items():
        torch.testing.assert_close(value, two.net.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_the_run_s_augmentation_can_stay() -> None:
    one, two = (
        toy_engine(method, optimizer=SGD, net=PLAIN)
        for method in ("rar(er(n_recall=5), iterations=3, augmentation='run')", "er(5, mem_iters=3)")
    )
    for engine in (one, two):
        feed(engine, toy_stream())
    assert_same(one.net.state_dict(), two.net.state_dict(), "rar with the run's augmentation")


def test_steps_against_a_plain_loop() -> None:
    """K steps of SGD on the sum of two means over one concatenation, with BatchNorm, from the images that the engine assembled."""
    engine = toy_engine("rar(iterations=4)", optimizer=SGD)
    feed(engine, toy_stream(), until=6)
    copy = toy_engine("rar(iterations=4)")
    copy.load_state_dict(engine.state_dict())
    net, seen = copy.net.train(), []
    update = engine.update
    engine.update = lambda batch: seen.append(batch) or update(batch)
    feed(engine, toy_stream(), until=7)
    assert len(seen) == 4
    for batch in seen:
        n = batch.blocks["new"].images
        logits = net(batch.x).logits[-1]
        loss = F.cross_entropy(logits[:n], batch.y[:n]) + F.cross_entropy(logits[n:], batch.y[n:])
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    for name, value in net.state_dict().items():
        torch.testing.assert_close(engine.net.state_dict()[name], value, rtol=1e-4, atol=1e-5)


class Spying(RAR):
    """Notes what each iteration trains on."""

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        for plan in super().plans(new, memories, planning):
            self.slots.append(plan["replay"].slots.tolist())
            yield plan

    def prepare(self, batch: Batch) -> None:
        self.seen.append(batch.x[batch.rows("new")].clone())


def test_each_iteration_draws_and_augments_anew() -> None:
    engine = toy_engine("rar()", memory=12)
    feed(engine, toy_stream(), until=6)
    method = Spying("er(reduction='sum_of_means', n_recall=6)", iterations=8)
    method.slots, method.seen = [], []
    method.attach(engine.net, engine.memories)
    engine.chain = engine.update.chain = method.chain
    feed(engine, toy_stream(), until=7)
    assert len(method.slots) == 8
    assert len({tuple(sorted(slots)) for slots in method.slots}) > 4
    assert all(len(set(slots)) == 6 for slots in method.slots)
    different = {tuple(x.flatten().tolist()) for x in method.seen}
    assert len(different) > 4


def test_memory_does_not_depend_on_the_iterations() -> None:
    engines = [toy_engine(method) for method in ("rar(iterations=1)", "rar(iterations=5)", "er()")]
    for engine in engines:
        feed(engine, toy_stream())
    states = [engine.memories.state_dict() for engine in engines]
    assert_same(states[0], states[1], "memory after 1 and 5 iterations")
    assert_same(states[0], states[2], "memory of rar and of er")


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_cost(iterations: int) -> None:
    """K times what replay costs: the batch and the draw, forward and backward."""
    engine = toy_engine(f"rar(er(reduction='sum_of_means', n_recall=7), iterations={iterations})")
    feed(engine, toy_stream(), until=8)
    (outcome,) = feed(engine, toy_stream(), until=9)
    assert outcome is not None
    assert (outcome.images, outcome.forward, outcome.backward) == (iterations * 10,) * 3


def test_views() -> None:
    view = (RandAugment(2, 9, False),)
    engine, _ = prepared("rar(er(), operations=2, magnitude=9, pixel_ranges='absolute')")
    assert incoming(engine).augment == view
    assert incoming(prepared("rar(mose())")[0])["new"].views[2] == (RandAugment(1, 14, True),)


def test_joint_forward_is_an_option() -> None:
    assert incoming(prepared("rar()")[0]).forwards is None
    assert incoming(prepared("rar(joint=False)")[0]).forwards == [["new"], ["replay"]]


def incoming(engine: Engine) -> Plan:
    """What the next step begins with."""
    return engine.plan(engine.meet(toy_stream().batch(engine.progress.step)))


def test_bad_options_are_refused() -> None:
    for options in ("iterations=0", "operations=-1", "magnitude=31"):
        with pytest.raises(UserError, match="rar: "):
            parse_method(f"rar({options})")


def test_weights_of_memory_and_stream() -> None:
    plain, weighted = (
        toy_engine(f"rar({options})") for options in ("iterations=1", "iterations=1, memory_weight=3.0, stream_weight=0.5")
    )
    stream = toy_stream()
    for engine in (plain, weighted):
        feed(engine, stream, until=1)
    weighted.load_state_dict(plain.state_dict())
    [one], [two] = (feed(engine, stream, until=2) for engine in (plain, weighted))
    assert one is not None
    assert two is not None
    torch.testing.assert_close(two.table["ce/replay"], 3 * one.table["ce/replay"])
    torch.testing.assert_close(two.table["ce/new"], 0.5 * one.table["ce/new"])
    with pytest.raises(UserError, match="no row ce/replay to weigh"):
        feed(toy_engine("rar(er(), memory_weight=2.0)"), stream, until=1)
