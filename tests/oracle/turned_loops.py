"""Section 3 of OCM's algorithm as loops over plain numbers, for the tests of the two methods that share it."""

from __future__ import annotations

import math

from torch import Tensor

from gracecl.core import Batch, Taps
from gracecl.engine.engine import Engine
from gracecl.engine.recipe import Recipe
from gracecl.inputs import Images
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import TOY_SHAPE, feed, toy_data

TAU = 0.07
Rows = list[list[float]]


def unit(rows: Rows) -> Rows:
    return [[v / (math.sqrt(sum(w * w for w in row)) + 1e-8) for v in row] for row in rows]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def terms(s: Rows, exclude_self: bool) -> Rows:
    """l_ij = -log(E_ij / (Σ_j E_ij + 1e-8) + 1e-8), E_ij = exp((S_ij - max_j S_ij) / τ)."""
    found = []
    for i, row in enumerate(s):
        e = [0.0 if exclude_self and i == j else math.exp((v - max(row)) / TAU) for j, v in enumerate(row)]
        found.append([-math.log(v / (sum(e) + 1e-8) + 1e-8) for v in e])
    return found


def class_mean(found: Rows, labels: list[tuple[float, int]]) -> float:
    """(1/N) Σ_ij W_ij l_ij, W_ij = 1[label_i = label_j] / #{j : label_j = label_i}."""
    value = 0.0
    for i, row in enumerate(found):
        same = [row[j] for j in range(len(row)) if labels[j] == labels[i]]
        value += sum(same) / len(same)
    return value / len(found)


def pseudo(labels: list[float], halves: int) -> list[tuple[float, int]]:
    """Labels and numbers of views, for 16 views of the images, once or twice."""
    return [(label, view) for view in range(16) for label in labels] * halves


def contrast(features: Tensor, projected: Tensor, labels: list[float], start: int, scale: float, *, new: bool) -> float:
    """L_new or L_mem of one layer's rows [R(x); A(R(x))]."""
    f, z = unit(features.tolist()), unit(projected.tolist())
    n = len(z)
    s = [[scale * (dot(z[i], f[j][start : start + len(z[j])]) + dot(z[i], z[j])) for j in range(n)] for i in range(n)]
    found = terms(s, exclude_self=new)
    value = class_mean(found, pseudo(labels, 2))
    if not new:
        return value
    return sum(found[i][(i + n // 2) % n] for i in range(n)) / n + 2 * value


def projections_kept(student: Tensor, teacher: Tensor, labels: list[float]) -> float:
    """L_pre of one layer's rows R(u)."""
    z, other = unit(student.tolist()), unit(teacher.tolist())
    return class_mean(terms([[dot(a, b) for b in other] for a in z], exclude_self=False), pseudo(labels, 1))


def mean_cross_entropy(logits: Tensor, labels: list[int]) -> float:
    rows = logits.tolist()
    return sum(math.log(sum(map(math.exp, row))) - row[y] for row, y in zip(rows, labels, strict=True)) / len(rows)


def stream(batch: int = 2, epochs: int = 1, per_class: int = 9) -> Stream:
    return split(toy_data(per_class=per_class), 0, tasks=3, batch=batch, epochs=epochs)


def engine_of(
    method: str, *, taps: int | None = None, augment: str = "tau", memory: int = 12, net: str = "mlp(width=12, depth=4, norm=True)"
) -> Engine:
    """On the toy problem, with any augmentation."""
    recipe = Recipe(method=method, net=net, memory=memory, taps=taps, augment=augment, device="cpu")
    return recipe.build(Images(TOY_SHAPE), 6)


def run(method: str, until: int, **options: object) -> Engine:
    engine = engine_of(method, **options)  # type: ignore[arg-type]
    feed(engine, stream(), until)
    return engine


def turned(out: Taps, batch: Batch, block: str) -> tuple[Tensor, Tensor]:
    """Features and projections of a block, computed apart from the method."""
    rows = batch.rows(block)
    features = out.features[:, rows].detach()
    return features, out._project(features).detach()
