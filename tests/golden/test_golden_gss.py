"""GSS-Greedy against numbers that its authors' program computed: gradients, similarities, chances, scores written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small import SmallNet, load
from whole_steps import engine_with

from gracecl.core import Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.memory.gss import replacement_chance, similarity, victim_weights
from gracecl.methods import gss
from gracecl.methods.gss import GSS, SCORE

GOLDEN = load("gss")
DOUBLE = {"rtol": 1e-7, "atol": 1e-9}
STREAM = len(GOLDEN["y"])


def build(capacity: int | None = None) -> tuple[SmallNet, Engine, StreamBatch]:
    small = SmallNet(GOLDEN)
    n, b = GOLDEN["groups"].shape
    engine = engine_with(small, GSS(n_groups=n, group_size=b), "sgd(lr=0.1)", GOLDEN["mem_x"], GOLDEN["mem_y"], capacity)
    memory = engine.memories.replay
    memory.attributes[SCORE] = torch.zeros(memory.capacity, dtype=torch.float64)
    memory.attributes[SCORE][: len(memory)] = torch.from_numpy(GOLDEN["mem_score"])
    new = StreamBatch(
        small.images(GOLDEN["x"]), GOLDEN["y"], np.arange(STREAM), progress=Progress(1, seen=tuple(range(len(GOLDEN["b2"]))))
    )
    return small, engine, new


class Drawn:
    """A generator whose uniform numbers make the program's replacements happen."""

    def __init__(self, taken: Any) -> None:
        self.taken = taken

    def random(self, n: int) -> np.ndarray:
        assert n == len(self.taken)
        return np.where(self.taken == 1, 0.0, 1.0)


def test_gradients_of_groups_and_similarities() -> None:
    small, engine, new = build()
    method = engine.method
    found = method.gradients(*method.stored(engine.memories.replay, GOLDEN["groups"]))
    names, sizes = zip(*((name, p.numel()) for name, p in small.net.named_parameters() if p.requires_grad), strict=True)
    for row, expected in zip(found, GOLDEN["mem_grads"], strict=True):
        by_name = dict(zip(names, row.split(list(sizes)), strict=True))
        ours = {id(p): by_name[name].view(p.shape) for name, p in small.net.named_parameters() if p.requires_grad}
        np.testing.assert_allclose(small.join(lambda parameter, ours=ours: ours[id(parameter)]), expected, **DOUBLE)
    whole = method.gradients(new.x[None], new.labels[None])
    np.testing.assert_allclose(float(similarity(whole, found)), GOLDEN["c_batch"], **DOUBLE)
    np.testing.assert_allclose(method.scores(new, found).numpy(), GOLDEN["c_item"], **DOUBLE)


def test_chances() -> None:
    np.testing.assert_allclose(victim_weights(GOLDEN["mem_score"]), GOLDEN["victim_weight"], **DOUBLE)
    item, slot = GOLDEN["keep_weight_item"], GOLDEN["keep_weight_slot"]
    chance = replacement_chance(GOLDEN["c_item"], GOLDEN["mem_score"][GOLDEN["victims"]])
    np.testing.assert_allclose(chance, slot / (slot + item), **DOUBLE)


def test_update_of_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `store`, with the program's draws: groups, victims, and which of them were replaced."""
    _, engine, new = build()
    memory = engine.memories.replay
    monkeypatch.setattr(gss, "draw_groups", lambda *_: GOLDEN["groups"])
    monkeypatch.setattr(gss, "draw_victims", lambda *_: GOLDEN["victims"])
    engine.method.after_batch(engine.memories, replace(new, rng=lambda _: Drawn(GOLDEN["replaced"])))
    np.testing.assert_allclose(memory.attributes[SCORE].numpy(), GOLDEN["score_after"], **DOUBLE)
    replaced = GOLDEN["replaced"] == 1
    assert replaced.any()
    assert torch.equal(memory.images[GOLDEN["victims"][replaced]], new.x[torch.from_numpy(replaced)])
    assert np.array_equal(memory.labels[GOLDEN["victims"][replaced]], GOLDEN["y"][replaced])


def test_update_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, new = build(capacity=len(GOLDEN["mem_y"]) + STREAM)
    memory = engine.memories.replay
    monkeypatch.setattr(gss, "draw_groups", lambda *_: GOLDEN["append_groups"])
    engine.method.after_batch(engine.memories, replace(new, rng=lambda _: np.random.default_rng(0)))
    np.testing.assert_allclose(memory.attributes[SCORE][-STREAM:].numpy(), GOLDEN["append_score"], **DOUBLE)
    assert torch.equal(memory.images[-STREAM:], new.x)
