"""OCM against numbers that its authors' program computed: views, pseudo labels, similarities, the losses of both kinds of step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import Batch, Block, Progress, Taps, total
from gracecl.functional.losses import INFO_NCE_EPSILON, products, split_similarity, unit
from gracecl.images import augment
from gracecl.images.augment import ROTATIONS
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.ocm import OCM
from gracecl.methods.rotation_contrast import TURNED, pseudo_labels
from gracecl.nets.mlp import MLP
from gracecl.nets.tapped import TappedNet

GOLDEN = np.load(Path(__file__).with_name("ocm.npz"))
IDENTITY = Images((3, 1, 1), (0.0,) * 3, (1 / 255,) * 3)


@pytest.fixture(params=["c100/", "c10/"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The fields of one of the two scripts."""
    return {name.removeprefix(request.param): GOLDEN[name] for name in GOLDEN.files if name.startswith(request.param)}


def close(value: Tensor, golden: np.ndarray, tolerance: float = 1e-5) -> None:
    """Tolerance V: relative to the largest stored magnitude, or to 1."""
    np.testing.assert_allclose(value.detach().numpy(), golden, rtol=0, atol=tolerance * max(1.0, float(np.abs(golden).max())))


def attached(case: dict[str, Any]) -> OCM:
    """The method on a net of the file's sizes, after a task in which the first half of the classes were met."""
    width, projection, classes = case["features"].shape[1], case["projections"].shape[1], case["q"].shape[1]
    method = OCM(scale=float(case["lam"]), projection=projection)
    method.attach(TappedNet(MLP(3 * 32 * 32, width, 1, 1, norm=False), classes), Memories(0, Images((3, 32, 32))))
    method.end_task(Memories(0, Images((3, 32, 32))), Progress(task=0, seen=tuple(range(classes // 2))))
    return method


def batch_of(case: dict[str, Any], blocks: dict[str, np.ndarray]) -> Batch:
    """A step with these labels in its blocks, each in as many views as the method asks for."""
    placed, labels, start = {}, [], 0
    for name, y in blocks.items():
        views = 2 * len(augment.ROTATIONS) if name in TURNED else 1
        placed[name] = Block(start, len(y), views, 0, (0,))
        labels.append(np.tile(y, views))
        start += views * len(y)
    y = np.concatenate(labels)
    task = int("replay" in blocks)
    return Batch(torch.zeros(len(y), 3, 1, 1), y, np.arange(len(y)), placed, Progress(task=task), case["q"].shape[1], seed=0)


def given(features: Tensor, projections: Tensor, logits: Tensor) -> Taps:
    """Two forwards of a net that returns these: logits are those of the second, the others those of the first."""
    first = Taps(features, logits.new_zeros(1, features.shape[1], logits.shape[-1]), lambda _: projections)
    second = Taps(logits.new_zeros(1, logits.shape[1], features.shape[-1]), logits, lambda _: projections[:, :0])
    return Taps.join([first, second])


def leaf(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values).to(dtype).unsqueeze(0).requires_grad_()


def test_views(case: dict[str, Any]) -> None:
    x = torch.from_numpy(case["rot_x"]).float()
    ours = [augment.apply(view, x, np.empty((len(x), 0)), IDENTITY).numpy().astype(np.uint8) for view in ROTATIONS]
    theirs = case["rot_views"].reshape(16, *case["rot_x"].shape)
    places = [k for view in ours for k in range(16) if np.array_equal(view, theirs[k])]
    assert sorted(places) == list(range(16))
    if "rot_labels" in case:  # the script whose order is ours
        assert places == list(range(16))


def test_pseudo_labels(case: dict[str, Any]) -> None:
    listed = [("y", "pseudo_stream"), ("v", "pseudo_replay")]
    for labels, pseudo in listed:
        y = case[labels]
        apart = int(case[pseudo][len(y)] - case[pseudo][0])
        np.testing.assert_array_equal(pseudo_labels(torch.from_numpy(y), apart).numpy(), case[pseudo])
    if "rot_labels" in case:
        n = len(case["rot_x"])
        np.testing.assert_array_equal(pseudo_labels(torch.from_numpy(case["rot_labels"][:n]), apart), case["rot_labels"])


def test_similarities(case: dict[str, Any]) -> None:
    features, projections = (torch.from_numpy(case[name]).unsqueeze(0) for name in ("features", "projections"))
    n, m, scale = len(case["y"]), len(case["v"]), float(case["lam"])
    for name, rows in (("stream", slice(0, 32 * n)), ("replay", slice(32 * n, 32 * (n + m)))):
        start = int(case[f"s_{name}"])
        close(scale * split_similarity(features[:, rows], projections[:, rows], start)[0], case[f"S_{name}"])
    student = projections[:, 32 * n : 32 * n + 16 * m]
    teacher = torch.from_numpy(case["teacher_projections"]).unsqueeze(0)
    close(products(unit(student, INFO_NCE_EPSILON), unit(teacher, INFO_NCE_EPSILON))[0], case["S_pre"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_later_step(case: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    method = attached(case)
    monkeypatch.setattr(method, "starts", lambda batch: (int(case["s_stream"]), int(case["s_replay"])))
    batch = batch_of(case, {"new": case["y"], "replay": case["v"], "supervised": case["v"]})
    shown: list[int] = []

    def teacher(x: Tensor) -> Taps:
        """Projections of R(u), then logits of A'(u)."""
        shown.append(len(x))
        logits = torch.from_numpy(case["q_teacher"]).to(dtype).unsqueeze(0)
        return Taps(logits, logits, lambda _: torch.from_numpy(case["teacher_projections"]).to(dtype).unsqueeze(0))

    teacher.classes = method.teacher.classes  # type: ignore[attr-defined]
    monkeypatch.setattr(method, "teacher", teacher)
    method.prepare(batch)
    assert shown == [len(case["teacher_projections"]), len(case["q_teacher"])]
    features, projections, q = (leaf(case[name], dtype) for name in ("features", "projections", "q"))
    table = method.losses(given(features, projections, q), batch)
    assert set(table) == {"ce/replay", "sc/new", "sc/replay", "kd/projected", "kd/logits"}
    where, tolerance = ("f64/", 1e-7) if dtype == torch.float64 else ("", 1e-5)
    for row, name in (("sc/new", "L_new"), ("sc/replay", "L_mem"), ("kd/projected", "L_pre")):
        close(table[row][0], case[f"{where}{name}"], tolerance)
    close(total(table), case[f"{where}loss"], tolerance)
    total(table).backward()
    for name, value in (("features", features), ("projections", projections), ("q", q)):
        golden = case[f"grad_{name}"]
        np.testing.assert_allclose(value.grad[0].numpy(), golden, rtol=0, atol=5e-5 * np.abs(golden).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_the_first_task(case: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    method = attached(case)
    monkeypatch.setattr(method, "starts", lambda batch: (int(case["task0_s"]), 0))
    batch = batch_of(case, {"new": case["y"], "supervised": case["y"]})
    method.prepare(batch)
    assert batch.targets == {}
    rows = 32 * len(case["y"])
    out = given(*(leaf(case[name][:rows], dtype) for name in ("features", "projections", "q_task0")))
    table = method.losses(out, batch)
    assert set(table) == {"ce/new", "sc/new"}
    where, tolerance = ("f64/", 1e-7) if dtype == torch.float64 else ("", 1e-5)
    close(table["sc/new"][0], case[f"{where}task0_L_new"], tolerance)
    close(total(table), case[f"{where}task0_loss"], tolerance)
