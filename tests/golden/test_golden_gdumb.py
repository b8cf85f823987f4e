"""GDumb against numbers that published programs computed: what the sampler keeps, the learning rates, CutMix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import load

from gracecl.core import Batch, Block, Progress, StreamBatch, Taps
from gracecl.methods.gdumb import GDumb, cut
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


class Drawn:
    """What the program drew, in the place of a step's generator."""

    def random(self) -> float:
        return 0.0

    def beta(self, first: float, second: float) -> float:
        return float(GOLDEN["mix_lam_drawn"])

    def permutation(self, n: int) -> np.ndarray:
        assert n == len(GOLDEN["mix_perm"])
        return GOLDEN["mix_perm"]

    def __init__(self) -> None:
        top, left, bottom, right = GOLDEN["mix_box"].tolist()
        height, width = GOLDEN["mix_x"].shape[-2:]
        self.centres = [(height, centre_of(height, top, bottom)), (width, centre_of(width, left, right))]

    def integers(self, n: int) -> int:
        length, centre = self.centres.pop(0)
        assert n == length
        return centre


def centre_of(length: int, start: int, end: int) -> int:
    """Where along an axis a box is centred that begins and ends there, at the drawn share."""
    half = int(length * np.sqrt(1 - float(GOLDEN["mix_lam_drawn"]))) // 2
    [centre] = [at for at in range(length) if (max(at - half, 0), min(at + half, length)) == (start, end)]
    return centre


def test_cutmix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, both labels and their share as the hook `prepare` leaves them, and the loss that follows from them."""
    x, y, n = torch.from_numpy(GOLDEN["mix_x"]), GOLDEN["mix_y"], len(GOLDEN["mix_y"])
    classes = int(y.max()) + 1
    batch = Batch(x, y, np.arange(n), {"all": Block(0, n, 1, 0, ())}, Progress(seen=tuple(range(classes))), classes, seed=0)
    monkeypatch.setattr(batch, "rng", lambda purpose: Drawn())
    method = GDumb()
    method.prepare(batch)
    assert np.array_equal(batch.x.numpy(), GOLDEN["mix_out"])
    assert np.array_equal(batch.y.numpy(), GOLDEN["mix_ya"])
    assert np.array_equal(batch.blocks["all"].found["other"].numpy(), GOLDEN["mix_yb"])
    share = float(GOLDEN["mix_lam"])
    assert batch.blocks["all"].found["share"].item() == pytest.approx(share, rel=1e-7)
    assert share not in (0.5, float(GOLDEN["mix_lam_drawn"])), "the file could not tell the clipped share from others"
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, n, classes)))
    (loss,) = method.losses(Taps(logits, logits, lambda features: features), batch).values()
    log_p = logits[0].log_softmax(dim=-1).numpy()
    rows = np.arange(n)
    expected = -(share * log_p[rows, GOLDEN["mix_ya"]] + (1 - share) * log_p[rows, GOLDEN["mix_yb"]]).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
