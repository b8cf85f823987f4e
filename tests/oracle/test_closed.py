"""The laws of closed forms: what does not depend on the order, the batches, the machine, the scale or the origin; what scikit-learn
and a loop over images say; what happens with next to nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS, empirical_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge as SklearnRidge
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import Misfit, UserError
from gracecl.functional import closed_forms as forms
from gracecl.functional import sums as sums_module
from gracecl.functional.sums import Sums
from gracecl.inputs import Inputs
from gracecl.memory import Memories
from gracecl.methods import closed_form
from gracecl.nets import Backbone, TappedNet
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same

WIDTH, CLASSES = 8, 5
FAMILY = [
    "closed()",
    "closed(map='relu', size=30, solver='ridge')",
    "closed(solver='ridge', shrink='gcv', features='concat')",
    "closed(solver='ridge', weights='sqrt', norm='layer', features='mean')",
    "closed(solver='lda', shrink=0.1, priors='empirical', norm='unit')",
    "ncm()",
    "ncm(score='euclidean', norm='unit')",
    "slda()",
    "slda(shrinkage='oas')",
    "ranpac(projections=30)",
    "acil(size=30)",
    "gacl(size=30)",
    "foal(size=30)",
    "air(size=30)",
    "air(size=10, weights='exact')",
    "klda(size=30, gamma=0.1, members=2)",
    "randumb(size=30, gamma=0.1)",
    "fecam()",
    "fecam(covariance='common')",
]
"""of which the order of the images decides nothing"""


class Given(Backbone):
    """The inputs are the features of the last tap; those of others are multiples of them."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers, self.width = layers, width

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.flatten(1) * (self.layers - layer) for layer in range(self.layers)])


