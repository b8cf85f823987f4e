"""The correction of logits against slow loops and a general minimiser, and its invariants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor

from gracecl.nets.correction import REACH, Correction, fit_correction

LAYERS, IMAGES, CLASSES = 3, 40, 8
SEEN = torch.tensor([True, True, False, True, True, True, True, False])
NEW = torch.tensor([False, True, False, False, True, False, True, False])
OLD = SEEN & ~NEW


def labels() -> Tensor:
    return torch.nonzero(SEEN).flatten().repeat(IMAGES)[:IMAGES]


def images(seed: int = 0, scale: float = 1.0) -> Tensor:
    """Logits that know something of their labels; the new classes are too high."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(LAYERS, IMAGES, CLASSES, generator=generator, dtype=torch.float64)
    z[:, torch.arange(IMAGES), labels()] += 1.5
    return scale * (z + 2 * NEW)


def slow_objective(a: float, b: float, z: Tensor, y: Tensor, penalty: float) -> float:
    """CE(z~ over the seen, y) + penalty b², z~_k = a z_k + b for the new classes alone, of one layer."""
    terms = []
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        corrected = {c: a * row[c] + b if NEW[c] else row[c] for c in range(CLASSES) if SEEN[c]}
        highest = max(corrected.values())
        terms.append(highest + math.log(sum(math.exp(value - highest) for value in corrected.values())) - corrected[label])
    return sum(terms) / len(terms) + penalty * b * b


def objective_of(z: np.ndarray, y: np.ndarray, penalty: float) -> Callable[[np.ndarray], float]:
    """What (a, b) cost, of one layer, for searches that ask often."""
    new, seen, rows = NEW.numpy(), SEEN.numpy(), np.arange(len(y))

    def objective(at: np.ndarray) -> float:
        corrected = np.where(new, at[0] * z + at[1], z)
        return float(np.mean(logsumexp(corrected[:, seen], axis=1) - corrected[rows, y]) + penalty * at[1] ** 2)

    assert objective(np.array([0.7, -0.4])) == pytest.approx(slow_objective(0.7, -0.4, torch.from_numpy(z), labels(), penalty))
    return objective


