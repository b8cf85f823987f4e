"""OCM against loops that follow its algorithm, and the invariants that follow from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from turned_loops import contrast, engine_of, mean_cross_entropy, projections_kept, run, stream, turned

from gracecl import rng
from gracecl.core import NO_TASK, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.functional.losses import info_nce, info_nce_of_pairs, info_nce_terms
from gracecl.images import augment
from gracecl.images.augment import ROTATIONS
from gracecl.inputs import Images
from gracecl.methods.ocm import OCM
from gracecl.nets import TappedNet
from gracecl.nets.tapped import BatchNorm
from gracecl.testing import TOY_INPUTS, feed, next_batch, resumes_exactly, toy_data

SMALL = "ocm(n_recall=3, scale=0.5)"
FIRST, LATER = 4, 12
"""steps in the middle of the first and of the second task: nine steps of two images each"""


@pytest.mark.parametrize("taps", [1, 4])
def test_a_step_of_the_first_task_is_the_loops(taps: int) -> None:
    """CE(A(x)) + L_new, λ = 1; memory holds images but none is used."""
    engine = run(SMALL, FIRST, taps=taps)
    assert len(engine.memories.replay)
    batch, out = next_batch(engine, stream())
    assert {name: (block.images, block.views) for name, block in batch.blocks.items()} == {"new": (2, 32), "supervised": (2, 1)}
    table = engine.chain.losses(out, batch)
    assert set(table) == {"ce/new", "sc/new"}
    (features, projected), rows = turned(out, batch, "new"), batch.rows("supervised")
    labels, starts = batch.labels[:2].tolist(), engine.method.starts(batch)
    for layer in range(taps):
        expected = contrast(features[layer], projected[layer], labels, starts[0], 1.0, new=True)
        assert table["sc/new"][layer].item() == pytest.approx(expected, rel=1e-4)
        assert table["ce/new"][layer].item() == pytest.approx(mean_cross_entropy(out.logits[layer, rows], labels), rel=1e-5)


@pytest.mark.parametrize("taps", [1, 4])
def test_a_later_step_is_the_loops(taps: int) -> None:
    """CE(A(u)) + L_mem + L_new + L_pre + MSE over the classes of earlier tasks, λ = scale."""
    engine = run(SMALL, LATER, taps=taps)
    batch, out = next_batch(engine, stream())
    assert {name: (block.images, block.views) for name, block in batch.blocks.items()} == {
        "new": (2, 32),
        "replay": (3, 32),
        "supervised": (3, 1),
    }
    table = engine.chain.losses(out, batch)
    assert set(table) == {"ce/replay", "sc/new", "sc/replay", "kd/projected", "kd/logits"}
    rows, starts = batch.rows("supervised"), engine.method.starts(batch)
    old = [c for c in engine.progress.seen if c not in engine.progress.current]
    assert len(old) == 2
    u = batch.labels[batch.blocks["replay"].view(0)].tolist()
    np.testing.assert_array_equal(batch.labels[rows], u)
    for layer in range(taps):
        for block, start in zip(("new", "replay"), starts, strict=True):
            features, projected = turned(out, batch, block)
            labels = batch.labels[batch.blocks[block].view(0)].tolist()
            expected = contrast(features[layer], projected[layer], labels, start, 0.5, new=block == "new")
            assert table[f"sc/{block}"][layer].item() == pytest.approx(expected, rel=1e-4)
        assert table["ce/replay"][layer].item() == pytest.approx(mean_cross_entropy(out.logits[layer, rows], u), rel=1e-5)
        expected = projections_kept(projected[layer, : 16 * 3], batch.targets["ocm/projected"][layer], u)
        assert table["kd/projected"][layer].item() == pytest.approx(expected, rel=1e-4)
        q, other = out.logits[layer, rows].tolist(), batch.targets["ocm/logits"][layer].tolist()
        expected = sum((q[i][c] - other[i][c]) ** 2 for i in range(3) for c in old) / (3 * len(old))
        assert table["kd/logits"][layer].item() == pytest.approx(expected, rel=1e-4)


def test_columns_of_features_are_drawn_anew_from_every_place_but_the_last() -> None:
    engine = run(SMALL, LATER)
    drawn = []
    for _ in range(6):
        batch, _ = next_batch(engine, stream())
        for repeat in range(40):
            batch.repeat = repeat
            drawn.append(engine.method.starts(batch))
        feed(engine, stream(), engine.progress.step + 1)
    new, replayed = np.array(drawn).T
    room = 12 - 3  # features and projections of the toy net
    assert set(new) == set(replayed) == set(range(room))
    assert abs(np.corrcoef(new, replayed)[0, 1]) < 0.25


# Views and forwards.


def test_every_view_is_turned_and_augmented_by_a_draw_of_its_own() -> None:
    batch, _ = next_batch(run(SMALL, LATER), stream())
    for block in (batch.blocks["new"], batch.blocks["replay"]):
        raw = batch.x[block.view(0)]
        nothing = np.empty((len(raw), 0))
        for number, view in enumerate(ROTATIONS):
            assert torch.equal(batch.x[block.view(number)], augment.apply(view, raw, nothing, TOY_INPUTS))
            assert not torch.equal(batch.x[block.view(16 + number)], batch.x[block.view(number)])
        # Turned back, two augmented views of an image still differ, as each has its own window.
        back = torch.rot90(batch.x[block.view(16 + 8)], 2, (-2, -1))
        assert not torch.allclose(back, batch.x[block.view(16)], atol=1e-3)
        assert block.raw_views == (0,)
    first, again = batch.blocks["replay"], batch.blocks["supervised"]
    assert not torch.equal(batch.x[first.view(16)], batch.x[again.view(0)])
    plain, _ = next_batch(run(SMALL, LATER, augment="none"), stream())
    block = plain.blocks["replay"]
    assert torch.equal(plain.x[block.view(0)], plain.x[plain.rows("supervised")])
    for number in range(16):
        assert torch.equal(plain.x[block.view(number)], plain.x[block.view(16 + number)])


def test_images_are_turned_before_they_are_augmented() -> None:
    """The window of an augmented view is one of the turned image, not turned itself."""
    engine = run(SMALL, LATER)
    batch, _ = next_batch(engine, stream())
    view = augment.augmentation("tau")
    for place, name in enumerate(("new", "replay")):
        block = batch.blocks[name]
        for number in range(16):
            stem = rng.key(0, "augment", batch.progress.step, 0, place, 16 + number)
            draws = rng.uniform(stem, batch.sources[block.view(0)], augment.draws(view))
            expected = augment.apply(view, batch.x[block.view(number)], draws, engine.net.inputs)
            torch.testing.assert_close(batch.x[block.view(16 + number)], expected, rtol=0, atol=1e-5)


def test_turned_views_share_a_forward_and_the_classified_images_have_their_own() -> None:
    engine = run(SMALL, LATER)
    batch, out = next_batch(engine, stream())
    end = batch.rows("replay").stop
    assert end == batch.rows("supervised").start
    torch.testing.assert_close(out.features[:, :end], engine.net(batch.x[:end]).features)
    torch.testing.assert_close(out.logits[:, end:], engine.net(batch.x[end:]).logits)
    assert batch.supervised == batch.rows("supervised")


def test_cost_is_that_of_the_algorithm() -> None:
    """With 10 new and 64 replayed images: 330 images in the first task; then 2,432, and 1,088 by the teacher."""
    engine = engine_of("ocm(recall_per_class=None)", memory=100)
    whole = stream(batch=10, per_class=60)
    outcomes = feed(engine, whole, until=13)
    assert engine.progress.task == 1
    assert (outcomes[3].forward, outcomes[3].backward) == (330, 330)
    assert (outcomes[12].forward, outcomes[12].backward) == (2432 + 1088, 2432)


def test_at_most_seven_images_per_class_met_are_replayed() -> None:
    engine, whole = engine_of("ocm()", memory=100), stream(batch=4, per_class=30)
    feed(engine, whole, 17)
    piece = whole.batch(17)
    new = engine.meet(piece)
    held = len(engine.memories.replay)
    assert held > 7 * len(engine.progress.seen) + 4
    for options, wanted in (({}, 7 * len(engine.progress.seen)), ({"n_recall": 5}, 5), ({"recall_per_class": 2}, 8)):
        for name, value in options.items():
            setattr(engine.method, name, value)
        plan = engine.plan(new)
        assert len(plan["replay"].slots) == min(wanted, held)
        engine.method.n_recall = 64
        np.testing.assert_array_equal(plan["replay"].slots, plan["supervised"].slots)
        assert len(set(plan["replay"].slots)) == len(plan["replay"].slots)
        assert len(plan["supervised"].stream) == 0


def test_replay_may_hold_images_of_the_current_task() -> None:
    engine = run("ocm()", 17, memory=100)
    batch, _ = next_batch(engine, stream())
    assert set(batch.labels[batch.rows("replay")]) & set(engine.progress.current)
    assert set(batch.labels[batch.rows("replay")]) - set(engine.progress.current)


@pytest.mark.parametrize("until", [1, 5])
def test_the_order_of_a_batch_does_not_matter(until: int) -> None:
    whole, order = stream(batch=5), np.array([3, 1, 4, 0, 2])
    piece = whole.batch(until)
    tables = []
    for rows in (np.arange(5), order):
        engine = engine_of(SMALL)
        feed(engine, whole, until)
        tables.append(
            engine.learn(
                StreamBatch(piece.x[torch.from_numpy(rows)], piece.labels[rows], task=piece.task, sources=piece.sources[rows])
            ).table
        )
    assert ("kd/logits" in tables[0]) == (piece.task > 0)
    for row, value in tables[0].items():
        torch.testing.assert_close(value, tables[1][row], rtol=1e-4, atol=1e-5)


# The teacher.


def spy_on_teacher(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    shown: list[Tensor] = []
    teacher = engine.method.teacher

    class Spy:
        def __bool__(self) -> bool:
            return bool(teacher)

        def __call__(self, x: Tensor) -> Taps:
            shown.append(x.clone())
            return teacher(x)

    monkeypatch.setattr(engine.method, "teacher", Spy())
    return shown


def test_the_teacher_sees_the_turned_images_and_another_view_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = run(SMALL, LATER)
    shown = spy_on_teacher(engine, monkeypatch)
    batch, _ = next_batch(engine, stream())
    block = batch.blocks["replay"]
    raw, another = shown
    assert torch.equal(raw, batch.x[block.start : block.start + 16 * 3])
    student = batch.x[batch.rows("supervised")]
    assert another.shape == student.shape
    assert not torch.allclose(another, student, atol=1e-3)
    view = augment.augmentation("tau")
    draws = batch.rng("the teacher's view").random((3, augment.draws(view)))
    assert torch.equal(another, augment.apply(view, batch.x[block.view(0)], draws, engine.net.inputs))
    engine = run(SMALL, LATER, augment="none")
    shown = spy_on_teacher(engine, monkeypatch)
    batch, _ = next_batch(engine, stream())
    assert torch.equal(shown[1], batch.x[batch.blocks["replay"].view(0)])


def test_the_teacher_is_the_net_at_the_end_of_the_last_task() -> None:
    engine = engine_of(SMALL)
    feed(engine, stream(), 8)
    assert not engine.method.teacher
    feed(engine, stream(), 9)  # the last step of the task, and its end
    at_end = {name: value.clone() for name, value in engine.net.state_dict().items()}
    seen = set(engine.progress.seen)
    feed(engine, stream(), 14)
    for name, value in engine.method.teacher.copy.state_dict().items():
        assert torch.equal(value, at_end[name]), name
    assert set(engine.method.teacher.classes.nonzero().flatten().tolist()) == seen
    feed(engine, stream(), 18)
    assert engine.method.teacher.classes.sum() == 4
    assert not any(parameter.requires_grad for parameter in engine.method.teacher.copy.parameters())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_teacher_mode_says_which_statistics_it_normalises_with(mode: str) -> None:
    engine = run(f"ocm(n_recall=3, teacher_mode='{mode}')", LATER)
    teacher: TappedNet = engine.method.teacher.copy
    assert teacher.training == (mode == "train")
    before = {name: value.clone() for name, value in teacher.named_buffers()}
    batch, _ = next_batch(engine, stream())
    moved = any(not torch.equal(value, before[name]) for name, value in teacher.named_buffers())
    assert moved == (mode == "train")
    images = batch.x[batch.blocks["replay"].start :][: 16 * 3]
    x = images.flatten(1)
    for layer, norm in zip(teacher.backbone.hidden, teacher.backbone.norms, strict=True):
        assert isinstance(norm, BatchNorm)
        x = layer(x)
        mean, var = (norm.running_mean, norm.running_var) if mode == "eval" else (x.mean(dim=0), x.var(dim=0, unbiased=False))
        x = torch.relu((x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias)
    torch.testing.assert_close(batch.targets["ocm/projected"], teacher.projector(x[None]), rtol=1e-4, atol=1e-5)


def test_a_teacher_equal_to_the_net_leaves_nothing_to_distil() -> None:
    """Without augmentation, both in evaluation mode."""
    engine = run(SMALL, LATER, augment="none")
    engine.method.teacher.renew()
    engine.net.eval()
    batch, out = next_batch(engine, stream())
    assert engine.chain.losses(out, batch)["kd/logits"].item() == pytest.approx(0, abs=1e-12)


def test_distillation_moves_only_the_columns_of_old_classes() -> None:
    engine = run(SMALL, LATER)
    batch, out = next_batch(engine, stream())
    [gradient] = torch.autograd.grad(engine.chain.losses(out, batch)["kd/logits"].sum(), engine.net.classifier.weight)
    moved = gradient[0].abs().sum(dim=0) > 0
    assert torch.equal(moved, engine.method.teacher.classes)
    assert engine.method.teacher.classes.sum() == 2


def test_gradients_reach_both_sides_of_every_similarity_of_the_net() -> None:
    """Nothing on the student's side is held: L_mem has the gradient of its value, by finite differences."""
    engine = run(SMALL, LATER)
    batch, _ = next_batch(engine, stream())
    engine.net.double()
    start = engine.method.starts(batch)[1]
    rows = batch.rows("replay")
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, rows.stop, 12, generator=generator, dtype=torch.float64).requires_grad_()
    logits = torch.zeros(1, rows.stop, 6, dtype=torch.float64)
    engine.method.contrasts(Taps(features, logits, engine.net.projector), batch)["sc/replay"].sum().backward()
    labels = batch.labels[batch.blocks["replay"].view(0)].tolist()

    def value(moved: Tensor) -> float:
        part = moved[0, rows].detach()
        return contrast(part, engine.net.projector(part[None])[0].detach(), labels, start, 0.5, new=False)

    for row, column in ((rows.start, 0), (rows.start + 20, start), (rows.stop - 1, 11)):
        sides = []
        for sign in (1, -1):
            moved = features.detach().clone()
            moved[0, row, column] += sign * 1e-5
            sides.append(value(moved))
        assert features.grad[0, row, column].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4, abs=1e-8)


