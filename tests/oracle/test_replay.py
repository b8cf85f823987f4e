"""What all methods that replay share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge

from gracecl.core import Plan, Planning, StreamBatch
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.functional import closed_forms as forms
from gracecl.functional.sums import Sums
from gracecl.memory import Memories
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, feed, prepared, toy_engine, toy_stream

REPLAYING = ["er", "mir", "gss", "aser", "er_ace", "er_aml", "pcr", "scr", "derpp"]


@pytest.mark.parametrize("name", [*REPLAYING, "adversarial_replay"])
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


@pytest.mark.parametrize("name", ["er", "mir", "er_ace", "er_aml", "pcr", "il2a", "derpp"])
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


BY_SUMS = ["er()", "derpp()", "mir()", "er_ace()", "pcr()", "icarl(exemplars='reservoir')", "scr()", "co2l()", "mose()"]


@pytest.mark.parametrize("rule", ["lda", "ridge"])
@pytest.mark.parametrize("method", BY_SUMS)
def test_sums_over_the_memory_predict_where_asked_to(method: str, rule: str) -> None:
    """As scikit-learn does on the memory's features, with the share and λ that closed forms choose; the net stays as it is."""
    option = f"inference='{rule}{'_last' if method == 'mose()' else ''}'"
    text = method[:-1] + (", " if method[-2] != "(" else "") + option + ")"
    engine, stream = toy_engine(text, memory=30), toy_stream()
    feed(engine, stream)
    data, memory, net = stream.data, engine.memories.replay, engine.net
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = evaluate(engine, data.test_x, data.test_y, np.zeros(len(data.test_y), np.int64))
    assert_same(net.state_dict(), before, "the net")
    [(_, kept)], [(_, asked)] = net.sweep(memory.examples.images), net.sweep(data.test_x)
    y, x, test = memory.examples.labels, kept.features[-1].double().numpy(), asked.features[-1].double().numpy()
    assert set(y.tolist()) == set(range(6)), "the toy memory holds every class"
    sums = Sums(1, 6, x.shape[1])
    sums.add(torch.from_numpy(x)[None], y)
    if rule == "ridge":
        ridge = float(forms.by_evidence(forms.Ridge(sums, intercept=True)))
        scores = SklearnRidge(alpha=ridge).fit(x, np.eye(6)[y]).predict(test)
    else:
        apart = x - np.stack([x[y == label].mean(axis=0) for label in range(6)])[y]
        covariance = apart.T @ apart / len(x)
        share = float(forms.oas(torch.from_numpy(covariance)[None], len(x) - 6))
        covariance = (1 - share) * covariance + share * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        means = np.stack([x[y == label].mean(axis=0) for label in range(6)])
        weight = np.linalg.solve(covariance, means.T)
        scores = test @ weight - (means.T * weight).sum(axis=0) / 2
    found = engine.chain.rules(asked)[rule][-1].double().numpy()
    np.testing.assert_allclose(
        found - found.mean(axis=1, keepdims=True), scores - scores.mean(axis=1, keepdims=True), rtol=1e-3, atol=1e-3
    )
    assert engine.chain.rule == f"{rule}_last"
    assert result.accuracy[f"{rule}_last"] == [pytest.approx(100 * np.mean(scores.argmax(axis=1) == data.test_y))]


@pytest.mark.parametrize("rule", ["lda", "ridge"])
def test_a_class_that_memory_lost_is_not_predicted_by_its_sums(rule: str) -> None:
    engine, stream = toy_engine(f"er(inference='{rule}')", memory=4), toy_stream()
    feed(engine, stream)
    engine.ready_to_predict()
    [(_, out)] = engine.net.sweep(stream.data.test_x)
    scores, held = engine.chain.rules(out)[rule][-1], set(engine.memories.replay.examples.labels.tolist())
    assert len(held) < 6
    assert {label for label in range(6) if scores[:, label].isfinite().all()} == held
    without = toy_engine(f"er(inference='{rule}')", memory=0)
    feed(without, stream)
    without.ready_to_predict()
    assert not without.chain.rules(out)[rule].any(), "nothing is known"


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
