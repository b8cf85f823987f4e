"""The views, similarities and contrasts that OCM and OnPro share, against loops that follow their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from common import noise
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Plan, Selection
from gracecl.functional.losses import (
    cross_entropy,
    info_nce,
    info_nce_of_pairs,
    info_nce_terms,
    mean_per_class,
    mixed_cross_entropy,
    prototype_contrast,
    split_similarity,
)
from gracecl.images import augment
from gracecl.images.augment import ROTATIONS, Blend, Mirror
from gracecl.inputs import Images
from gracecl.testing import toy_engine, toy_stream

PIXELS = Images((3, 1, 1), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
LAYERS = 3


def view(number: int, x: Tensor) -> Tensor:
    return augment.apply(ROTATIONS[number], x, np.empty((len(x), 0)), PIXELS)


# Views.


def turned_by_loops(image: list[list[float]], left: bool, right: bool, quarters: int) -> list[list[float]]:
    """Pixel by pixel: a half turned in place sends (i, j) to its opposite corner; a quarter turn counter-clockwise sends (i, j)
    to (size - 1 - j, i)."""
    size, middle = len(image), len(image) // 2
    inner = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(size):
            first, last, turn = (0, middle - 1, left) if j < middle else (middle, size - 1, right)
            a, b = (size - 1 - i, first + last - j) if turn else (i, j)
            inner[a][b] = image[i][j]
    for _ in range(quarters):
        out = [[0.0] * size for _ in range(size)]
        for i in range(size):
            for j in range(size):
                out[size - 1 - j][i] = inner[i][j]
        inner = out
    return inner


@pytest.mark.parametrize("size", [2, 5, 6])
def test_views_move_every_pixel_as_the_loops_do(size: int) -> None:
    [image] = noise(1, 2, size, size)
    number = 0
    for quarters in range(4):
        for left, right in ((False, False), (False, True), (True, True), (True, False)):
            expected = [turned_by_loops(channel.tolist(), left, right, quarters) for channel in image]
            assert view(number, image[None])[0].tolist() == expected
            number += 1
    assert number == len(ROTATIONS) == 16


def test_views_are_distinct_and_the_first_is_the_image() -> None:
    x = noise(2, 3, 6, 6)
    views = [view(number, x) for number in range(16)]
    assert torch.equal(views[0], x)
    for one in range(16):
        for other in range(one):
            assert not torch.equal(views[one], views[other])
    for number in (4, 8, 12):
        again = x
        for _ in range(4):
            again = view(number, again)
        assert torch.equal(again, x)


def test_only_the_image_itself_and_its_mirror_are_raw() -> None:
    """Turned and blended views draw nothing, but do not show the image as it is."""
    assert [number for number, turned in enumerate(ROTATIONS) if augment.is_raw(turned)] == [0]
    assert augment.is_raw((Mirror(),))
    assert not augment.is_raw((Blend(torch.zeros(1), np.zeros(1)),))
    assert not augment.is_raw(augment.augmentation("tau"))
    engine = toy_engine("er()")
    views = (ROTATIONS[3], (), engine.augmentation, (Mirror(),), ROTATIONS[9])
    batch = engine.assemble(Plan({"all": Selection(np.arange(3), views=views)}), engine.meet(toy_stream().batch(0)))
    assert batch.blocks["all"].raw_views == (1, 3)


def test_a_blend_lies_between_its_parents() -> None:
    x, others = torch.randint(0, 256, (2, 4, 3, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    share = np.array([0.0, 1.0, 0.25, 0.6])
    a, b = PIXELS.normalise(x), PIXELS.normalise(others)
    got = Blend(others, share)(a, np.empty((4, 0)), PIXELS)
    for i, part in enumerate(share):
        torch.testing.assert_close(got[i] - a[i], part * (b[i] - a[i]), rtol=0, atol=1e-6)
    assert torch.equal(got[0], a[0])
    assert torch.equal(got[1], b[1])


# Similarities and InfoNCE.


def test_similarity_is_the_double_loop() -> None:
    features, projected = noise(LAYERS, 5, 9), noise(LAYERS, 5, 3, seed=1)
    for start in (0, 4, 6):
        got = split_similarity(features, projected, start)
        for layer in range(LAYERS):
            f = [[v / (math.sqrt(sum(w * w for w in row)) + 1e-8) for v in row] for row in features[layer].tolist()]
            z = [[v / (math.sqrt(sum(w * w for w in row)) + 1e-8) for v in row] for row in projected[layer].tolist()]
            for i in range(5):
                for j in range(5):
                    expected = sum(z[i][e] * f[j][start + e] + z[i][e] * z[j][e] for e in range(3))
                    assert got[layer, i, j].item() == pytest.approx(expected, rel=1e-12)


def terms_by_loops(s: list[list[float]], tau: float, exclude_self: bool) -> list[list[float]]:
    """E_ij = exp((S_ij - max_j S_ij) / tau), 0 on the diagonal if excluded; -log(E_ij / (sum_j E_ij + 1e-8) + 1e-8)."""
    out = []
    for i, row in enumerate(s):
        e = [0.0 if exclude_self and i == j else math.exp((v - max(row)) / tau) for j, v in enumerate(row)]
        out.append([-math.log(v / (sum(e) + 1e-8) + 1e-8) for v in e])
    return out


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("tau", [0.07, 0.5])
def test_terms_are_the_loops(tau: float, exclude_self: bool) -> None:
    s = noise(LAYERS, 6, 6).requires_grad_()
    got = info_nce_terms(s, tau, exclude_self=exclude_self)
    for layer in range(LAYERS):
        expected = terms_by_loops(s[layer].tolist(), tau, exclude_self)
        torch.testing.assert_close(got[layer], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    got.sum().backward()
    assert s.grad.isfinite().all()
    assert got.diagonal(dim1=1, dim2=2).allclose(torch.tensor(-math.log(1e-8), dtype=torch.float64)) == exclude_self


def test_a_row_that_is_excluded_from_itself_has_no_gradient_there() -> None:
    s = noise(1, 4, 4).requires_grad_()
    info_nce_terms(s, 0.2, exclude_self=True).diagonal(dim1=1, dim2=2).sum().backward()
    assert not s.grad.any()


def test_gradient_of_terms_is_that_of_finite_differences_with_the_maximum_held() -> None:
    tau, step = 0.3, 1e-6
    s = noise(1, 4, 4).requires_grad_()
    info_nce_terms(s, tau)[0, 1, 2].backward()
    top = s.detach().amax(dim=-1)[0, 1].item()
    for j in range(4):
        sides = []
        for sign in (1, -1):
            row = s.detach()[0, 1].tolist()
            row[j] += sign * step
            e = [math.exp((v - top) / tau) for v in row]
            sides.append(-math.log(e[2] / (sum(e) + 1e-8) + 1e-8))
        assert s.grad[0, 1, j].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("y", [[0, 1, 0, 2, 1, 0], [3] * 6, [0, 1, 2, 3, 4, 5]], ids=["mixed", "one class", "distinct"])
def test_class_means_and_pairs_of_terms_are_loops(y: list[int]) -> None:
    terms = noise(LAYERS, 6, 6)
    by_class, by_pair = info_nce(terms, torch.tensor(y)), info_nce_of_pairs(terms)
    for layer in range(LAYERS):
        t = terms[layer].tolist()
        classes = [[t[i][j] for j in range(6) if y[j] == y[i]] for i in range(6)]
        assert by_class[layer].item() == pytest.approx(sum(sum(row) / len(row) for row in classes) / 6, rel=1e-12)
        assert by_pair[layer].item() == pytest.approx(sum(t[i][(i + 3) % 6] for i in range(6)) / 6, rel=1e-12)


# Prototypes.


def means_by_loops(z: list[list[float]], y: list[int], classes: int) -> list[list[float]]:
    means = []
    for c in range(classes):
        rows = [row for row, label in zip(z, y, strict=True) if label == c]
        means.append([sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else [0.0] * len(z[0]))
    return means


def prototypes_by_loops(p: list[list[float]], q: list[list[float]], present: list[int], tau: float) -> float:
    """Mean over 2K rows of -log softmax at the other view of the class, self excluded."""
    rows = [vector for side in (p, q) for vector in (side[c] for c in present)]
    rows = [[v / math.sqrt(sum(w * w for w in row)) for v in row] for row in rows]
    k, total = len(present), 0.0
    for i in range(2 * k):
        e = {j: math.exp(sum(a * b for a, b in zip(rows[i], rows[j], strict=True)) / tau) for j in range(2 * k) if j != i}
        total -= math.log(e[(i + k) % (2 * k)] / sum(e.values()))
    return total / (2 * k)


@pytest.mark.parametrize("y", [[0, 3, 0, 4, 3, 3], [2] * 6, [5, 4, 3, 2, 1, 0]], ids=["mixed", "one class", "distinct"])
@pytest.mark.parametrize("tau", [0.5, 0.1])
def test_prototype_contrast_is_the_loops(y: list[int], tau: float) -> None:
    z, other = (noise(LAYERS, 6, 4, seed=seed).requires_grad_() for seed in (0, 1))
    labels, present = torch.tensor(y), torch.zeros(7, dtype=torch.bool)
    present[y] = True
    p, q = mean_per_class(z, labels, 7), mean_per_class(other, labels, 7)
    got = prototype_contrast(p, q, present, tau)
    for layer in range(LAYERS):
        expected = [means_by_loops(side[layer].tolist(), y, 7) for side in (z, other)]
        torch.testing.assert_close(p[layer], torch.tensor(expected[0], dtype=torch.float64))
        assert got[layer].item() == pytest.approx(prototypes_by_loops(*expected, sorted(set(y)), tau), rel=1e-10, abs=1e-12)
    got.sum().backward()
    assert z.grad.isfinite().all()
    assert other.grad.isfinite().all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_orthogonal_classes_that_agree_give_the_analytic_value(k: int) -> None:
    p = torch.eye(6, dtype=torch.float64)[None]
    present = torch.arange(6) < k
    expected = -math.log(math.e**2 / (math.e**2 + 2 * (k - 1)))
    assert prototype_contrast(p, 3 * p, present, 0.5).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


# Mixed labels.


def test_cross_entropy_of_mixed_images_takes_a_share_for_each() -> None:
    logits, y, other = noise(LAYERS, 4, 5), torch.tensor([0, 3, 2, 2]), torch.tensor([1, 3, 0, 4])
    share = torch.tensor([1.0, 0.3, 0.0, 0.6], dtype=torch.float64)
    got = mixed_cross_entropy(logits, y, other, share)
    log_p = F.log_softmax(logits, dim=-1)
    for layer in range(LAYERS):
        terms = [-(s * log_p[layer, i, y[i]] + (1 - s) * log_p[layer, i, other[i]]) for i, s in enumerate(share)]
        torch.testing.assert_close(got[layer], sum(terms) / 4)
    same = torch.full((4,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(mixed_cross_entropy(logits, y, other, same), mixed_cross_entropy(logits, y, other, same[0]))
    torch.testing.assert_close(mixed_cross_entropy(logits, y, other, torch.ones(4)), cross_entropy(logits, y))
