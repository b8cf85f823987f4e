"""The Bayesian strength against its printed table, the definition of the bound by quadrature, Monte Carlo, grids and scipy."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from gracecl.controllers.posterior import M_RANGE, S_RANGE, Posterior, Strength
from gracecl.errors import UserError

TABLE = """
 z       rule   m        s       E      unit   half   map
-1.732   0.391  -0.0383  0.5731  1.134  0.555  0.715  0.680
-1       0.467   0.3053  0.6312  1.656  0.722  0.837  1.000
-0.5     0.630   0.4927  0.6505  2.022  0.856  0.919  1.261
 0       1.000   0.6501  0.6594  2.381  1.000  1.000  1.532
 0.5     1.587   0.7842  0.6616  2.727  1.152  1.079  1.799
 1       2.142   0.9003  0.6601  3.059  1.308  1.157  2.058
 1.732   2.558   1.0453  0.6542  3.523  1.541  1.268  2.423
"""
NAMES, *LINES = [line.split() for line in TABLE.strip().splitlines()]
COLUMN = {name: [line[i] for line in LINES] for i, name in enumerate(NAMES)}
Z = torch.tensor([float(z) for z in COLUMN["z"]], dtype=torch.float64)

D = torch.tensor([-1.73, -1.0, -0.3, 0.0, 0.4, 1.1, 1.73], dtype=torch.float64)
OPTIONS = [
    Strength(c, sigma, tau, mu0)
    for c, sigma, tau, mu0 in product((-1.0, 1.0), (0.1, 0.3, 0.6, 1.0), (0.5, 1.0, 2.0, 3.0), (0.0, "unit"))
]


def printed(values: Tensor, column: str) -> list[str]:
    """Values with as many digits as the table's column has."""
    digits = max(len(text.partition(".")[2]) for text in COLUMN[column])
    return [f"{value:.{digits}f}" for value in values.tolist()]


def literal_elbo(strength: Strength, m: float, s: float, d: float, mu0: float) -> float:
    """The specification's formula, number by number."""
    c, sigma, tau = strength.c, strength.sigma, strength.tau
    square = d**2 - 2 * d * c * math.exp(-m + s**2 / 2) + c**2 * math.exp(-2 * m + 2 * s**2)
    kl = math.log(tau / s) + (s**2 + (m - mu0) ** 2) / (2 * tau**2) - 1 / 2
    return -0.5 * math.log(2 * math.pi * sigma**2) - square / (2 * sigma**2) - kl


