"""Loss terms against loops that follow their definitions number by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import noise
from torch import Tensor
from torch.nn import functional as F

from gracecl.functional.losses import class_blocks, cross_entropy, distillation, entropy, frobenius_distance, supervised_contrast

LAYERS, IMAGES, CLASSES = 3, 8, 6
MASK = torch.tensor([True, False, True, True, False, True])


def softmax(row: list[float], allowed: list[int]) -> dict[int, float]:
    """Probabilities of the allowed classes alone."""
    weights = {c: math.exp(row[c]) for c in allowed}
    return {c: weight / sum(weights.values()) for c, weight in weights.items()}


def contrast_by_loops(vectors: list[list[float]], labels: list[int], temperature: float) -> float:
    """grace.md 1.6: mean over anchors with a positive of -(1/|P|) Σ_p [ u_a·u_p/T - log Σ_{k≠a} exp(u_a·u_k/T) ]."""
    unit = [[value / math.sqrt(sum(v * v for v in row)) for value in row] for row in vectors]

    def similarity(a: int, b: int) -> float:
        return sum(x * y for x, y in zip(unit[a], unit[b], strict=True)) / temperature

    images = range(len(labels))
    terms = []
    for a in images:
        positives = [p for p in images if p != a and labels[p] == labels[a]]
        if positives:
            denominator = math.log(sum(math.exp(similarity(a, k)) for k in images if k != a))
            terms.append(-sum(similarity(a, p) - denominator for p in positives) / len(positives))
    return sum(terms) / len(terms) if terms else 0.0


@pytest.mark.parametrize(
    "labels",
    [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 0, 1, 2, 2, 5], [4, 4, 4, 4, 4, 4, 4, 4], [0, 1, 2, 3, 4, 5, 6, 7]],
    ids=["two classes", "one anchor alone in its class", "one class", "every anchor alone"],
)
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_supervised_contrast_is_the_double_loop(labels: list[int], temperature: float) -> None:
    embedding = noise(LAYERS, IMAGES, 5)
    value = supervised_contrast(embedding, torch.tensor(labels), temperature)
    expected = [contrast_by_loops(layer.tolist(), labels, temperature) for layer in embedding]
    assert value.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("labels", [[3], [3, 4], [3, 3, 4]], ids=["one image", "no positives", "one anchor alone"])
def test_supervised_contrast_stays_finite_without_positives(labels: list[int]) -> None:
    """Neither the value nor the gradient is NaN where an anchor, or every anchor, has nothing to be compared with."""
    embedding = noise(LAYERS, len(labels), 5).requires_grad_()
    value = supervised_contrast(embedding, torch.tensor(labels))
    value.sum().backward()
    assert value.tolist() == pytest.approx([contrast_by_loops(layer, labels, 0.07) for layer in embedding.tolist()], rel=1e-9)
    assert torch.isfinite(embedding.grad).all()


def test_supervised_contrast_gradient_of_an_anchor_without_positives_is_through_the_others_only() -> None:
    """The gradient agrees with finite differences of the loops, also at the image that is alone in its class."""
    labels, step = [0, 0, 1, 0], 1e-6
    embedding = noise(1, 4, 3, seed=2).requires_grad_()
    supervised_contrast(embedding, torch.tensor(labels), 0.5).sum().backward()
    for image in range(4):
        for axis in range(3):
            shifted = []
            for sign in (1, -1):
                moved = embedding.detach().clone()
                moved[0, image, axis] += sign * step
                shifted.append(contrast_by_loops(moved[0].tolist(), labels, 0.5))
            assert embedding.grad[0, image, axis].item() == pytest.approx((shifted[0] - shifted[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("classes", [None, MASK], ids=["all classes", "some classes"])
def test_cross_entropy_is_the_loop(classes: Tensor | None) -> None:
    """Mean over images of -ln softmax(logits)[y], the softmax over the marked classes only."""
    logits = noise(LAYERS, IMAGES, CLASSES, scale=3)
    allowed = [c for c in range(CLASSES) if classes is None or classes[c]]
    y = [allowed[i % len(allowed)] for i in range(IMAGES)]
    value = cross_entropy(logits, torch.tensor(y), classes)
    expected = [sum(-math.log(softmax(layer[i], allowed)[y[i]]) for i in range(IMAGES)) / IMAGES for layer in logits.tolist()]
    assert value.tolist() == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_does_not_move_masked_logits() -> None:
    logits = noise(LAYERS, IMAGES, CLASSES).requires_grad_()
    cross_entropy(logits, torch.tensor([0, 2, 3, 5, 0, 2, 3, 5]), MASK).sum().backward()
    assert (logits.grad[..., ~MASK] == 0).all()
    assert (logits.grad[..., MASK] != 0).all()


@pytest.mark.parametrize("classes", [None, MASK], ids=["all classes", "some classes"])
def test_entropy_is_the_loop(classes: Tensor | None) -> None:
    """Mean over images of -Σ p ln p, in nats, over the marked classes only; its gradient is finite and masked likewise."""
    logits = noise(LAYERS, IMAGES, CLASSES, scale=3).requires_grad_()
    allowed = [c for c in range(CLASSES) if classes is None or classes[c]]
    value = entropy(logits, classes)
    expected = [
        sum(-p * math.log(p) for image in layer for p in softmax(image, allowed).values()) / IMAGES for layer in logits.tolist()
    ]
    assert value.tolist() == pytest.approx(expected, rel=1e-12)
    value.sum().backward()
    assert torch.isfinite(logits.grad).all()
    if classes is not None:
        assert (logits.grad[..., ~classes] == 0).all()


def test_entropy_of_known_distributions() -> None:
    """ln C where all logits are equal, 0 where one is certain, ln 2 between two; 0 over one marked class."""
    flat, sure, two = torch.zeros(CLASSES), torch.zeros(CLASSES), torch.zeros(CLASSES)
    sure[2], two[[1, 4]] = 1e4, 1e4
    logits = torch.stack([flat, sure, two])[:, None].requires_grad_()
    assert entropy(logits).tolist() == pytest.approx([math.log(CLASSES), 0, math.log(2)], abs=1e-6)
    alone = torch.zeros(CLASSES, dtype=torch.bool)
    alone[3] = True
    value = entropy(logits, alone)
    value.sum().backward()
    assert value.tolist() == [0, 0, 0]
    assert (logits.grad == 0).all()


def test_frobenius_distance_of_identical_features_is_zero_with_zero_gradient() -> None:
    unit = F.normalize(noise(LAYERS, IMAGES, 5), dim=-1)
    student = unit.clone().requires_grad_()
    value = frobenius_distance(student, unit)
    value.sum().backward()
    assert value.tolist() == [0, 0, 0]
    assert (student.grad == 0).all()


@pytest.mark.parametrize("images", [1, 8, 384])
def test_frobenius_distance_of_opposite_unit_features(images: int) -> None:
    """Each row differs by a vector of length 2, so the matrix by 2 √B'."""
    unit = F.normalize(noise(LAYERS, images, 5), dim=-1)
    assert frobenius_distance(unit, -unit).tolist() == pytest.approx([2 * math.sqrt(images)] * LAYERS, rel=1e-12)