# Values that are known.


def test_two_identical_rows() -> None:
    y = torch.tensor([0, 0])
    same = torch.zeros(1, 2, 2, dtype=torch.float64)
    assert info_nce(info_nce_terms(same, 0.07), y).item() == pytest.approx(math.log(2), abs=1e-7)
    alone = info_nce_terms(same, 0.07, exclude_self=True)
    assert info_nce_of_pairs(alone).item() == pytest.approx(0, abs=1e-7)
    assert 2 * info_nce(alone, y).item() == pytest.approx(-math.log(1e-8), abs=1e-6)


def test_projections_that_are_kept_cost_nothing() -> None:
    """Mutually orthogonal projections, one pseudo class each, equal to the teacher's."""
    engine = engine_of("ocm(n_recall=3, projection=16)", net="mlp(width=80, depth=1)", taps=1)
    feed(engine, stream(), LATER)
    batch, _ = next_batch(engine, stream())
    block = batch.blocks["replay"]
    block_rows = slice(block.start, block.start + 16)
    one = type(block)(block.start, 1, 32, 0, (0,))
    batch.blocks["replay"] = one
    projected = torch.zeros(1, one.rows.stop, 16)
    projected[0, block_rows] = 3 * torch.eye(16)
    batch.targets["ocm/projected"] = torch.eye(16)[None]
    out = Taps(torch.zeros(1, one.rows.stop, 80), torch.zeros(1, one.rows.stop, 6), lambda _: projected)
    assert engine.method.projections_kept(out, batch).item() == pytest.approx(0, abs=1e-4)