def data(n: int = 60, seed: int = 0, width: int = WIDTH, offset: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Features of five classes, the later ones rarer."""
    generator = np.random.default_rng(seed)
    y = np.sort(generator.choice(CLASSES, n, p=[0.4, 0.3, 0.15, 0.1, 0.05]))
    y[:CLASSES], y[CLASSES : 2 * CLASSES] = np.arange(CLASSES), np.arange(CLASSES)
    means = np.random.default_rng(99).normal(size=(CLASSES, width)) + offset
    return np.abs(means[y] + 0.7 * generator.normal(size=(n, width)) * np.linspace(0.5, 2, width)), y


def engine_of(expression: str, layers: int = 1, width: int = WIDTH, classes: int = CLASSES) -> Engine:
    net = TappedNet(Given(layers, width), classes, embedding=1).double()
    return Engine(parse_method(expression), net, Memories(0, Inputs((width, 1, 1))))


def learn(engine: Engine, x: np.ndarray, y: np.ndarray, batches: int = 1) -> Engine:
    for rows in np.array_split(np.arange(len(x)), batches):
        engine.learn(StreamBatch(torch.from_numpy(x[rows])[:, :, None, None], y[rows]))
    return engine


def learned(expression: str, x: np.ndarray, y: np.ndarray, **options: int) -> Engine:
    return learn(engine_of(expression, width=x.shape[1], **options), x, y)


def scores(engine: Engine, x: np.ndarray) -> np.ndarray:
    """`[L, B, C]`"""
    [(_, out)] = engine.ready_to_predict().sweep(torch.from_numpy(x)[:, :, None, None], batch=len(x))
    [found] = engine.chain.rules(out).values()
    return found.numpy()


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-9) -> None:
    expected = np.asarray(expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_allclose(
        np.asarray(found)[finite], expected[finite], rtol=0, atol=tolerance * max(1, np.abs(expected[finite]).max())
    )


def sums_of(x: np.ndarray, y: np.ndarray, each_class: bool = False, classes: int = CLASSES) -> Sums:
    sums = Sums(1, classes, x.shape[1], each_class=each_class)
    sums.add(torch.from_numpy(x)[None], y)
    return sums


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


# Any order, any batching, any split over machines: the same learner.


@pytest.mark.parametrize("expression", FAMILY)
def test_neither_order_nor_batches_nor_machines_matter(expression: str) -> None:
    x, y = data()
    order = np.random.default_rng(1).permutation(len(x))
    alone = learn(engine_of(expression, layers=2), x, y)
    batched = learn(engine_of(expression, layers=2), x[order], y[order], batches=13)
    single = learn(engine_of(expression, layers=2), x[order[::-1]], y[order[::-1]], batches=len(x))
    here, there = (learn(engine_of(expression, layers=2), x[part], y[part], batches=3) for part in (order[:25], order[25:]))
    here.chain.learner.merge(there.chain.learner)
    here.progress = alone.progress
    test = data(12, seed=5)[0]
    for other in (batched, single, here):
        mine, theirs = alone.chain.learner, other.chain.learner
        for name in ("counts", "means", "scatter", "class_sums", "gram"):
            if name != "gram" or mine.sums.scatter.ndim == 3:
                close(getattr(theirs.sums, name).numpy(), getattr(mine.sums, name).numpy())
        if getattr(mine, "solver", "") == "ridge":
            close(theirs.ridges().numpy(), mine.ridges().numpy())
        close(scores(other, test), scores(alone, test))


@pytest.mark.parametrize("columns", [1, 4, 5])
def test_many_features_have_the_same_scatter(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    whole, size = sums_of(x, y), x.shape[1]
    monkeypatch.setattr(sums_module, "COLUMNS", columns)
    here, there = sums_of(x[:20], y[:20]), sums_of(x[20:], y[20:])
    here.merge(there)
    here.add(torch.from_numpy(x)[None], y)
    whole.add(torch.from_numpy(x)[None], y)
    assert columns < size
    close(here.within.numpy(), whole.within.numpy())
    close(forms.Ridge(here, True).at(one(0.1)).weight.numpy(), forms.Ridge(whole, True).at(one(0.1)).weight.numpy())
    assert bool(sums_of(x, y).scatter[0, 0, columns:].eq(0).all())  # above the diagonal nothing is computed


def test_a_large_batch_is_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    whole, parts, added = engine_of("closed()"), engine_of("closed()"), []
    learn(whole, x, y)
    monkeypatch.setattr(closed_form, "AT_ONCE", 7)
    add = Sums.add
    monkeypatch.setattr(Sums, "add", lambda self, h, labels: (added.append(len(labels)), add(self, h, labels))[1])
    learn(parts, x, y)
    assert sum(added) == len(x)
    assert max(added) == 7
    close(scores(parts, x), scores(whole, x))


def test_state_holds_no_image_and_does_not_grow() -> None:
    for expression in FAMILY:
        few, many = (engine_of(expression), engine_of(expression))
        learn(few, *data(20))
        learn(many, *data(60), batches=4)
        sizes = [
            {name: tuple(np.shape(value)) for part in engine.chain.state_dict() for name, value in flat(part)}
            for engine in (few, many)
        ]
        assert sizes[0] == sizes[1]


def flat(state: dict, prefix: str = "") -> list[tuple[str, Tensor]]:
    found = []
    for name, value in state.items():
        found += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


@pytest.mark.parametrize("expression", FAMILY)
def test_renumbered_classes_have_the_same_scores(expression: str) -> None:
    number, (x, y), test = np.array([3, 0, 4, 1, 2]), data(), data(10, seed=5)[0]
    close(scores(learned(expression, x, number[y]), test)[..., number], scores(learned(expression, x, y), test))


@pytest.mark.parametrize("expression", FAMILY)
def test_declared_classes_that_never_come_change_nothing(expression: str) -> None:
    """They are never predicted, whatever the signs of the scores."""
    (x, y), test = data(), data(10, seed=5)[0]
    some = y < 3
    small, large = (scores(learned(expression, x[some], y[some], classes=classes), test) for classes in (3, 9))
    close(large[..., :3], small)
    assert np.isneginf(large[..., 3:]).all()


@pytest.mark.parametrize("expression", FAMILY)
@pytest.mark.parametrize(
    "case", ["one image", "one class", "an image per class", "fewer images than features", "constant", "twice"]
)
def test_next_to_nothing_gives_finite_scores(expression: str, case: str) -> None:
    x, y = data()
    rows = {
        "one image": [7],
        "one class": np.flatnonzero(y == 0)[:6],
        "an image per class": [np.flatnonzero(y == label)[0] for label in range(CLASSES)],
        "fewer images than features": [0, 1, 2, 3, 20, 21],
        "constant": [0, 1, 2, 3],
        "twice": [0, 0, 0, 1, 1, 1, 2, 2],
    }[case]
    x, y = x[rows], y[rows]
    if case == "constant":
        x = np.ones_like(x)
    found = scores(learned(expression, x, y), data(10, seed=5)[0])
    assert np.isfinite(found[..., np.unique(y)]).all()


# Ridge regression.


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [1e-3, 1.0, 1e3])
def test_ridge_is_scikit_learns(intercept: bool, ridge: float) -> None:
    (x, y), test = data(), data(10, seed=5)[0]
    regression = SklearnRidge(alpha=ridge, fit_intercept=intercept, tol=1e-12, solver="cholesky").fit(x, np.eye(CLASSES)[y])
    found = scores(learned(f"closed(solver='ridge', shrink={ridge}, intercept={intercept})", x, y), test)[0]
    close(found, regression.predict(test), 1e-8)
    if intercept:
        close(found.sum(axis=1), np.ones(10))


def test_recursive_least_squares_ends_in_the_solution_from_sums() -> None:
    """Block by block and image by image, as ACIL and GACL write it."""
    (x, y), ridge = data(), 0.3
    for batches in (7, 60):
        inverse, weight = np.eye(WIDTH) / ridge, np.zeros((WIDTH, CLASSES))
        for rows in np.array_split(np.random.default_rng(2).permutation(60), batches):
            h, targets = x[rows], np.eye(CLASSES)[y[rows]]
            inverse = inverse - inverse @ h.T @ np.linalg.solve(np.eye(len(h)) + h @ inverse @ h.T, h @ inverse)
            weight = weight + inverse @ h.T @ (targets - h @ weight)
        solution = forms.Ridge(sums_of(x, y), intercept=False).at(one(ridge))
        close(solution.weight[0].numpy(), weight)


@pytest.mark.parametrize("intercept", [False, True])
def test_one_factor_serves_every_rule(intercept: bool) -> None:
    """V = P (D⁻¹ + T)⁻¹ is the direct solution, and P and T are those of discriminant analysis with the covariance S_w + λ I."""
    (x, y), ridge = data(), 0.7
    sums = sums_of(x, y)
    made = forms.Ridge(sums, intercept)
    center = x.mean(axis=0) * intercept
    targets = np.eye(CLASSES)[y] - intercept * np.eye(CLASSES)[y].mean(axis=0)
    direct = np.linalg.solve((x - center).T @ (x - center) + ridge * np.eye(WIDTH), (x - center).T @ targets)
    close(made.at(one(ridge)).weight[0].numpy(), direct)
    if not intercept:
        solution, _ = made.solved(one(ridge))
        analysis = forms.discriminant(sums, forms.plus_identity(sums.within, one(ridge)))
        close(analysis.weight[0].numpy(), solution.directions[0].numpy())
        close(analysis.bias[0, 0].numpy(), -np.diag(solution.overlaps[0]) / 2)


def test_the_scale_of_features_does_not_matter() -> None:
    """h -> c h with λ -> c² λ leaves scores; the relative grid takes the same power, the covariance the same share."""
    (x, y), test = data(), data(10, seed=5)[0]
    for intercept in (False, True):
        large, small = (
            scores(learned(f"closed(solver='ridge', intercept={intercept}, shrink={ridge})", c * x, y), c * test)
            for c, ridge in ((30, 450.0), (1, 0.5))
        )
        close(large, small)
        small, large = (forms.Ridge(sums_of(c * x, y), intercept) for c in (1.0, 30.0))
        close(large.scale.numpy(), 900 * small.scale.numpy())
        close(forms.by_evidence(large).numpy(), 900 * forms.by_evidence(small).numpy())
        close(forms.by_cross_validation(large).numpy(), 900 * forms.by_cross_validation(small).numpy())
    for expression in ("closed()", "closed(solver='ridge')", "closed(solver='ridge', intercept=False, shrink='gcv')"):
        close(scores(learned(expression, 30 * x, y), 30 * test), scores(learned(expression, x, y), test))


@pytest.mark.parametrize("expression", ["closed()", "closed(solver='ridge')", "ncm(score='euclidean')"])
def test_the_origin_does_not_matter(expression: str) -> None:
    """Scores change by what is the same for all classes."""
    (x, y), test, shift = data(), data(10, seed=5)[0], np.linspace(-3, 4, WIDTH)
    moved, still = (scores(learned(expression, x + by, y), test + by)[0] for by in (shift, 0))
    close(moved - moved[:, :1], still - still[:, :1], 1e-8)
    if "ridge" in expression:  # with an intercept, scores sum to 1: nothing is left to change
        close(moved, still, 1e-8)


def test_means_far_from_the_origin_do_not_cancel() -> None:
    x, y = data()
    near, far = sums_of(x, y), sums_of(x + 2.0**20, y)  # rounds x to 2^-32, and nothing more
    np.testing.assert_allclose(far.within, near.within, rtol=1e-6, atol=1e-6)


def test_every_image_twice_with_twice_the_ridge_is_every_image_once() -> None:
    (x, y), both = data(), np.tile(np.arange(60), 2)
    for intercept in (False, True):
        twice, once = (
            forms.Ridge(sums_of(x[rows], y[rows]), intercept).at(one(ridge)) for rows, ridge in ((both, 4.0), (both[:60], 2.0))
        )
        close(twice.weight.numpy(), once.weight.numpy())
        close(twice.bias.numpy(), once.bias.numpy())


def test_a_huge_ridge_compares_with_class_sums() -> None:
    (x, y), test = data(), data(30, seed=5)[0]
    found = scores(learned("closed(solver='ridge', intercept=False, shrink=1e9)", x, y), test)[0]
    expected = test @ np.stack([x[y == label].sum(axis=0) for label in range(CLASSES)], axis=1)
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))
    nearest = scores(learned("ncm(score='euclidean')", x, y), test)[0]
    assert (found.argmax(axis=1) != nearest.argmax(axis=1)).any(), "which is not the nearest mean"


def test_weights_of_classes() -> None:
    x, y = data()
    counts = torch.from_numpy(np.bincount(y)).double()
    for kind in ("none", "sqrt", "balanced"):
        weights = forms.class_weights(counts, kind)
        assert float((weights * counts).sum()) == pytest.approx(len(y))
    close((weights * counts).numpy(), np.full(CLASSES, len(y) / CLASSES))
    shared, exact = sums_of(x, y), sums_of(x, y, each_class=True)
    plain = forms.Ridge(shared, intercept=True).at(one(0.5))
    close(forms.Ridge(exact, intercept=True, weights="none").at(one(0.5)).weight.numpy(), plain.weight.numpy())
    # Weighed images, written out; classes kept apart, or with one covariance for all.
    for kind in ("sqrt", "balanced"):
        weigh = forms.class_weights(counts, kind).numpy()[y]
        regression = SklearnRidge(alpha=0.5).fit(x, np.eye(CLASSES)[y], sample_weight=weigh)
        close(forms.Ridge(exact, intercept=True, weights=kind).at(one(0.5)).weight[0].numpy().T, regression.coef_, 1e-8)
        means = np.stack([x[y == label].mean(axis=0) for label in range(CLASSES)])
        mass = forms.class_weights(counts, kind).numpy() * counts.numpy()
        gram = shared.within[0].numpy() + means.T @ np.diag(mass) @ means + 0.5 * np.eye(WIDTH)
        found = forms.Ridge(shared, intercept=False, weights=kind).at(one(0.5)).weight[0]
        close(found.numpy(), np.linalg.solve(gram, means.T * mass))


# The choice of λ.


@pytest.mark.parametrize("n", [6, 60])
@pytest.mark.parametrize("intercept", [False, True])
def test_evidence_and_cross_validation_by_brute_force(n: int, intercept: bool) -> None:
    """From the factor, from eigenvalues, and from the images themselves; n < M and n > M."""
    x, y = data(60)
    rows = np.random.default_rng(3).permutation(60)[:n]
    x, y = x[rows], np.unique(y[rows], return_inverse=True)[1]
    classes = int(y.max()) + 1
    made = forms.Ridge(sums_of(x, y, classes=classes), intercept)
    h, targets = x - intercept * x.mean(axis=0), np.eye(classes)[y]
    targets = targets - intercept * targets.mean(axis=0)
    tried = made.scale * 10.0 ** torch.arange(-6, 3).double()
    values, squares = made.spectrum()
    for ridge in tried:
        kernel = np.eye(n) + h @ h.T / float(ridge)
        fitted = h @ np.linalg.solve(h.T @ h + float(ridge) * np.eye(WIDTH), h.T)
        left = (targets * np.linalg.solve(kernel, targets)).sum()
        close(made.unexplained(made.solved(ridge[None])[1]).numpy(), [left], 1e-8)
        expected = (n - intercept) * np.log(left) + np.linalg.slogdet(kernel)[1]
        close(made.evidence(ridge[None]).numpy(), [expected], 1e-5)
        by_values = (targets**2).sum() - (squares / (values + ridge)).sum()
        np.testing.assert_allclose(by_values, left, rtol=1e-4, atol=1e-8)
        residual, freedom = made.fit_and_freedom(ridge[None, None])
        close(residual[0].numpy(), [((targets - fitted @ targets) ** 2).sum()], 1e-8)
        close(freedom[0].numpy(), [intercept + np.trace(fitted)], 1e-8)
        gcv = ((targets - fitted @ targets) ** 2).sum() / n / (1 - (intercept + np.trace(fitted)) / n) ** 2
        if n > WIDTH:  # else 0 / 0
            np.testing.assert_allclose(made.generalised_cross_validation(ridge[None, None])[0], [gcv], rtol=1e-6)


def test_the_search_finds_the_least_of_all_half_powers() -> None:
    for n, seed in ((20, 0), (60, 0), (60, 1), (300, 2)):
        x, y = data(n, seed)
        y = np.where(np.random.default_rng(seed).random(n) < 0.3, np.random.default_rng(seed).integers(0, CLASSES, n), y)
        made = forms.Ridge(sums_of(x, y), intercept=True)
        tried = made.scale * 10 ** (torch.arange(-12, 5).double() / 2)
        losses = [float(made.evidence(ridge[None])) for ridge in tried]
        assert float(forms.by_evidence(made)) == pytest.approx(float(tried[int(np.argmin(losses))]))


@pytest.mark.parametrize("choose", [forms.by_evidence, forms.by_cross_validation])
def test_renumbered_classes_have_the_same_ridge(choose: Callable[[forms.Ridge], Tensor]) -> None:
    (x, y), number = data(), np.array([3, 0, 4, 1, 2])
    for intercept in (False, True):
        renumbered, plain = (choose(forms.Ridge(sums_of(x, labels), intercept)) for labels in (number[y], y))
        close(renumbered.numpy(), plain.numpy())


def test_the_search_takes_few_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solution itself is one of them."""
    counted, real = [], forms.solve
    monkeypatch.setattr(forms, "solve", lambda *given: counted.append(1) or real(*given))
    engine = learned("closed(solver='ridge')", *data(300))
    engine.ready_to_predict()
    assert 4 <= len(counted) <= 6


@pytest.mark.parametrize("least_at", [-6.0, -5.5, -3.0, -2.0, -1.5, 0.0, 0.5, 2.0])
def test_the_search_goes_downhill_in_each_layer(least_at: float) -> None:
    scale = torch.tensor([1.0, 10.0], dtype=torch.float64)
    at = torch.tensor([least_at, -1.0], dtype=torch.float64)
    found = forms.by_descent(lambda ridge: ((ridge / scale).log10() - at).abs(), scale)
    torch.testing.assert_close(found, scale * 10**at)


def test_the_error_on_images_held_out_is_that_of_the_images() -> None:
    x, y = data()
    held = np.arange(60) % 5 == 4
    ridges = torch.tensor([1e-2, 1.0, 100.0], dtype=torch.float64)
    _, errors = forms.held_out_errors(sums_of(x[~held], y[~held]), sums_of(x[held], y[held]), ridges)
    targets = np.eye(CLASSES)[y]
    for ridge, error in zip(ridges.tolist(), errors[:, 0].tolist(), strict=True):
        fitted = SklearnRidge(alpha=ridge, fit_intercept=False).fit(x[~held], targets[~held])
        assert error == pytest.approx(((fitted.predict(x[held]) - targets[held]) ** 2).sum())


def test_a_ridge_below_rounding_is_raised_and_told() -> None:
    matrix = torch.tensor([[[1.0, 1.0], [1.0, 1.0 - 1e-15]], [[4.0, 0.0], [0.0, 9.0]]], dtype=torch.float64)
    with pytest.warns(Misfit, match="below what double precision"):
        factor = forms.factored(matrix)
    torch.testing.assert_close(factor @ factor.transpose(1, 2), matrix)
    assert forms.factored(torch.full((1, 2, 2), torch.nan)).isnan().any(), "nor does it search for ever"


# Discriminant analysis.


class Pooled:
    """A covariance as one of scikit-learn's estimators; it pools if it is given deviations from class means."""

    def __init__(self, covariance: np.ndarray) -> None:
        self.covariance = covariance

    def fit(self, x: np.ndarray) -> Pooled:
        self.covariance_ = self.covariance
        return self


def deviations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x - np.stack([x[y == label].mean(axis=0) for label in range(CLASSES)])[y]


@pytest.mark.parametrize("shrink", ["oas", 0.2])
def test_analysis_is_scikit_learns(shrink: str | float) -> None:
    (x, y), test = data(), data(10, seed=5)[0]
    covariance = empirical_covariance(deviations(x, y), assume_centered=True)
    share = float(forms.oas(torch.from_numpy(covariance)[None], 60 - CLASSES)) if shrink == "oas" else shrink
    covariance = (1 - share) * covariance + share * np.trace(covariance) / WIDTH * np.eye(WIDTH)
    sklearn = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Pooled(covariance)).fit(x, y)
    found = scores(learned(f"closed(shrink={shrink!r})", x, y), test)[0]
    close(found, sklearn.decision_function(test) - np.log(sklearn.priors_))


