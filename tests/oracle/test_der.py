"""DER and DER++ against slow loops over the specification's equations, and its invariants step by step."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import MEMORY_SOURCE, Plan, Selection, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.functional.losses import logit_distance
from gracecl.testing import assert_same, feed, next_batch, prepared, toy_engine, toy_stream

# Slow loops.


def slow_cross_entropy(logits: Tensor, y: Tensor, columns: list[int]) -> float:
    terms = []
    for row, label in zip(logits.tolist(), y.tolist(), strict=True):
        terms.append(-row[label] + np.log(sum(np.exp(row[c]) for c in columns)))
    return float(np.mean(terms))


def slow_distance(logits: Tensor, targets: Tensor, columns: list[int]) -> float:
    pairs = [(a[c], b[c]) for a, b in zip(logits.tolist(), targets.tolist(), strict=True) for c in columns]
    return sum((a - b) ** 2 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("columns", [None, [0, 2, 3]])
def test_logit_distance(columns: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = (torch.randn(3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    classes = None if columns is None else torch.tensor([c in columns for c in range(4)])
    value = logit_distance(logits, targets, classes)
    expected = [slow_distance(logits[layer], targets[layer], columns or [0, 1, 2, 3]) for layer in range(3)]
    np.testing.assert_allclose(value.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("options", ["", ", seen_only=True", ", joint_forward=True", ", shared_replay=True"])
@pytest.mark.parametrize("taps", [1, 3])
def test_table_of_derpp(options: str, taps: int) -> None:
    """Each row from the stored logits and labels of the slots that were drawn, by loops."""
    engine, stream = prepared(f"derpp(n_recall=5, alpha=0.3, beta=0.7{options})", taps=taps)
    batch, out = next_batch(engine, stream)
    memory = engine.memories.replay
    columns = list(batch.progress.seen) if "seen_only" in options else list(range(6))
    assert set(batch.progress.seen) < set(range(6)), "the option makes a difference"
    dark = "replay" if "shared" in options else "dark"
    with torch.no_grad():
        table = engine.chain.losses(out, batch)
    for layer in range(taps):
        logits = out.logits[layer].detach()
        new, replay, matched = (batch.rows(block) for block in ("new", "replay", dark))
        slots = (batch.sources - MEMORY_SOURCE)[replay]
        labels = torch.from_numpy(memory.labels[slots])
        stored = torch.stack([memory.attributes["logits"][slot, layer] for slot in (batch.sources - MEMORY_SOURCE)[matched]])
        expected = {
            "ce/new": slow_cross_entropy(logits[new], torch.from_numpy(batch.labels[new]), columns),
            "ce/replay": 0.7 * slow_cross_entropy(logits[replay], labels, columns),
            "kd/logits": 0.3 * slow_distance(logits[matched], stored, columns),
        }
        assert table.keys() == expected.keys()
        for row, value in expected.items():
            np.testing.assert_allclose(float(table[row][layer]), value, rtol=1e-5, err_msg=row)


def test_der_has_no_label_term() -> None:
    engine, stream = prepared("der()")
    batch, out = next_batch(engine, stream)
    assert list(batch.blocks) == ["new", "dark"]
    assert engine.chain.losses(out, batch).keys() == {"ce/new", "kd/logits"}


def test_gradient_on_the_head_s_bias() -> None:
    """∂ α MSE / ∂ b_k = 2 α / (m C) · Σ_i (z_ik - o_ik)."""
    engine, stream = prepared("der(alpha=0.3, n_recall=5)", taps=2)
    batch, out = next_batch(engine, stream)
    engine.net.zero_grad()
    engine.chain.losses(out, batch)["kd/logits"].sum().backward()
    rows = batch.rows("dark")
    difference = out.logits[:, rows].detach() - batch.stored("dark", "logits")
    expected = 2 * 0.3 / (5 * 6) * difference.sum(dim=1)
    np.testing.assert_allclose(engine.net.classifier.bias.grad.squeeze(1).numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


# What a step is made of.


def test_two_independent_draws_without_repetition() -> None:
    engine, stream = prepared("derpp(n_recall=5)", memory=20)
    pairs = []
    for step in range(9, 17):
        feed(engine, stream, until=step)
        batch, _ = next_batch(engine, stream)
        pairs.append([tuple(batch.sources[batch.rows(block)] - MEMORY_SOURCE) for block in ("replay", "dark")])
    for pair in pairs:
        for slots in pair:
            assert len(set(slots)) == 5
            assert max(slots) < len(engine.memories.replay)
    assert all(set(first) != set(second) for first, second in pairs)


def test_all_of_a_small_memory_is_drawn() -> None:
    engine, stream = toy_engine("derpp(n_recall=64)"), toy_stream()
    feed(engine, stream, until=2)
    batch, _ = next_batch(engine, stream)
    assert [block.images for block in batch.blocks.values()] == [3, 6, 6]


@pytest.mark.parametrize(
    ("method", "forwards"),
    [("der()", 2), ("derpp()", 3), ("derpp(shared_replay=True)", 2), ("derpp(joint_forward=True)", 1), ("derpp(beta=0)", 2)],
)
def test_batch_norm_batches_of_a_step(method: str, forwards: int) -> None:
    engine, stream = toy_engine(method), toy_stream()
    feed(engine, stream, until=3)
    counter = engine.net.backbone.norms[0].num_batches_tracked
    before = int(counter)
    feed(engine, stream, until=4)
    assert int(counter) - before == forwards


@pytest.mark.parametrize(
    ("method", "images"),
    [("der()", 74), ("derpp()", 138), ("derpp(shared_replay=True)", 74), ("derpp(joint_forward=True)", 138), ("der(alpha=0)", 10)],
)
def test_cost_of_a_step(method: str, images: int) -> None:
    engine = toy_engine(method, memory=80)
    generator = np.random.default_rng(0)
    for _ in range(9):
        x = torch.from_numpy(generator.integers(0, 256, (10, 1, 8, 8), dtype=np.uint8))
        outcome = engine.learn(StreamBatch(x, generator.integers(0, 6, 10)))
    assert (outcome.forward, outcome.backward) == (images, images)


def test_rows_that_enter_cross_entropy() -> None:
    """GRACE's entropies and the observed accuracy leave out images whose labels the step does not read."""
    engine, stream = prepared("derpp(n_recall=5)")
    batch, _ = next_batch(engine, stream)
    assert batch.supervised == slice(0, 3 + 5)
    engine, stream = prepared("derpp(n_recall=5, shared_replay=True)")
    batch, _ = next_batch(engine, stream)
    assert batch.supervised == slice(0, 3 + 5)
    assert len(batch) == 3 + 5


