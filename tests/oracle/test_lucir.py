"""LUCIR against loops over its equations, through the engine's own steps, and its invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from unequal_tasks import DATA, DECAYING, FIRST, SECOND, assembled, images, second_task, teach

from gracecl.core import Taps, total
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import seen_scores
from gracecl.errors import UserError
from gracecl.functional.losses import margin_ranking
from gracecl.methods.lucir import LUCIR
from gracecl.nets.teacher import frozen_copy
from gracecl.streams.split import split
from gracecl.testing import feed, resumes_exactly, toy_data, toy_engine


def cosine(u: list[float], v: list[float]) -> float:
    return sum(a * b for a, b in zip(u, v, strict=True)) / (math.hypot(*u) * math.hypot(*v))


def slow_table(
    features: Tensor, taught: Tensor, weights: Tensor, eta: float, labels: list[int], seen: tuple[int, ...], new: tuple[int, ...]
) -> dict[str, float]:
    """One layer, image by image: features `[B, D]` of the net and of its teacher, weights `[D, C]`."""
    old = [c for c in seen if c not in new]
    ce, distance, hinge = [], [], []
    for f, f_star, y in zip(features.tolist(), taught.tolist(), labels, strict=True):
        cos = {c: cosine(f, weights[:, c].tolist()) for c in seen}
        ce.append(-eta * cos[y] + math.log(sum(math.exp(eta * cos[c]) for c in seen)))
        distance.append(1 - cosine(f, f_star))
        if y in old:
            hinge += [max(0.0, 0.5 - cos[y] + value) for value in sorted((cos[c] for c in new), reverse=True)[:2]]
    return {
        "ce/all": sum(ce) / len(ce),
        "kd/features": 5 * math.sqrt(len(old) / len(new)) * sum(distance) / len(distance),
        "margin/old": sum(hinge) / len(hinge),
    }


@pytest.mark.parametrize("taps", [1, 3])
def test_table(taps: int) -> None:
    """Two old and three new classes, one not met: sums over seen classes, λ with old over new, the two nearest of three."""
    engine = toy_engine("lucir()", memory=100, taps=taps, optimizer=DECAYING)
    teach(engine, FIRST, 0)
    engine.end_task()
    then = frozen_copy(engine.net)
    teach(engine, SECOND, 1)
    with torch.no_grad():  # so that no two layers, and neither η, are alike
        engine.net.classifier.scale += torch.arange(taps).view(-1, 1, 1) + 1.5
    batch, out = assembled(engine, [3, 0, 4, 4])
    labels = batch.labels.tolist()
    assert set(labels) == {*FIRST, *SECOND}
    assert len(labels) == 4 + 64
    table = engine.chain.losses(out, batch)
    assert table.keys() == {"ce/all", "kd/features", "margin/old"}
    head = engine.net.classifier
    for layer in range(taps):
        expected = slow_table(
            out.features[layer].detach().double(), then(batch.x).features[layer].double(), head.weight[layer].detach().double(),
            head.scale[layer].item(), labels, batch.progress.seen, SECOND,
        )  # fmt: skip
        assert {row: value[layer].item() for row, value in table.items()} == pytest.approx(expected, rel=1e-4)
        assert all(value > 1e-3 for value in expected.values())


def test_first_task_is_cross_entropy_over_the_classes_met() -> None:
    engine = toy_engine("lucir()", memory=100)
    teach(engine, FIRST, 0)
    batch, out = assembled(engine, [5, 1], task=0)
    table = engine.chain.losses(out, batch)
    assert table.keys() == {"ce/all"}
    expected = torch.nn.functional.cross_entropy(
        out.logits[0][:, list(FIRST)], torch.tensor([FIRST.index(y) for y in batch.labels])
    )
    assert table["ce/all"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_strength_is_the_root_of_old_over_new() -> None:
    """5 √t over equal tasks, once all classes of a task were met."""
    engine, stream = toy_engine("lucir()"), split(toy_data(), 0, tasks=3, batch=6)
    found = []
    for step in range(len(stream)):
        feed(engine, stream, until=step + 1)
        if stream.ends_task(step):
            found.append(engine.method.strength(engine.progress))
    assert found == pytest.approx([0, 5, 5 * math.sqrt(2)])


def test_options_weigh_their_rows() -> None:
    engine = second_task("lucir()")
    batch, out = assembled(engine, [3, 0, 4, 4])
    plain = {row: value.item() for row, value in engine.chain.losses(out, batch).items()}
    engine.method.less_forget, engine.method.margin_weight = 2.0, 3.0
    other = {row: value.item() for row, value in engine.chain.losses(out, batch).items()}
    assert other["kd/features"] == pytest.approx(0.4 * plain["kd/features"], rel=1e-6)
    assert other["margin/old"] == pytest.approx(3 * plain["margin/old"], rel=1e-6)
    assert other["ce/all"] == plain["ce/all"]


def test_without_its_terms_it_is_plain_cross_entropy() -> None:
    engine = second_task("lucir(less_forget=0, margin_weight=0, imprint='off')")
    batch, out = assembled(engine, [3, 0, 4, 4])
    table = engine.chain.losses(out, batch)
    assert torch.equal(total(table), table["ce/all"].sum())


# Less forget.


def test_directions_do_not_differ_right_after_the_teacher_was_copied() -> None:
    engine = toy_engine("lucir()", memory=100, taps=2)
    teach(engine, FIRST, 0)
    engine.end_task()
    engine.net.eval()
    batch, out = assembled(engine, [3, 0])
    row = engine.chain.losses(out, batch)["kd/features"]
    assert row.abs().max() < 1e-5
    turned = Taps(-out.features, out.logits, lambda x: x)
    most = 2 * engine.method.strength(batch.progress)
    assert engine.chain.losses(turned, batch)["kd/features"].tolist() == pytest.approx([most] * 2, rel=1e-5)


def test_teacher_is_renewed_at_each_task_s_end_and_stays_between() -> None:
    engine = toy_engine("lucir()", memory=100)
    teach(engine, FIRST, 0)
    assert not engine.method.teacher
    engine.end_task()
    then = engine.net.backbone.hidden[0].weight.detach().clone()
    teach(engine, SECOND, 1)
    assert torch.equal(engine.method.teacher.copy.backbone.hidden[0].weight, then)
    assert not torch.equal(engine.net.backbone.hidden[0].weight, then)
    engine.end_task()
    assert torch.equal(engine.method.teacher.copy.backbone.hidden[0].weight, engine.net.backbone.hidden[0].weight)


# Margin ranking.


def scores(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


RIVALS = torch.tensor([True, False, False, True, True, False])


def test_ranking_is_the_loop() -> None:
    values, y, marked = scores(), torch.tensor([1, 3, 5, 1]), torch.tensor([True, False, True, True])
    for nearest in (1, 2, 3):
        found = margin_ranking(values, y, RIVALS, nearest, 0.5, marked)
        for layer in range(2):
            terms = []
            for i in (0, 2, 3):
                row = values[layer, i].tolist()
                terms += [
                    max(0.0, 0.5 - row[y[i]] + rival) for rival in sorted((row[c] for c in (0, 3, 4)), reverse=True)[:nearest]
                ]
            assert found[layer].item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)
            assert len(terms) == 3 * nearest


def test_ranking_moves_nothing_for_images_that_do_not_count() -> None:
    values, y = scores(), torch.tensor([1, 3, 5, 1])
    margin_ranking(values, y, RIVALS, 2, 5.0, torch.tensor([True, False, True, True])).sum().backward()
    assert not values.grad[:, 1].any()
    assert values.grad[:, [0, 2, 3]].any(dim=-1).all()
    nobody = margin_ranking(values, y, RIVALS, 2, 5.0, torch.zeros(4, dtype=torch.bool))
    assert nobody.tolist() == [0, 0]
    assert not torch.autograd.grad(nobody.sum(), values)[0].any()


def test_ranking_is_nothing_where_every_image_keeps_the_margin() -> None:
    values = torch.zeros(1, 2, 6)
    values[0, 0, 1] = values[0, 1, 5] = 0.5
    y, both = torch.tensor([1, 5]), torch.ones(2, dtype=torch.bool)
    assert margin_ranking(values, y, RIVALS, 3, 0.5, both).item() == 0
    assert margin_ranking(values, y, RIVALS, 3, 0.75, both).item() == 0.25


def test_the_margin_is_on_cosines_whatever_the_scale() -> None:
    engine = second_task("lucir()")
    batch, out = assembled(engine, [3, 0, 4, 4])
    before = engine.chain.losses(out, batch)["margin/old"]
    with torch.no_grad():
        engine.net.classifier.scale *= 100
    after = engine.chain.losses(engine.update.forward(batch), batch)["margin/old"]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def test_with_one_new_class_there_is_one_rival() -> None:
    engine = toy_engine("lucir()", memory=100)
    teach(engine, FIRST, 0)
    engine.end_task()
    teach(engine, (4,), 1)
    batch, out = assembled(engine, [4, 4])
    head, hinge = engine.net.classifier, []
    for f, y in zip(out.features[0].detach().double().tolist(), batch.labels.tolist(), strict=True):
        if y != 4:
            own, rival = (cosine(f, head.weight[0, :, c].double().tolist()) for c in (y, 4))
            hinge.append(max(0.0, 0.5 - own + rival))
    assert engine.chain.losses(out, batch)["margin/old"].item() == pytest.approx(sum(hinge) / len(hinge), rel=1e-4)


def test_current_images_in_memory_count_as_new() -> None:
    """An image of a new class gets no margin, whether it came with the stream or from memory."""
    engine = second_task("lucir(n_recall=0)")
    batch, out = assembled(engine, [3, 0, 4, 4])
    assert engine.chain.losses(out, batch)["margin/old"].item() == 0
    engine = second_task("lucir()")
    batch, out = assembled(engine, [3, 0, 4, 4])
    from_memory = batch.labels[4:]
    assert set(from_memory.tolist()) == {*FIRST, *SECOND}
    out.features.retain_grad()
    engine.chain.losses(out, batch)["margin/old"].sum().backward()
    is_old = np.isin(batch.labels, FIRST)
    moved = out.features.grad[0].any(dim=1).numpy()
    assert moved[is_old].any()
    assert not moved[~is_old].any()


# Rows.


@pytest.mark.parametrize("optimizer", [DECAYING, "adam(lr=0.01, weight_decay=0.01)", "adamw(lr=0.01)"])
@pytest.mark.parametrize("taps", [1, 2])
def test_old_rows_and_those_of_classes_not_met_stay_to_the_bit(optimizer: str, taps: int) -> None:
    engine = toy_engine("lucir()", memory=100, taps=taps, optimizer=optimizer)
    head = engine.net.classifier
    start = head.weight.detach().clone()
    teach(engine, FIRST, 0)
    assert torch.equal(head.weight[..., [0, 2, 3, 4]], start[..., [0, 2, 3, 4]])
    assert not (head.weight[..., FIRST] == start[..., FIRST]).any()
    engine.end_task()
    before, eta, body = (
        head.weight.detach().clone(),
        head.scale.detach().clone(),
        engine.net.backbone.hidden[0].weight.detach().clone(),
    )
    teach(engine, SECOND, 1, steps=1)
    new = head.weight[..., SECOND].detach().clone()
    teach(engine, SECOND, 1, steps=3)
    assert torch.equal(head.weight[..., [*FIRST, 2]], before[..., [*FIRST, 2]])
    assert not (head.weight[..., SECOND] == new).any()
    assert (head.scale != eta).all()
    assert not torch.equal(engine.net.backbone.hidden[0].weight, body)


def mean_directions(engine: Engine, x: Tensor) -> Tensor:
    """`[L, D]` by loops: the unit vector along the mean of the images' unit features, in evaluation mode."""
    twin = frozen_copy(engine.net)
    found = []
    for layer in twin(twin.inputs.normalise(x)).features.double():
        units = [[value / math.hypot(*f) for value in f] for f in layer.tolist()]
        mean = [sum(column) / len(units) for column in zip(*units, strict=True)]
        found.append([value / math.hypot(*mean) for value in mean])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("taps", [1, 3])
