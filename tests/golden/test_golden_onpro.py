"""OnPro against numbers that its authors' program computed: a step of the first task, two of the next one, and APF between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl.core import Batch, Block, Ints, Plan, Planning, Progress, StreamBatch, Taps, total
from gracecl.functional.losses import split_similarity
from gracecl.images import augment
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.onpro import OnPro, pair_probabilities
from gracecl.methods.rotation_contrast import pseudo_labels
from gracecl.nets.mlp import MLP
from gracecl.nets.tapped import TappedNet

GOLDEN = np.load(Path(__file__).with_name("onpro.npz"))
PER_TASK, CLASSES, _, _ = GOLDEN["cfg"].tolist()
RATE, PROBABILITY, SCALE = GOLDEN["rates"].tolist()
SHAPE = GOLDEN["apf/buffer_x"].shape[1:]
IDENTITY = Images((3, 1, 1), (0.0,) * 3, (1 / 255,) * 3)
"""normalises bytes to themselves: the stored images are normalised already"""


def step(name: str) -> dict[str, Any]:
    return {field.removeprefix(f"{name}/"): GOLDEN[field] for field in GOLDEN.files if field.startswith(f"{name}/")}


APF = step("apf")


def close(value: Any, golden: np.ndarray, tolerance: float = 1e-5) -> None:
    """Tolerance V: relative to the largest stored magnitude, or to 1."""
    value = value.detach().numpy() if isinstance(value, Tensor) else value
    np.testing.assert_allclose(value, golden, rtol=0, atol=tolerance * max(1.0, float(np.abs(golden).max())))


class Scripted:
    """A generator that gives what is written down for each kind of draw."""

    def __init__(self, **script: list[Any]) -> None:
        self.script = script

    def __getattr__(self, kind: str) -> Any:
        return lambda *_: self.script[kind].pop(0)


def attached() -> OnPro:
    features, projections = GOLDEN["step0/features"], GOLDEN["step0/projections"]
    method = OnPro(base_rate=RATE, mix_probability=PROBABILITY, scale=SCALE, projection=projections.shape[1])
    net = TappedNet(MLP(int(np.prod(SHAPE)), features.shape[1], 1, 1, norm=False), CLASSES, IDENTITY)
    method.attach(net, Memories(0, Images(SHAPE)))
    return method


def holding(images: Tensor, labels: Ints, drawn: Ints) -> Memories:
    """A memory of these images, which are no bytes, of which a uniform draw gives the slots `drawn`."""
    memories = Memories(len(labels), Images(SHAPE))
    memory = memories.replay
    memory.images = torch.zeros_like(images)
    rows = np.arange(len(labels))
    memory.put(rows, images, rows, labels, 0, {})
    memory.draw = lambda n, rng: drawn
    return memories


def planned(method: OnPro, fields: dict[str, Any], memories: Memories, task: int, first: bool, rng: Any) -> Plan:
    seen = tuple(range(PER_TASK * (task + 1)))
    y = fields["y"]
    new = StreamBatch(
        torch.zeros(len(y), *SHAPE), y, np.arange(len(y)), progress=Progress(task=task, first_of_task=first, seen=seen)
    )
    return method.plan(new, memories, Planning(rng, augment.augmentation("simclr")))


def batch_of(method: OnPro, fields: dict[str, Any], plan: Plan, memories: Memories, task: int) -> Batch:
    """The planned step, each block in as many views as the method asks for."""
    placed, labels, start = {}, [], 0
    for name, rows in plan.blocks.items():
        views = len(rows.views or (plan.augment,))
        placed[name] = Block(start, len(rows), views, len(rows.stream), (0,), rows.found)
        labels.append(np.tile(np.concatenate([fields["y"][rows.stream], memories.replay.labels[rows.slots]]), views))
        start += views * len(rows)
    y = np.concatenate(labels)
    batch = Batch(torch.zeros(len(y), 1), y, np.arange(len(y)), placed, Progress(task=task), CLASSES, seed=0)
    method.prepare(batch)
    return batch


def given(leaves: dict[str, Tensor]) -> Taps:
    """Three forwards: of the turned views, of the images that are classified, and of those whose prototypes are compared."""
    features, logits = leaves["features"], leaves["logits"]

    def no_logits(n: int) -> Tensor:
        return logits.new_zeros(1, n, logits.shape[-1])

    def no_features(n: int) -> Tensor:
        return features.new_zeros(1, n, features.shape[-1])

    u = leaves["u_projections"]
    turned = Taps(features, no_logits(features.shape[1]), lambda _: leaves["projections"])
    classified = Taps(no_features(logits.shape[1]), logits, lambda _: leaves["projections"][:, :0])
    return Taps.join([turned, classified, Taps(no_features(u.shape[1]), no_logits(u.shape[1]), lambda _: u)])


def check_step(method: OnPro, fields: dict[str, Any], batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients and prototypes of a step, through the method's own hooks."""
    replayed = "replay" in batch.blocks
    starts = (int(fields["s_stream"]), int(fields["s_replay"])) if replayed else (int(fields["s"]), 0)
    monkeypatch.setattr(method, "starts", lambda batch: starts)
    names = ("features", "projections", "u_projections", "logits")
    leaves = {name: torch.from_numpy(fields[name]).unsqueeze(0).requires_grad_() for name in names}
    out = given(leaves)
    table = method.losses(out, batch)
    rows = {"sc/new": "L_new", "sc/replay": "L_mem", "ope/new": "OPE_new", "ope/seen": "OPE_seen", "ce/replay": "CE"}
    for row, name in rows.items():
        assert (row in table) == (name in fields)
        if row in table:
            close(table[row][0], fields[name])
    assert set(table) - set(rows) == (set() if replayed else {"ce/new"})
    close(total(table), fields["loss"])
    total(table).backward()
    for name, value in leaves.items():
        if (golden := fields.get(f"grad_{name}")) is not None:
            np.testing.assert_allclose(value.grad[0].numpy(), golden, rtol=0, atol=5e-5 * np.abs(golden).max())
    if "p_new" in fields:
        for block in ("new", "seen"):
            for found, name in zip(method.prototypes(out, batch, block), (f"p_{block}", f"p_{block}_aug"), strict=True):
                check_table(found[0], fields[name])
    with torch.no_grad():
        method.after_step(out, batch)
    check_table(method.proto, fields["proto"])