# Where it runs.


def test_the_projection_is_a_quarter_of_the_features() -> None:
    assert engine_of("ocm()").net.projector.weight.shape == (1, 12, 3)
    assert engine_of("ocm(projection=5)", taps=4).net.projector.weight.shape == (4, 12, 5)
    wide = engine_of("ocm()", net="mlp(width=512, depth=1)")
    assert wide.net.projector.weight.shape == (1, 512, 128)
    assert engine_of("ocm(projection=12)").method.starts(next_batch(engine_of("ocm(projection=12)"), stream())[0]) == (0, 0)


def test_streams_without_task_marks_renew_the_teacher_every_so_many_steps() -> None:
    data = toy_data()
    engine = engine_of("ocm(n_recall=3, every=4)")

    def learn(step: int) -> set[str]:
        rows = np.array([step, 17 - step])
        return set(engine.learn(StreamBatch(data.train_x[torch.from_numpy(rows)], data.train_y[rows], task=NO_TASK)).table)

    for step in range(4):
        assert "kd/logits" not in learn(step)
    assert engine.method.teacher
    assert engine.method.teacher.classes.sum() == len(engine.progress.seen)
    assert "kd/logits" in learn(4)
    never = engine_of("ocm(every=0)")
    never.learn(StreamBatch(data.train_x[:2], data.train_y[:2]))
    assert not never.method.teacher
    marked = run("ocm(n_recall=3, every=2)", 7)
    assert not marked.method.teacher


