"""ER-ACE against loops that follow er_aml.md, and the invariants that the specification lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from common import longer, noise, run
from torch import Tensor
from torch.nn import functional as F

from gracecl import rng
from gracecl.core import Batch, Block, Planning, Progress, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.methods.er_ace import ERACE
from gracecl.nets.heads import CosineHead
from gracecl.nets.tapped import StackedLinear
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import feed, next_batch, toy_data, toy_engine

LAYERS, CLASSES = 3, 7
NEW, REPLAY = [4, 2, 4, 4, 2], [0, 2, 5, 1, 0, 4, 5, 0]
SEEN = (0, 1, 2, 4, 5)


def step(new: list[int] = NEW, replay: list[int] = REPLAY) -> tuple[Tensor, Batch]:
    """Logits of a step on these labels, and its batch."""
    labels = np.array(new + replay)
    blocks = {"new": Block(0, len(new), 1, len(new), ())}
    if replay:
        blocks["replay"] = Block(len(new), len(replay), 1, 0, ())
    batch = Batch(torch.zeros(len(labels)), labels, np.arange(len(labels)), blocks, Progress(seen=SEEN), CLASSES, seed=0)
    return noise(LAYERS, len(labels), CLASSES, scale=2), batch


def losses(method: ERACE, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    return method.losses(Taps(logits, logits, torch.nn.Identity()), batch)


def loop(logits: Tensor, labels: list[int], allowed: set[int]) -> list[float]:
    """Mean over images of -log softmax(z)[y] with z_c = -1e9 for c that is not allowed, as the text has it."""
    values = []
    for layer in logits.tolist():
        terms = []
        for z, y in zip(layer, labels, strict=True):
            masked = [value if c in allowed else -1e9 for c, value in enumerate(z)]
            highest = max(masked)
            terms.append(math.log(sum(math.exp(value - highest) for value in masked)) + highest - masked[y])
        values.append(sum(terms) / len(terms))
    return values


@pytest.mark.parametrize("keep_unseen", [False, True])
@pytest.mark.parametrize("reduction", ["sum_of_means", "concat"])
def test_losses_are_the_loops(keep_unseen: bool, reduction: str) -> None:
    logits, batch = step()
    table = losses(ERACE(keep_unseen=keep_unseen, reduction=reduction), logits, batch)
    b, r = len(NEW), len(REPLAY)
    allowed = {2, 4} | ({3, 6} if keep_unseen else set())
    weights = (b / (b + r), r / (b + r)) if reduction == "concat" else (1, 1)
    of_new, of_replay = loop(logits[:, :b], NEW, allowed), loop(logits[:, b:], REPLAY, set(range(CLASSES)))
    assert set(table) == {"ce/new", "ce/replay"}
    assert table["ce/new"].tolist() == pytest.approx([weights[0] * value for value in of_new], rel=1e-9)
    assert table["ce/replay"].tolist() == pytest.approx([weights[1] * value for value in of_replay], rel=1e-9)


def test_the_stream_term_is_cross_entropy_on_the_columns_of_its_classes() -> None:
    logits, batch = step()
    columns = [4, 2]
    target = torch.tensor([columns.index(label) for label in NEW])
    expected = [F.cross_entropy(layer[: len(NEW), columns], target).item() for layer in logits]
    assert losses(ERACE(), logits, batch)["ce/new"].tolist() == pytest.approx(expected, rel=1e-9)


def test_the_stream_term_moves_no_head_of_another_class_and_features_only_along_its_own() -> None:
    _, batch = step(replay=[])
    head, features = StackedLinear(LAYERS, 5, CLASSES).double(), noise(LAYERS, len(NEW), 5, seed=1).requires_grad_()
    losses(ERACE(), head(features), batch)["ce/new"].sum().backward()
    outside = [c for c in range(CLASSES) if c not in NEW]
    assert (head.weight.grad[:, :, outside] == 0).all()
    assert (head.bias.grad[:, :, outside] == 0).all()
    assert (head.weight.grad[:, :, [2, 4]] != 0).any()
    for layer in range(LAYERS):
        rows = head.weight[layer][:, [2, 4]].detach()
        gradient = features.grad[layer].T
        left = gradient - rows @ torch.linalg.lstsq(rows, gradient).solution
        assert left.abs().max() < 1e-12


def test_a_batch_of_one_class_leaves_the_replay_term_alone() -> None:
    logits, batch = step(new=[4, 4, 4])
    logits.requires_grad_()
    table = losses(ERACE(), logits, batch)
    assert table["ce/new"].tolist() == [0] * LAYERS
    sum(value.sum() for value in table.values()).backward()
    both, logits.grad = logits.grad, None
    losses(ERACE(), logits, batch)["ce/replay"].sum().backward()
    assert torch.equal(both, logits.grad)


def test_masked_logits_do_not_matter() -> None:
    logits, batch = step()
    shifted = logits.clone()
    shifted[:, : len(NEW), [0, 1, 3, 5, 6]] += 17.0
    assert torch.equal(losses(ERACE(), shifted, batch)["ce/new"], losses(ERACE(), logits, batch)["ce/new"])


def mixed_stream(batch: int = 12) -> Stream:
    """A single task in random order: nearly every batch has all six classes, and those without are cut off."""
    stream = split(toy_data(6, 60), 0, tasks=1, batch=batch)
    complete = [len(set(stream.batch(step).labels)) == 6 for step in range(len(stream))]
    return stream.cut(complete.index(False)) if False in complete else stream


def test_where_a_batch_has_all_classes_it_is_experience_replay() -> None:
    """The same steps as er(reduction='sum_of_means') with the same head, to the bit."""
    stream = mixed_stream(batch=30)
    assert len(stream) >= 3
    ace, er = (toy_engine(method, memory=50) for method in ("er_ace(n_recall=20)", "er(n_recall=20, reduction='sum_of_means')"))
    for engine in (ace, er):
        assert all(outcome is not None for outcome in feed(engine, stream))
    for name, value in ace.net.state_dict().items():
        assert torch.equal(value, er.net.state_dict()[name]), name


def test_memory_and_draws_are_those_of_experience_replay() -> None:
    one, two = run("er_ace()"), run("er()")
    assert torch.equal(one.memories.replay.images, two.memories.replay.images)
    mine, theirs = (next_batch(engine, longer())[0] for engine in (one, two))
    assert np.array_equal(mine.sources, theirs.sources)


def test_cost_is_one_pass_over_new_and_replayed_images() -> None:
    """er_aml.md 10: 10 + 64 forward and backward, in passes of 10 and 64."""
    engine = run("er_ace()")
    [outcome] = feed(engine, longer(), until=10)
    assert (outcome.images, outcome.forward, outcome.backward) == (74, 74, 74)
    assert next_batch(engine, longer())[0].plan.forwards == [["new"], ["replay"]]
    assert next_batch(run("er_ace(joint_forward=True)"), longer())[0].plan.forwards is None


def test_iterations_draw_anew_and_store_once() -> None:
    engine = run("er_ace(mem_iters=3, n_recall=20)")
    [outcome] = feed(engine, longer(), until=10)
    assert outcome.forward == 3 * 30
    assert engine.memories.replay.offered == 100
    piece = longer().batch(10)
    new = StreamBatch(piece.x, piece.labels, piece.sources, progress=engine.progress)
    draws = [engine.method.plan(new, engine.memories, Planning(rng.generator("plan", i)))["replay"].slots for i in range(2)]
    assert not np.array_equal(*draws)


def test_the_first_step_trains_on_the_stream_alone() -> None:
    [outcome] = feed(toy_engine("er_ace()"), longer(), until=1)
    assert {row for row in outcome.table if row.startswith("ce")} == {"ce/new"}
    assert outcome.images == 10


# The cosine head.


def test_cosine_head_is_the_loop() -> None:
    """10 cos(w_c, f), norms plus 1e-5, no bias; the weights are those that the linear head had."""
    linear = StackedLinear(LAYERS, 5, CLASSES).double()
    head, x = CosineHead(linear, 10.0, 1e-5), noise(LAYERS, 4, 5, seed=2)
    assert head.weight is linear.weight
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    got = head(x)
    for layer in range(LAYERS):
        for image in range(4):
            for c in range(CLASSES):
                f, w = x[layer, image].tolist(), linear.weight[layer, :, c].tolist()
                norms = [math.sqrt(sum(v * v for v in vector)) + 1e-5 for vector in (f, w)]
                expected = 10 * sum(a * b for a, b in zip(f, w, strict=True)) / (norms[0] * norms[1])
                assert got[layer, image, c].item() == pytest.approx(expected, rel=1e-9)


def test_cosine_head_is_blind_to_lengths_and_finite_at_zero() -> None:
    head, x = CosineHead(StackedLinear(LAYERS, 5, CLASSES).double(), 10.0, 1e-5), noise(LAYERS, 4, 5, seed=2, scale=100)
    torch.testing.assert_close(head(3 * x), head(x), rtol=1e-6, atol=0)
    zero = torch.zeros(LAYERS, 4, 5, dtype=torch.float64, requires_grad=True)
    head(zero).square().sum().backward()
    assert torch.isfinite(zero.grad).all()
    assert (head(zero) == 0).all()


def test_the_engine_trains_and_saves_the_head_that_the_method_chose() -> None:
    engine = run("er_ace(head='cosine')")
    assert isinstance(engine.net.classifier, CosineHead)
    assert "classifier.bias" not in engine.net.state_dict()
    trained = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    assert any(parameter is engine.net.classifier.weight for parameter in trained)
    plain = toy_engine("er_ace()")
    assert torch.equal(toy_engine("er_ace(head='cosine')").net.classifier.weight, plain.net.classifier.weight)


# Inference and input.


def test_nearest_mean_is_an_option() -> None:
    engine = run("er_ace(inference='ncm')", net="mlp(width=12, depth=2)")
    assert engine.chain.rule == "ncm_last"
    net, memory = engine.ready_to_predict(), engine.memories.replay
    [(_, held)] = net.sweep(memory.images[: len(memory)])
    [(_, out)] = net.sweep(toy_data().test_x)
    scores = engine.chain.rules(out)
    assert set(scores) == {"linear", "ncm"}
    for label in engine.progress.seen:
        mean = F.normalize(F.normalize(held.features[0, memory.labels[: len(memory)] == label], dim=-1).mean(dim=0), dim=0)
        distance = ((F.normalize(out.features[0], dim=-1) - mean) ** 2).sum(dim=-1)
        torch.testing.assert_close(-scores["ncm"][0, :, label], distance, rtol=0, atol=1e-5)
    assert set(run("er_ace()").method.rules(out)) == {"linear"}


def test_bad_options_are_told() -> None:
    with pytest.raises(UserError, match="mem_iters must be between 1 and 1000"):
        ERACE(mem_iters=0)
    with pytest.raises(UserError, match="head must be one of linear, cosine"):
        ERACE(head="round")
