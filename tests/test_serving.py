"""Predictions while another thread learns: from the last finished step, whole, without waiting for the step in progress."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl import Learner
from gracecl.core import Batch, LossTable, Progress, Taps
from gracecl.engine import serving
from gracecl.engine.serving import Serving, Snapshot
from gracecl.forking import Turns
from gracecl.lab.catalogue import LEARNERS
from gracecl.memory import Memories
from gracecl.methods.sgd import SGD
from gracecl.nets.tapped import TappedNet
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, in_order_of_arrival, toy_engine, toy_net, toy_stream

TOY: dict[str, Any] = {"net": "mlp(width=8, depth=2)", "memory": 12, "device": "cpu", "augment": "none"}
STREAM = in_order_of_arrival(toy_stream())


def batches(learner: Learner, start: int, stop: int) -> None:
    for batch in map(STREAM.batch, range(start, stop)):
        learner.learn(batch.x, batch.labels)


@pytest.fixture
def served() -> Learner:
    """A learner that another thread has asked while it learned."""
    learner = Learner("er(n_recall=4)", **TOY)
    batches(learner, 0, 3)
    learner._serving.wanted()
    batches(learner, 3, 6)
    assert learner._serving.latest is not None
    return learner


def elsewhere(function: Any) -> Any:
    """What a function returns in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    assert found, "the other thread waits"
    return found[0]


# A snapshot is what the learner was.


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in LEARNERS if parse_method(method).chain.traits.trains != "evaluation"])
def test_snapshots_predict_what_the_learner_does_and_stay(method: str) -> None:
    """At every step of a stream with growing heads; the steps are those without any snapshot, to the bit."""
    x = STREAM.data.test_x
    learner, alone = (Learner(method, **TOY | {"net": toy_net(method)}) for _ in range(2))
    learner._serving.wanted()
    kept: list[tuple[Snapshot, list[Any]]] = []
    for batch in map(STREAM.batch, (0, 1, 2, 6, 7, 12, 13)):
        learner.learn(batch.x, batch.labels, batch.task)
        alone.learn(batch.x, batch.labels, batch.task)
        snapshot = learner._serving.latest
        assert snapshot is not None
        assert np.array_equal(learner.predict_proba(x), alone.predict_proba(x))
        if len(kept) < 3:
            snapshot.readers += 1  # it is in use from now on
            kept.append((snapshot, snapshot.scores(x, None)))
    for snapshot, before in kept:
        assert_same([[*part] for part in snapshot.scores(x, None)], [[*part] for part in before], "an earlier snapshot")
    assert_same(learner.engine.state_dict(), alone.engine.state_dict(), "with snapshots and without")


def test_nothing_is_copied_for_one_thread() -> None:
    learner = Learner("er(n_recall=4)", **TOY)
    for batch in map(STREAM.batch, range(4)):
        learner.learn(batch.x, batch.labels)
        learner.predict(batch.x)
    assert elsewhere(lambda: learner.predict(batch.x)) is not None
    assert learner._serving.latest is None


def test_snapshots_in_use_are_not_written_to(served: Learner) -> None:
    """Two nets take turns; a third is made while both are in use."""
    nets = set()
    for step in range(6, 10):
        batches(served, step, step + 1)
        nets.add(id(served._serving.latest.net))  # type: ignore[union-attr]
    assert len(nets) <= 3, "a head that grew is a new net"
    with served._serving.reading() as one:
        assert one is not None
        before = copy.deepcopy(one.net.state_dict())
        batches(served, 10, 11)
        with served._serving.reading() as two:
            assert two is not None
            assert two.net is not one.net
            batches(served, 10, 12)
            assert served._serving.latest.net not in (one.net, two.net)  # type: ignore[union-attr]
        assert_same(one.net.state_dict(), before, "a snapshot in use")


def test_a_net_that_is_never_trained_is_shared() -> None:
    learner = Learner("slda", **TOY)
    learner._serving.wanted()
    batches(learner, 0, 6)
    snapshot = learner._serving.latest
    assert snapshot is not None
    assert next(snapshot.net.backbone.parameters()) is next(learner.net.backbone.parameters())
    assert snapshot.net.classifier.weight is not learner.net.classifier.weight
    assert not snapshot.net.training
    assert learner.net.training