def test_the_share_is_scikit_learns_with_n_degrees_of_freedom() -> None:
    x, y = data()
    apart = deviations(x, y)
    sums = sums_of(x, y)
    estimated = OAS(assume_centered=True).fit(apart)
    share = forms.oas(sums.within / 60, 60)
    close(share.numpy(), [estimated.shrinkage_])
    close(forms.shrunk(sums.within / 60, share)[0].numpy(), estimated.covariance_)
    assert float(forms.oas(sums.within / 60, 55)) > float(share)


def test_the_share_falls_as_images_are_doubled() -> None:
    x, y = data(20)
    shares = []
    for times in (1, 2, 4, 8):
        sums = sums_of(np.tile(x, (times, 1)), np.tile(y, times))
        shares.append(float(forms.oas(sums.within / len(sums), len(sums) - CLASSES)))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]


def test_all_of_the_covariance_replaced_is_the_nearest_mean() -> None:
    (x, y), test = data(), data(30, seed=5)[0]
    expected = np.stack([((test - x[y == label].mean(axis=0)) ** 2).sum(axis=1) for label in range(CLASSES)]).argmin(axis=0)
    for expression in ("closed(shrink=1.0)", "slda(shrinkage=1.0)", "ncm(score='euclidean')"):
        np.testing.assert_array_equal(scores(learned(expression, x, y), test)[0].argmax(axis=1), expected)
    singles = [np.flatnonzero(y == label)[0] for label in range(CLASSES)]  # nothing varies: OAS, too
    alone = scores(learned("closed()", x[singles], y[singles]), test)
    close(alone, scores(learned("ncm(score='euclidean')", x[singles], y[singles]), test))


