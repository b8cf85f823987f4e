"""Methods that tell old from new classes, where a class comes back together with new ones; and what happens at a second tick."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from unequal_tasks import assembled, images, teach

from gracecl.core import NO_TASK, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.methods.grace import memory_means
from gracecl.registry import methods
from gracecl.testing import feed, toy_engine, toy_stream

FIRST, SECOND, BACK = (5, 1), (0, 4), (5, 2, 3)
"""the third task brings 5 back beside two new classes"""
OLD, NEW = [0, 1, 4, 5], [2, 3]


def third_task(method: str, memory: int = 100, **options: Any) -> Engine:
    """In the middle of the third task; each batch of ten has all classes of its task."""
    engine = toy_engine(method, memory=memory, **options)
    for task, classes in enumerate((FIRST, SECOND, BACK)):
        engine.end_task()
        for step in range(4):
            engine.learn(StreamBatch(*images((10 * list(classes))[:10], seed=100 * task + step), task=task))
    return engine


def log_softmax(row: list[float], columns: list[int]) -> dict[int, float]:
    log_sum = math.log(sum(math.exp(row[c]) for c in columns))
    return {c: row[c] - log_sum for c in columns}


def test_bic_corrects_new_classes_alone() -> None:
    """The teacher knows 5, so its logits are held where they are; λ counts it among the old, once."""
    engine = third_task("bic(n_recall=20)", memory=120)
    batch, out = assembled(engine, [5, 2, 3, 5, 2], task=2)
    weighted = engine.chain.losses(out, batch)["ce/all"]
    seen = [[log_softmax(z, OLD + NEW)[y] for z, y in zip(out.logits[0].tolist(), batch.labels.tolist(), strict=True)]]
    assert weighted.item() == pytest.approx(-(1 - 4 / 6) * float(np.mean(seen)), rel=1e-4)
    engine.end_task()
    assert engine.method.correction.classes.nonzero().flatten().tolist() == NEW
    assert engine.method.of_teacher.classes.nonzero().flatten().tolist() == NEW
    assert set(engine.method.old) == set(OLD + NEW)


def test_ssil_s_new_classes_compete_without_the_one_that_came_back() -> None:
    engine = third_task("ssil(n_recall=8)")
    batch, out = assembled(engine, [5, 2, 3, 5, 2], task=2)
    table, rows = engine.chain.losses(out, batch), batch.rows("new")
    terms = [
        log_softmax(z, OLD if y in OLD else NEW)[y]
        for z, y in zip(out.logits[0, rows].tolist(), batch.labels[rows].tolist(), strict=True)
    ]
    assert len(terms) == 5
    assert table["ce/new"].item() == pytest.approx(-sum(terms) / len(batch), rel=1e-4)
    engine.end_task()
    assert [set(classes) for classes in engine.method.tasks] == [{5, 1}, {0, 4}, {2, 3}], "5 stays with its first task"


def test_il2a_s_gaussian_of_a_class_that_came_back_is_the_newest() -> None:
    """Mean and covariance are those of its images in memory now, of which there are fewer than when it came first."""
    engine = toy_engine("il2a(n_recall=8)", memory=24)
    held = []
    for task, classes in enumerate((FIRST, SECOND, BACK)):
        engine.end_task()
        teach(engine, classes, task, steps=(4, 4, 1)[task])
        held.append(engine.memories.replay.count(label=5))
    engine.end_task()
    assert 2 < held[2] < held[0]
    memory = engine.memories.replay
    for label in BACK:
        slots = memory.slots_of(label)
        features = torch.cat([taps.features for _, taps in engine.net.sweep(memory[slots])], dim=1)[0].double()
        root = engine.method.factors[0, label].double()
        centred = features - features.mean(dim=0)
        torch.testing.assert_close(engine.method.means[0, label].double(), features.mean(dim=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(root.T @ root, centred.T @ centred / max(1, len(slots) - 1), rtol=1e-3, atol=1e-5)
    assert sorted(engine.method.old) == sorted(OLD + NEW)


def test_onpro_mixes_pairs_of_all_classes_met() -> None:
    """Those of the current task, too, whose prototypes are the closest here."""
    engine = third_task("onpro(n_recall=12, base_rate=0.0, mix_probability=1.0)")
    engine.method.proto = torch.zeros_like(engine.method.proto)
    for label in OLD + NEW:
        engine.method.proto[label, 0] = 1 + 10 * label if label in OLD else 1 + 0.1 * label
    batch, _ = assembled(engine, [5, 2, 3, 5], task=2)
    replay = batch.blocks["replay"]
    pairs = zip(batch.labels[replay.view(0)].tolist(), replay.found["other"].tolist(), strict=True)
    assert {tuple(sorted(pair)) for pair in pairs} >= {(2, 3)}


def test_mose_counts_a_class_that_came_back_as_current_and_once() -> None:
    """New images of the balanced block: n_recall · current / met; those of the other block compete among the current."""
    engine = third_task("mose(n_recall=6)", taps=1)
    batch, out = assembled(engine, [5, 2, 3, 5], task=2)
    assert batch.blocks["balanced"].from_stream == 6 * 3 // 6
    rows = batch.rows("new")
    terms = [log_softmax(z, list(BACK))[y] for z, y in zip(out.logits[0, rows].tolist(), batch.labels[rows].tolist(), strict=True)]
    assert engine.chain.losses(out, batch)["ce/new"].item() == pytest.approx(-float(np.mean(terms)), rel=1e-4)


def test_er_ace_leaves_out_the_classes_met_that_are_not_in_the_batch() -> None:
    """Those of the task itself, too."""
    engine = third_task("er_ace(n_recall=8, keep_unseen=True)")
    batch, out = assembled(engine, [5, 2, 5, 2], task=2)
    rows = batch.rows("new")
    terms = [log_softmax(z, [2, 5])[y] for z, y in zip(out.logits[0, rows].tolist(), batch.labels[rows].tolist(), strict=True)]
    found = engine.chain.losses(out, batch)["ce/new"].item()
    assert found == pytest.approx(-float(np.mean(terms)), rel=1e-4)


def test_aser_s_candidates_are_shared_out_among_all_classes_met() -> None:
    """Twice n_recall over six classes, not over three: no class has more than 4 of them among what is chosen."""
    engine = third_task("aser(n_recall=12)", memory=60)
    batch, _ = assembled(engine, [5, 2, 3, 5], task=2)
    assert engine.memories.replay.offered > 60
    assert len(batch) == 4 + 12
    assert max(Counter(batch.labels[4:].tolist()).values()) <= 4


@pytest.mark.parametrize(
    "method",
    ["er(inference='ncm')", "mose(n_recall=4)", "scr(n_recall=4, without_images='random')", "grace(er(), past_head='ncm')"],
)
def test_every_class_met_has_a_direction_without_any_image(method: str) -> None:
    """Old and current alike, where the memory has hardly room."""
    engine = third_task(method, memory=2)
    engine.ready_to_predict()
    means = memory_means(engine.net, engine.memories, engine.progress) if "grace" in method else engine.method.means
    assert means.shape[1] == 6
    torch.testing.assert_close(means.norm(dim=-1), torch.ones(means.shape[:2]))


@pytest.mark.parametrize("method", ["icarl(n_recall=4)", "ocm(n_recall=4)", "er() + lwf()"])
def test_a_teacher_knows_all_classes_met(method: str) -> None:
    engine = third_task(method)
    engine.end_task()
    [teacher] = [part.teacher for part in engine.chain.parts if hasattr(part, "teacher")]
    assert teacher.classes.nonzero().flatten().tolist() == sorted(OLD + NEW)


# Streams without task marks: what happens every so many steps happens each time.

CLOCKS = {
    "ocm(n_recall=4, every=3)": "teacher",
    "co2l(n_recall=4, every=3)": "teacher",
    "icarl(n_recall=4, every=3)": "teacher",
    "er() + lwf(every=3)": "teacher",
    "er() + ewc(every=3)": "anchor",
    "er() + ewc_on(every=3)": "anchor",
    "er() + mas(every=3)": "anchor",
    "er() + si(every=3)": "anchor",
    "er() + ewc_pp(every=3)": "anchor",
    "grace(er(n_recall=6), refresh_every=3)": "feedback",
}


def values(state: Any) -> list[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in values(value)]
    return [state.detach().clone().double().nan_to_num(nan=-1)] if isinstance(state, Tensor) else []


@pytest.mark.parametrize(("method", "key"), CLOCKS.items())
def test_each_tick_of_an_unmarked_stream_acts(method: str, key: str) -> None:
    engine, stream = toy_engine(method, memory=30, taps=4, optimizer="sgd(lr=0.2)"), toy_stream()
    clocked = next(part for part in engine.chain.parts if part.traits.interval is not None)
    states = []
    for step in range(9):
        engine.learn(dataclasses.replace(stream.batch(2 * step), task=NO_TASK, last_of_task=False))
        states.append(values(clocked.state_dict()[key]))
    changed = [
        len(one) != len(other) or not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in pairwise(states)
    ]
    assert changed == [False, True, False, False, True, False, False, True], "in the steps 3, 6 and 9"


@pytest.mark.parametrize("method", ["icarl(n_recall=4, every=3)", "ocm(n_recall=4, every=3)", "er() + lwf(every=3)"])
def test_a_tick_within_a_guessed_task_teaches_all_classes_met(method: str) -> None:
    """Where labels alone say when a task begins, the current classes are some of them."""
    engine = toy_engine(method, memory=60)
    for step in range(6):
        task = step // 4
        batch = StreamBatch(*images((5 * list((FIRST, SECOND)[task]))[:10], seed=step), task=task, marked=False)
        engine.learn(batch)
    assert set(engine.progress.current) == set(SECOND)
    [teacher] = [part.teacher for part in engine.chain.parts if hasattr(part, "teacher")]
    assert teacher.classes.nonzero().flatten().tolist() == OLD


def test_every_method_with_a_clock_is_tried() -> None:
    tried = {part.name for method in CLOCKS for part in toy_engine(method).chain.parts}
    kinds = {name: methods.get(name) for name in methods.names()}
    assert {name for name, kind in kinds.items() if getattr(kind.traits, "interval", None)} <= tried


def test_online_lora_begins_new_adapters_on_both_sides_of_zero() -> None:
    """A from U(-b, b): its mean near 0 and its standard deviation b / √3."""
    engine = toy_engine("online_lora(n_hard=2, window=1, mean_below=1e9, variance_below=1e9, rank=4)")
    feed(engine, toy_stream(), until=2)
    assert engine.method.consolidated == 1
    drawn = torch.cat([adapter.down.detach().flatten() / adapter.bound for adapter in engine.method.adapters])
    assert drawn.abs().max() <= 1
    assert abs(drawn.mean().item()) < 4 / math.sqrt(3 * len(drawn))
    assert drawn.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.1)
