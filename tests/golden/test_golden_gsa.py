"""GSA against numbers that its authors' program computed: the blocks' sizes, sums, weights, losses and gradients of every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from small import load
from torch import Tensor

from gracecl import nets
from gracecl.core import Batch, Block, Planning, Progress, StreamBatch, Taps, total
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.gsa import GSA

GOLDEN = load("gsa")
PER_TASK, N, CURRENT, _ = GOLDEN["cfg"].tolist()
STEPS = [str(step) for step in GOLDEN["steps"]]
TASK = {step: int(step[1 : step.index("b")]) for step in STEPS}
CLASSES = PER_TASK * (1 + max(TASK.values()))
SHAPE = (1, 1, 1)


def attached() -> tuple[GSA, Memories]:
    method, memories = GSA(n_current=CURRENT), Memories(1000, Images(SHAPE))
    method.attach(nets.build("mlp(width=2, depth=1)", Images(SHAPE, (0.0,), (1.0,)), CLASSES, taps=1), memories)
    return method, memories


def stored(step: str) -> tuple[Tensor, Batch, int]:
    """The step's logits, padded to all classes, as one tensor; its batch; the rows of the first block.

    The program's softmax spans all classes of the task from its first batch on, so they count as met.
    """
    blocks = [part for part in ("new", "replay") if f"{step}/{part}_logits" in GOLDEN]
    logits = [GOLDEN[f"{step}/{part}_logits"] for part in blocks]
    labels = [GOLDEN[f"{step}/{'y_new_rows' if part == 'new' else 'replay_labels'}"] for part in blocks]
    rows = [len(some) for some in labels]
    known = PER_TASK * (TASK[step] + 1)
    z = torch.full((1, sum(rows), CLASSES), 7.0)
    z[..., :known] = torch.from_numpy(np.concatenate(logits))
    progress = Progress(STEPS.index(step), TASK[step], False, tuple(range(known)), tuple(range(known - PER_TASK, known)))
    where = {"new": Block(0, rows[0] // 2, 2, N, ())}
    if len(rows) > 1:
        where["balanced"] = Block(rows[0], rows[1] // 2, 2, 0, ())
    y = np.concatenate(labels)
    batch = Batch(torch.zeros(len(y), *SHAPE), y, np.arange(len(y)), where, progress, CLASSES, seed=0)
    return z.requires_grad_(), batch, rows[0]


def history() -> Iterator[tuple[str, GSA, Tensor, Taps, Batch, int]]:
    """Every step in turn, before its sums are kept."""
    method, _ = attached()
    for number, step in enumerate(STEPS):
        if number == 0 or TASK[STEPS[number - 1]] != TASK[step]:
            method.begin_task(Progress(number, TASK[step]))
        z, batch, first = stored(step)
        out = Taps(z, z, lambda x: x)
        yield step, method, z, out, batch, first
        method.after_step(out, batch)


def close(value: Tensor, golden: np.ndarray, tolerance: float = 1e-5, least: float = 1.0) -> None:
    found = value.detach().numpy()
    assert found.shape == golden.shape
    np.testing.assert_allclose(found, golden, rtol=0, atol=tolerance * max(least, float(np.abs(golden).max())))


def test_sums_and_weights() -> None:
    weighted = 0
    for step, method, _, out, batch, _ in history():
        if f"{step}/K" not in GOLDEN:
            continue
        known = PER_TASK * (TASK[step] + 1)
        for sums, name in zip(method.sums_with(out, batch), ("K", "P", "N"), strict=True):
            close(sums[0, :known], GOLDEN[f"{step}/{name}"])
        weights = method.weights(out, batch)[0, batch.y[batch.rows("balanced")]]
        close(weights, GOLDEN[f"{step}/row_weight"])
        weighted += bool((weights != 1).any())
    assert weighted > 0


def test_losses_and_gradients() -> None:
    for step, method, z, out, batch, first in history():
        table = method.losses(out, batch)
        close(table["ce/new"][0], GOLDEN[f"{step}/L_ce"])
        assert ("ce/balanced" in table) == (f"{step}/L_rep" in GOLDEN)
        if "ce/balanced" in table:
            close(table["ce/balanced"][0], 2 * GOLDEN[f"{step}/L_rep"])
        loss = total(table)
        close(loss, GOLDEN[f"{step}/loss"])
        loss.backward()
        assert z.grad is not None
        known = PER_TASK * (TASK[step] + 1)
        assert not z.grad[..., known:].any()
        close(z.grad[0, :first, :known], GOLDEN[f"{step}/grad_new_logits"], 5e-5, 0)
        if "ce/balanced" in table:
            close(z.grad[0, first:, :known], GOLDEN[f"{step}/grad_replay_logits"], 5e-5, 0)


@pytest.mark.parametrize("step", [step for step in STEPS if f"{step}/rate" in GOLDEN])
def test_blocks(step: str) -> None:
    """With more images in memory than are asked for; the classes are those met by the step."""
    method, memories = attached()
    task, so_far = TASK[step], STEPS[: STEPS.index(step) + 1]
    earlier = [*range(task), *([task] if task == TASK.get(so_far[max(0, len(so_far) - 2)]) else [])]
    for number in earlier:
        labels = np.arange(100) % PER_TASK + PER_TASK * number
        memories.replay.add(np.random.default_rng(0), torch.zeros(100, *SHAPE, dtype=torch.uint8), labels, number)
    seen = tuple(dict.fromkeys(int(label) for past in so_far for label in GOLDEN[f"{past}/y"]))
    current = tuple(label for label in seen if label // PER_TASK == task)
    rate, labels = float(GOLDEN[f"{step}/rate"]), GOLDEN[f"{step}/y"]
    assert len(current) / len(seen) == rate
    x = torch.zeros(len(labels), *SHAPE, dtype=torch.uint8)
    progress = Progress(len(so_far) - 1, task, False, seen, current)
    new = StreamBatch(x, labels, np.arange(len(labels)), progress=progress)
    plan = next(method.plans(new, memories, Planning(np.random.default_rng(1))))
    assert 2 * len(plan["new"]) == len(GOLDEN[f"{step}/y_new_rows"])
    assert (memories.replay.tasks[plan["new"].slots] == task).all()
    balanced = plan["balanced"]
    past = memories.replay.tasks[balanced.slots] != task
    assert past.sum() == int(GOLDEN[f"{step}/n_old_asked"])
    assert len(balanced) - past.sum() == min(int(method.n_recall * rate), len(plan["new"]))