def check_table(ours: Tensor, theirs: np.ndarray) -> None:
    """Ours has a row for every class, theirs for those of the tasks so far."""
    close(ours[: len(theirs)], theirs)
    assert not ours[len(theirs) :].any()


def unmixed(fields: dict[str, Any]) -> Memories:
    v = fields["v"]
    return holding(torch.zeros(len(v), *SHAPE), v, np.arange(len(v)))


def test_the_second_step_of_the_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    method, fields = attached(), step("task0")
    memories = unmixed(fields)
    plan = planned(method, fields, memories, task=0, first=False, rng=None)
    assert list(plan.blocks) == ["new", "supervised", "seen"]
    check_step(method, fields, batch_of(method, fields, plan, memories, 0), monkeypatch)


def test_the_first_step_of_the_second_task(monkeypatch: pytest.MonkeyPatch) -> None:
    method, fields = attached(), step("step0")
    memories = unmixed(fields)
    plan = planned(method, fields, memories, task=1, first=True, rng=None)
    assert list(plan.blocks) == ["new", "replay", "supervised", "seen"]
    batch = batch_of(method, fields, plan, memories, 1)
    n = len(fields["y"])
    for block, name, labels in (("new", "pseudo_stream", "y"), ("replay", "pseudo_replay", "v")):
        close(pseudo_labels(method.labels_of(block, batch), CLASSES), fields[name])
        np.testing.assert_array_equal(method.labels_of(block, batch), fields[labels])
    features, projections = (torch.from_numpy(fields[name][: 32 * n]).unsqueeze(0) for name in ("features", "projections"))
    close(SCALE * split_similarity(features, projections, int(fields["s_stream"]))[0], fields["S_stream"])
    check_step(method, fields, batch, monkeypatch)


def draws_of_the_file(memories: Memories, drawn: Ints) -> Scripted:
    """Every random choice of APF as the file tells it. The program gated mixes within u once, so the second gate is open."""
    memory, classes, m_pair = memories.replay, APF["nonzero_classes"], int(APF["m_pair"])
    pairs = APF["out_triples"][len(APF["base_select"]) :]
    one, other = np.triu_indices(len(classes), 1)
    counts = np.array([sum((pairs[:, 0] == classes[a]) & (pairs[:, 1] == classes[b])) for a, b in zip(one, other, strict=True)])
    assert counts.sum() == m_pair
    changed = np.flatnonzero(counts != np.rint(APF["prob"] * m_pair))
    left = np.setdiff1d(np.arange(len(drawn)), APF["base_select"])
    sides = [
        np.array([memory.slots_of(memory.labels[slot]).tolist().index(slot) for slot in APF[f"pair_index_{side}"]]) for side in "ab"
    ]
    gate = 0.0 if float(APF["base_mix_applied"]) else 1.0
    return Scripted(
        permutation=[changed, np.concatenate([APF["base_select"], left]), APF["base_partner"]],
        random=[gate, np.zeros(len(APF["base_select"])), np.zeros(len(counts))],
        uniform=[APF["base_lam_drawn"].astype(np.float64)],
        choice=[np.zeros(len(counts), np.int64)] * 2,
        integers=sides,
        beta=[pairs[:, 2].astype(np.float64)],
    )


def test_prototype_feedback_and_the_second_step_of_the_second_task(monkeypatch: pytest.MonkeyPatch) -> None:
    method, fields = attached(), step("step1")
    images = torch.from_numpy(APF["buffer_x"])
    drawn = np.array([int((images == u).flatten(1).all(dim=1).nonzero()[0]) for u in torch.from_numpy(APF["u"])])
    memories = holding(images, APF["buffer_y"], drawn)
    np.testing.assert_array_equal(memories.replay.labels[drawn], fields["v"])
    method.proto[: len(APF["proto"])] = torch.from_numpy(APF["proto"])
    close(pair_probabilities(APF["proto"][APF["nonzero_classes"]].astype(np.float64)), APF["prob"])

    plan = planned(method, fields, memories, task=1, first=False, rng=draws_of_the_file(memories, drawn))
    assert list(plan.blocks) == ["new", "replay", "supervised", "seen"]
    batch = batch_of(method, fields, plan, memories, 1)
    first = batch.labels[batch.blocks["replay"].view(0)]
    mixed = plan["replay"].found
    close(np.stack([first, mixed["other"], mixed["share"]], axis=1), APF["out_triples"])
    close(method.labels_of("replay", batch), APF["out_label"])
    close(pseudo_labels(method.labels_of("replay", batch), CLASSES), fields["pseudo_replay"])
    base = IDENTITY.normalise(memories.replay[plan["replay"].slots])
    for block in ("replay", "supervised"):
        mixing = plan[block].views[0][:1]
        close(augment.apply(mixing, base, np.empty((len(base), 0)), IDENTITY), APF["out_x"])

    # Which labels are equal follows the file, where they have single precision.
    mixed["mixed_label"] = torch.from_numpy(fields["pseudo_replay"][: len(first)])
    check_step(method, fields, batch, monkeypatch)
