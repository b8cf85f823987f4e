"""The paper's two bounds: on quadratics, where everything is known, by hand, and on a small run through the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call

from commands import gracecl, only_run
from gracecl.lab.runs.run import Interrupted, RunConfig, Work, resume, run
from gracecl.lab.theory import bounds, page
from gracecl.lab.theory.bounds import ForgettingBound, Objective, Point
from gracecl.lab.theory.measure import (
    NO_SCALE,
    LabelledImages,
    Noise,
    NoiseSearch,
    PacBayesTask,
    Settings,
    choose_noise,
    drawn,
    fold,
    fold_norms,
    forgetting_of_all_pairs,
    measure,
    variances,
)
from stopping import StopAfter

# --- quadratics, where every assumption holds -------------------------------------------------------------------------------


def point(*values: float) -> dict[str, Tensor]:
    """θ in two tensors, so that nothing depends on there being one."""
    return {"a": torch.tensor(values[:1], dtype=torch.float64), "b": torch.tensor(values[1:], dtype=torch.float64)}


def flat(theta: Point) -> Tensor:
    return torch.cat([theta["a"], theta["b"]])


@dataclasses.dataclass(frozen=True)
class Bowl:
    """R(θ) = ½ (θ - c)'A(θ - c) and, for each row h of `slopes`, an entropy H = h·θ; split into parts with these shares."""

    matrix: Tensor
    centre: Tensor
    slopes: Tensor
    weight: float = 0.0
    target: float = 0.0
    shares: tuple[float, ...] = (0.25, 0.75)

    def objective(self) -> Objective:
        def part(share: float, theta: Point) -> Tensor:
            away = flat(theta) - self.centre
            return share * torch.cat([(away @ self.matrix @ away / 2).unsqueeze(0), self.slopes @ flat(theta)])

        return Objective([lambda theta, share=share: part(share, theta) for share in self.shares], self.weight, self.target)

    @property
    def hessian(self) -> Tensor:
        return self.matrix + 2 * self.weight * self.slopes.T @ self.slopes

    @property
    def minimiser(self) -> Tensor:
        pull = self.matrix @ self.centre + 2 * self.weight * self.target * self.slopes.sum(dim=0)
        return torch.linalg.solve(self.hessian, pull)


def bowl(seed: int, weight: float = 0.0, layers: int = 2) -> Bowl:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    root = normal(3, 3)
    return Bowl(root @ root.T + torch.eye(3, dtype=torch.float64), normal(3), normal(layers, 3), weight, 0.4)


def at(vector: Tensor) -> dict[str, Tensor]:
    return point(*vector.tolist())


def learned(bowls: Sequence[Bowl], start: Tensor) -> list[dict[str, Tensor]]:
    """θ_0 and the exact minimiser of each task's objective."""
    return [at(start), *(at(task.minimiser) for task in bowls)]


def theorem_two(bowls: Sequence[Bowl], thetas: list[dict[str, Tensor]], points: int = 11) -> list[ForgettingBound]:
    objectives = [task.objective() for task in bowls]
    segments = [
        bounds.measure_segment(objective, before, after, points)
        for objective, before, after in zip(objectives, thetas, thetas[1:], strict=False)
    ]
    return forgetting_of_all_pairs(objectives, thetas, segments, points, lambda done: None)


def test_value_and_derivatives_of_an_objective_in_parts() -> None:
    """Against the closed forms of a quadratic with two entropies."""
    task = bowl(3, weight=0.7)
    objective, where = task.objective(), torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    away, entropies = where - task.centre, task.slopes @ where
    deviation = float(((entropies - 0.4) ** 2).sum())
    values, slopes = objective.values(at(where)), objective.slopes(at(where))
    assert values.risk == pytest.approx(float(away @ task.matrix @ away) / 2)
    assert values.entropies == pytest.approx(entropies.tolist())
    assert values.deviation == pytest.approx(deviation)
    assert values.total == pytest.approx(values.risk + 0.7 * deviation)
    gradient = task.matrix @ away + 2 * 0.7 * task.slopes.T @ (entropies - 0.4)
    torch.testing.assert_close(flat(objective.gradient(at(where))), gradient)
    torch.testing.assert_close(flat(slopes.total), gradient)
    assert slopes.risk == pytest.approx(float((task.matrix @ away).norm()))
    assert slopes.entropies == pytest.approx(task.slopes.norm(dim=1).tolist())
    end = torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64)
    u = (end - where) / (end - where).norm()
    for fraction in (0.0, 0.4, 1.0):
        assert objective.curvature(at(where), at(end), fraction) == pytest.approx(float(u @ task.hessian @ u))


