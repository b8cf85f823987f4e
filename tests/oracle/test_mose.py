"""MOSE's step through the real engine: which images, how many, in which views, and what each term adds up to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from common import steps_of
from torch import Tensor
from torch.nn import functional as F

from gracecl import nets, rng
from gracecl.core import MEMORY_SOURCE, Batch, Block, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.data import Data, from_arrays
from gracecl.engine.engine import Engine, StepResult
from gracecl.errors import UserError
from gracecl.images.augment import AUGMENTATIONS, apply, draws
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.methods.mose import MOSE
from gracecl.testing import feed, toy_engine, toy_stream

SHAPE = (3, 2, 2)


def unscaled(shape: tuple[int, int, int]) -> Images:
    """Leaves bytes as they are, so that an image's number can be read back from a step's pixels."""
    return Images(shape, (0.0,) * 3, (1 / 255,) * 3)


class Spy(MOSE):
    """MOSE that keeps the batches it trained on."""

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.__dict__.setdefault("batches", []).append(batch)


def numbered(classes: int, per_class: int) -> Data:
    """Images that carry their number in two bytes of the left column, not the right one, so that mirrors can be told."""
    y = np.repeat(np.arange(classes), per_class)
    x = np.zeros((len(y), 2, 2, 3), np.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1], x[:, 1, 0, 2] = np.arange(len(y)) % 256, np.arange(len(y)) // 256, y
    return from_arrays(x, y, x[:classes], y[:classes])


def number(pixels: Tensor) -> np.ndarray:
    """The numbers of images that are shown as they are."""
    return (pixels[:, 0, 0, 0] + 256 * pixels[:, 1, 0, 0]).round().long().numpy()


def make_engine(
    method: Method, memory: int, classes: int, shape: tuple[int, int, int] = SHAPE, net: str = "mlp(width=6, depth=4)"
) -> Engine:
    with rng.torch_seed(0, "net"):
        tapped = nets.build(net, unscaled(shape), classes)
    return Engine(method, tapped, Memories(memory, Images(shape)))


@pytest.fixture(scope="module")
def spied() -> tuple[Engine, list[tuple[int, StepResult | None]], Data]:
    """Two tasks of ten classes, 80 images of the first and 50 of the second, b = 10, B = 64, 130 slots."""
    data = numbered(20, 8)
    engine = make_engine(Spy(), 130, 20)
    return engine, list(steps_of(engine, data, batch=10, steps=13)), data


# grace.md 1.5: how many images.


def test_image_counts_of_the_first_task(spied: tuple) -> None:
    """No update on the first batch; then 4 (10 + what is stored), up to 4 (10 + 64) = 296."""
    counts = [None if outcome is None else outcome.images for task, outcome in spied[1] if task == 0]
    assert counts == [None, 80, 120, 160, 200, 240, 280, 296]


def test_image_counts_of_later_tasks(spied: tuple) -> None:
    """First step 4 (10 + 64) = 296, then 4 (10 + what is stored of the task + 64) up to 4 (32 + 64) = 384."""
    counts = [outcome.images for task, outcome in spied[1] if task == 1]
    assert counts == [296, 336, 376, 384, 384]


def test_the_first_batch_is_stored_without_an_update() -> None:
    engine = make_engine(MOSE(), 30, 2)
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    steps = steps_of(engine, numbered(2, 15), 1, batch=10)
    assert next(steps) == (0, None)
    assert len(engine.memories.replay) == 10
    assert all(torch.equal(value, before[name]) for name, value in engine.net.state_dict().items())
    assert next(steps)[1].images == 80
    assert not all(torch.equal(value, before[name]) for name, value in engine.net.state_dict().items())


def test_without_memory_nothing_is_ever_learned() -> None:
    engine = make_engine(MOSE(), 0, 2)
    assert all(outcome is None for _, outcome in steps_of(engine, numbered(2, 15), batch=10))


# Which images.


def test_block_n_is_the_stream_batch_and_current_images_only(spied: tuple) -> None:
    engine, _, data = spied
    for batch in engine.method.batches:
        task, block = batch.progress.task, batch.blocks["new"]
        raw = batch.x[block.view(0)]
        labels = batch.labels[block.view(0)]
        np.testing.assert_array_equal(data.train_y[number(raw)], labels)
        assert set((labels // 10).tolist()) == {task}
        assert block.from_stream == 10
        assert block.images - 10 <= (64 if task == 0 else 22)
        assert len(set(number(raw).tolist())) == block.images  # the stream batch is not in memory yet, and no slot twice
        if batch.progress.first_of_task:
            assert block.images == 10


def test_block_k_is_the_first_new_images_and_past_images_only(spied: tuple) -> None:
    engine, _, data = spied
    checked = 0
    for batch in engine.method.batches:
        task = batch.progress.task
        assert ("balanced" in batch.blocks) == (task > 0)
        if task > 0:
            block, new = batch.blocks["balanced"], batch.blocks["new"]
            raw = number(batch.x[block.view(0)])
            k = block.from_stream
            expected = min(64 * len(batch.progress.current) // len(batch.progress.seen), 10)
            assert k == expected
            np.testing.assert_array_equal(raw[:k], number(batch.x[new.view(0)])[:k])
            np.testing.assert_array_equal(batch.labels[block.view(0)], data.train_y[raw])
            assert (data.train_y[raw[k:]] // 10 < task).all()
            assert len(set(raw.tolist())) == len(raw) == 64
            checked += 1
    assert checked == 5


def test_sources_name_stream_images_and_slots(spied: tuple) -> None:
    """Rows that came with the stream have their position in it, the others a slot; each view of an image the same."""
    for batch in spied[0].method.batches:
        for block in batch.blocks.values():
            first = batch.sources[block.view(0)]
            assert (first[: block.from_stream] < MEMORY_SOURCE).all()
            assert ((first[block.from_stream :] >= MEMORY_SOURCE) & (first[block.from_stream :] < MEMORY_SOURCE + 130)).all()
            for view in range(1, 4):
                np.testing.assert_array_equal(batch.sources[block.view(view)], first)
                np.testing.assert_array_equal(batch.labels[block.view(view)], batch.labels[block.view(0)])


@pytest.fixture(scope="module")
def large_memory() -> Memories:
    """100 images of each of tasks 0, 1, 2, of classes 0, 1, 2."""
    memories = Memories(300, Images((1, 1, 1)))
    for task in range(3):
        x = torch.zeros(100, 1, 1, 1, dtype=torch.uint8)
        memories.replay.add(np.random.default_rng(0), x, np.full(100, task), task)
    return memories


def planned(
    memories: Memories, new: int, seen: int, b: int = 10, task: int = 2, first: bool = False, **options: int
) -> dict[str, tuple]:
    """(from the stream, from memory) of each block, for a learner that has met so many classes."""
    progress = Progress(99, task, first, tuple(range(seen)), tuple(range(seen - new, seen)))
    incoming = StreamBatch(torch.zeros(b, 1, 1, 1, dtype=torch.uint8), np.full(b, seen - 1), np.arange(b), progress=progress)
    plan = next(MOSE(**options).plans(incoming, memories, Planning(np.random.default_rng(0))), Plan({}))
    for name, rows in plan.blocks.items():
        tasks = memories.replay.tasks[rows.slots]
        assert (tasks == task).all() if name == "new" else (tasks != task).all()
        assert rows.stream.tolist() == list(range(len(rows.stream)))
        assert rows.store == "replay"
    return {name: (len(rows.stream), len(rows.slots)) for name, rows in plan.blocks.items()}


@pytest.mark.parametrize(("t", "n_k"), [(2, 10), (3, 10), (4, 10), (5, 10), (6, 10), (7, 9), (8, 8), (9, 7), (10, 6)])
def test_block_sizes_of_split_cifar100(large_memory: Memories, t: int, n_k: int) -> None:
    assert planned(large_memory, 10, 10 * t) == {"new": (10, 22), "balanced": (n_k, 64 - n_k)}


@pytest.mark.parametrize(("t", "past"), [(2, 28), (3, 42), (4, 54), (5, 54), (50, 63), (65, 64)])
def test_block_sizes_with_two_classes_per_task(large_memory: Memories, t: int, past: int) -> None:
    """CIFAR-10 and 100-task Tiny-ImageNet: at most seven past images per seen class; late in the stream few or no new ones."""
    assert planned(large_memory, 2, 2 * t) == {"new": (10, 22), "balanced": (min(64 // t, 10), past)}


def test_block_sizes_in_other_situations(large_memory: Memories) -> None:
    assert planned(large_memory, 10, 20, first=True) == {"new": (10, 0), "balanced": (10, 54)}
    assert planned(large_memory, 10, 10, task=0) == {"new": (10, 64)}
    assert planned(large_memory, 10, 10, task=0, first=True) == {"new": (10, 0)}
    assert planned(large_memory, 10, 20, b=32) == {"new": (32, 0), "balanced": (32, 32)}
    assert planned(large_memory, 10, 20, b=40) == {"new": (40, 0), "balanced": (32, 32)}
    assert planned(large_memory, 10, 20, b=4) == {"new": (4, 28), "balanced": (4, 60)}
    assert planned(large_memory, 10, 20, task=7) == {"new": (10, 0), "balanced": (10, 54)}
    assert planned(large_memory, 1, 20, n_recall=10) == {"new": (10, 0), "balanced": (0, 10)}
    assert planned(large_memory, 2, 4, per_class=3) == {"new": (10, 22), "balanced": (10, 12)}


def test_all_qualifying_images_where_fewer_are_stored() -> None:
    memories = Memories(30, Images((1, 1, 1)))
    for task, n in enumerate((5, 0, 3)):
        memories.replay.add(np.random.default_rng(0), torch.zeros(n, 1, 1, 1, dtype=torch.uint8), np.full(n, task), task)
    assert planned(memories, 10, 30) == {"new": (10, 3), "balanced": (10, 5)}
    assert planned(Memories(30, Images((1, 1, 1))), 10, 30) == {}


# The four views.


def test_views_are_raw_mirror_tau_and_tau_of_the_mirror(spied: tuple) -> None:
    """View after view; the mirror is the raw view reversed, and tau uses draws keyed by step, block, view and image."""
    engine = spied[0]
    tau = AUGMENTATIONS["tau"]
    for batch in engine.method.batches[::7]:
        for place, block in enumerate(batch.blocks.values()):
            assert (block.views, block.raw_views) == (4, (0, 1))
            raw, mirror, second, second_mirror = (batch.x[block.view(view)] for view in range(4))
            for column in range(2):
                assert torch.equal(mirror[..., column], raw[..., 1 - column])
            sources = batch.sources[block.view(0)]
            for view, base, got in ((2, raw, second), (3, mirror, second_mirror)):
                stem = rng.key(0, "augment", batch.progress.step, 0, place, view)
                expected = apply(tau, base, rng.uniform(stem, sources, draws(tau)), unscaled(SHAPE))
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
            assert not torch.equal(second, raw)
            assert not torch.equal(second.flip(-1), second_mirror)


@pytest.mark.parametrize(("views", "kept"), [(2, (0, 3)), (1, (2,))])
def test_fewer_views_are_some_of_the_four(views: int, kept: tuple[int, ...]) -> None:
    """Two are raw, and mirrored and augmented; one is augmented. Which images and slots does not change."""
    four, fewer = (planned_blocks(f"mose(n_recall=8, views={count})") for count in (4, views))
    assert four.keys() == fewer.keys() == {"new", "balanced"}
    for name, block in fewer.items():
        assert block.views == tuple(four[name].views[view] for view in kept)
        assert np.array_equal(block.slots, four[name].slots)
        assert np.array_equal(block.stream, four[name].stream)


def planned_blocks(method: str) -> dict[str, Selection]:
    """The blocks of the fifth step, in the second task."""
    engine, stream = toy_engine(method), toy_stream(batch=6)
    feed(engine, stream, until=5)
    [plan] = [plan for plan in engine.plans(engine.meet(stream.batch(5))) if plan]
    return dict(plan.blocks)


# The terms of the loss.


def layered(layers: int = 4, n: int = 3, k: int = 2, classes: int = 6, task: int = 1, seed: int = 0) -> tuple[MOSE, Taps, Batch]:
    """A small step with random features and logits: labels of N among the current classes 3, 4, 5; double precision."""
    choice = torch.Generator().manual_seed(seed)
    net = nets.build("mlp(width=8, depth=4)", unscaled(SHAPE), classes, taps=layers).double()
    method = MOSE()
    method.attach(net, Memories(0, Images(SHAPE)))
    method.adapt.double()
    labels_n, labels_k = np.tile([3, 4, 5][:n], 4), np.tile([5, 1, 0][:k], 4)
    blocks = {"new": Block(0, n, 4, n, (0, 1))}
    if task > 0:
        blocks["balanced"] = Block(4 * n, k, 4, 1, (0, 1))
    labels = np.concatenate([labels_n, labels_k]) if task > 0 else labels_n
    features = torch.randn(layers, len(labels), 8, generator=choice, dtype=torch.float64).requires_grad_()
    logits = 2 * torch.randn(layers, len(labels), classes, generator=choice, dtype=torch.float64)
    progress = Progress(5, task, False, tuple(range(6)), (3, 4, 5))
    batch = Batch(torch.zeros(len(labels), *SHAPE), labels, np.arange(len(labels)), blocks, progress, classes, seed=0)
    return method, Taps(features, logits, net.projector), batch


def cross_entropy_by_loop(logits: Tensor, labels: np.ndarray, rows: range, classes: list[int]) -> list[float]:
    values = []
    for layer in logits.tolist():
        terms = [math.log(sum(math.exp(layer[i][c]) for c in classes)) - layer[i][labels[i]] for i in rows]
        values.append(sum(terms) / len(terms))
    return values


def test_cross_entropy_of_later_tasks() -> None:
    """2 · CE(K) over all outputs, plus CE(N) over the classes met in the current task; 4|K| and 4|N| images."""
    method, out, batch = layered()
    table = method.losses(out, batch)
    of_new = cross_entropy_by_loop(out.logits, batch.labels, range(12), [3, 4, 5])
    of_balanced = cross_entropy_by_loop(out.logits, batch.labels, range(12, 20), list(range(6)))
    assert table["ce/new"].tolist() == pytest.approx(of_new, rel=1e-9)
    assert table["ce/balanced"].tolist() == pytest.approx([2 * value for value in of_balanced], rel=1e-9)
    assert set(table) == {"sc", "ce/new", "ce/balanced", "rsd"}


def test_cross_entropy_of_the_first_task() -> None:
    """Plain, over all outputs, on block N."""
    method, out, batch = layered(task=0)
    table = method.losses(out, batch)
    assert table["ce/new"].tolist() == pytest.approx(
        cross_entropy_by_loop(out.logits, batch.labels, range(12), list(range(6))), rel=1e-9
    )
    assert set(table) == {"sc", "ce/new", "rsd"}


def test_contrast_is_over_all_images_of_the_step() -> None:
    """N and K, all views together, on the projections at temperature 0.07: against a double loop."""
    method, out, batch = layered()
    got = method.losses(out, batch)["sc"].tolist()
    for layer in range(4):
        u = F.normalize(out.embedding[layer].detach(), dim=-1)
        similarity = (u @ u.T / 0.07).tolist()
        rows, terms = range(20), []
        for a in rows:
            denominator = math.log(sum(math.exp(similarity[a][k]) for k in rows if k != a))
            positives = [p for p in rows if p != a and batch.labels[p] == batch.labels[a]]
            terms.append(-sum(similarity[a][p] - denominator for p in positives) / len(positives))
        assert got[layer] == pytest.approx(sum(terms) / 20, rel=1e-9)


def test_contrast_has_a_weight_and_can_be_left_out() -> None:
    method, out, batch = layered()
    whole = method.losses(out, batch)
    method.contrast = 0.3
    torch.testing.assert_close(method.losses(out, batch)["sc"], 0.3 * whole["sc"])
    method.contrast = 0.0
    without = method.losses(out, batch)
    assert without.keys() == whole.keys() - {"sc"}
    assert all(torch.equal(without[term], whole[term]) for term in without)


@pytest.mark.parametrize("student", [-1, 0, 2])
def test_distillation_is_zero_for_the_student_and_a_norm_for_the_others(student: int) -> None:
    """‖ n(A f_student) - n(f_i) ‖ over all images and features, and nothing for the student itself."""
    method, out, _ = layered()
    method.student = student
    method.attach(method.net, Memories(0, Images(SHAPE)))
    method.adapt.double()
    got = method.reverse_self_distillation(out.features)
    adapted = out.features[student] @ method.adapt.weight.T + method.adapt.bias
    for layer in range(4):
        squares = 0.0
        for image in range(20):
            a, b = adapted[image], out.features[layer, image]
            squares += ((a / a.norm() - b / b.norm()) ** 2).sum().item()
        expected = 0.0 if layer == student % 4 else math.sqrt(squares)
        assert got[layer].item() == pytest.approx(expected, rel=1e-9)


def test_distillation_moves_the_student_and_the_adaptation_but_no_teacher() -> None:
    method, out, _ = layered()
    method.reverse_self_distillation(out.features).sum().backward()
    assert (out.features.grad[:3] == 0).all()
    assert (out.features.grad[3] != 0).any()
    assert (method.adapt.weight.grad != 0).any()


def test_distillation_of_a_student_that_agrees_is_zero_with_a_finite_gradient() -> None:
    """A = identity and equal features: value 0, gradient 0 (a square root of a sum would give NaN)."""
    method, out, _ = layered()
    with torch.no_grad():
        method.adapt.weight.copy_(torch.eye(8))
        method.adapt.bias.zero_()
    features = F.normalize(out.features[:1].detach(), dim=-1).repeat(4, 1, 1).requires_grad_()
    value = method.reverse_self_distillation(features)
    value.sum().backward()
    assert value.abs().max() < 1e-6
    assert torch.isfinite(features.grad).all()


def test_a_single_expert_has_nobody_to_learn_from() -> None:
    method, out, batch = layered(layers=1)
    table = method.losses(out, batch)
    assert table["rsd"].tolist() == [0]
    assert all(torch.isfinite(value).all() for value in table.values())


def test_distillation_under_autocast_is_in_full_precision() -> None:
    method, out, _ = layered()
    method.adapt.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = method.reverse_self_distillation(out.features.detach().bfloat16())
    assert value.dtype == torch.float32


@pytest.mark.parametrize("student", [4, -5])
def test_a_student_that_does_not_exist_is_refused(student: int) -> None:
    with pytest.raises(UserError, match="one of the 4 experts"):
        make_engine(MOSE(student=student), 10, 2)


# Small batches.


def test_a_batch_of_one_trains() -> None:
    """One image a task: stored, then an update on 4 (1 + 2) images, all finite."""
    data = numbered(2, 1)
    engine = make_engine(MOSE(), 4, 2)
    first, second = (outcome for _, outcome in steps_of(engine, data, batch=1))
    assert first is None
    assert second.images == 12
    assert all(torch.isfinite(value).all() for value in second.table.values())
    assert all(torch.isfinite(value).all() for value in engine.net.state_dict().values())


# Inference.


def test_nearest_mean_rule_is_the_squared_distance() -> None:
    """grace.md 1.8: argmin over seen classes of ‖n(f) - mu‖², of the last expert and of the mean over experts."""
    engine = make_engine(MOSE(), 40, 4)
    data = numbered(4, 10)
    for _ in steps_of(engine, data, batch=10):
        pass
    net, memory = engine.ready_to_predict(), engine.memories.replay
    [(_, held)] = net.sweep(memory.images[: len(memory)])
    [(_, out)] = net.sweep(data.test_x)
    scores = engine.chain.rules(out)
    assert torch.equal(scores["linear"], out.logits)
    for layer in range(4):
        for label in range(4):
            mean = F.normalize(held.features[layer, memory.labels[: len(memory)] == label], dim=-1).mean(dim=0)
            mean = F.normalize(mean, dim=0)
            distance = ((F.normalize(out.features[layer], dim=-1) - mean) ** 2).sum(dim=-1)
            # n(f) is the zero vector where all of a small net's units are off; then the distance is that of the mean alone.
            alive = out.features[layer].norm(dim=-1) > 0
            torch.testing.assert_close(-scores["ncm"][layer, alive, label], distance[alive], rtol=0, atol=1e-5)


def test_without_task_marks_the_batchs_classes_stand_for_the_task() -> None:
    """N: the batch and memory images of its classes; K: some of the batch and memory images of other classes; CE(N) among N's."""
    method = Spy(n_recall=16, per_class=7)
    engine, labels = make_engine(method, memory=60, classes=6), np.tile(np.arange(6), 30)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (180, *SHAPE), dtype=np.uint8))
    groups = [[0, 1], [2, 3], [4, 5], [1, 4]]
    for step in range(12):
        mine = np.flatnonzero(np.isin(labels, groups[step // 3]))[4 * (step % 3) : 4 * (step % 3) + 4]
        outcome = engine.learn(StreamBatch(images[torch.from_numpy(mine)], labels[mine]))
        if step == 0:
            assert outcome is None
            continue
        batch, seen, current = method.batches[-1], engine.progress.seen, set(labels[mine].tolist())
        new = batch.blocks["new"]
        assert new.from_stream == 4
        assert set(batch.labels[batch.rows("new")].tolist()) == current
        held = batch.sources[new.view(0)][4:] - MEMORY_SOURCE
        if len(seen) == len(current):
            assert "balanced" not in batch.blocks
            assert method.rivals(batch) is None
            continue
        assert len(held) <= 16 // 2 - 4
        balanced = batch.blocks["balanced"]
        assert balanced.from_stream == min(16 * len(current) // len(seen), 4)
        assert not set(batch.labels[balanced.view(0)][balanced.from_stream :].tolist()) & current
        assert balanced.images == 16 if step > 5 else balanced.images <= 16
        rivals = method.rivals(batch)
        assert rivals is not None
        assert set(torch.nonzero(rivals)[:, 0].tolist()) == current