def test_none_are_made_after_a_lull(served: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LULL", 2)
    served.predict(STREAM.batch(0).x)
    batches(served, 6, 8)
    assert served._serving.latest is not None
    batches(served, 8, 9)
    assert served._serving.latest is None
    assert not served._serving._made


def test_copies_and_pickles_have_none(served: Learner) -> None:
    x = STREAM.data.test_x
    for twin in (copy.deepcopy(served), pickle.loads(pickle.dumps(served))):
        assert twin._serving.latest is None
        assert np.array_equal(twin.predict_proba(x), served.predict_proba(x))


def test_weights_that_are_not_finite_are_told_of(served: Learner) -> None:
    with torch.no_grad():
        served.net.classifier.bias.fill_(torch.nan)
    served.engine.invalidate_predictions()
    served._publish()
    assert served._serving.latest is None
    with pytest.raises(Exception, match="not finite after step 5"):
        served.predict(STREAM.batch(0).x)


# Two threads.


@dataclass(eq=False, repr=False)
class Paused(SGD):
    """Waits in the middle of a step, when it is told to."""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.reached, self.go_on, self.pausing = threading.Event(), threading.Event(), False

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        if self.pausing:
            self.reached.set()
            assert self.go_on.wait(60)
        return super().losses(out, batch)


def paused_in_a_step(learner: Learner, steps: Any) -> tuple[Paused, threading.Thread]:
    method = learner.engine.chain.learner
    assert isinstance(method, Paused)
    method.pausing = True
    thread = threading.Thread(target=steps)
    thread.start()
    assert method.reached.wait(60)
    return method, thread


def test_a_prediction_does_not_wait_for_the_step_in_progress() -> None:
    """It sees all steps that are finished, and those that finish later once they have."""
    x = STREAM.data.test_x
    learner, alone = Learner(Paused(), **TOY), Learner(SGD(), **TOY)
    learner._serving.wanted()
    batches(learner, 0, 5)
    batches(alone, 0, 5)
    method, thread = paused_in_a_step(learner, lambda: batches(learner, 5, 6))
    assert np.array_equal(elsewhere(lambda: learner.predict_proba(x)), alone.predict_proba(x))
    method.go_on.set()
    thread.join(60)
    batches(alone, 5, 6)
    assert np.array_equal(learner.predict_proba(x), alone.predict_proba(x))


@pytest.mark.parametrize("how", ["learn", "fit"])
def test_the_first_prediction_waits_for_one_step(how: str) -> None:
    """And no more: also within `fit`, which is one call."""
    learner = Learner(Paused(), **TOY)
    batches(learner, 0, 1)
    rest = [(batch.x, batch.labels) for batch in map(STREAM.batch, range(1, 9))]
    steps = (lambda: learner.fit(rest)) if how == "fit" else (lambda: batches(learner, 1, 9))
    method, thread = paused_in_a_step(learner, steps)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(learner.predict(rest[0][0])))
    asking.start()
    while not learner._serving._wanted:
        pass
    method.reached.clear()
    method.go_on.set()
    asking.join(60)
    thread.join(60)
    assert len(answers) == 1
    assert learner._serving.latest is not None
    assert learner._serving.latest.progress.step == learner.engine.progress.step


@dataclass(eq=False, repr=False)
class Agreeing(SGD):
    """Scores that are right only if the rule's state, the net's and the classes met belong to one step."""

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        self.sums = (net.classifier.weight.double().sum(), len(progress.seen))

    def rules(self, out: Taps) -> dict[str, Tensor]:
        found = self.net.classifier.weight.double().sum(), out.logits.shape[-1]
        assert found == self.sums, "the state of two steps"
        return super().rules(out)


@pytest.mark.slow
def test_no_prediction_sees_half_a_step() -> None:
    """Three threads predict while classes arrive; each answer is that of one step, and steps never go back."""
    rng = np.random.default_rng(0)
    learner = Learner(Agreeing(), **TOY | {"net": "mlp(width=64)"})
    x = rng.standard_normal((8, 10)).astype("float32")
    learner.learn(x, [0] * 8)
    going, errors, answers = threading.Event(), [], [0, 0, 0]

    def ask(who: int) -> None:
        steps = 0
        try:
            while not going.is_set():
                with learner._predicting() as now:
                    assert now is not None
                    assert now.progress.step >= steps
                    assert len(now.labels) == len(now.progress.seen)
                    steps = now.progress.step
                    now.scores(torch.from_numpy(x), None)
                answers[who] += 1
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for step in range(300):
        learner.learn(x, rng.integers(0, 2 + step // 10, 8))
    going.set()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]
    assert min(answers) > 0


def test_a_method_that_fits_before_it_predicts_is_waited_for() -> None:
    learner = Learner("gdumb(epochs=1, cutmix=0)", **TOY)
    batches(learner, 0, 2)
    learner._serving.wanted()
    batches(learner, 2, 4)
    assert learner._serving.latest is None
    assert len(elsewhere(lambda: learner.predict(STREAM.batch(0).x))) == 3


# The lock.


def test_turns_come_in_order() -> None:
    turns, order, threads = Turns(), list[int](), []
    with turns:
        for number in range(5):

            def take(number: int = number) -> None:
                with turns, turns:
                    order.append(number)

            threads.append(threading.Thread(target=take))
            threads[-1].start()
            while len(turns._waiting) <= number:
                pass
        assert turns.mine
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]
    assert turns._owner is None


def test_a_wait_ends_when_there_is_no_more_need_to() -> None:
    turns = Turns()
    shown = Serving(turns)
    with turns:
        asking = threading.Thread(target=lambda: found.append(turns.take(unless=shown.wanted)))
        found: list[bool] = []
        asking.start()
        while not shown._wanted:
            pass
        engine = toy_engine("sgd")
        engine.learn(toy_stream().batch(0))
        shown.publish(engine, Learner("sgd", classes=6).labels)
        asking.join(60)
        assert found == [False]
        assert not turns._waiting
    assert elsewhere(lambda: turns.take())