def test_curvature_along_the_way_of_a_function_that_is_not_quadratic() -> None:
    """R = x⁴ + sin(3y) from (0, 0) to (1, 2): the second derivative in that direction, point by point."""
    objective = Objective([lambda theta: theta["a"] ** 4 + torch.sin(3 * theta["b"])])
    for x in (0.0, 0.3, 1.0):
        expected = (12 * x**2 * 1 - 9 * math.sin(6 * x) * 4) / 5
        assert objective.curvature(point(0, 0), point(1, 2), x) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_levels_are_ordered_and_bound_what_is_forgotten(weight: float) -> None:
    """Exact minimisers of strongly convex objectives: every assumption holds, so every level must."""
    bowls = [bowl(seed, weight) for seed in range(4)]
    pairs = theorem_two(bowls, learned(bowls, torch.zeros(3, dtype=torch.float64)))
    assert [(pair.old, pair.new) for pair in pairs] == [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    for pair in pairs:
        assert pair.stationary
        levels = [pair.measured, pair.by_distance, pair.by_path, pair.corrected(), pair.printed(), pair.second_form()]
        assert all(level is not None for level in levels)
        assert all(low <= high * (1 + 1e-9) for low, high in pairwise(levels))  # type: ignore[operator]
        assert pair.measured > 0
        if weight == 0:
            assert pair.printed() == pytest.approx(pair.corrected())
            assert pair.second_form() == pytest.approx(pair.printed())


def test_every_quantity_of_the_printed_bound_on_quadratics() -> None:
    """L_s at the far end, μ_k = u'Hu, c_l = ‖h_l‖, and the sum written out."""
    bowls = [bowl(seed, 0.3) for seed in range(3)]
    thetas = learned(bowls, torch.ones(3, dtype=torch.float64))
    pair = theorem_two(bowls, thetas)[1]
    assert (pair.old, pair.new) == (1, 3)
    first = bowls[0]
    corners = [flat(theta) for theta in thetas[1:]]
    # The gradient of a convex quadratic is largest at an end of a segment, so the sampled maximum is the true one.
    steepness = max(float((first.hessian @ (corner - first.minimiser)).norm()) for corner in corners)
    assert pair.steepness == pytest.approx(steepness)
    # Every task has the entropies of its own images.
    c_delta = math.sqrt(sum(max(float(task.slopes[layer].norm()) for task in bowls[1:]) ** 2 for layer in range(2)))
    assert pair.entropy_lipschitz == pytest.approx(c_delta)
    total = second = 0.0
    for task, before, after in zip(bowls[1:], corners, corners[1:], strict=False):
        u = (after - before) / (after - before).norm()
        mu = float(u @ task.hessian @ u)
        deviation = float(((task.slopes @ before - 0.4) ** 2).sum())
        risk = float((task.matrix @ (before - task.centre)).norm())
        total += (risk + 2 * 0.3 * c_delta * math.sqrt(deviation)) / mu
        gradient = float((task.hessian @ (before - task.minimiser)).norm())
        second += (gradient + 4 * 0.3 * c_delta * math.sqrt(deviation)) / mu
    assert pair.printed() == pytest.approx(steepness * total)
    assert pair.printed("secant") == pytest.approx(steepness * total)
    assert pair.second_form() == pytest.approx(steepness * second)
    away = corners[-1] - first.minimiser
    assert pair.measured == pytest.approx(float(away @ first.hessian @ away) / 2)


def test_the_factor_between_bound_and_forgetting_on_round_bowls_is_two() -> None:
    """R_k = (m_k/2) ‖θ - k e‖²: F = (m/2)(t - s)², L_s = m (t - s), Σd = t - s, μ_k d_k = ‖∇J_k‖. Every level is 2 F."""
    direction = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    none = torch.zeros(0, 3, dtype=torch.float64)
    bowls = [
        Bowl(steep * torch.eye(3, dtype=torch.float64), number * direction, none) for number, steep in enumerate((3, 1, 5, 2), 1)
    ]
    for pair in theorem_two(bowls, learned(bowls, torch.zeros(3, dtype=torch.float64))):
        expected = [pair.by_distance, pair.by_path, pair.corrected(), pair.printed()]
        assert expected == pytest.approx([2 * pair.measured] * 4)


def test_the_factor_on_a_long_bowl_is_the_one_of_its_eigenvalues() -> None:
    """One step along (cos φ, sin φ) in bowls with eigenvalues 1 and κ.

    With u that direction and A both Hessians, F = d² u'Au/2, L_1 = d ‖Au‖ and μ = u'Au, so that L_1 d = 2 F ρ and the printed bound
    is 2 F ρ², ρ = ‖Au‖/u'Au; ρ is at most (κ + 1)/(2 sqrt κ), which is reached at tan φ = 1/sqrt κ.
    """
    kappa = 16.0
    matrix = torch.diag(torch.tensor([1.0, kappa, 7.0], dtype=torch.float64))
    u = torch.tensor([math.sqrt(kappa), 1.0, 0.0], dtype=torch.float64) / math.sqrt(kappa + 1)
    none = torch.zeros(0, 3, dtype=torch.float64)
    bowls = [Bowl(matrix, number * 0.7 * u, none) for number in range(2)]
    (pair,) = theorem_two(bowls, learned(bowls, u * 3))
    rho = (kappa + 1) / (2 * math.sqrt(kappa))
    assert pair.by_path == pytest.approx(2 * rho * pair.measured)
    assert pair.printed() == pytest.approx(2 * rho**2 * pair.measured)


def test_without_a_stationary_point_the_printed_number_is_no_bound_and_the_corrected_one_is() -> None:
    """θ_1 beyond task 2's minimum on the far side from θ_2: the gradient at θ_1 alone says too little."""
    none = torch.zeros(0, 3, dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    first, second = Bowl(eye, torch.zeros(3, dtype=torch.float64), none), Bowl(eye, torch.tensor([0.1, 0, 0]).double(), none)
    (pair,) = theorem_two([first, second], [point(0, 1, 0), point(0, 0, 0), point(4, 0, 0)])
    assert not pair.stationary
    printed, corrected = pair.printed(), pair.corrected()
    assert printed is not None
    assert corrected is not None
    assert printed < pair.measured <= pair.by_path <= corrected
    assert corrected == pytest.approx(4 * (0.1 + 3.9))


def test_a_way_that_curves_downwards_makes_the_theorem_not_applicable() -> None:
    """R = cos x over [0, 3] curves down at first; the secant, its mean curvature, is positive only if the slope grows."""
    objective = Objective([lambda theta: torch.cos(theta["a"])])
    segment = bounds.measure_segment(objective, point(0), point(3))
    assert segment.curvature == pytest.approx(-1.0)
    assert segment.secant == pytest.approx((-math.sin(3) + math.sin(0)) / 3)
    later = bounds.measure_segment(objective, point(1), point(4.5))
    assert later.curvature < 0 < later.secant
    pair = ForgettingBound(1, 2, 0.1, 1.0, 1.0, 3.5, (later,), 0.0)
    assert pair.corrected() is None
    assert pair.printed() is None
    assert pair.second_form() is None
    assert pair.corrected("secant") is not None
    assert dataclasses.replace(pair, steepness=3.0, chord_steepness=2.0).by_distance == pytest.approx(3 * 3.5)
    assert ForgettingBound(1, 3, 0.1, 1.0, 1.0, 3.5, (later, segment), 0.0).printed("secant") is None, "one bad segment is enough"


@pytest.mark.parametrize(("end", "stationary"), [(0.0099, True), (0.0101, False), (0.5, False)])
def test_stationary_is_a_hundredth_of_the_gradient_before(end: float, stationary: bool) -> None:
    parabola = Objective([lambda theta: theta["a"] ** 2 / 2])
    assert bounds.measure_segment(parabola, point(1), point(end)).stationary is stationary


def test_the_entropy_s_gradient_is_the_largest_on_the_way() -> None:
    """H = sin x on [-1, 1] is steepest in the middle, H = cos x at the ends."""
    objective = Objective([lambda theta: torch.cat([theta["a"] ** 2, torch.sin(theta["a"]), torch.cos(theta["a"])])], 0.1, 0.4)
    segment = bounds.measure_segment(objective, point(-1), point(1), points=3)
    assert segment.entropy_gradients == pytest.approx((1.0, math.sin(1)))


def test_a_task_that_moved_nothing_is_not_applicable_and_no_fault() -> None:
    segment = bounds.measure_segment(bowl(0, 0.1).objective(), point(1, 2, 3), point(1, 2, 3))
    assert segment.length == 0
    assert math.isnan(segment.curvature)
    assert ForgettingBound(1, 2, 0.0, 1.0, 1.0, 0.0, (segment,), 0.1).corrected() is None


def test_more_points_can_only_find_a_larger_gradient() -> None:
    objective = Objective([lambda theta: torch.sin(9 * theta["a"])])
    found = [bounds.largest_gradient(objective, point(0.1), point(2), points) for points in (2, 3, 5, 9, 17)]
    assert found == sorted(found)
    assert found[-1] > found[0]
    assert found[-1] <= 9


# --- theorem 1 by hand ------------------------------------------------------------------------------------------------------


def test_the_pac_bayes_formula_against_a_hand_computation() -> None:
    """n = 5000, KL = 1000, δ = 0.05: ln(2 sqrt(5000)/0.05) = 7.9475, sqrt(1007.9475/9998) = 0.317514."""
    assert bounds.complexity(1000.0, 5000, 0.05) == pytest.approx(0.317514, abs=1e-6)
    task = pac_bayes(training_error=0.2, kl=1000.0 - 1.5, cost=1.5, samples=5000, training_deviation=2.0, test_deviation=3.0)
    assert task.bound(0.05) == pytest.approx(0.517514, abs=1e-6)
    assert task.bound_objective(0.05) == pytest.approx(0.517514 + 0.01 * 5, abs=1e-6)
    assert task.bound_printed_kl(0.05) > task.bound(0.05)
    assert task.objective == pytest.approx(0.25 + 0.01 * 3)


def pac_bayes(**changed: float) -> bounds.PacBayes:
    values = {
        "task": 1,
        "samples": 5000,
        "family": "relative",
        "rung": 3,
        "variance": 0.1,
        "kl": 10.0,
        "kl_printed": 2000.0,
        "cost": 1.0,
        "training_error": 0.2,
        "spread": 0.01,
        "test_error": 0.25,
        "net_error": 0.2,
        "training_deviation": 0.0,
        "test_deviation": 0.0,
        "weight": 0.01,
    }
    return bounds.PacBayes(**(values | changed))  # type: ignore[arg-type]


def test_the_bound_shrinks_with_samples_and_grows_with_kl_and_confidence() -> None:
    by_samples = [bounds.complexity(50.0, samples, 0.05) for samples in (2, 10, 100, 1000, 10000)]
    assert by_samples == sorted(by_samples, reverse=True)
    assert bounds.complexity(51.0, 100, 0.05) > bounds.complexity(50.0, 100, 0.05)
    assert bounds.complexity(50.0, 100, 0.01) > bounds.complexity(50.0, 100, 0.05)
    with pytest.raises(ValueError, match="at least 2 samples"):
        bounds.complexity(50.0, 1, 0.05)


def test_kl_of_gaussians_against_pytorch_and_the_closed_form() -> None:
    before, after = point(0.5, -1.0, 2.0), point(1.5, 0.0, 2.5)
    prior, posterior = {"a": 0.3, "b": 2.0}, {"a": 0.6, "b": 0.5}
    expected = 0.0
    for name in before:
        q = torch.distributions.Normal(after[name], math.sqrt(posterior[name]))
        p = torch.distributions.Normal(before[name], math.sqrt(prior[name]))
        expected += float(torch.distributions.kl_divergence(q, p).sum())
    assert bounds.gaussian_kl(before, after, prior, posterior) == pytest.approx(expected)
    same = {"a": 0.3, "b": 0.3}
    assert bounds.gaussian_kl(before, after, same, same) == pytest.approx((1 + 1 + 0.25) / (2 * 0.3))
    # The paper's (κ/2)‖·‖² + C is the same for one variance everywhere and above it for several.
    assert bounds.printed_kl(before, after, same, same) == pytest.approx(bounds.gaussian_kl(before, after, same, same))
    assert bounds.printed_kl(before, after, prior, posterior) > expected
    constant = sum(before[name].numel() / 2 * (w / v - 1 - math.log(w / v)) for name, v, w in (("a", 0.3, 0.6), ("b", 2.0, 0.5)))
    printed = (1 + 1 + 0.25) / (2 * 0.3) + constant
    assert bounds.printed_kl(before, after, prior, posterior) == pytest.approx(printed)


def test_another_posterior_variance_is_ruinous_in_many_dimensions() -> None:
    """(k/2)(w/v - 1 - ln(w/v)) with k = 10⁶ and w = 2v: 153,426."""
    many = {"a": torch.zeros(1_000_000)}
    assert bounds.gaussian_kl(many, many, {"a": 1.0}, {"a": 2.0}) == pytest.approx(1e6 / 2 * (1 - math.log(2)))


def test_the_shares_of_all_rungs_and_ladders_sum_to_one() -> None:
    """A choice by the data costs ln of one over its share of δ."""
    shares = [math.exp(-bounds.choice_cost(rung, families=2)) for rung in range(1, 20001)]
    assert 2 * sum(shares) == pytest.approx(1.0, abs=1e-4)
    assert bounds.choice_cost(3) == pytest.approx(math.log(math.pi**2 * 9 / 6))


def test_variances_follow_each_tensor_of_the_prior_s_centre() -> None:
    centre = {"weight": torch.full((4,), 2.0), "zero": torch.zeros(3), "small": torch.full((2,), 2 * math.sqrt(NO_SCALE))}
    assert variances(centre, "isotropic", 0.25) == {"weight": 0.25, "zero": 0.25, "small": 0.25}
    found = variances(centre, "relative", 0.25)
    assert found == pytest.approx({"weight": 1.0, "zero": 0.25, "small": NO_SCALE})


def test_draws_have_the_variance_asked_for_and_depend_on_their_key() -> None:
    centre, spread = {"w": torch.full((40000,), 3.0)}, {"w": 0.25}
    one, again, other = (drawn(centre, spread, 0, "draw", number) for number in (1, 1, 2))
    assert torch.equal(one["w"], again["w"])
    assert not torch.equal(one["w"], other["w"])
    assert float((one["w"] - 3).square().mean()) == pytest.approx(0.25, rel=0.03)


class Threshold(nn.Module):
    """Says class 1 where w is above an image's grey level."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        margin = self.w - x.flatten(1).mean(dim=1)
        return SimpleNamespace(logits=torch.stack([torch.zeros_like(margin), margin], dim=-1)[None])


LEVELS = torch.arange(300, dtype=torch.float32) / 300
IMAGES = LabelledImages(
    Threshold(), lambda x: x.float(), LEVELS.view(-1, 1, 1, 1), torch.zeros(300, dtype=torch.int64), "last", False
)
"""more than fit into one batch; all are of class 0"""


def wrong(theta: Point, images: int = 300) -> float:
    return float((theta["w"] > LEVELS[:images]).float().mean())


def test_every_variance_that_is_tried_pays_for_the_choice() -> None:
    before, after = {"w": torch.tensor([0.1])}, {"w": torch.tensor([0.4])}
    search = choose_noise(IMAGES, before, after, 300, Settings(delta=0.1), seed=3)
    assert [(noise.family, noise.rung) for noise in search.tried] == [
        (f, r) for f in ("isotropic", "relative") for r in range(1, 13)
    ]
    assert search.error == pytest.approx(wrong(after, 256))
    for noise in search.tried:
        assert noise.variance == 4.0 ** (1 - noise.rung)
        spread = noise.variance * (1.0 if noise.family == "isotropic" else 0.01)
        assert noise.kl == pytest.approx(0.3**2 / (2 * spread), rel=1e-5)
        draws = [drawn(after, {"w": spread}, 3, "theory search", draw) for draw in range(3)]
        assert noise.training_error == pytest.approx(np.mean([wrong(theta, 256) for theta in draws]), abs=1e-6)
        paid = noise.kl + math.log(2 * math.pi**2 * noise.rung**2 / 6)
        assert noise.bound == pytest.approx(noise.training_error + bounds.complexity(paid, 300, 0.1))


def test_the_error_and_its_standard_error_are_those_of_the_draws() -> None:
    before, after = {"w": torch.tensor([0.1])}, {"w": torch.tensor([0.4])}
    task = PacBayesTask(2, 300, IMAGES, IMAGES.first(100), 0.0, math.nan)
    found = task.measure(Noise("isotropic", 3, 0.0625, 0.0, 0.0, 0.0), before, after, Settings(draws=5), seed=7)
    errors = [wrong(drawn(after, {"w": 0.0625}, 7, "theory", 2, draw)) for draw in range(5)]
    assert found.training_error == pytest.approx(np.mean(errors), abs=1e-6)
    assert found.spread == pytest.approx(stats.sem(errors), rel=1e-4)
    assert found.cost == pytest.approx(math.log(2 * math.pi**2 * 3**2 / 6))
    assert found.net_error == pytest.approx(wrong(after, 100))


def test_the_steepest_place_may_be_on_an_earlier_segment() -> None:
    parabola = Objective([lambda theta: theta["a"] ** 2 / 2])
    thetas = [point(value) for value in (3, 0, 5, 1, 2)]
    pairs = forgetting_of_all_pairs([parabola] * 4, thetas, [], 3, lambda done: None)
    assert {(pair.old, pair.new): pair.steepness for pair in pairs}[1, 4] == pytest.approx(5.0)


def test_the_chosen_and_the_tolerated_variance() -> None:
    tried = (
        Noise("isotropic", 1, 1.0, 5.0, 0.9, 0.95),
        Noise("isotropic", 2, 0.25, 20.0, 0.24, 1.1),
        Noise("relative", 3, 0.1, 80.0, 0.2, 2.0),
    )
    search = NoiseSearch(tried, 0.2)
    assert search.best is tried[0]
    assert search.tolerated is tried[1]
    assert NoiseSearch(tried[:1], 0.2).tolerated is None


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 3)])
def test_batch_norm_as_scale_and_shift_is_batch_norm(shape: tuple[int, ...]) -> None:
    norm = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3, eps=0.5)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        norm(x * 3 + 1)
    nn.init.normal_(norm.weight)
    net = nn.Sequential(norm).eval()
    expected = net(x)
    folded = fold(net.state_dict(), fold_norms(net))
    assert sorted(folded) == ["0.num_batches_tracked", "0.scale", "0.shift"]
    torch.testing.assert_close(functional_call(net, folded, (x,)), expected)


# --- a run, from the command line ---------------------------------------------------------------------------------------------

SMALL = ["--stream", "split-digits", "--memory", "50", "--net", "mlp(width=16, depth=4)", "--steps", "60", "--device", "cpu"]
QUICK = ["--draws", "3", "--points", "3", "--images", "40"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    code, _, err = gracecl("run", "grace(er())", *SMALL, "--snapshots", "--out", out)
    assert code == 0, err
    return only_run(out)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_theory_writes_page_numbers_and_picture_prints_tables_and_leaves_the_run_as_it_was(copied: Path) -> None:
    before = {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()}
    code, out, err = gracecl("theory", copied, *QUICK)
    assert code == 0, err
    for words in ("Theorem 1: PAC-Bayes", "Theorem 2: forgetting", "1→3", "estimates, not certificates", str(copied / "theory.md")):
        assert words in out
    assert "theorem 1: 3 tasks" in err
    assert (copied / "theory.png").read_bytes().startswith(b"\x89PNG")
    text = (copied / "theory.md").read_text()
    assert "## What the numbers do and do not show" in text
    assert "λ = β = 0.005" in text
    assert before == {file: file.read_bytes() for file in before}
    numbers = json.loads((copied / "theory.json").read_text())
    again = page.as_json(measure(copied, Settings(draws=3, points=3, images=40)))
    assert json.loads(json.dumps(again)) == numbers
    assert [task["samples"] for task in numbers["theorem_1"]] == [288, 288, 20]
    assert [(pair["old"], pair["new"]) for pair in numbers["theorem_2"]["pairs"]] == [(1, 2), (1, 3), (2, 3)]
    for task in numbers["theorem_1"]:
        assert task["bound_all_tasks"] > task["bound"] > task["training_error"]
        assert task["training_images"] == min(40, task["samples"])
        assert task["bound_objective"] == pytest.approx(
            task["bound"] + 0.005 * (task["training_deviation"] + task["test_deviation"])
        )
    for pair in numbers["theorem_2"]["pairs"]:
        assert pair["measured"] <= pair["by_distance"] <= pair["by_path"] * (1 + 1e-6)
        for level in ("corrected", "printed", "second_form"):
            defined = all(segment["curvature"] > 0 for segment in numbers["theorem_2"]["segments"][pair["old"] : pair["new"]])
            assert (pair[f"{level}_curvature"] is not None) == defined


def test_the_measured_values_agree_with_the_snapshots_evaluated_by_hand(copied: Path) -> None:
    """F and the error of θ_t with the net's own forward pass on the whole test sets; H* from the record."""
    from safetensors.torch import load_file

    from gracecl.lab.runs.run import learner_and_stream

    theory = measure(copied, Settings(draws=2, points=2, images=10_000))
    engine, stream = learner_and_stream(theory.config)
    data = stream.data
    missing, wrong = [], []
    for number in range(1, 4):
        engine.net.load_state_dict(load_file(copied / "snapshots" / f"{number}.safetensors"))
        objective, errors = [], []
        for task, target in enumerate(theory.targets):
            index = np.flatnonzero(stream.test_task == task)
            ((_, taps),) = engine.net.sweep(data.test_x[index])
            p = taps.logits.softmax(-1)
            y = torch.from_numpy(data.test_y[index])
            h = -(p * p.log()).sum(-1).mean(-1)
            risk = 1 - p[-1].gather(1, y[:, None]).mean()
            objective.append(float(risk + 0.005 * ((h - target) ** 2).sum()))
            errors.append(float((p[-1].argmax(1) != y).float().mean()))
        missing.append(objective)
        wrong.append(errors)
    for pair in theory.pairs:
        assert pair.measured == pytest.approx(missing[pair.new - 1][pair.old - 1] - missing[pair.old - 1][pair.old - 1], abs=1e-5)
    assert [task.net_error for task in theory.tasks] == pytest.approx([wrong[number][number] for number in range(3)])
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    last = [line["rows"]["log/H"] for line in lines if line["kind"] == "step" and line["task"] == 0][-20:]
    assert theory.targets[0] == pytest.approx(np.mean(last))
    moved = [{name: value.double() for name, value in load_file(copied / "snapshots" / f"{n}.safetensors").items()} for n in (0, 1)]
    used = [name for name in moved[0] if not name.startswith(("projector", "extras"))]
    distance = math.sqrt(sum(float((moved[1][name] - moved[0][name]).square().sum()) for name in used))
    assert theory.segments[0].length == pytest.approx(distance, rel=1e-5)


def test_a_net_with_batch_norm_counts_its_scales_and_shifts_and_a_method_without_entropy_has_no_lambda(tmp_path: Path) -> None:
    options = ["--stream", "split-digits(size=8, classes='0-3', tasks=2)", "--memory", "20", "--device", "cpu"]
    assert gracecl("run", "er", *options, "--net", "mlp(width=8, norm=True)", "--snapshots", "--out", tmp_path)[0] == 0
    theory = measure(only_run(tmp_path), Settings(draws=2, points=3, images=30, head="mean"))
    assert (theory.weight, theory.norm_entries) == (0.0, 2 * 2 * 8)
    assert all(moved > 0 for moved in theory.norms_moved)
    assert "λ = 0, because the method has no entropy term" in page.markdown(theory)
    assert all(task.bound_objective(0.05) == task.bound(0.05) for task in theory.tasks)
    (pair,) = theory.pairs
    assert pair.entropy_lipschitz == 0
    assert pair.measured <= pair.by_path


def test_one_task_alone_has_a_pac_bayes_bound_and_nothing_to_forget(finished: Path) -> None:
    theory = dataclasses.replace(measure(finished, Settings(draws=2, points=2, images=20)), pairs=())
    assert "nothing could be forgotten" in page.markdown(theory)
    assert "F stays" not in page.reading(theory)
    assert len(page.tables(theory)) == 2


# --- snapshots ------------------------------------------------------------------------------------------------------------------


def test_snapshots_change_neither_the_place_nor_any_result_of_a_run(finished: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(Work.begun(finished).config, snapshots=False)
    with pytest.raises(Interrupted):
        run(config, tmp_path, watch=StopAfter(59))
    without = only_run(tmp_path)
    assert not (without / "snapshots").exists()
    assert without.parts[-4:] == finished.parts[-4:]
    record = (without / "metrics.jsonl").read_bytes()
    assert len(record) > 1000
    assert (finished / "metrics.jsonl").read_bytes().startswith(record)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_snapshots_to_the_byte(finished: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a task and at the very end of one; what the last checkpoint lost is written again, the same."""
    config = Work.begun(finished).config
    expected = {file.name: file.read_bytes() for file in (finished / "snapshots").iterdir()}
    assert sorted(expected) == [f"{number}.safetensors" for number in range(4)]
    for step in (13, 29):
        with pytest.raises(Interrupted):
            run(config, tmp_path, watch=StopAfter(step))
    folder = only_run(tmp_path)
    saved = (folder / "checkpoint.safetensors").read_bytes()
    with pytest.raises(Interrupted):
        resume(folder, watch=StopAfter(58))
    (folder / "checkpoint.safetensors").write_bytes(saved)
    resume(folder)
    assert {file.name: file.read_bytes() for file in (folder / "snapshots").iterdir()} == expected


def test_a_configuration_from_before_the_option_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(
            RunConfig(method="er", stream="split-digits", net="mlp(width=4)", memory=10, steps=6, device="cpu"),
            tmp_path,
            watch=StopAfter(3),
        )
    folder = only_run(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name in ("snapshots", "layout", "cuda_graphs", "digests"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    work = Work.begun(folder)
    assert (work.config.snapshots, work.config.layout, work.config.steps) == (False, "auto", 6)
    with pytest.raises(Interrupted):
        resume(folder, watch=StopAfter(5))


# --- what the user can mend -------------------------------------------------------------------------------------------------------


def refusal(*arguments: str | Path) -> str:
    code, _, err = gracecl(*arguments)
    assert code == 2, err
    (sentence,) = [line for line in err.splitlines() if line.startswith("gracecl: ")]
    assert "Traceback" not in err
    return sentence


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert "holds no run (no config.json)" in refusal("theory", tmp_path)


def test_a_run_that_is_not_finished(copied: Path) -> None:
    (copied / "summary.json").unlink()
    assert f"is not finished; finish it with: gracecl resume {copied}" in refusal("theory", copied)


def test_a_run_without_snapshots(copied: Path) -> None:
    shutil.rmtree(copied / "snapshots")
    assert "kept no snapshots; run it again with --snapshots" in refusal("theory", copied)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"nothing")])
def test_a_snapshot_that_is_missing_or_damaged(damage: Callable[[Path], object], copied: Path) -> None:
    damage(copied / "snapshots" / "2.safetensors")
    assert "2.safetensors is missing or damaged" in refusal("theory", copied)


def test_a_stream_without_tasks(tmp_path: Path) -> None:
    config = RunConfig(method="joint", stream="split-digits", net="mlp(width=4)", memory=10, steps=4, device="cpu", snapshots=True)
    with pytest.raises(Interrupted):
        run(config, tmp_path, watch=StopAfter(3))
    (only_run(tmp_path) / "summary.json").write_text('{"metrics": {}}')  # as if it had come to its end
    assert "a stream without tasks" in refusal("theory", only_run(tmp_path))


@pytest.mark.parametrize("option", [("--draws", "1"), ("--points", "1"), ("--images", "0"), ("--delta", "0"), ("--delta", "1")])
def test_options_that_make_no_sense(option: tuple[str, str], copied: Path) -> None:
    assert f"theory: {option[0].removeprefix('--')} must be" in refusal("theory", copied, *option)