def quadrature_elbo(strength: Strength, m: float, s: float, d: float, mu0: float) -> float:
    """The definition, E_q[ln p(d | γ) + ln p(γ) - ln q(γ)], with log-normal densities of γ, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    gamma = np.exp(m + s * nodes)

    def log_normal(x: np.ndarray, centre: float, spread: float) -> np.ndarray:
        return -0.5 * np.log(2 * np.pi * spread**2) - (x - centre) ** 2 / (2 * spread**2)

    likelihood = log_normal(d - strength.c / gamma, 0.0, strength.sigma)
    prior = log_normal(np.log(gamma), mu0, strength.tau) - np.log(gamma)
    q = log_normal(np.log(gamma), m, s) - np.log(gamma)
    return float((weights * (likelihood + prior - q)).sum() / weights.sum())


def points() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(12, generator=generator, dtype=torch.float64)
    s = 0.1 + 0.9 * torch.rand(12, generator=generator, dtype=torch.float64)
    return m, s, 2 * torch.randn(12, generator=generator, dtype=torch.float64)


def grid() -> tuple[Tensor, Tensor]:
    """[M, S, 1] each: m and s all over their ranges, s evenly in its logarithm."""
    m = torch.linspace(*M_RANGE, 161, dtype=torch.float64)
    s = torch.linspace(math.log(S_RANGE[0]), math.log(S_RANGE[1]), 61, dtype=torch.float64).exp()
    s[0], s[-1] = S_RANGE
    return m[:, None, None], s[None, :, None]


def scipy_maximum(value: Callable[[float, float], float], start: tuple[float, float]) -> tuple[float, float, float]:
    found = minimize(
        lambda x: -value(x[0], math.exp(x[1])),
        (min(max(start[0], M_RANGE[0]), M_RANGE[1]), math.log(start[1])),
        method="L-BFGS-B",
        bounds=[M_RANGE, tuple(math.log(s) for s in S_RANGE)],
        options={"ftol": 1e-15, "gtol": 1e-9},
    )
    return -found.fun, found.x[0], math.exp(found.x[1])


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_table(name: str) -> None:
    zero = Strength(tau=1, mu0=0)
    columns = {
        "rule": torch.exp(torch.tanh(Z)),
        "m": zero.posterior(Z).m,
        "s": zero.posterior(Z).s,
        "E": zero.posterior(Z).mean,
        "unit": Strength(tau=1).posterior(Z).mean,
        "half": Strength(tau=0.5).posterior(Z).mean,
        "map": zero.map(Z),
    }
    assert printed(columns[name], name) == COLUMN[name]


@pytest.mark.parametrize(("tau", "expected"), [(1.0, "-1.98382"), (0.5, "-0.45322")])
def test_the_unit_prior(tau: float, expected: str) -> None:
    assert f"{Strength(tau=tau).centre:.5f}" == expected


@pytest.mark.parametrize("strength", [Strength(mu0=-1.0, tau=0.7), Strength(sigma=2, tau=1), Strength(mu0=0.0, tau=1.5)], ids=repr)
def test_at_rest_nothing_pulls(strength: Strength) -> None:
    """The start of every search: both derivatives vanish there."""
    m, s = (torch.tensor([value], dtype=torch.float64) for value in strength.at_rest)
    for derivative in strength.gradient(m, s, torch.zeros(1, dtype=torch.float64)):
        assert derivative.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("strength", [*OPTIONS[1::2], Strength(sigma=20, tau=5), Strength(sigma=0.01, tau=3)], ids=repr)
def test_unit_means_one_where_nothing_deviates(strength: Strength) -> None:
    """Also where s is held by its limits, as in the last two."""
    assert strength.posterior(torch.zeros(1)).mean.item() == pytest.approx(1, abs=1e-10)


def test_elbo_is_its_definition() -> None:
    m, s, d = points()
    for strength in (Strength(), Strength(1, 0.4, 2.0, -0.7), Strength(-1, 2.0, 0.3, 0.5)):
        found = strength.elbo(m, s, d)
        for i in range(len(m)):
            at = m[i].item(), s[i].item(), d[i].item(), strength.centre
            assert found[i].item() == pytest.approx(literal_elbo(strength, *at), rel=1e-12)
            assert found[i].item() == pytest.approx(quadrature_elbo(strength, *at), rel=1e-9)


def test_elbo_is_the_mean_of_monte_carlo() -> None:
    """40 independent estimates give the standard error; z is then nearly normal, and 24 values stay within 4."""
    m, s, d = points()
    s = s.clamp(max=0.6)  # the estimator's own variance grows as exp(8 s²)
    for strength in (Strength(), Strength(1, 0.7, 0.8, 0.3)):
        generator = torch.Generator().manual_seed(1)
        estimates = torch.stack([strength.monte_carlo_elbo(m, s, d, 2000, generator) for _ in range(40)])
        z = (estimates.mean(dim=0) - strength.elbo(m, s, d)) / (estimates.std(dim=0) / math.sqrt(40))
        assert z.abs().max() < 4
        assert z.abs().mean() > 0.2  # an estimate without noise would be no check


def test_gradient_of_monte_carlo() -> None:
    m, s, d = points()
    s = s.clamp(max=0.5)
    strength, generator = Strength(), torch.Generator().manual_seed(2)
    found = []
    for _ in range(40):
        free = m.clone().requires_grad_(), s.clone().requires_grad_()
        found.append(torch.stack(torch.autograd.grad(strength.monte_carlo_elbo(*free, d, 1000, generator).sum(), free)))
    estimates = torch.stack(found)
    z = (estimates.mean(dim=0) - torch.stack(strength.gradient(m, s, d))) / (estimates.std(dim=0) / math.sqrt(40))
    assert z.abs().max() < 4.5


@pytest.mark.parametrize("strength", OPTIONS[::5], ids=repr)
def test_gradient(strength: Strength) -> None:
    m, s, d = points()
    free = m.clone().requires_grad_(), s.clone().requires_grad_()
    by_autograd = torch.autograd.grad(strength.elbo(*free, d).sum(), free)
    h = 1e-5
    by_difference = (
        (strength.elbo(m + h, s, d) - strength.elbo(m - h, s, d)) / (2 * h),
        (strength.elbo(m, s + h, d) - strength.elbo(m, s - h, d)) / (2 * h),
    )
    for found, exact, difference in zip(strength.gradient(m, s, d), by_autograd, by_difference, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found, difference, rtol=1e-5, atol=1e-4)


def test_hessian_by_autograd() -> None:
    """The second derivatives in (m, ln s) that Newton's step uses, else it would converge slowly and nobody would see why."""
    m, s, d = points()
    strength = Strength(1, 0.5, 2.0, -1.0)
    found = strength._derivatives(m, s**2, strength._pull(d))[2:]
    for i in range(len(m)):
        exact = torch.autograd.functional.hessian(
            lambda x, i=i: strength.elbo(x[0], torch.exp(x[1]), d[i]), torch.stack([m[i], s[i].log()])
        )
        torch.testing.assert_close(torch.stack([value[i] for value in found]), exact[[0, 0, 1], [0, 1, 1]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strength", OPTIONS, ids=repr)
def test_no_grid_point_and_no_search_is_better(strength: Strength) -> None:
    found = strength.posterior(D)
    reached = strength.elbo(found.m, found.s, D)
    for slope in strength.gradient(found.m, found.s, D):
        assert slope.abs().max() < 1e-10 / strength.sigma**2
    m, s = grid()
    on_grid = strength.elbo(m, s, D)
    assert (on_grid.amax(dim=(0, 1)) <= reached + 1e-12).all()
    starts = [(strength.centre, 0.3), (0.0, 1.5), (3.0, 0.05), (-2.0, 0.8)]
    for i, d in enumerate(D.tolist()):
        best, *_ = scipy_maximum(lambda m, s, d=d: literal_elbo(strength, m, s, d, strength.centre), starts[i % len(starts)])
        assert best <= reached[i].item() + 1e-8 * max(1.0, abs(best))


@pytest.mark.parametrize(
    ("strength", "held"),
    [
        (Strength(sigma=100, tau=5, mu0=0), "s"),
        (Strength(sigma=0.01, tau=1, mu0=0), "s"),
        (Strength(sigma=1, tau=0.5, mu0=20), "m"),
        (Strength(sigma=3000, tau=0.3, mu0=-20), "m"),
    ],
    ids=repr,
)
def test_optimum_at_a_limit(strength: Strength, held: str) -> None:
    """Where the best m or s lies outside its range, the other one is the best beside the limit."""
    found = strength.posterior(D)
    low, high = M_RANGE if held == "m" else S_RANGE
    value = getattr(found, held)
    assert ((value - low).abs() < 1e-12).logical_or((value - high).abs() < 1e-12).any()
    reached = strength.elbo(found.m, found.s, D)
    m, s = grid()
    assert (strength.elbo(m, s, D).amax(dim=(0, 1)) <= reached + 1e-9).all()
    for i, d in enumerate(D.tolist()):
        best, *_ = scipy_maximum(lambda m, s, d=d: literal_elbo(strength, m, s, d, strength.centre), (found.m[i].item(), 0.3))
        assert best <= reached[i].item() + 1e-8 * max(1.0, abs(best))


@pytest.mark.parametrize("strength", OPTIONS[::3], ids=repr)
def test_symmetry(strength: Strength) -> None:
    mirrored = Strength(-strength.c, strength.sigma, strength.tau, strength.mu0)
    one, two = strength.posterior(D), mirrored.posterior(-D)
    assert torch.equal(one.m, two.m)
    assert torch.equal(one.s, two.s)
    assert torch.equal(strength.map(D), mirrored.map(-D))


@pytest.mark.parametrize("strength", OPTIONS[::3], ids=repr)
def test_without_ln_s_the_bound_is_largest_at_no_width_at_all(strength: Strength) -> None:
    """The paper's bound: its optimum is at the lower limit of s, and near the most probable γ."""
    m, s = grid()
    printed_bound = strength.elbo(m, s, D) - torch.log(s)
    assert (printed_bound.amax(dim=0).argmax(dim=0) == 0).all()
    complete = strength.elbo(m, s, D)
    assert (complete.amax(dim=0).argmax(dim=0) > 0).all()
    for d, most_probable in zip(D.tolist(), strength.map(D).tolist(), strict=True):
        _, best_m, best_s = scipy_maximum(
            lambda m, s, d=d: literal_elbo(strength, m, s, d, strength.centre) - math.log(s), (math.log(most_probable), 0.3)
        )
        assert best_s == pytest.approx(S_RANGE[0], rel=1e-6)
        assert best_m == pytest.approx(math.log(most_probable), abs=0.01)


@pytest.mark.parametrize("strength", OPTIONS[::3], ids=repr)
def test_map_is_the_highest_point_of_the_posterior_density(strength: Strength) -> None:
    """ln p(d | γ) + ln p(ln γ) on a fine grid of ln γ."""
    theta = torch.linspace(*M_RANGE, 160_001, dtype=torch.float64)
    for d, found in zip(D.tolist(), strength.map(D).tolist(), strict=True):
        miss = (d - strength.c * torch.exp(-theta)) / strength.sigma
        density = -(miss**2) / 2 - ((theta - strength.centre) / strength.tau) ** 2 / 2
        assert math.log(found) == pytest.approx(theta[density.argmax()].item(), abs=1e-4)


@pytest.mark.parametrize("strength", OPTIONS[::3], ids=repr)
def test_layers_do_not_see_each_other(strength: Strength) -> None:
    together = strength.posterior(D)
    for i in range(len(D)):
        alone = strength.posterior(D[i : i + 1])
        torch.testing.assert_close((alone.m, alone.s), (together.m[i : i + 1], together.s[i : i + 1]), rtol=0, atol=1e-12)
    square = strength.posterior(D[:6].view(2, 3))
    torch.testing.assert_close(square.m.flatten(), together.m[:6], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strength", OPTIONS, ids=repr)
def test_the_start_does_not_matter(strength: Strength) -> None:
    """An earlier answer, the prior, and the corners of the ranges lead to the same optimum as no start at all."""
    cold = strength.posterior(D)
    earlier = strength.posterior(D.flip(0))
    torch.testing.assert_close(strength.posterior(D, earlier).mean, cold.mean, rtol=1e-11, atol=0)
    starts = torch.tensor([(strength.centre, 0.3), *product(M_RANGE, S_RANGE)], dtype=torch.float64)
    d = D.expand(len(starts), -1)
    start = Posterior(starts[:, :1].expand_as(d), starts[:, 1:].expand_as(d))
    torch.testing.assert_close(strength.posterior(d, start, iterations=40).mean, cold.mean.expand_as(d), rtol=1e-11, atol=0)


def test_a_near_start_needs_few_iterations() -> None:
    strength = Strength()
    before = strength.posterior(D + 0.1)
    torch.testing.assert_close(strength.posterior(D, before, iterations=4).mean, strength.posterior(D).mean, rtol=1e-10, atol=0)
    off = (strength.posterior(D, before, iterations=0).mean / strength.posterior(D).mean - 1).abs()
    assert off.min() > 1e-3


@pytest.mark.parametrize("c", [-1, 1])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_direction_and_flatness(c: int, tau: float) -> None:
    """With c = -1 γ rises with the entropy as the rule's does, with c = 1 it falls; either way it moves less than the rule."""
    log_gamma = Strength(c=c, tau=tau).posterior(Z).mean.log()
    assert (-c * log_gamma.diff() > 0).all()
    assert (log_gamma.diff().abs() < torch.tanh(Z).diff())[1:-1].all()


def test_nothing_waits_for_values() -> None:
    """On the meta device there are no values, so reading one, or branching on one, would fail."""
    d = torch.zeros(4, device="meta")
    assert Strength().posterior(d).mean.shape == (4,)
    assert Strength().map(d).shape == (4,)


def test_double_precision_and_no_gradient() -> None:
    d = torch.tensor([0.5, -0.5], requires_grad=True)
    found = Strength().posterior(d)
    for value in (found.m, found.s, found.mean, Strength().map(d)):
        assert value.dtype == torch.float64
        assert not value.requires_grad
    assert not Strength().posterior(d, Posterior(d, d.abs())).mean.requires_grad


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"c": 0.0}, "c must be -1 or 1, not 0.0"),
        ({"c": 2}, "c must be -1 or 1, not 2"),
        ({"tau": 0.0}, "tau must be above 0, not 0.0"),
        ({"tau": math.nan}, "tau must be a finite number, not nan"),
        ({"sigma": -1.0}, "sigma must be above 0, not -1.0"),
        ({"sigma": math.inf}, "sigma must be a finite number, not inf"),
        ({"mu0": "one"}, "mu0 must be a number or one of unit, not 'one'"),
        ({"mu0": math.inf}, "mu0 must be a finite number or one of unit, not inf"),
    ],
)
def test_bad_options(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Strength(**options)  # type: ignore[arg-type]