# Special cases are other methods.


def trained(method: str, until: int | None = None) -> Engine:
    engine = toy_engine(method)
    feed(engine, toy_stream(), until)
    return engine


@pytest.mark.parametrize("method", ["derpp(alpha=0, beta=0)", "der(alpha=0)"])
def test_without_its_terms_it_is_fine_tuning(method: str) -> None:
    assert_same(trained(method).net.state_dict(), trained("sgd()").net.state_dict(), method)


def test_without_the_logits_it_is_replay_with_two_means() -> None:
    er = trained("er(n_recall=5, reduction='sum_of_means')").net.state_dict()
    for method in ("derpp(n_recall=5, alpha=0, beta=1)", "derpp(n_recall=5, alpha=0, beta=1, shared_replay=True)"):
        assert_same(trained(method).net.state_dict(), er, method)


def test_without_the_labels_it_is_der() -> None:
    one, two = trained("derpp(beta=0)"), trained("der()")
    assert_same(one.net.state_dict(), two.net.state_dict(), "derpp without labels")
    assert_same(one.memories.state_dict(), two.memories.state_dict(), "derpp without labels")


@pytest.mark.parametrize("method", ["der()", "derpp()"])
def test_first_step_is_fine_tuning(method: str) -> None:
    assert_same(trained(method, 1).net.state_dict(), trained("sgd()", 1).net.state_dict(), method)
    with pytest.raises(AssertionError):
        assert_same(trained(method, 2).net.state_dict(), trained("sgd()", 2).net.state_dict(), method)


# What is stored.


def test_frozen_weights_match_their_stored_logits() -> None:
    """No learning, BatchNorm in evaluation mode, no augmentation: nothing moved, so there is nothing to regress to."""
    engine, stream = toy_engine("der(n_recall=5)", optimizer="sgd(lr=0.0)", taps=2), toy_stream()
    engine.net.eval()
    engine.augmentation = ()
    outcomes = feed(engine, stream)
    distances = torch.stack([outcome.table["kd/logits"] for outcome in outcomes[1:]])
    assert distances.max() < 1e-12
    assert outcomes[-1].table["ce/new"].min() > 0.1


def test_slots_keep_image_label_and_logits_of_one_item() -> None:
    """Logits are those of the augmented view, in training mode, before the step that the image was new in; they never change."""
    engine, stream = toy_engine("derpp(n_recall=5)", taps=2), toy_stream()
    said: dict[bytes, tuple[int, Tensor]] = {}
    for step in range(len(stream)):
        piece = stream.batch(step)
        twin = copy.deepcopy(engine)
        new = twin.meet(piece)
        logits = twin.net(twin.assemble(Plan({"new": Selection(np.arange(len(piece.labels)))}), new, 0).x).logits.detach()
        for row, label in enumerate(piece.labels.tolist()):
            said[piece.x[row].numpy().tobytes()] = (label, logits[:, row])
        feed(engine, stream, until=step + 1)
        memory = engine.memories.replay
        for slot in range(len(memory)):
            label, expected = said[memory.images[slot].numpy().tobytes()]
            assert memory.labels[slot] == label
            torch.testing.assert_close(memory.attributes["logits"][slot], expected, rtol=0, atol=0)
    assert len(memory) == 12
    assert memory.attributes["logits"].shape == (12, 2, 6)


def test_logits_are_stored_in_full_precision() -> None:
    engine, stream = toy_engine("derpp()"), toy_stream()
    engine.precision = "bf16"
    feed(engine, stream, until=6)
    assert engine.memories.replay.attributes["logits"].dtype == torch.float32