def test_without_memory_every_step_is_one_of_the_first_task() -> None:
    engine = run(SMALL, LATER, memory=0)
    batch, out = next_batch(engine, stream())
    assert engine.method.teacher
    assert set(engine.chain.losses(out, batch)) == {"ce/new", "sc/new"}


def test_several_epochs_store_each_image_once() -> None:
    engine = engine_of(SMALL, memory=100)
    twice = stream(epochs=2)
    feed(engine, twice)
    assert engine.memories.replay.offered == 54
    assert engine.progress.step == len(twice)


def test_resumes_exactly_with_a_teacher_in_training_mode() -> None:
    resumes_exactly("ocm(n_recall=3, teacher_mode='train')", stops=[9, 11], until=13)


def test_half_precision_keeps_the_contrast() -> None:
    tables = []
    for precision in ("fp32", "bf16"):
        recipe = Recipe(method=SMALL, net="mlp(width=12, depth=4)", memory=12, device="cpu", precision=precision)
        engine = recipe.build(Images((1, 8, 8)), 6)
        tables.append(feed(engine, stream(), 1)[0].table)
    for row in ("ce/new", "sc/new"):
        assert tables[1][row].dtype == torch.float32
        assert tables[1][row].item() == pytest.approx(tables[0][row].item(), rel=0.05)