def test_cosines() -> None:
    (x, y), test = data(), data(10, seed=5)[0]
    means = np.stack([x[y == label].mean(axis=0) for label in range(CLASSES)])
    expected = (test / np.linalg.norm(test, axis=1)[:, None]) @ (means / np.linalg.norm(means, axis=1)[:, None]).T
    close(scores(learned("ncm()", x, y), test)[0], expected)
    unit = x / np.linalg.norm(x, axis=1)[:, None]
    near = np.stack([unit[y == label].mean(axis=0) for label in range(CLASSES)])
    probe = test / np.linalg.norm(test, axis=1)[:, None]
    close(scores(learned("ncm(score='euclidean', norm='unit')", x, y), test)[0], probe @ near.T - (near**2).sum(axis=1) / 2)


# FeCAM.


def test_a_covariance_of_few_images_is_mixed_with_that_of_all() -> None:
    x, y = data()
    kept = np.flatnonzero((y != 4) | (np.arange(60) == np.flatnonzero(y == 4)[0]))
    x, y = x[kept], y[kept]
    learner = learned("fecam(beta=1.0, few=3.0)", x, y).chain.learner
    shared = deviations(x, y).T @ deviations(x, y) / len(x)
    covariances = list(learner.covariances())
    for label in range(CLASSES):
        own = x[y == label]
        expected = shared if label == 4 else (len(own) * np.cov(own.T) + 3 * shared) / (len(own) + 3)
        close(covariances[label][0].numpy(), expected)


