"""BiC against numbers that its authors' program computed from given logits; fields `_kl` and `_nopenalty` are a second program's.

The images are the logits themselves: a net without layers shows the student's half of an image, its teacher the other half.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor

from gracecl.core import Batch, Block, LossTable, Progress, Taps, total
from gracecl.engine.engine import Engine
from gracecl.functional.losses import entropy
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.bic import BiC
from gracecl.nets.correction import Correction
from gracecl.nets.tapped import Backbone, TappedNet

GOLDEN = load("bic")
CLASSES = GOLDEN["in_z"].shape[1]
PER_TASK, TASK = int(GOLDEN["in_classes_per_task"]), int(GOLDEN["in_t"])
N_VALIDATION = len(GOLDEN["in_val_y"])
SHAPE = (2 * CLASSES, 1, 1)
VALUES, GRADIENTS, FITTED = ({"rtol": tol, "atol": tol} for tol in (1e-9, 1e-8, 1e-6))


class Flat(Backbone):
    """Features are the image's own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.width = 1, 2 * CLASSES

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).unsqueeze(0)


def show(net: TappedNet, half: int) -> None:
    """Lets the heads repeat one half of an image."""
    with torch.no_grad():
        net.classifier.weight.zero_()
        net.classifier.weight[0, half * CLASSES : (half + 1) * CLASSES] = torch.eye(CLASSES)
        net.classifier.bias.zero_()


def images(student: np.ndarray, teacher: np.ndarray | None = None) -> Tensor:
    halves = [student, np.zeros_like(student) if teacher is None else teacher]
    return torch.from_numpy(np.concatenate(halves, axis=1)).view(-1, *SHAPE)


def progress(task: int) -> Progress:
    return Progress(5, task, seen=tuple(range((task + 1) * PER_TASK)), current=tuple(range(task * PER_TASK, (task + 1) * PER_TASK)))


def learner(task: int, **options: float) -> tuple[Engine, BiC]:
    """In a task, with a teacher if it is not the first; the validation store has as many slots as the file has images."""
    net = TappedNet(Flat(), CLASSES, embedding=1).double()
    method = BiC(temperature=float(GOLDEN["in_T"]), **options)
    memories = Memories(10 * N_VALIDATION, Images(SHAPE))
    engine = Engine(method, net, memories, augmentation="none", optimizer="sgd(lr=0)")
    show(net, 1)
    for earlier in range(task):
        method.begin_task(progress(earlier))
        method.end_task(memories, progress(earlier))
    show(net, 0)
    method.begin_task(progress(task))
    memory = method.validation.memory
    assert memory.capacity == N_VALIDATION
    memory.images = images(GOLDEN["in_val_z"])[:0].new_zeros(N_VALIDATION, *SHAPE)
    return engine, method


def stage_one(task: int, labels: np.ndarray, corrected: bool) -> tuple[LossTable, Batch, Taps]:
    """A step's table on the file's logits; `corrected` gives the teacher the file's correction of its last task's classes."""
    engine, method = learner(task)
    if corrected:
        method.of_teacher = Correction(
            torch.tensor([float(GOLDEN["in_a_star"])], dtype=torch.float64),
            torch.tensor([float(GOLDEN["in_b_star"])], dtype=torch.float64),
            method.marked(progress(task - 1).current),
        )
    n = len(labels)
    x = images(GOLDEN["in_z"], GOLDEN["in_z_teacher"])
    batch = Batch(x, labels, np.arange(n), {"all": Block(0, n, 1, n, ())}, progress(task), CLASSES, seed=0)
    engine.update.prepare(batch)
    out = engine.update.forward(batch)
    out.logits.retain_grad()
    return method.losses(out, batch), batch, out


def test_corrected_teacher() -> None:
    _, batch, _ = stage_one(TASK, GOLDEN["in_y"], corrected=True)
    old = TASK * PER_TASK
    np.testing.assert_allclose(batch.targets["bic"][0, :, :old].numpy(), GOLDEN["out_z_teacher_corrected"], **VALUES)


def test_step() -> None:
    table, batch, out = stage_one(TASK, GOLDEN["in_y"], corrected=True)
    weight = float(GOLDEN["out_lambda"])
    np.testing.assert_allclose(table["ce/all"].item(), (1 - weight) * GOLDEN["out_L_ce"], **VALUES)
    np.testing.assert_allclose(table["kd/old"].item(), weight * GOLDEN["out_L_kd"], **VALUES)
    loss = total(table)
    np.testing.assert_allclose(loss.item(), GOLDEN["out_loss"], **VALUES)
    loss.backward()
    np.testing.assert_allclose(out.logits.grad[0].numpy(), GOLDEN["out_dloss_dz"], **GRADIENTS)
    old = torch.arange(CLASSES) < TASK * PER_TASK
    of_teacher = entropy(batch.targets["bic"] / float(GOLDEN["in_T"]), old).item()
    np.testing.assert_allclose(table["kd/old"].item() / weight - of_teacher, GOLDEN["out_L_kd_kl"], **VALUES)
    np.testing.assert_allclose(loss.item() - weight * of_teacher, GOLDEN["out_loss_kl"], **VALUES)


