"""Replay in Avalanche (https://avalanche.continualai.org) and here, online: a step for every ten images.

Avalanche is used as its own example of online replay uses it: a stream split into experiences of one batch, and `ReplayPlugin` over
a `ReservoirSamplingBuffer`. (The buffer that its `Replay` strategy has by default is balanced over experiences, which here would
mean a group for each batch, and is slower.) It is given what spares it work: a plain `nn.Sequential` of the same layers, pixels
normalised beforehand, the same fused optimizer, no logger, no metric, no worker process, and no garbage collection while timing,
which would cost it much more than us.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.hand import two_layers
from benchmarks.measure import Row, in_turns, row, timed
from gracecl import rng, streams
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.streams import Stream, cut_into_batches
from gracecl.streams.iid import endless, without_tasks

AIMS = {500: 1.0, 5_000: 5.0}
"""slots of the memory -> how many times longer Avalanche's step should at least take"""
BATCH = 10
"""new images in a step, and as many replayed"""
WIDTH = 100
OPTIMISER = "sgd(lr=0.01)"
AGE = 2
"""images offered before the timing begins, in capacities of the memory"""


def rows(quick: bool) -> Iterator[Row]:
    """Seconds per step of Avalanche over ours, at two sizes of the memory."""
    load_avalanche()
    return (compare_replay(memory, aim, quick) for memory, aim in AIMS.items())


def compare_replay(memory: int, aim: float, quick: bool) -> Row:
    repeats, steps = (2, 5) if quick else (15, 25)
    stream = repeated_digits(AGE * memory + BATCH * steps * (repeats + 2))
    with quiet(), rng.torch_seed(0, "bench avalanche"):
        theirs, ours = AvalancheReplay(stream, memory, steps), OurReplay(stream, memory, steps)
        seconds, seconds_ours = in_turns(theirs.learn, ours.learn, repeats)
        unsplit = timed(theirs.learn_unsplit)
        step = {"images_per_step": theirs.images_of_a_step(), "images_per_step_against": ours.images}
    return row(
        f"replay step, memory {memory:,}",
        f"a step of Avalanche's online replay with {memory:,} images in memory, {BATCH} new and {BATCH} replayed",
        "a step of er",
        seconds / seconds_ours,
        aim,
        sense="at least",
        seconds=float(np.median(seconds)) / steps,
        seconds_against=float(np.median(seconds_ours)) / steps,
        seconds_where_the_stream_is_one_experience=unsplit / steps,
        images_held=theirs.held,
        images_held_against=ours.held,
        **step,
    )


def repeated_digits(images: int) -> Stream:
    """The digits at 8×8, shuffled pass after shuffled pass: there are fewer of them than the larger memory holds."""
    once = streams.build("split-digits(size=8)", seed=0)
    order = endless(np.arange(len(once.data.train_y)), images, once.seed)
    return without_tasks(once, order, cut_into_batches(images, BATCH))


class OurReplay:
    """`er` with a full memory, further along the stream with every call of `learn`."""

    def __init__(self, stream: Stream, memory: int, steps: int) -> None:
        data = stream.data
        recipe = Recipe(
            method=f"er(n_recall={BATCH})",
            net=f"mlp(width={WIDTH})",
            memory=memory,
            augment="none",
            optimizer=OPTIMISER,
            device="cpu",
        )
        self.stream, self.engine = stream, recipe.build(data.inputs, data.classes)
        self.images = 0
        """in the last step"""
        self.steps = AGE * memory // BATCH
        self.learn()
        self.steps = steps

    def learn(self) -> None:
        for _ in range(self.steps):
            batch = self.stream.batch(self.engine.progress.step)
            outcome = self.engine.learn(batch)
            self.images = outcome.images if outcome else 0

    @property
    def held(self) -> int:
        return len(self.engine.memories.replay)


class AvalancheReplay:
    """Avalanche's replay with a full memory, further along the stream with every call of `learn`."""

    def __init__(self, stream: Stream, memory: int, steps: int) -> None:
        from avalanche.benchmarks import benchmark_from_datasets, split_online_stream
        from avalanche.benchmarks.utils import as_classification_dataset
        from avalanche.training.plugins import ReplayPlugin
        from avalanche.training.storage_policy import ReservoirSamplingBuffer
        from avalanche.training.supervised import Naive

        self.steps = steps
        self.buffer = ReservoirSamplingBuffer(max_size=memory)
        self.net = two_layers(int(np.prod(stream.data.shape)), WIDTH, stream.data.classes)
        self.strategy = Naive(
            model=self.net,
            optimizer=optim.build(OPTIMISER, [(1.0, list(self.net.parameters()))]),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=BATCH,
            train_epochs=1,
            device="cpu",
            evaluator=None,
            plugins=[ReplayPlugin(mem_size=memory, batch_size=BATCH, batch_size_mem=BATCH, storage_policy=self.buffer)],
        )
        images = as_classification_dataset(NormalisedImages(stream))
        first = AGE * memory
        # As one experience: batch by batch the buffer comes to the same form, but that takes about a minute.
        self.train(benchmark_from_datasets(train=[images.subset(range(first))]).train_stream)
        rest = benchmark_from_datasets(train=[images.subset(range(first, len(images)))])
        self.experiences = iter(split_online_stream(rest.train_stream, experience_size=BATCH, shuffle=False))
        self.unsplit = benchmark_from_datasets(train=[images.subset(range(BATCH * steps))]).train_stream

    def learn(self) -> None:
        self.train(itertools.islice(self.experiences, self.steps))

    def learn_unsplit(self) -> None:
        """As many steps on one experience: replay from a memory that receives nothing before the experience ends."""
        self.train(self.unsplit)

    def train(self, experiences: Any) -> None:
        self.strategy.train(experiences, eval_streams=[], num_workers=0, pin_memory=False)

    def images_of_a_step(self) -> int:
        """How many images go through the net in the next step."""
        sizes: list[int] = []
        hook = self.net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        self.train(itertools.islice(self.experiences, 1))
        hook.remove()
        return sum(sizes)

    @property
    def held(self) -> int:
        return len(self.buffer.buffer)


class NormalisedImages(Dataset[tuple[Tensor, int]]):
    """The images of a stream in its order, ready for a net."""

    def __init__(self, stream: Stream) -> None:
        data = stream.data
        self.images = data.inputs.normalise(data.train_x[torch.from_numpy(stream.order)])
        self.targets: list[int] = data.train_y[stream.order].tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]


def installed() -> bool:
    return importlib.util.find_spec("avalanche") is not None


def load_avalanche() -> None:
    """Imports Avalanche, or says how to get it."""
    if not installed():
        raise UserError("the part 'avalanche' compares with Avalanche, which is not installed; pip install gracecl[avalanche]")
    with quiet():
        load_torchvision()
        importlib.import_module("avalanche.training")


def load_torchvision() -> None:
    """A CPU-only torch cannot load the published torchvision; Avalanche imports it only for data sets and models.

    What fails is the registration of two operators that torchvision's own compiled part, built for CUDA, should have brought. That
    they exist is enough, since nothing here calls them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


@contextmanager
def quiet() -> Iterator[None]:
    """Avalanche warns at every step of a deprecated call of its own; to print that would take time that is not replay's."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("ignore")
        yield
