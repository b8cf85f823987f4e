"""Learners on features in double precision, so that a net's rounding has no part in what is compared."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.nets import Backbone, TappedNet
from gracecl.registry.spec import parse_method
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import TOY_SHAPE, feed, toy_data


class PixelsAsFeatures(Backbone):
    """The pixels, at each tap another multiple of them."""

    width = TOY_SHAPE[1] * TOY_SHAPE[2]

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1).double()
        return torch.stack([flat * (layer + 1) + layer for layer in range(self.layers)])


def engine_of(method: str, taps: int = 1) -> Engine:
    """At its first step, for six classes, without memory."""
    net = TappedNet(PixelsAsFeatures(taps), 6, Images((1, 1, 1), (0.5,), (0.25,))).double()
    return Engine(parse_method(method), net, Memories(0, Images(TOY_SHAPE)))


def learned(method: str, taps: int = 1, batch: int = 7, until: int | None = None) -> tuple[Engine, Stream]:
    """After a stream of three tasks of two classes, or so many of its steps; ready to predict."""
    engine, stream = engine_of(method, taps), split(toy_data(6, 40), 0, tasks=3, batch=batch)
    feed(engine, stream, until)
    engine.ready_to_predict()
    return engine, stream


def scores(engine: Engine, images: Tensor) -> Tensor:
    """`[L, B, C]` as `rules` gives them."""
    [(_, out)] = engine.net.sweep(images, batch=len(images))
    return engine.chain.rules(out)[engine.chain.rule.removesuffix("_last")]


def features(engine: Engine, images: Tensor) -> np.ndarray:
    """`[L, B, D]`"""
    [(_, out)] = engine.net.sweep(images, batch=len(images))
    return out.features.numpy()


def seen_images(engine: Engine, stream: Stream) -> tuple[Tensor, np.ndarray]:
    """Everything that was learned, in its order."""
    batches = [stream.batch(step) for step in range(engine.progress.step)]
    return torch.cat([batch.x for batch in batches]), np.concatenate([batch.labels for batch in batches])