def test_rows_are_imprinted_when_a_class_comes_first(taps: int) -> None:
    """From the batch's images as they are, before the step; as long as old rows are on average."""
    engine = toy_engine("lucir()", memory=100, taps=taps, optimizer=DECAYING)
    teach(engine, FIRST, 0)
    engine.end_task()
    head = engine.net.classifier
    with torch.no_grad():
        head.weight[..., FIRST[0]] *= 3  # so that the mean length is neither one's
    x, y = images([3, 3, 0, 3], seed=77)
    directions = {c: mean_directions(engine, x[torch.from_numpy(y == c)]) for c in (0, 3)}
    start = head.weight.detach().clone()
    assembled(engine, [3, 3, 0, 3])
    for layer in range(taps):
        length = sum(start[layer, :, c].norm().item() for c in FIRST) / 2
        for c in (0, 3):
            expected = length * directions[c][layer]
            torch.testing.assert_close(head.weight[layer, :, c].double(), expected, rtol=1e-4, atol=1e-6)
    others = [1, 2, 4, 5]
    assert torch.equal(head.weight[..., others], start[..., others])


def note_imprints(engine: Engine) -> list[tuple[int, set[int]]]:
    """A list that will hold the step and the classes of every imprint."""
    found: list[tuple[int, set[int]]] = []
    head = engine.net.classifier
    imprint = head.imprint

    def noted(directions: Tensor, like: Tensor) -> None:
        found.append((engine.progress.step, set(torch.nonzero(directions[0].any(dim=-1)).flatten().tolist())))
        imprint(directions, like)

    head.imprint = noted
    return found


