"""Repeated augmented rehearsal against numbers that its authors' program computed: the losses and the weights of each iteration."""

from __future__ import annotations

import numpy as np
import torch
from small import SmallNet, load
from torch import Tensor
from whole_steps import engine_with

from gracecl.core import LossTable, StreamBatch, Taps
from gracecl.images.augment import Floats
from gracecl.inputs import Images
from gracecl.methods.rar import RAR

GOLDEN = load("rar")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}


class GivenViews:
    """The file's augmented views of the stream's batch, one after the other; images of the memory stay as they are."""

    draws = 0

    def __init__(self, stream: Tensor, views: list[Tensor]) -> None:
        self.stream, self.views = stream, views

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        return self.views.pop(0) if torch.equal(x, self.stream) else x


def test_iterations() -> None:
    """One batch of the stream, learned by the engine: K steps, each with its own views and its own images of the memory."""
    iterations, per_draw = GOLDEN["v"].shape
    memory_weight, stream_weight = float(GOLDEN["w_m"]), float(GOLDEN["w_s"])
    small = SmallNet(GOLDEN)
    seen: list[tuple[dict[str, float], np.ndarray]] = []

    class Followed(RAR):
        def adjust(self, table: LossTable, out: Taps, batch: object) -> LossTable:
            self.table = super().adjust(table, out, batch)
            return self.table

        def after_step(self, out: Taps, batch: object) -> None:
            seen.append(({row: value.item() for row, value in self.table.items()}, small.weights()))

    method = Followed(iterations=iterations, augmentation="run", memory_weight=memory_weight, stream_weight=stream_weight)
    engine = engine_with(
        small, method, f"sgd(lr={float(GOLDEN['lr'])})", GOLDEN["u"].reshape(-1, GOLDEN["u"].shape[-1]), GOLDEN["v"].ravel()
    )
    draws = iter(np.arange(iterations * per_draw).reshape(iterations, per_draw))
    engine.memories.replay.draw = lambda n, rng: next(draws)  # type: ignore[method-assign]
    stream = torch.full((len(GOLDEN["y"]), *small.shape), -1.0, dtype=torch.float64)
    engine.augmentation = (GivenViews(stream, [small.images(x) for x in GOLDEN["x"]]),)
    engine.learn(StreamBatch(stream, GOLDEN["y"]))
    assert len(seen) == iterations
    for k, (row, weights) in enumerate(seen):
        np.testing.assert_allclose(row["ce/new"] / stream_weight, GOLDEN["loss_stream"][k], **DOUBLE)
        np.testing.assert_allclose(row["ce/replay"] / memory_weight, GOLDEN["loss_mem"][k], **DOUBLE)
        np.testing.assert_allclose(row["ce/new"] + row["ce/replay"], GOLDEN["loss"][k], **DOUBLE)
        np.testing.assert_allclose(weights, GOLDEN["theta"][k], **DOUBLE)