def test_common_covariance() -> None:
    x, y = data()
    learner = learned("fecam(covariance='common')", x, y).chain.learner
    root = np.sqrt(x)
    assert learner.sums.scatter.shape == (1, WIDTH, WIDTH)
    [covariance] = learner.covariances()
    close(covariance[0].numpy(), deviations(root, y).T @ deviations(root, y) / 60)


# Features, maps, members.


def test_how_tapped_layers_become_features() -> None:
    x = data()[0]
    taps = torch.from_numpy(np.stack([3 * x, x**2, x]))
    for option, expected in {
        "features='last'": taps[-1:],
        "features='each'": taps,
        "features='mean'": taps.mean(dim=0, keepdim=True),
        "features='concat'": torch.cat([*taps], dim=1)[None],
        "features='each', norm='unit'": F.normalize(taps, dim=-1),
        "norm='tukey'": taps[-1:].sqrt(),
        "norm='layer'": torch.from_numpy((x - x.mean(axis=1)[:, None]) / np.sqrt(x.var(axis=1) + 1e-5)[:, None])[None],
    }.items():
        method = engine_of(f"closed({option})", layers=3).chain.learner
        torch.testing.assert_close(method.mapped(taps), expected)
    for option, taken in (("features='mean'", True), ("features='concat'", True), ("features='each'", False)):
        assert parse_method(f"closed({option})").chain.traits.all_taps is taken