def test_rows_are_imprinted_once() -> None:
    """Not in the first task, not in later batches or iterations on the same one; a class that comes back keeps its row."""
    engine = toy_engine("lucir(mem_iters=2)", memory=100, optimizer=DECAYING)
    imprints = note_imprints(engine)
    teach(engine, FIRST, 0)
    teach(engine, (3, 0), 1)
    teach(engine, (3, 4), 1)
    teach(engine, (5, 2), 2)
    assert imprints == [(4, {0, 3}), (8, {4}), (12, {2})]


def test_without_imprinting_rows_start_random() -> None:
    engine = toy_engine("lucir(imprint='off')", memory=100)
    teach(engine, FIRST, 0)
    start = engine.net.classifier.weight.detach().clone()
    assembled(engine, [3, 0, 4])
    assert torch.equal(engine.net.classifier.weight, start)


def test_a_class_that_comes_back_is_new_again() -> None:
    engine = toy_engine("lucir()", memory=100, optimizer=DECAYING)
    teach(engine, FIRST, 0)
    engine.end_task()
    before = engine.net.classifier.weight.detach().clone()
    outcomes = teach(engine, FIRST, 1)  # nothing is old
    assert outcomes[-1].table["kd/features"].item() == outcomes[-1].table["margin/old"].item() == 0
    assert not (engine.net.classifier.weight[..., FIRST] == before[..., FIRST]).any()
    teach(engine, (5, 3), 2)
    assert engine.progress.old == (1,)


