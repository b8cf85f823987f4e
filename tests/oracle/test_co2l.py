"""Co2L against loops over its equations, and what it promises: anchors, relations, teacher, classifier."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import NO_TASK, Batch, Block
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate, seen_scores
from gracecl.errors import UserError
from gracecl.functional.losses import asymmetric_contrast, log_relations, relation_distillation, supervised_contrast
from gracecl.methods.co2l import HIDDEN, Co2L, projected
from gracecl.nets.probe import LinearProbe
from gracecl.nets.teacher import frozen_copy
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import assert_same, feed, flatten, next_batch, toy_data, toy_engine

LAYERS, WIDTH = 3, 6
FIRST_TASK = 12


def vectors(images: int, seed: int = 0) -> Tensor:
    """Unit vectors of two views of so many images."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(LAYERS, 2 * images, WIDTH, generator=generator, dtype=torch.float64), dim=-1)


def dots(z: list[list[float]], tau: float) -> list[dict[int, float]]:
    """s_ij = z_i·z_j / τ for every i and all j but i."""
    rows = range(len(z))
    return [{j: sum(a * b for a, b in zip(z[i], z[j], strict=True)) / tau for j in rows if j != i} for i in rows]


def contrast_loop(z: list[list[float]], labels: list[int], current: set[int], tau: float, base: float) -> float:
    """(1 / 2N) Σ over rows of current classes of -(τ / τ_0) mean over P(i) of [s_ij - log Σ_{k ≠ i} exp s_ik]."""
    total = 0.0
    for i, s in enumerate(dots(z, tau)):
        if labels[i] in current:
            positives = [j for j in s if labels[j] == labels[i]]
            denominator = math.log(sum(math.exp(v) for v in s.values()))
            total += -(tau / base) * sum(s[j] - denominator for j in positives) / len(positives)
    return total / len(z)


def relation_loop(z: list[list[float]], teacher: list[list[float]], kappa: float, kappa_star: float) -> float:
    """Mean over rows of -Σ_j q_ij log p_ij."""
    terms = []
    for mine, theirs in zip(dots(z, kappa), dots(teacher, kappa_star), strict=True):
        top = max(theirs.values())
        q = {j: math.exp(v - top) for j, v in theirs.items()}
        norm_p, norm_q = sum(math.exp(v) for v in mine.values()), sum(q.values())
        terms.append(-sum(q[j] / norm_q * math.log(math.exp(mine[j]) / norm_p) for j in mine))
    return sum(terms) / len(terms)


LABELS = [2, 0, 0, 5, 2, 0, 1]


def anchors(labels: list[int], current: set[int]) -> Tensor:
    return torch.tensor([label in current for label in labels])


@pytest.mark.parametrize("current", [{2, 5}, {0}, {0, 1, 2, 5}, {7}])
def test_contrast_is_the_double_loop(current: set[int]) -> None:
    z, labels = vectors(len(LABELS)).requires_grad_(), LABELS * 2
    got = asymmetric_contrast(z, torch.tensor(labels), anchors(labels, current), 0.3)
    assert got.tolist() == pytest.approx([contrast_loop(layer, labels, current, 0.3, 0.3) for layer in z.tolist()], rel=1e-9)
    got.sum().backward()
    assert bool(z.grad.any()) == (current != {7})


def test_with_all_anchors_it_is_supervised_contrast() -> None:
    z, labels = vectors(len(LABELS)), torch.tensor(LABELS * 2)
    got = asymmetric_contrast(z, labels, torch.ones_like(labels, dtype=torch.bool), 0.5)
    torch.testing.assert_close(got, supervised_contrast(z, labels, 0.5), rtol=1e-12, atol=0)


def test_old_images_are_compared_with_and_get_gradients() -> None:
    """Taking the old images from the anchors changes no term of a current one; yet their vectors are moved by these."""
    z, labels = vectors(len(LABELS)).requires_grad_(), torch.tensor(LABELS * 2)
    current, old = anchors(LABELS * 2, {2, 5}), anchors(LABELS * 2, {0, 1})
    parts = [asymmetric_contrast(z, labels, rows, 0.5) for rows in (current, old, current | old)]
    torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=1e-12, atol=0)
    parts[0].sum().backward()
    assert (z.grad[:, old].abs().amax(dim=-1) > 0).all()


