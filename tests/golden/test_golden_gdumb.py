"""GDumb against numbers that published programs computed: what the sampler keeps, the learning rates, CutMix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import load

from gracecl.core import StreamBatch
from gracecl.methods.gdumb import cut, paste
from gracecl.testing import TOY_SHAPE, fit_steps, toy_engine

GOLDEN = load("gdumb")


@pytest.mark.parametrize("order", ["ci", "iid"])
@pytest.mark.parametrize("size", [1, 7])
def test_sampler(order: str, size: int) -> None:
    """Bucket sizes do not depend on the random victim, nor on how the stream is cut into batches."""
    labels, counts = GOLDEN[f"{order}_labels"], GOLDEN[f"{order}_counts"]
    engine = toy_engine("gdumb()", memory=int(GOLDEN["M"]))
    for start in range(0, len(labels), size):
        some = labels[start : start + size]
        engine.learn(StreamBatch(torch.zeros(len(some), *TOY_SHAPE, dtype=torch.uint8), some))
        held = engine.memories.replay.composition()
        assert [held.get(label, 0) for label in range(counts.shape[1])] == counts[start + len(some) - 1].tolist()


@pytest.mark.parametrize("case", ["EA", "EB"])
def test_learning_rates(case: str) -> None:
    """The rate of the optimizer's step in every epoch of a fit; the memory is a single mini-batch."""
    (highest, lowest), rates = GOLDEN[f"lr_{case}_maxmin"].tolist(), GOLDEN[f"lr_{case}"]
    engine = toy_engine(f"gdumb(epochs={len(rates)}, lr={highest}, lr_min={lowest})")
    engine.learn(StreamBatch(torch.zeros(4, *TOY_SHAPE, dtype=torch.uint8), np.array([0, 0, 1, 1])))
    used = []
    for _ in rates:
        fit_steps(engine, 1)
        assert engine.fit is not None
        used.append(engine.fit.optimizer.param_groups[0]["lr"])
    assert engine.unfinished_fit is None
    np.testing.assert_allclose(used, rates, rtol=1e-7, atol=1e-9)


def test_boxes() -> None:
    for first, second, share, centre_1, centre_2, *box in GOLDEN["box"]:
        (start_1, end_1), (start_2, end_2) = cut(int(first), share, int(centre_1)), cut(int(second), share, int(centre_2))
        assert [start_1, start_2, end_1, end_2] == box


def test_cutmix() -> None:
    top, left, bottom, right = GOLDEN["mix_box"].tolist()
    mixed, share = paste(torch.from_numpy(GOLDEN["mix_x"]), torch.from_numpy(GOLDEN["mix_perm"]), (top, bottom, left, right))
    assert np.array_equal(mixed.numpy(), GOLDEN["mix_out"])
    assert share == pytest.approx(float(GOLDEN["mix_lam"]), rel=1e-7)
    assert np.array_equal(GOLDEN["mix_y"][GOLDEN["mix_perm"]], GOLDEN["mix_yb"])
    assert np.array_equal(GOLDEN["mix_y"], GOLDEN["mix_ya"])