def test_grace_weighs_the_cross_entropy_of_each_layer() -> None:
    engine = run(f"grace({SMALL})", LATER, taps=4)
    batch, out = next_batch(engine, stream())
    inner, table = engine.method.inner.chain.losses(out, batch), engine.chain.losses(out, batch)
    alpha = table["log/alpha"]
    assert (alpha != 1).any()
    torch.testing.assert_close(table["ce/replay"], alpha * inner["ce/replay"])
    for row in ("sc/new", "sc/replay", "kd/projected", "kd/logits"):
        assert torch.equal(table[row], inner[row])


def test_images_that_are_not_square_are_refused() -> None:
    recipe = Recipe(method="ocm()", net="mlp(width=12)", memory=5, device="cpu")
    with pytest.raises(UserError, match="square, not 8 × 6"):
        recipe.build(Images((1, 8, 6)), 6)


def test_defaults_are_the_programs_for_cifar100() -> None:
    method = OCM()
    assert (method.n_recall, method.recall_per_class, method.scale, method.temperature) == (64, 7, 1.0, 0.07)


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"every": -1}, {"n_recall": -1}, {"recall_per_class": 0}])
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        OCM(**bad)
    with pytest.raises(UserError, match="projection must lie between 1 and the 12 features"):
        engine_of("ocm(projection=13)")