def minimiser(z: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
    """(a, b) by a search that knows no derivatives."""
    options = {"xatol": 1e-9, "fatol": 1e-14, "maxiter": 2000}
    return minimize(objective_of(z, y, penalty), [1.0, 0.0], method="Nelder-Mead", options=options).x


def test_no_correction_changes_no_bit() -> None:
    for z in (images(), images().float()):
        assert torch.equal(Correction.none(LAYERS, CLASSES, z.device)(z), z)
        ones = torch.ones(LAYERS, dtype=torch.float64)
        assert torch.equal(Correction(ones, 0 * ones, NEW)(z), z)


def test_each_tap_has_its_own_numbers_and_other_classes_stay() -> None:
    z, scale, shift = images(), torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([1.0, -3.0, 0.25]).double()
    got = Correction(scale, shift, NEW)(z)
    for layer in range(LAYERS):
        torch.testing.assert_close(got[layer][:, NEW], scale[layer] * z[layer][:, NEW] + shift[layer], rtol=1e-12, atol=0)
    assert torch.equal(got[..., ~NEW], z[..., ~NEW])


def test_ranking_inside_both_groups_stays() -> None:
    z = images()
    got = fit_correction(z, labels(), NEW, SEEN, 0.05)(z)
    for group in (NEW, OLD):
        assert torch.equal(got[..., group].argsort(dim=-1), z[..., group].argsort(dim=-1))


@pytest.mark.parametrize("penalty", [0.0, 0.05, 1.0])
def test_objective_is_the_loop(penalty: float) -> None:
    z, scale, shift = images(), torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([1.0, -3.0, 0.25]).double()
    got = Correction(scale, shift, NEW).objective(z, labels(), SEEN, penalty)
    expected = [slow_objective(a, b, layer, labels(), penalty) for a, b, layer in zip(scale, shift, z, strict=True)]
    assert got.tolist() == pytest.approx([float(value) for value in expected], rel=1e-10)


@pytest.mark.parametrize("penalty", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
def test_fit_is_the_minimum(penalty: float, scale: float) -> None:
    z = images(scale=scale)
    found = fit_correction(z, labels(), NEW, SEEN, penalty)
    none = Correction(torch.ones(LAYERS).double(), torch.zeros(LAYERS).double(), NEW)
    better = found.objective(z, labels(), SEEN, penalty)
    assert (better < none.objective(z, labels(), SEEN, penalty)).all()
    inside = 0
    for layer in range(LAYERS):
        best = minimiser(z[layer].numpy(), labels().numpy(), penalty)
        if max(abs(best - [1, 0])) < REACH:
            inside += 1
            assert [found.scale[layer].item(), found.shift[layer].item()] == pytest.approx(list(best), abs=1e-6)
    assert inside or (scale, penalty) == (6.0, 0.0)


def test_from_the_minimum_nothing_moves() -> None:
    """The gradient is 0 there, for each tap."""
    z = images()
    found = fit_correction(z, labels(), NEW, SEEN, 0.05)
    scale, shift = found.scale.clone().requires_grad_(), found.shift.clone().requires_grad_()
    Correction(scale, shift, NEW).objective(z, labels(), SEEN, 0.05).sum().backward()
    assert scale.grad.abs().max() < 1e-10
    assert shift.grad.abs().max() < 1e-10


def test_a_level_added_to_calibrated_logits_is_taken_off_again() -> None:
    """Labels as likely as the softmax says, so that a = 1, b = 0 is the best; with c on the new block it is b = -c."""
    generator, images_of_each = torch.Generator().manual_seed(0), 400
    z = torch.randn(1, 30, CLASSES, generator=generator, dtype=torch.float64)
    # Every image stands as often with each label as its softmax says, up to the rounding of counts.
    p = z[0].masked_fill(~SEEN, -torch.inf).softmax(dim=-1)
    counts = (p * images_of_each).round().long()
    y = torch.cat([torch.arange(CLASSES).repeat_interleave(row) for row in counts])
    rows = z[:, torch.arange(30).repeat_interleave(counts.sum(dim=1))]
    for c in (-1.7, 2.5):
        found = fit_correction(rows + c * NEW, y, NEW, SEEN, 0.0)
        assert found.shift.item() == pytest.approx(-c, abs=0.03)
        assert found.scale.item() == pytest.approx(1, abs=0.02)
    exact = fit_correction(rows, y, NEW, SEEN, 0.0)
    moved = fit_correction(rows + 2.5 * NEW, y, NEW, SEEN, 0.0)
    assert moved.scale.item() == pytest.approx(exact.scale.item(), abs=1e-9)
    assert moved.shift.item() == pytest.approx(exact.shift.item() - 2.5 * exact.scale.item(), abs=1e-9)


def test_taps_are_fitted_apart() -> None:
    z = images()
    together = fit_correction(z, labels(), NEW, SEEN, 0.05)
    for layer in range(LAYERS):
        alone = fit_correction(z[layer : layer + 1], labels(), NEW, SEEN, 0.05)
        assert alone.scale.item() == pytest.approx(together.scale[layer].item(), abs=1e-8)
        assert alone.shift.item() == pytest.approx(together.shift[layer].item(), abs=1e-8)


@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_images_that_can_be_told_apart_perfectly_end_the_search_within_reach(penalty: float) -> None:
    z = torch.zeros(1, 6, CLASSES, dtype=torch.float64)
    y = torch.nonzero(SEEN).flatten()
    z[..., NEW] = -4.0
    z[0, torch.arange(6), y] = 4.0
    found = fit_correction(z, y, NEW, SEEN, penalty)
    assert abs(found.scale.item() - 1) <= REACH + 1e-12
    assert abs(found.shift.item()) <= REACH + 1e-12
    none = Correction(torch.ones(1).double(), torch.zeros(1).double(), NEW)
    assert found.objective(z, y, SEEN, penalty).item() <= none.objective(z, y, SEEN, penalty).item()


@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_where_the_minimum_lies_beyond_reach_it_is_the_least_within(penalty: float) -> None:
    """Also where a first step ends at the border and the way goes on along it, or back from it."""
    generator, bounds, beyond = torch.Generator().manual_seed(0), [(1 - REACH, 1 + REACH), (-REACH, REACH)], 0
    for scale in (0.05, 0.2, 1.0, 3.0):
        for lift in (-7.0, -3.0, 3.0, 7.0):
            z = scale * torch.randn(1, IMAGES, CLASSES, generator=generator, dtype=torch.float64)
            z[:, torch.arange(IMAGES), labels()] += scale
            z = z + scale * lift * NEW if penalty else z + lift * NEW  # so that a goes too far, or b
            found = fit_correction(z, labels(), NEW, SEEN, penalty)
            objective = objective_of(z[0].numpy(), labels().numpy(), penalty)
            best = minimize(objective, [1.0, 0.0], method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-15, "gtol": 1e-10})
            beyond += max(abs(best.x - [1, 0])) > REACH - 1e-6
            assert objective(np.array([found.scale.item(), found.shift.item()])) <= best.fun + 1e-9
            assert max(abs(found.scale.item() - 1), abs(found.shift.item())) <= REACH + 1e-12
    assert beyond > 1


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_logits_that_say_nothing_give_finite_numbers(value: float) -> None:
    """Of equal logits a and b cannot be told apart."""
    z = torch.full((LAYERS, IMAGES, CLASSES), value)
    found = fit_correction(z, labels(), NEW, SEEN, 0.0)
    assert torch.isfinite(found.scale).all()
    assert torch.isfinite(found.shift).all()


def test_comes_back_from_its_state() -> None:
    one = fit_correction(images(), labels(), NEW, SEEN, 0.05)
    two = Correction.from_state_dict(one.state_dict(), torch.device("cpu"))
    assert torch.equal(two(images()), one(images()))