@pytest.mark.parametrize("images", [2, 7])
def test_relations_are_the_double_loop(images: int) -> None:
    z, teacher = vectors(images), vectors(images, seed=1)
    got = relation_distillation(z, teacher, 0.2, 0.05)
    expected = [relation_loop(mine, theirs, 0.2, 0.05) for mine, theirs in zip(z.tolist(), teacher.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(expected, rel=1e-9)
    assert log_relations(z, 0.2).exp().sum(dim=-1).flatten().tolist() == pytest.approx([1.0] * (LAYERS * 2 * images))


def test_relations_pass_no_gradient_to_the_teacher() -> None:
    z, teacher = vectors(4).requires_grad_(), vectors(4, seed=1).requires_grad_()
    relation_distillation(z, teacher, 0.2, 0.05).sum().backward()
    assert z.grad.any()
    assert teacher.grad is None


def test_relations_equal_to_the_teachers_cost_their_entropy_and_pull_nowhere() -> None:
    z = vectors(5).requires_grad_()
    got = relation_distillation(z, z.detach(), 0.2, 0.2)
    log_q = log_relations(z.detach(), 0.2)
    torch.testing.assert_close(got.detach(), -(log_q.exp() * log_q).sum(dim=-1).mean(dim=-1), rtol=1e-12, atol=0)
    got.sum().backward()
    assert z.grad.abs().max() < 1e-12


def test_two_views_of_one_image_have_nothing_to_learn() -> None:
    z, labels = vectors(1), torch.tensor([4, 4])
    assert not asymmetric_contrast(z, labels, labels == 4, 0.5).any()
    assert not relation_distillation(z, vectors(1, seed=1), 0.2, 0.01).any()


def test_rotations_change_nothing() -> None:
    z, teacher, labels = vectors(7), vectors(7, seed=1), torch.tensor(LABELS * 2)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).Q
    rows = anchors(LABELS * 2, {0, 5})
    torch.testing.assert_close(asymmetric_contrast(z @ turn, labels, rows, 0.5), asymmetric_contrast(z, labels, rows, 0.5))
    turned = relation_distillation(z @ turn, teacher @ turn, 0.2, 0.01)
    torch.testing.assert_close(turned, relation_distillation(z, teacher, 0.2, 0.01))


def test_relations_are_taken_in_full_precision() -> None:
    z = vectors(7).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = log_relations(z, 0.01)
    assert torch.equal(within, log_relations(z, 0.01))


# Steps.


def stream(epochs: int = 1) -> Stream:
    return split(toy_data(6, 60), 0, tasks=3, batch=10, epochs=epochs)


def run(method: str, until: int = FIRST_TASK + 3, memory: int = 80, taps: int | None = None, epochs: int = 1) -> Engine:
    engine = toy_engine(method, memory=memory, taps=taps)
    feed(engine, stream(epochs), until=until)
    return engine


@pytest.mark.parametrize("taps", [1, 4])
def test_table_in_the_second_task(taps: int) -> None:
    """Both rows by loops: anchors are the current task's classes, from stream and memory; the teacher is that of the task's end."""
    engine = toy_engine("co2l(temperature=0.4, base_temperature=0.1, distillation=0.7)", memory=80, taps=taps)
    feed(engine, stream(), until=FIRST_TASK)
    then, old = frozen_copy(engine.net), set(engine.progress.seen)
    feed(engine, stream(), until=FIRST_TASK + 3)
    batch, out = next_batch(engine, stream())
    current = set(engine.progress.current)
    from_memory = set(batch.labels[10:74].tolist())
    assert from_memory & old
    assert from_memory & current
    assert not old & current
    table = engine.chain.losses(out, batch)
    assert table.keys() == {"ce/contrast", "kd/relations"}
    z, teacher = projected(engine.net, out.features), projected(then, then(batch.x).features)
    labels = batch.labels.tolist()
    for layer in range(taps):
        mine, theirs = z[layer].tolist(), teacher[layer].tolist()
        assert table["ce/contrast"][layer].item() == pytest.approx(contrast_loop(mine, labels, current, 0.4, 0.1), rel=1e-4)
        assert table["kd/relations"][layer].item() == pytest.approx(0.7 * relation_loop(mine, theirs, 0.2, 0.01), rel=1e-4)


def test_projector() -> None:
    """Unit vectors of Linear(D, D), ReLU, Linear(D, 128), one for each layer."""
    engine = toy_engine("co2l()", taps=4)
    features = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    hidden, last = engine.net.extras[HIDDEN], engine.net.projector
    for layer, got in enumerate(projected(engine.net, features)):
        inside = torch.relu(features[layer] @ hidden.weight[layer] + hidden.bias[layer])
        expected = inside @ last.weight[layer] + last.bias[layer]
        torch.testing.assert_close(got, expected / expected.norm(dim=-1, keepdim=True))


def test_a_step_is_two_augmented_views_in_one_forward() -> None:
    """2 (10 + 64) = 148 images forward and backward, and 148 through the teacher."""
    engine = run("co2l()")
    batch, out = next_batch(engine, stream())
    block = batch.blocks["all"]
    assert (block.images, block.views, block.from_stream, block.raw_views) == (74, 2, 10, ())
    assert np.array_equal(batch.labels[:74], batch.labels[74:])
    assert not torch.equal(batch.x[:74], batch.x[74:])
    torch.testing.assert_close(out.features, engine.net(batch.x).features)
    [outcome] = feed(engine, stream(), until=engine.progress.step + 1)
    assert (outcome.images, outcome.forward, outcome.backward) == (148, 296, 148)


def test_the_first_task_has_no_teacher_and_its_first_step_no_replay() -> None:
    engine = toy_engine("co2l()", memory=80)
    outcomes = feed(engine, stream(), until=FIRST_TASK)
    assert [outcome.images for outcome in outcomes[:3]] == [20, 40, 60]
    assert all("kd/relations" not in outcome.table for outcome in outcomes)
    [after] = feed(engine, stream(), until=FIRST_TASK + 1)
    assert "kd/relations" in after.table


def test_memory_and_draws_are_those_of_experience_replay() -> None:
    one, two = run("co2l()"), run("er()")
    assert torch.equal(one.memories.replay.images, two.memories.replay.images)
    mine, theirs = (next_batch(engine, stream())[0] for engine in (one, two))
    assert np.array_equal(mine.sources[:74], theirs.sources)


def test_the_teacher_stays_until_the_next_task_ends() -> None:
    engine = run("co2l()", until=FIRST_TASK)
    teacher = engine.method.teacher.copy
    before = dict(flatten(teacher.state_dict()))
    feed(engine, stream(), until=2 * FIRST_TASK - 1)
    assert engine.method.teacher.copy is teacher
    assert_same(dict(flatten(teacher.state_dict())), before, "the teacher within a task")
    feed(engine, stream(), until=2 * FIRST_TASK)
    assert_same(engine.method.teacher.copy.state_dict(), engine.net.state_dict(), "the teacher at the task's end")


def test_the_teacher_may_normalise_by_the_batch() -> None:
    """As a net in training mode does."""
    engine = run("co2l(teacher_mode='train')")
    batch, _ = next_batch(engine, stream())
    copy = frozen_copy(engine.method.teacher.copy).train()
    torch.testing.assert_close(batch.targets["co2l"], projected(copy, copy(batch.x).features))
    copy.eval()
    quiet = projected(copy, copy(batch.x).features)
    assert not torch.allclose(batch.targets["co2l"], quiet, atol=1e-3)


def test_later_epochs_train_and_store_nothing() -> None:
    engine = run("co2l()", until=2 * FIRST_TASK, epochs=2)
    assert engine.memories.replay.offered == 120
    assert engine.method.teacher
    assert set(engine.progress.current) == set(engine.progress.seen)
    outcomes = feed(engine, stream(2), until=2 * FIRST_TASK + 2)
    assert all({"ce/contrast", "kd/relations"} <= outcome.table.keys() for outcome in outcomes)


def test_without_task_marks_every_class_is_an_anchor_and_the_teacher_is_renewed_now_and_then() -> None:
    plain = stream()
    unmarked = dataclasses.replace(plain, task_of_step=np.full(len(plain), NO_TASK))
    engine = toy_engine("co2l(every=5)", memory=80)
    outcomes = feed(engine, unmarked, until=FIRST_TASK + 2)
    assert [step for step, outcome in enumerate(outcomes) if "kd/relations" in outcome.table] == list(range(5, FIRST_TASK + 2))
    batch, _ = next_batch(engine, unmarked)
    assert batch.current[batch.y].all()
    never = toy_engine("co2l(every=0)", memory=80)
    feed(never, unmarked, until=FIRST_TASK)
    assert not never.method.teacher


def test_only_old_images_give_no_contrast() -> None:
    engine = run("co2l()")
    labels = np.tile([engine.progress.seen[0]] * 3 + [engine.progress.seen[1]], 2)
    batch = Batch(
        torch.randn(8, 1, 8, 8), labels, np.arange(8), {"all": Block(0, 4, 2, 0, ())}, engine.progress, 6, seed=0
    )  # fmt: skip
    row = engine.chain.losses(engine.net(batch.x), batch)["ce/contrast"]
    assert row.tolist() == [0.0]
    gradients = torch.autograd.grad(row.sum(), list(engine.net.backbone.parameters()), allow_unused=True)
    assert not any(gradient is not None and gradient.any() for gradient in gradients)


def test_heads_learn_only_if_asked_to_and_move_nothing_else() -> None:
    plain, headed = run("co2l()"), run("co2l(train_head=True)")
    for name, parameter in plain.net.named_parameters():
        assert torch.equal(parameter, headed.net.get_parameter(name)) != name.startswith("classifier."), name
    batch, out = next_batch(headed, stream())
    terms = -F.log_softmax(out.logits[0], dim=-1)[torch.arange(len(batch)), batch.y]
    torch.testing.assert_close(headed.chain.losses(out, batch)["ce/head"][0], terms.mean())


# Inference.


def predictions(engine: Engine) -> list[int]:
    [(_, out)] = engine.ready_to_predict().sweep(toy_data(6, 60).test_x)
    scores, columns = seen_scores(engine.chain, out, engine.progress, engine.chain.rule)
    return columns[scores.argmax(dim=1)].tolist()


@pytest.mark.parametrize("classes", [2, 6])
def test_the_probe_minimises_balanced_cross_entropy(classes: int) -> None:
    """At its weights, the gradient of C Σ_i w_i CE_i + |W|² / 2 is 0, with w_i = M / (classes · images of i's class)."""
    engine = run("co2l(probe_c=0.5)", until=FIRST_TASK if classes == 2 else None)
    engine.ready_to_predict()
    probe, memory = engine.method.probe, engine.memories.replay
    labels = torch.from_numpy(memory.labels[: len(memory)])
    counts = torch.bincount(labels, minlength=6)
    held = counts > 0
    assert int(held.sum()) == classes
    [(_, out)] = engine.net.sweep(memory.images[: len(memory)])
    weight, bias = (part[0].double().clone().requires_grad_() for part in (probe.weight, probe.bias))
    logits = (out.features[0].double() @ weight + bias)[:, held]
    of_each = F.cross_entropy(logits, torch.cumsum(held, 0)[labels] - 1, reduction="none")
    balance = len(labels) / (classes * counts[labels])
    differences = weight if classes > 2 else weight[:, held][:, 1:] - weight[:, held][:, :1]
    objective = 0.5 * (balance * of_each).sum() + differences.square().sum() / 2
    gradient, of_bias = torch.autograd.grad(objective, [weight, bias])
    last = gradient if classes > 2 else gradient[:, held][:, 1:]
    assert last.abs().max() < 1e-2 * len(labels) ** 0.5
    assert of_bias[:, held].abs().max() < 1e-2 * len(labels) ** 0.5
    nowhere = F.cross_entropy(torch.zeros_like(logits), torch.cumsum(held, 0)[labels] - 1, reduction="none")
    assert objective < 0.5 * (balance * nowhere).sum()


def test_balance_of_the_probe() -> None:
    """On features that tell nothing, a class with one image is as likely as one with many."""
    engine, data = toy_engine("co2l()"), toy_data()
    same = data.train_x[:1].expand(12, -1, -1, -1)
    probe = LinearProbe(engine.net, same, np.array([3] * 11 + [1]), (3, 1), 1.0)
    [(_, out)] = engine.net.sweep(same[:1])
    chances = probe(out.features)[0, 0].softmax(dim=-1)
    assert chances[[1, 3]].tolist() == pytest.approx([0.5, 0.5], abs=1e-3)
    assert not chances[[0, 2, 4, 5]].any()


def test_the_probe_is_fitted_to_clean_features_at_every_tap_and_leaves_the_net_alone() -> None:
    engine = run("co2l()", taps=4)
    before = dict(flatten(engine.net.state_dict()))
    engine.ready_to_predict()
    assert_same(dict(flatten(engine.net.state_dict())), before, "the net")
    data = toy_data(6, 60)
    result = evaluate(engine, data.test_x, data.test_y, np.zeros(len(data.test_y), np.int64))
    assert set(result.accuracy) == {"probe_last", "probe_mean", "probe_1", "probe_2", "probe_3", "probe_4"}
    memory = engine.memories.replay
    [(_, out)] = engine.net.sweep(memory.images[: len(memory)])
    guesses = engine.chain.rules(out)["probe"].argmax(dim=-1).numpy()
    assert ((guesses == memory.labels[: len(memory)]).mean(axis=1) > 0.8).all()


def test_a_class_without_images_is_never_predicted() -> None:
    engine = run("co2l()")
    memory, lost, kept = engine.memories.replay, engine.progress.seen[0], engine.progress.seen[1]
    slots = memory.slots_of(lost)
    memory.put(slots, memory[slots], np.arange(len(slots)), np.full(len(slots), kept), 0, {})
    assert lost not in predictions(engine)


@pytest.mark.parametrize("memory", [0, 1])
def test_little_memory(memory: int) -> None:
    """Without any image the first class met is as good as another; with images of one class it is that one."""
    engine = run("co2l()", memory=memory)
    expected = engine.memories.replay.labels[0] if memory else engine.progress.seen[0]
    assert set(predictions(engine)) == {expected}


def test_other_inference() -> None:
    data = toy_data(6, 60)
    tasks = np.zeros(len(data.test_y), np.int64)
    for options, families in (("inference='ncm'", {"ncm"}), ("inference='linear', train_head=True", {"linear"})):
        engine = run(f"co2l({options})")
        rules = evaluate(engine, data.test_x, data.test_y, tasks).accuracy
        assert {rule.rsplit("_", 1)[0] for rule in rules} == families
        assert engine.chain.rule in rules


def test_defaults_are_the_programs() -> None:
    method = Co2L()
    assert (method.temperature, method.base_temperature, method.distillation) == (0.5, 0.07, 1.0)
    assert (method.relation_temperature, method.teacher_temperature, method.n_recall) == (0.2, 0.01, 64)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 0.0}, "co2l: temperature must be above 0"),
        ({"base_temperature": -1.0}, "co2l: base_temperature must be above 0"),
        ({"probe_c": 0.0}, "probe_c"),
        ({"distillation": -1.0}, "distillation"),
        ({"inference": "linear"}, "train_head=True"),
        ({"n_recall": -1}, "n_recall"),
    ],
)
def test_bad_options_are_told(options: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Co2L(**options)


# Under GRACE.


def test_grace_weighs_the_contrast_and_leaves_the_relations() -> None:
    engine = run("grace(co2l(train_head=True))", taps=4)
    batch, out = next_batch(engine, stream())
    inner, table = engine.method.inner.chain.losses(out, batch), engine.chain.losses(out, batch)
    alpha = table["log/alpha"]
    assert (alpha != 1).any()
    for row in ("ce/contrast", "ce/head"):
        torch.testing.assert_close(table[row], alpha * inner[row])
    assert torch.equal(table["kd/relations"], inner["kd/relations"])
