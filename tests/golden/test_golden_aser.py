"""ASER against numbers that its authors' two programs computed: Shapley values, retrieval, the update of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor, nn

from gracecl.core import Ints, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.memory.knn_shapley import adversarial_values, shapley_values
from gracecl.methods import aser
from gracecl.methods.aser import ASER, is_minority
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = load("aser")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
K, R = int(GOLDEN["K"]), int(GOLDEN["R"])
CLASSES = int(GOLDEN["C_total"])


class Identity(Backbone):
    """Features are the pixels, as in the file."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.width, self.unused = 1, width, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).unsqueeze(0)


def build() -> tuple[Engine, StreamBatch]:
    width = GOLDEN["x"].shape[1]
    memories = Memories(len(GOLDEN["mem_y"]), Images((width, 1, 1)))
    memories.replay.images = torch.zeros(len(GOLDEN["mem_y"]), width, 1, 1)
    generator = np.random.default_rng(0)
    memories.replay.add(generator, torch.from_numpy(GOLDEN["mem_x"])[:, :, None, None], GOLDEN["mem_y"])
    memories.replay.offered += 1
    net = TappedNet(Identity(width), CLASSES)
    engine = Engine(ASER(n_recall=R, neighbours=K, per_class=int(GOLDEN["n_c_update"])), net, memories)
    x = torch.from_numpy(GOLDEN["x"])[:, :, None, None]
    return engine, StreamBatch(x, GOLDEN["y"], np.arange(len(x)), progress=Progress(1, seen=tuple(range(CLASSES))))


def values(kind: str, dtype: torch.dtype) -> Tensor:
    points, labels = (GOLDEN["x"], GOLDEN["y"]) if kind == "adv" else (GOLDEN["coop_x"], GOLDEN["coop_y"])
    x, candidates = (torch.from_numpy(part).to(dtype) for part in (points, GOLDEN["cand_x"]))
    return shapley_values(x, torch.from_numpy(labels), candidates, torch.from_numpy(GOLDEN["cand_y"]), K)


@pytest.mark.parametrize("kind", ["adv", "coop"])
def test_values(kind: str) -> None:
    np.testing.assert_allclose(values(kind, torch.float32).numpy(), GOLDEN[f"SV_{kind}"], **SINGLE)
    np.testing.assert_allclose(values(kind, torch.float64).numpy(), GOLDEN[f"SV_{kind}_paper"], **DOUBLE)


@pytest.mark.parametrize(("variant", "field"), [("asvm", "score_mu"), ("asv", "score_maxmin"), ("neg_sv", "score_neg")])
def test_scores(variant: str, field: str) -> None:
    scores = adversarial_values(values("coop", torch.float32), values("adv", torch.float32), variant)
    np.testing.assert_allclose(scores.numpy(), GOLDEN[field], **SINGLE)


def slots_of(x: np.ndarray) -> Ints:
    """Where in memory these vectors are."""
    return np.array([int(np.flatnonzero((GOLDEN["mem_x"] == row).all(axis=1))[0]) for row in x])


def test_retrieval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a step, with the program's candidates and cooperative set in place of the draws."""
    engine, new = build()
    monkeypatch.setattr(aser, "balanced_draws", lambda *_, **__: [GOLDEN["cand_slots"], slots_of(GOLDEN["coop_x"])])
    plan = engine.plan(new)
    assert set(plan["all"].slots) == set(GOLDEN["cand_slots"][GOLDEN["selected_mu"]])


def test_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `store`, with the program's draws."""
    engine, new = build()
    memory = engine.memories.replay
    before = memory.images.clone()
    minority = is_minority(new.labels, memory.labels, float(GOLDEN["upd_u"]))
    assert np.array_equal(new.labels[minority], GOLDEN["upd_minority_y"])
    found: dict[str, Tensor] = {}
    exchanges = aser.exchanges

    def watched(values: Tensor, stored: int) -> tuple[Ints, Ints]:
        found["values"] = values
        return exchanges(values, stored)

    class Drawn:
        def permutation(self, others: Ints) -> Ints:
            assert set(GOLDEN["upd_cand_slots"]) <= set(others)
            return GOLDEN["upd_cand_slots"]

        def uniform(self, low: float, high: float) -> float:
            assert (low, high) == (0, 1 / CLASSES)
            return float(GOLDEN["upd_u"])

    monkeypatch.setattr(aser, "balanced_draws", lambda *_, **__: [GOLDEN["upd_eval_slots"]])
    monkeypatch.setattr(aser, "exchanges", watched)
    engine.method.after_batch(engine.memories, replace(new, rng=lambda _: Drawn()))
    np.testing.assert_allclose(found["values"].numpy(), GOLDEN["upd_value"], **SINGLE)
    changed = np.flatnonzero((memory.images != before).flatten(1).any(dim=1).numpy())
    assert set(changed) == set(GOLDEN["upd_evicted"])
    assert {tuple(row) for row in memory.images[changed].flatten(1).tolist()} == {
        tuple(row) for row in new.x[GOLDEN["upd_stored"]].flatten(1).tolist()
    }