# The net.


def test_head_and_features() -> None:
    engine = toy_engine("lucir(scale=10)", taps=2)
    assert engine.net.classifier.scale.tolist() == [[[10.0]], [[10.0]]]
    assert toy_engine("lucir()").net.classifier.scale.tolist() == [[[1.0]]]
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (engine.net(x).features < 0).flatten(1).any(dim=1).all()
    assert (engine.net(x).logits.abs() <= 10 + 1e-5).all()
    assert (toy_engine("lucir(last_relu=True)").net(x).features >= 0).all()


def test_predictions_are_the_nearest_row_among_seen_classes() -> None:
    engine = second_task("lucir()")
    [(_, out)] = engine.ready_to_predict().sweep(DATA.test_x)
    picked, columns = seen_scores(engine.chain, out, engine.progress, engine.chain.rule)
    head = engine.net.classifier
    for f, found in zip(out.features[0].double().tolist(), columns[picked.argmax(dim=1)].tolist(), strict=True):
        assert found == max(engine.progress.seen, key=lambda c: cosine(f, head.weight[0, :, c].double().tolist()))


# Steps.


def test_a_step_is_one_forward_over_stream_and_memory() -> None:
    engine = second_task("lucir()")
    batch, _ = assembled(engine, [3, 0, 4, 4])
    assert list(batch.blocks) == ["all"]
    assert batch.plan.forwards is None
    assert (batch.blocks["all"].from_stream, batch.blocks["all"].views) == (4, 1)


def test_cost_of_a_step() -> None:
    """74 forward and back and 74 by the teacher; ten more to imprint when a batch brings new classes."""
    engine = toy_engine("lucir()", memory=100)
    first = teach(engine, FIRST, 0, steps=10)
    second = teach(engine, SECOND, 1, steps=2)
    assert [(found.images, found.forward, found.backward) for found in (first[-1], *second)] == [
        (74, 74, 74), (74, 158, 74), (74, 148, 74),
    ]  # fmt: skip


def test_later_epochs_neither_imprint_nor_store_again() -> None:
    engine, stream = toy_engine("lucir()", memory=200), split(toy_data(), 0, tasks=3, batch=6, epochs=3)
    imprints = note_imprints(engine)
    outcomes = feed(engine, stream)
    assert len(outcomes) == 3 * 9
    assert engine.memories.replay.offered == len(toy_data().train_y)
    assert sorted(label for _, labels in imprints for label in labels) == [2, 3, 4, 5]
    assert all(stream.fresh[step] for step, _ in imprints)


@pytest.mark.parametrize("expression", ["lucir(mem_iters=2)", "grace(lucir(imprint='off', n_recall=3))", "ema(lucir())"])
def test_resumes_exactly(expression: str) -> None:
    resumes_exactly(expression, stops=[5, 6, 7, 13])


@pytest.mark.parametrize("bad", [{"nearest": 0}, {"less_forget": -1.0}, {"margin_weight": -1.0}])
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        LUCIR(**bad)
