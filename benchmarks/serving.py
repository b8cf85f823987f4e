"""How long a prediction takes while another thread learns, against the same prediction on an idle learner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.measure import Floats, Row, row
from benchmarks.scene import CIFAR, STREAM_BATCH
from gracecl.learner import Learner

LEARNERS = {"er()": "resnet18(width=8)", "slda()": "resnet18(width=8)"}
MEMORY, CLASSES = 1000, 20


class Service:
    """A learner in the middle of its stream, and the images that it is asked about."""

    def __init__(self, method: str, net: str, memory: int = MEMORY) -> None:
        rng = np.random.default_rng(0)
        self.learner = Learner(method, classes=CLASSES, shape=CIFAR, net=net, memory=memory, augment="none", device="cpu")
        self.x = rng.integers(0, 256, (STREAM_BATCH, *CIFAR), np.uint8)
        self.y = rng.integers(0, CLASSES, STREAM_BATCH)
        for _ in range(5):
            self.step()

    def step(self) -> None:
        self.learner.learn(self.x, self.y)

    def predict(self) -> None:
        self.learner.predict(self.x[:1])

    def predict_in_turn(self) -> None:
        """As it was before snapshots: the prediction waits for the step in progress."""
        with self.learner._turns:
            self.learner.predict(self.x[:1])

    @contextmanager
    def learning(self) -> Iterator[list[float]]:
        """Another thread learns within the block; the seconds of its steps."""
        over, seconds = threading.Event(), list[float]()

        def learn() -> None:
            while not over.is_set():
                started = time.perf_counter()
                self.step()
                seconds.append(time.perf_counter() - started)

        thread = threading.Thread(target=learn)
        thread.start()
        try:
            yield seconds
        finally:
            over.set()
            thread.join()


def seconds_of(work: Callable[[], Any], calls: int) -> Floats:
    """Seconds of each call, with a pause between two as requests have."""
    found = np.zeros(calls)
    for call in range(calls):
        started = time.perf_counter()
        work()
        found[call] = time.perf_counter() - started
        time.sleep(0.002)
    return found


def rows(quick: bool) -> Iterator[Row]:
    repeats, calls = (1, 5) if quick else (9, 100)
    for method, net in LEARNERS.items():
        service = Service(method, net, 50 if quick else MEMORY)
        idle, waiting, served, alone, beside = (list[Floats]() for _ in range(5))
        for _ in range(repeats):
            idle.append(seconds_of(service.predict, calls))
            with service.learning() as steps:
                waiting.append(seconds_of(service.predict_in_turn, calls))
            alone.append(np.array([service_step(service) for _ in range(calls // 5)]))
            with service.learning() as steps:
                served.append(seconds_of(service.predict, calls))
            beside.append(np.array(steps))
        usual = np.array([np.median(part) for part in idle])
        against = f"the prediction of an idle learner, {method} on {net}"
        for name, parts, aim in (("waiting for its turn", waiting, None), ("from snapshots", served, 2.0)):
            everything = np.concatenate(parts)
            yield row(
                f"prediction during learning, {name}, {method}",
                f"a prediction while another thread learns, {name}",
                against,
                np.array([np.median(part) for part in parts]) / usual,
                aim,
                seconds=float(np.median(everything)),
                seconds_against=float(np.median(np.concatenate(idle))),
                seconds_at_95_percent=float(np.quantile(everything, 0.95)),
                seconds_at_most=float(everything.max()),
            )
        yield row(
            f"step while predictions are served, {method}",
            "a step of learning while another thread predicts from snapshots",
            "the step alone",
            [np.median(one) / np.median(two) for one, two in zip(beside, alone, strict=True)],
            None,
            seconds=float(np.median(np.concatenate(beside))),
            seconds_against=float(np.median(np.concatenate(alone))),
        )


def service_step(service: Service) -> float:
    """Seconds of a step that nobody disturbs."""
    started = time.perf_counter()
    service.step()
    return time.perf_counter() - started