def test_frobenius_distance_is_one_square_root_over_all_entries() -> None:
    """Against loops, one student for several teachers; the gradient has unit norm over the whole matrix."""
    student, teachers = noise(IMAGES, 5, seed=1).requires_grad_(), noise(LAYERS, IMAGES, 5, seed=2)
    value = frobenius_distance(student, teachers)
    for layer in range(LAYERS):
        squares = sum((student[i, d].item() - teachers[layer, i, d].item()) ** 2 for i in range(IMAGES) for d in range(5))
        assert value[layer].item() == pytest.approx(math.sqrt(squares), rel=1e-12)
    [gradient] = torch.autograd.grad(value[0], student)
    assert gradient.norm().item() == pytest.approx(1, rel=1e-9)


BLOCKS = [[4, 1], [0], [2, 5]]


def distillation_by_loops(z: Tensor, teacher: Tensor, temperature: float, columns: list[int], measure: str, over: str) -> float:
    """Mean over the images of one layer of Σ_c p_c ln(p_c / q_c), or of -Σ_c p_c ln q_c; `mean` divides by the columns."""
    terms = []
    for row, target in zip(z.tolist(), teacher.tolist(), strict=True):
        q, p = (softmax([value / temperature for value in values], columns) for values in (row, target))
        divergence = sum(p[c] * math.log(p[c] / q[c]) for c in columns)
        own = -sum(p[c] * math.log(p[c]) for c in columns)
        terms.append((divergence + (own if measure == "cross_entropy" else 0)) / (len(columns) if over == "mean" else 1))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("measure", ["divergence", "cross_entropy"])