def test_maps() -> None:
    x = torch.from_numpy(data()[0])[None]
    for spread, bound in (("normal", None), ("fan_in", WIDTH**-0.5)):
        method = engine_of(f"closed(map='sigmoid', size=4000, spread='{spread}')").chain.learner
        torch.testing.assert_close(method.mapped(x), (x @ method.projection).sigmoid())
        assert abs(method.projection.mean()) < 0.02
        assert float(method.projection.std()) == pytest.approx(1 if bound is None else bound / 3**0.5, rel=0.02)
        if bound is not None:
            assert float(method.projection.abs().max()) == pytest.approx(bound, rel=0.01)


def test_fourier_features_make_the_kernel() -> None:
    x, y = data(12)
    engine = engine_of("closed(map='rff', size=2000, gamma=0.05)")
    method = engine.chain.learner
    h = method.mapped(torch.from_numpy(x)[None])[0]
    kernel = np.exp(-0.05 * ((x[:, None] - x[None]) ** 2).sum(axis=2))
    np.testing.assert_allclose(h @ h.T, kernel, atol=0.1)
    assert np.abs(h @ h.T - kernel).mean() < 0.02
    first = learned("closed(map='rff', size=10)", x, y).chain.learner
    assert float(first.gammas) == pytest.approx(1 / (WIDTH * x.var()))
    before = first.gammas.clone()
    first.add(torch.from_numpy(5 * x)[None], y)
    assert torch.equal(first.gammas, before), "fixed after the first batch"


def test_members_vote_by_their_mean_softmax() -> None:
    (x, y), test = data(), data(10, seed=5)[0]
    engine = learned("klda(size=20, gamma=0.1, members=3)", x, y)
    found = scores(engine, test)
    learner = engine.chain.learner
    each = learner.scored(learner.solution, learner.mapped(torch.from_numpy(test)[None]))
    assert each.shape[0] == 3
    assert not torch.allclose(each[0], each[1])
    close(np.exp(found[0]), each.softmax(dim=-1).mean(dim=0).numpy())


# Presets.


@pytest.mark.parametrize(
    ("preset", "meant"),
    [
        ("ncm(norm='unit')", "closed(solver='ncm', features='each', norm='unit')"),
        ("ncm(score='euclidean')", "closed(solver='ncm', features='each', score='euclidean')"),
        ("slda(priors='empirical')", "closed(shrink=0.0001, features='each', shrink_to='identity', priors='empirical')"),
        ("slda(shrinkage=0.2, shrink_to='variance')", "closed(shrink=0.2, features='each')"),
        ("ranpac()", "closed(map='relu', solver='ridge', shrink='evidence', features='each', intercept=False)"),
        (
            "ranpac(projections=9, ridge=2.0, refresh=7)",
            "closed(map='relu', size=9, solver='ridge', shrink=2.0, features='each', intercept=False, refresh=7)",
        ),
        ("acil()", "closed(map='relu', solver='ridge', shrink=0.1, spread='fan_in', intercept=False)"),
        ("gacl()", "closed(map='relu', solver='ridge', shrink=100.0, spread='fan_in', intercept=False)"),
        (
            "foal()",
            "closed(map='sigmoid', size=1000, solver='ridge', shrink=1.0, features='mean', norm='layer', "
            "spread='fan_in', intercept=False)",
        ),
        ("air()", "closed(map='relu', solver='ridge', shrink=0.1, spread='fan_in', intercept=False, weights='balanced')"),
        (
            "air(weights='exact')",
            "closed(map='relu', solver='ridge', shrink=0.1, spread='fan_in', intercept=False, weights='exact')",
        ),
        ("klda(members=5)", "closed(map='rff', members=5)"),
        ("klda(gamma=0.5)", "closed(map='rff', gamma=0.5)"),
        ("randumb(priors='empirical')", "closed(map='rff', priors='empirical')"),
    ],
)
def test_a_preset_is_its_papers_options(preset: str, meant: str) -> None:
    assert repr(parse_method(preset).chain.learner) == meant


