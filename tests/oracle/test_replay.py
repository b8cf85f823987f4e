"""What all methods that replay share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gracecl.core import Plan, Planning, StreamBatch
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.memory import Memories
from gracecl.registry.spec import parse_method
from gracecl.testing import feed, prepared, toy_engine, toy_stream

REPLAYING = ["er", "mir", "gss", "aser", "er_ace", "er_aml", "pcr", "scr"]


@pytest.mark.parametrize("name", REPLAYING)
def test_repeats_and_bad_numbers(name: str) -> None:
    engine, stream = prepared(f"{name}(mem_iters=3)")
    [outcome] = feed(engine, stream, until=10)
    assert outcome is not None
    assert outcome.updates == 3
    for bad, told in (
        ("mem_iters=0", "mem_iters must be between 1 and 1000, not 0"),
        ("n_recall=-1", "n_recall must be at least 0, not -1"),
    ):
        with pytest.raises(UserError, match=f"{name}: {told}"):
            parse_method(f"{name}({bad})")


@pytest.mark.parametrize("name", ["er", "mir", "er_ace", "er_aml", "pcr", "il2a"])
def test_the_nearest_class_mean_of_the_memory_predicts_where_asked_to(name: str) -> None:
    engine, stream = toy_engine(f"{name}(inference='ncm')", memory=30), toy_stream()
    feed(engine, stream)
    data, memory, net = stream.data, engine.memories.replay, engine.net
    result = evaluate(engine, data.test_x, data.test_y, np.zeros(len(data.test_y), np.int64))
    net.eval()
    with torch.no_grad():
        kept = net(net.inputs.normalise(memory.images[: len(memory)])).features[-1]
        asked = net(net.inputs.normalise(data.test_x)).features[-1]
    net.train()
    means = {}
    for label in set(memory.labels[: len(memory)].tolist()):
        vectors = [row / row.norm() for row, of in zip(kept, memory.labels, strict=False) if of == label]
        mean = torch.stack(vectors).mean(dim=0)
        means[label] = mean / mean.norm()
    assert set(means) == set(range(6)), "the toy memory holds every class"
    right = 0
    for row, label in zip(asked, data.test_y.tolist(), strict=True):
        nearest = min(means, key=lambda of: (row / row.norm() - means[of]).norm().item())
        right += nearest == label
    assert engine.chain.rule == "ncm_last"
    assert result.accuracy["ncm_last"] == [pytest.approx(100 * right / len(data.test_y))]


@pytest.mark.parametrize("name", REPLAYING)
def test_few_classes_met_are_replayed_a_few_images_each(name: str) -> None:
    engine, stream = toy_engine(f"{name}(n_recall=9, recall_per_class=2)", memory=30), toy_stream()
    plan, drawn = engine.method.plan, []

    def watched(new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        held, planned = len(memories.replay), plan(new, memories, planning)
        replayed = max((len(rows.slots) for block, rows in planned.blocks.items() if block != "pairs"), default=0)
        if held > 9:
            drawn.append((replayed, min(9, 2 * len(new.progress.seen))))
        return planned

    engine.method.plan = watched  # type: ignore[method-assign]
    feed(engine, stream)
    assert {wanted for _, wanted in drawn} == {4, 8, 9}
    assert all(replayed == wanted for replayed, wanted in drawn)
    with pytest.raises(UserError, match=f"{name}: recall_per_class must be at least 1"):
        parse_method(f"{name}(recall_per_class=0)")


def test_a_class_that_memory_holds_no_image_of_is_not_predicted_by_class_means() -> None:
    engine, stream = toy_engine("er(inference='ncm')", memory=30), toy_stream()
    feed(engine, stream)
    memory = engine.memories.replay
    lost, kept = engine.progress.seen[0], engine.progress.seen[-1]
    slots = memory.slots_of(lost)
    memory.put(slots, memory[memory.slots_of(kept)[:1].repeat(len(slots))], np.arange(len(slots)), np.full(len(slots), kept), 0, {})
    [(_, out)] = engine.ready_to_predict().sweep(stream.data.test_x)
    scores = engine.chain.rules(out)["ncm"]
    assert (scores[..., lost] == -torch.inf).all()
    assert scores[..., kept].isfinite().all()