def test_second_task_has_a_teacher_without_correction() -> None:
    table, _, _ = stage_one(1, GOLDEN["in_y_task1"], corrected=False)
    weight = float(GOLDEN["out_lambda_task1"])
    np.testing.assert_allclose(table["kd/old"].item(), weight * GOLDEN["out_L_kd_task1"], **VALUES)
    np.testing.assert_allclose(total(table).item(), GOLDEN["out_loss_task1"], **VALUES)


def test_first_task() -> None:
    table, _, _ = stage_one(0, GOLDEN["in_y_task0"], corrected=False)
    assert table.keys() == {"ce/all"}
    np.testing.assert_allclose(total(table).item(), GOLDEN["out_loss_task0"], **VALUES)


def stage_two(**options: float) -> tuple[BiC, Tensor]:
    """The end of the task, with the file's validation images; also what the net says of them."""
    engine, method = learner(TASK, **options)
    memory, labels = method.validation.memory, GOLDEN["in_val_y"]
    memory.add(np.random.default_rng(0), images(GOLDEN["in_val_z"]), labels)
    method.end_task(engine.memories, progress(TASK))
    [(_, out)] = engine.net.sweep(memory.images)
    return method, out.logits


def objective(correction: Correction, logits: Tensor, method: BiC, penalty: float = 0.05) -> Tensor:
    return correction.objective(logits, torch.from_numpy(GOLDEN["in_val_y"]), method.marked(progress(TASK).seen), penalty)


def test_fit() -> None:
    method, logits = stage_two()
    found = method.correction
    np.testing.assert_allclose([found.scale.item(), found.shift.item()], [GOLDEN["out_fit_a"], GOLDEN["out_fit_b"]], **FITTED)
    assert found.classes.nonzero().flatten().tolist() == list(progress(TASK).current)
    nothing = dataclasses.replace(found, scale=torch.ones_like(found.scale), shift=torch.zeros_like(found.shift))
    np.testing.assert_allclose(objective(nothing, logits, method).item(), GOLDEN["out_val_obj_identity"], **VALUES)
    np.testing.assert_allclose(objective(found, logits, method).item(), GOLDEN["out_val_obj_fit"], **FITTED)
    np.testing.assert_allclose(objective(found, logits, method, 0.0).item(), GOLDEN["out_val_ce_fit"], **FITTED)


def test_predictions() -> None:
    method, logits = stage_two()
    scores = method.rules(Taps(logits, logits, torch.nn.Identity()))["linear"][0]
    np.testing.assert_allclose(scores.numpy(), GOLDEN["out_val_z_corrected"], **FITTED)
    np.testing.assert_array_equal(scores.argmax(dim=1).numpy(), GOLDEN["out_val_pred"])


def test_fit_without_penalty() -> None:
    method, _ = stage_two(shift_penalty=0.0)
    expected = [GOLDEN["out_fit_a_nopenalty"], GOLDEN["out_fit_b_nopenalty"]]
    np.testing.assert_allclose([method.correction.scale.item(), method.correction.shift.item()], expected, **FITTED)


def test_the_program_s_gradient_descent_follows_the_same_objective() -> None:
    method, logits = stage_two()
    scale, shift = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
    sgd = torch.optim.SGD([scale, shift], lr=0.1, momentum=0.9)
    correction, trace = Correction(scale, shift, method.correction.classes), []
    wanted = GOLDEN["out_sgd_trace"]
    for step in range(1, int(wanted[-1, 0]) + 1):
        sgd.zero_grad()
        objective(correction, logits, method).sum().backward()
        sgd.step()
        if step in wanted[:, 0]:
            trace.append([step, scale.item(), shift.item()])
    np.testing.assert_allclose(trace, wanted, **GRADIENTS)


def test_no_field_is_left_out() -> None:
    """What the tests above compare with; a file with further fields would need further tests."""
    covered = "z_teacher_corrected L_ce L_kd lambda loss dloss_dz L_kd_kl loss_kl L_kd_task1 lambda_task1 loss_task1 loss_task0 "
    covered += (
        "val_obj_identity fit_a fit_b val_obj_fit val_ce_fit val_z_corrected val_pred fit_a_nopenalty fit_b_nopenalty sgd_trace"
    )
    assert {name for name in GOLDEN if name.startswith("out_")} == {f"out_{name}" for name in covered.split()}


@pytest.mark.parametrize(("task", "field"), [(TASK, "out_lambda"), (1, "out_lambda_task1")])
def test_weight(task: int, field: str) -> None:
    """λ, out of the library's two rows: with logits and teacher alike only their weights differ from task to task."""
    table, batch, out = stage_one(task, GOLDEN["in_y" if task == TASK else "in_y_task1"], corrected=False)
    on_labels = torch.nn.functional.cross_entropy(out.logits[0, :, : (task + 1) * PER_TASK], batch.y).item()
    np.testing.assert_allclose(1 - table["ce/all"].item() / on_labels, GOLDEN[field], **VALUES)