def test_images_held_out_are_merged_too() -> None:
    """Every fifth of each site's, which are every fifth of all where the sites have multiples of five."""
    x, y = data()
    text = "closed(solver='ridge', shrink='held_out', intercept=False)"
    whole, here, there = (learned(text, x[rows], y[rows]) for rows in (slice(None), slice(0, 25), slice(25, None)))
    here.chain.learner.merge(there.chain.learner)
    here.progress = whole.progress
    close(here.chain.learner.held_out.gram.numpy(), whole.chain.learner.held_out.gram.numpy())
    close(scores(here, x[:9]), scores(whole, x[:9]))


# Predictions while the stream goes on.


def between(engine: Engine, x: np.ndarray) -> np.ndarray:
    """`[L, B, C]`: scores as they are predicted while the stream goes on."""
    [(_, out)] = engine.ready_to_predict(exact=False).sweep(torch.from_numpy(x)[:, :, None, None], batch=len(x))
    [found] = engine.chain.rules(out).values()
    return found.numpy()


def shuffled(n: int = 60, first: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Data of which the first images hold every class twice."""
    x, y = data(n)
    order = np.concatenate([np.arange(first), first + np.random.default_rng(0).permutation(n - first)])
    return x[order], y[order]


@pytest.mark.parametrize("option", ["", ", refresh=20", ", refresh=0"])
@pytest.mark.parametrize("solver", ["lda", "ridge"])
def test_predictions_between_evaluations_are_those_of_the_last_solution(solver: str, option: str) -> None:
    """Which is made anew when it is stale; an evaluation is always of all images, and leaves that solution alone."""
    x, y = shuffled()
    test, text = data(10, seed=5)[0], f"closed(solver='{solver}', map='relu', size=60{option})"
    engine, solved_at, chosen_at, share = engine_of(text), 0, 0, None
    for now in range(6, 61, 6):
        learn(engine, x[now - 6 : now], y[now - 6 : now])
        stale = now - solved_at >= {"": max(1, now / 10), ", refresh=20": 20, ", refresh=0": 1}[option]
        if stale or not set(y[:now]) <= set(y[:solved_at]):
            solved_at = now
        exact = learned(f"closed(solver='{solver}', map='relu', size=60)", x[:solved_at], y[:solved_at])
        method = exact.chain.learner
        if solver == "ridge" and option != ", refresh=0" and solved_at == now:
            ridge = method.ridge(method.sums)
            if now >= 2 * chosen_at:
                share, chosen_at = method.ridges() / ridge.scale, now
            expected = ridge.at(share * ridge.scale)(method.mapped(torch.from_numpy(test)[None])).numpy()
        elif solved_at == now:
            expected = scores(exact, test)
        close(between(engine, test), expected)
        close(scores(engine, test), scores(learned(text, x[:now], y[:now]), test))
        close(between(engine, test), expected)
    assert solved_at == {"": 60, ", refresh=20": 54, ", refresh=0": 60}[option]


def test_few_features_make_a_solution_stale_sooner() -> None:
    """A tenth of 8 features is less than one image."""
    x, y = shuffled()
    engine, test = engine_of("closed(solver='ridge')"), data(10, seed=5)[0]
    for now in range(30, 35):
        learn(engine, x[now - 30 if now == 30 else now - 1 : now], y[now - 30 if now == 30 else now - 1 : now])
        between(engine, test)
        assert engine.chain.learner.solved_at == now


@pytest.mark.parametrize("expression", ["closed(solver='ridge', map='relu', size=90)", "closed(temperature=True)"])
def test_a_resumed_learner_predicts_the_same_bits(expression: str) -> None:
    x, y = shuffled()
    test, whole = data(10, seed=5)[0], engine_of(expression)
    for now in range(4, 61, 4):
        learn(whole, x[now - 4 : now], y[now - 4 : now])
        second = engine_of(expression)
        second.load_state_dict(whole.state_dict())
        np.testing.assert_array_equal(between(second, test), between(whole, test))
        assert_same(second.state_dict(), whole.state_dict(), "the state after a prediction")


def test_predictions_change_nothing_that_learning_depends_on() -> None:
    x, y = shuffled()
    asked, left = (engine_of("closed(solver='ridge', temperature=True)") for _ in range(2))
    for now in range(4, 61, 4):
        for engine in (asked, left):
            learn(engine, x[now - 4 : now], y[now - 4 : now])
        between(asked, x[:3])
    assert_same(asked.chain.state_dict(), left.chain.state_dict(), "the state")


def test_a_new_class_is_predicted_from_its_first_image() -> None:
    x, y = data()
    engine = engine_of("closed(refresh=1000)")
    for label, images in ((0, 20), (1, 1), (2, 1)):
        rows = np.flatnonzero(y == label)[:images]
        learn(engine, x[rows], y[rows])
        found = between(engine, x[:3])
        assert np.isfinite(found[..., : label + 1]).all()
        assert np.isneginf(found[..., label + 1 :]).all()


def test_a_learner_saved_by_an_earlier_version_is_read() -> None:
    """It has no solution of its own yet."""
    x, y = data()
    old, new = learned("closed()", x, y), engine_of("closed()")
    state = old.state_dict()
    for name in ("recent", "solved_at", "share", "chosen_at"):
        del state["method"][0][name]
    new.load_state_dict(state | {"method": [state["method"][0] | {"refreshed": {}}]})
    np.testing.assert_array_equal(between(new, x[:3]), scores(old, x[:3]))


def test_a_merged_learner_has_no_solution_from_before() -> None:
    x, y = data()
    whole, here, there = (
        learned("closed(refresh=1000)", x[rows], y[rows]) for rows in (slice(None), slice(0, 25), slice(25, None))
    )
    between(here, x[:9])
    here.chain.learner.merge(there.chain.learner)
    here.invalidate_predictions()
    close(between(here, x[:9]), scores(whole, x[:9]))


def log_loss(scores: np.ndarray, y: np.ndarray, temperature: float = 1.0) -> float:
    return float(F.cross_entropy(torch.from_numpy(scores) / temperature, torch.from_numpy(y)))


@pytest.mark.parametrize("solver", ["lda", "ridge"])
def test_the_running_temperature_calibrates(solver: str) -> None:
    """The log loss comes near the least that any temperature has; predictions stay."""
    x, y = data(850, seed=1)
    order = np.random.default_rng(0).permutation(850)
    x, y = x[order], y[order]
    plain, warm = (engine_of(f"closed(solver='{solver}'{option})") for option in ("", ", temperature=True"))
    for engine in (plain, warm):
        learn(engine, x[:600], y[:600], batches=60)
    raw, calibrated = (scores(engine, x[600:])[0] for engine in (plain, warm))
    np.testing.assert_array_equal(raw.argmax(axis=1), calibrated.argmax(axis=1))
    least = min(log_loss(raw, y[600:], 10**power) for power in np.linspace(-2, 2, 33))
    assert log_loss(calibrated, y[600:]) < min(log_loss(raw, y[600:]), least + 0.03)
    if solver == "ridge":
        assert log_loss(raw, y[600:]) > least + 0.3


def test_log_losses_of_temperatures_by_a_loop() -> None:
    """Each batch before it is added, by the last solution, of classes that it knew, decayed."""
    x, y = data()
    order = np.random.default_rng(4).permutation(60)
    x, y = x[order], y[order]
    engine = engine_of("closed(solver='ridge', shrink=0.5, temperature=True, refresh=20)")
    expected, solved_at = np.zeros(33), 0
    for start in range(0, 60, 5):
        rows, met = np.arange(start, start + 5), np.unique(y[:solved_at])
        known = rows[np.isin(y[rows], met)]
        if len(known):
            last = scores(learned("closed(solver='ridge', shrink=0.5)", x[:solved_at], y[:solved_at]), x[known])[0][:, met]
            own = np.searchsorted(met, y[known])
            expected = 0.99 * expected + [len(known) * log_loss(last, own, 10**power) for power in np.linspace(-2, 2, 33)]
        learn(engine, x[rows], y[rows])
        if start + 5 - solved_at >= 20 or not set(y[rows]) <= set(y[:solved_at]):
            solved_at = start + 5
    close(engine.chain.learner.log_losses[0].numpy(), expected, 1e-7)


# What is refused.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("shrink=1.5", "at most 1"),
        ("shrink='evidence'", "solver='lda'"),
        ("solver='ridge', shrink='oas'", "evidence"),
        ("solver='ridge', shrink=0.0", "above 0"),
        ("solver='ncm', shrink=0.5", "'auto'"),
        ("size=0", "size must be at least 1"),
        ("gamma=0.0", "gamma must be"),
    ],
)
def test_bad_options_are_told(options: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_method(f"closed({options})")


def test_what_cannot_be_merged_is_refused() -> None:
    x, y = data()
    one, two = (learned("slda(reference=True)", x, y).chain.learner for _ in range(2))
    with pytest.raises(UserError, match="order"):
        one.merge(two)
    one, two = (learned("klda(size=10)", x * scale, y).chain.learner for scale in (1, 2))
    with pytest.raises(UserError, match="gamma"):
        one.merge(two)


def test_the_net_stays_as_it_is() -> None:
    for expression in FAMILY:
        engine = engine_of(expression)
        before = {name: value.clone() for name, value in engine.net.state_dict().items()}
        learn(engine, *data(), batches=3)
        scores(engine, data(10)[0])
        assert_same(engine.net.state_dict(), before, "the net")
        assert (engine.net.meter.backward, len(engine.memories.replay)) == (0, 0)


def test_images_that_are_all_alike_have_a_scale() -> None:
    x, y = np.full((8, WIDTH), 3.0), np.arange(8) % CLASSES
    assert forms.Ridge(sums_of(x, y), intercept=True).scale.tolist() == [1.0]


def test_phases_go_round_the_whole_circle() -> None:
    phase = engine_of("closed(map='rff', size=400, gamma=1.0)").method.phase
    assert 0 <= phase.min() < 0.1
    assert 2 * np.pi - 0.1 < phase.max() < 2 * np.pi