@pytest.mark.parametrize("over_classes", ["sum", "mean"])
@pytest.mark.parametrize("groups", [None, [[0, 2, 3, 5]], BLOCKS], ids=["all classes", "some classes", "blocks"])
def test_distillation_is_the_loop(groups: list[list[int]] | None, over_classes: str, measure: str) -> None:
    """One softmax over all or some of the classes, or one for each block of them, added up; gradients on those columns alone."""
    student, teacher = noise(LAYERS, IMAGES, CLASSES, scale=2).requires_grad_(), noise(LAYERS, IMAGES, CLASSES, seed=1, scale=2)
    options: dict[str, Any] = {"measure": measure, "over_classes": over_classes}
    if groups is BLOCKS:
        options["blocks"] = class_blocks(groups)
    elif groups is not None:
        options["classes"] = MASK
    value = distillation(student, teacher, 2.0, **options)
    spans = groups or [list(range(CLASSES))]
    expected = [
        sum(distillation_by_loops(student[i], teacher[i], 2.0, columns, measure, over_classes) for columns in spans)
        for i in range(LAYERS)
    ]
    assert value.tolist() == pytest.approx(expected, rel=1e-9)
    value.sum().backward()
    alone = {columns[0] for columns in spans if len(columns) == 1}  # a softmax over one class is constant
    moved = {c for columns in spans for c in columns} - alone
    for c in range(CLASSES):
        assert (student.grad[..., c] != 0).any() == (c in moved), c


def test_distillation_by_blocks_is_blind_to_a_level_of_one_block() -> None:
    """Also where blocks lie hundreds apart, as each is brought to its own highest logit."""
    student, teacher = noise(LAYERS, IMAGES, CLASSES), noise(LAYERS, IMAGES, CLASSES, seed=1)
    blocks = class_blocks(BLOCKS)
    moved = student.clone()
    moved[..., BLOCKS[0]] += 900
    torch.testing.assert_close(distillation(moved, teacher, 1.0, blocks=blocks), distillation(student, teacher, 1.0, blocks=blocks))


def test_one_block_is_distillation_over_its_classes() -> None:
    student, teacher = noise(LAYERS, IMAGES, CLASSES), noise(LAYERS, IMAGES, CLASSES, seed=1)
    by_block = distillation(student, teacher, 2.0, blocks=class_blocks([[5, 0, 3, 2]]))
    torch.testing.assert_close(by_block, distillation(student, teacher, 2.0, MASK), rtol=1e-12, atol=0)


def test_class_blocks_are_filled_up() -> None:
    assert class_blocks([[4, 1], [0]]).tolist() == [[4, 1], [0, -1]]
    assert class_blocks([]).shape == (0, 0)


def test_distillation_takes_one_choice_of_classes() -> None:
    with pytest.raises(ValueError, match="not both"):
        distillation(noise(1, 1, CLASSES), noise(1, 1, CLASSES), 2.0, MASK, blocks=class_blocks(BLOCKS))


LABELS = torch.tensor([0, 2, 3, 5, 0, 2, 3, 5])
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "contrast": lambda x: supervised_contrast(x, LABELS),
    "cross_entropy": lambda x: cross_entropy(x, LABELS),
    "masked cross_entropy": lambda x: cross_entropy(x, LABELS, MASK),
    "entropy": entropy,
    "masked entropy": lambda x: entropy(x, MASK),
    "distillation": lambda x: distillation(x, x.flip(-1), 2.0),
    "distillation by blocks": lambda x: distillation(x, x.flip(-1), 2.0, blocks=class_blocks(BLOCKS)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_full(name: str, dtype: torch.dtype) -> None:
    """Half-precision inputs give the float32 result of the same numbers, to the bit."""
    x = noise(LAYERS, IMAGES, CLASSES, scale=4).to(dtype)
    value = LOSSES[name](x)
    assert value.dtype == torch.float32
    assert torch.equal(value, LOSSES[name](x.float()))


@pytest.mark.parametrize("name", LOSSES)
def test_layers_do_not_mix(name: str) -> None:
    """One call on [L, B, ·] equals L calls on one layer each."""
    x = noise(LAYERS, IMAGES, CLASSES, scale=4)
    apart = [LOSSES[name](x[layer : layer + 1]) for layer in range(LAYERS)]
    torch.testing.assert_close(LOSSES[name](x), torch.cat(apart), rtol=1e-12, atol=1e-12)


def test_contrast_is_a_softmax_in_full_precision_under_autocast() -> None:
    """The products alone may be taken in half."""
    u = F.normalize(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    y = torch.arange(8) // 2
    with torch.autocast("cpu", torch.bfloat16):
        half = supervised_contrast(u, y, 0.1)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, supervised_contrast(u, y, 0.1), rtol=1e-2, atol=0)


def test_frobenius_layers_do_not_mix() -> None:
    a, b = noise(LAYERS, IMAGES, 5, seed=1), noise(LAYERS, IMAGES, 5, seed=2)
    apart = [frobenius_distance(a[layer : layer + 1], b[layer : layer + 1]) for layer in range(LAYERS)]
    torch.testing.assert_close(frobenius_distance(a, b), torch.cat(apart), rtol=1e-12, atol=0)
