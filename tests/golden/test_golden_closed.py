"""Closed forms against numbers that their authors' programs computed, and, for the choice of λ, our own brute force.

Features go through the engine as inputs of a net without layers; maps get the draws of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from small import NoLayers, load
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import StreamBatch
from gracecl.engine.engine import Engine
from gracecl.functional import closed_forms as forms
from gracecl.inputs import Inputs
from gracecl.memory import Memories
from gracecl.nets.tapped import TappedNet
from gracecl.registry.spec import parse_method

CLOSE, LOOSE = 1e-8, 1e-6


def engine_of(expression: str, width: int, classes: int) -> Engine:
    net = TappedNet(NoLayers(width), classes, embedding=1).double()
    return Engine(parse_method(expression), net, Memories(0, Inputs((width, 1, 1))))


def learn(engine: Engine, x: np.ndarray, y: np.ndarray) -> None:
    engine.learn(StreamBatch(torch.from_numpy(x)[:, :, None, None], y))


def learned(expression: str, x: np.ndarray, y: np.ndarray, classes: int) -> Engine:
    engine = engine_of(expression, x.shape[1], classes)
    learn(engine, x, y)
    return engine


def scores(engine: Engine, x: np.ndarray) -> np.ndarray:
    """`[B, C]`"""
    net = engine.ready_to_predict()
    [(_, out)] = net.sweep(torch.from_numpy(x)[:, :, None, None])
    [found] = engine.chain.rules(out).values()
    return found[0].numpy()


def use_draws(engine: Engine, projection: np.ndarray) -> None:
    method = engine.chain.learner
    assert method.projection.shape == (1, *projection.shape)
    method.projection = torch.from_numpy(np.array(projection))[None]


def assert_close(found, expected, tolerance: float = CLOSE) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))


def weight(engine: Engine) -> np.ndarray:
    """`[M, C]`"""
    engine.ready_to_predict()
    return engine.chain.learner.solution.weight[0].numpy()


def inverse(engine: Engine, ridge: float) -> np.ndarray:
    gram = engine.chain.learner.sums.gram[0].numpy()
    return np.linalg.inv(gram + ridge * np.eye(len(gram)))


# RanPAC, and nearest means in its program.


@pytest.mark.parametrize("prefix", ["rp", "raw"])
def test_ranpac(prefix: str) -> None:
    golden = load("ranpac")
    x, y, x_test = golden["x"], golden["y"], golden["x_test"]
    cuts = np.concatenate([[0], np.cumsum(golden["task_sizes"])])
    classes = int(cuts[-1])
    for task in range(len(cuts) - 1):
        ridge = float(golden[f"{prefix}_lambda_{task}"])
        text = (
            f"ranpac(projections={golden['rp_W_rand'].shape[1]}, ridge={ridge})"
            if prefix == "rp"
            else f"closed(solver='ridge', intercept=False, shrink={ridge})"
        )
        engine, alone, held = (engine_of(text, x.shape[1], classes) for _ in range(3))
        for one in (engine, alone, held) if prefix == "rp" else ():
            use_draws(one, golden["rp_W_rand"])
        for earlier in range(task + 1):
            rows = golden[f"{prefix}_order_{earlier}"]
            learn(engine, x[rows], y[rows])
        sums = engine.chain.learner.sums
        assert_close(sums.gram[0], golden[f"{prefix}_G_{task}"])
        assert_close(sums.class_sums[0], golden[f"{prefix}_Q_{task}"])
        met = int(cuts[task + 1])
        assert_close(weight(engine).T[:met], golden[f"{prefix}_weight_{task}"])
        found = scores(engine, x_test)
        assert_close(found[:, :met], golden[f"{prefix}_scores_{task}"])
        assert np.isneginf(found[:, met:]).all()
        asked = golden["y_test"] < met
        np.testing.assert_array_equal(found[asked].argmax(axis=1), golden[f"{prefix}_pred_{task}"])
        # What the program chooses λ by: the error on the last fifth of the newest task.
        first = int(0.8 * len(rows))
        learn(alone, x[rows[:first]], y[rows[:first]])
        learn(held, x[rows[first:]], y[rows[first:]])
        tried, errors = forms.held_out_errors(alone.chain.learner.sums, held.chain.learner.sums, torch.from_numpy(golden["ridges"]))
        mean = errors[:, 0].numpy() / (len(rows) - first) / classes
        usable = tried[:, 0].numpy() == golden["ridges"]
        expected = golden[f"{prefix}_val_mse_{task}"]
        assert usable.sum() >= 12
        np.testing.assert_allclose(mean[usable], expected[usable], rtol=1e-5)
        assert golden["ridges"][np.argmin(mean)] == ridge


def test_nearest_means() -> None:
    golden = load("ranpac")
    x, y, cuts = golden["x"], golden["y"], np.cumsum(golden["task_sizes"])
    engine = engine_of("ncm()", x.shape[1], int(cuts[-1]))
    for task in range(len(cuts)):
        rows = golden[f"ncm_order_{task}"]
        learn(engine, x[rows], y[rows])
        met = int(cuts[task])
        assert_close(engine.chain.learner.sums.means[0, :met], golden[f"ncm_weight_{task}"])
        found = scores(engine, golden["x_test"])
        assert_close(found[:, :met], golden[f"ncm_scores_{task}"])
        asked = golden["y_test"] < met
        np.testing.assert_array_equal(found[asked].argmax(axis=1), golden[f"ncm_pred_{task}"])


# Recursive least squares.


def test_acil() -> None:
    golden = load("acil")
    x, y, cuts, ridge = golden["x"], golden["y"], golden["cuts"], float(golden["gamma"])
    classes, size = int(y.max()) + 1, golden["h"].shape[1]
    engine = engine_of(f"acil(size={size}, ridge={ridge})", x.shape[1], classes)
    use_draws(engine, golden["buffer_weight"].T)
    mapped = engine.chain.learner.mapped
    assert_close(mapped(torch.from_numpy(x)[None])[0], golden["h"])
    assert_close(mapped(torch.from_numpy(golden["x_test"])[None])[0], golden["h_test"])
    for batch in range(len(cuts) - 1):
        rows = slice(cuts[batch], cuts[batch + 1])
        learn(engine, x[rows], y[rows])
        met = np.unique(y[: rows.stop])
        assert_close(inverse(engine, ridge), golden[f"R_{batch}"])
        expected = golden[f"weight_{batch}"]
        assert_close(weight(engine)[:, : expected.shape[1]], expected)
        assert_close(scores(engine, golden["x_test"])[:, met], golden[f"scores_{batch}"][:, met])
    ones = [np.concatenate([part, np.ones((len(part), 1))], axis=1) for part in (golden["h"], golden["h_test"])]
    engine = learned(f"closed(solver='ridge', intercept=False, shrink={ridge})", ones[0], y, classes)
    assert_close(inverse(engine, ridge), golden["bias_R_last"])
    assert_close(weight(engine), golden["bias_weight_last"])
    assert_close(scores(engine, ones[1]), golden["bias_scores_last"])


@pytest.mark.parametrize("times", [1, 3])
def test_gacl(times: int) -> None:
    """The authors' script adds each batch three times, which is a third of λ."""
    golden = load("gacl")
    x, y, cuts, ridge = golden["x"], golden["y"], golden["cuts"], float(golden["gamma"]) / times
    classes, size = int(y.max()) + 1, len(golden["buffer_weight"])
    engine = engine_of(f"gacl(size={size}, ridge={ridge})", x.shape[1], classes)
    use_draws(engine, golden["buffer_weight"].T)
    for batch in range(len(cuts) - 1):
        learn(engine, x[cuts[batch] : cuts[batch + 1]], y[cuts[batch] : cuts[batch + 1]])
        if times == 1:
            exposed = golden[f"iter1_exposed_{batch}"]
            assert list(dict.fromkeys(engine.progress.seen)) == exposed.tolist()
            assert_close(weight(engine)[:, exposed], golden[f"iter1_weight_{batch}"])
    last = len(cuts) - 2
    exposed = golden[f"iter1_exposed_{last}"] if times == 1 else golden["iter3_exposed_last"]
    expected = golden[f"iter1_weight_{last}"] if times == 1 else golden["iter3_weight_last"]
    assert_close(weight(engine)[:, exposed], expected)
    assert_close(inverse(engine, ridge) / times, golden[f"iter{times}_R_last"])
    assert_close(scores(engine, golden["x_test"])[:, exposed], golden[f"iter{times}_scores_last"])


def test_air() -> None:
    golden = load("air")
    h, y, cuts, ridge = golden["h"], golden["y"], golden["cuts"], float(golden["gamma"])
    classes = int(y.max()) + 1
    for batch in range(len(cuts) - 1):
        seen = slice(0, cuts[batch + 1])
        counts = np.bincount(y[seen], minlength=classes)
        met = counts > 0
        expected = golden[f"weight_{batch}"]
        theirs = np.where(met, 1 / np.maximum(counts, 1), 0) * expected.shape[1] / (1 / counts[met]).sum()
        scale = counts.sum() / (theirs * counts).sum()  # ours are scaled to sum to n
        engine = learned(
            f"closed(solver='ridge', intercept=False, weights='exact', shrink={ridge * scale})", h[seen], y[seen], classes
        )
        assert_close(weight(engine)[:, : expected.shape[1]], expected)
        assert_close(scores(engine, golden["h_test"])[:, met], golden[f"scores_{batch}"][:, met[: expected.shape[1]]])
    sums = engine.chain.learner.sums
    of_classes = sums.scatter[0] + sums.counts[:, None, None] * sums.means[0, :, :, None] * sums.means[0, :, None]
    assert_close(of_classes, golden["A"])
    assert_close(sums.class_sums[0], golden["C"])
    np.testing.assert_array_equal(sums.counts, golden["counts"])


def test_foal() -> None:
    golden = load("foal")
    tokens, y = golden["cls_tokens"], golden["y"]
    blocks, _, width = tokens.shape
    size, classes = len(golden["projection"]), golden["W_0"].shape[1]
    taps = TappedNet(NoLayers(width), classes, embedding=1).double()
    taps.layers = blocks
    ours = parse_method(f"foal(size={size})").chain
    ours.attach(taps, Memories(0, Inputs((width, 1, 1))))
    maps = torch.from_numpy(golden["projection"].T.copy())

    def normed(values: np.ndarray) -> Tensor:
        """The mean of the blocks through our norm, then the weights of the program's, which ours has not."""
        fused = ours.learner.chosen(torch.from_numpy(values))
        plain = F.layer_norm(torch.from_numpy(values).mean(dim=0), (width,), eps=float(golden["norm_eps"]))
        torch.testing.assert_close(fused[0], plain)
        return fused[0] * torch.from_numpy(golden["norm_weight"]) + torch.from_numpy(golden["norm_bias"])

    text = f"closed(map='sigmoid', spread='fan_in', size={size}, solver='ridge', shrink=1.0, intercept=False)"
    engine = engine_of(text, width, classes)
    use_draws(engine, maps.numpy())
    x, x_test = normed(tokens).numpy(), normed(golden["cls_tokens_test"]).numpy()
    assert_close(engine.chain.learner.mapped(torch.from_numpy(x)[None])[0], golden["activation"])
    assert_close(engine.chain.learner.mapped(torch.from_numpy(x_test)[None])[0], golden["activation_test"])
    for task in range(int(golden["task_of"].max()) + 1):
        for rows in golden[f"used_{task}"]:
            assert len(rows) == golden["batch"]
            assert (golden["task_of"][rows] == task).all()
            learn(engine, x[rows], y[rows])
        met = list(engine.progress.seen)
        assert_close(inverse(engine, 1.0), golden[f"R_{task}"])
        assert_close(weight(engine), golden[f"W_{task}"])
        assert_close(scores(engine, x_test)[:, met], golden[f"scores_{task}"][:, met])


# Discriminant analysis.


def test_slda() -> None:
    """The authors' recursion, from nothing and after a first batch whose covariance is found by OAS."""
    golden = load("slda")
    x, y, n_base, share = golden["x"], golden["y"], int(golden["n_base"]), float(golden["shrinkage"])
    classes = len(golden["stream_counts"])
    met = golden["stream_counts"] > 0
    text = f"slda(shrinkage={share}, reference=True)"
    engine = engine_of(text, x.shape[1], classes)
    learner = engine.chain.learner
    for number in range(len(x)):
        learn(engine, x[number : number + 1], y[number : number + 1])
        covariance = learner.sums.scatter[0] / learner.sums.images
        for after, name in ((0, "first"), (1, "second"), (n_base, "base_and_one")):
            if number == after:
                assert_close(covariance, golden[f"stream_Sigma_after_{name}"])

    def check(engine: Engine, prefix: str) -> None:
        learner = engine.chain.learner
        assert_close(learner.sums.means[0], golden[f"{prefix}_means"])
        np.testing.assert_array_equal(learner.sums.counts, golden[f"{prefix}_counts"])
        assert_close(learner.sums.scatter[0] / learner.sums.images, golden[f"{prefix}_Sigma"])
        assert_close(np.linalg.inv(learner.covariance()[0]), golden[f"{prefix}_Lambda"])
        found = scores(engine, golden["x_test"])
        assert_close(found[:, met], golden[f"{prefix}_scores"][:, met])
        among = golden[f"{prefix}_probas"][:, met]
        assert_close(torch.from_numpy(found).softmax(dim=1).numpy()[:, met], among / among.sum(axis=1, keepdims=True))

    check(engine, "stream")
    exact = learned("closed()", x[:n_base], y[:n_base], classes).chain.learner.sums
    covariance = exact.within / n_base
    base = forms.shrunk(covariance, forms.oas(covariance, n_base))
    assert_close(base[0], golden["base_Sigma_after_base"])
    assert_close(base[0], golden["fixed_Sigma_after_base"])
    based = learned(text, x[:n_base], y[:n_base], classes)
    based.chain.learner.sums.scatter = n_base * base
    learn(based, x[n_base:], y[n_base:])
    check(based, "base")
    fixed = learned(text, x, y, classes)
    fixed.chain.learner.sums.scatter = len(x) * base
    check(fixed, "fixed")


def test_klda() -> None:
    """Without shrinkage; the program does not divide the scatter by n, so its exponents are 2/n of ours."""
    golden = load("klda")
    x, y, gamma, size = golden["x"], golden["y"], float(golden["sigma"]), int(golden["D"])
    n, classes, members = len(x), int(y.max()) + 1, len(golden["omega"])
    engine = engine_of(f"closed(map='rff', size={size}, gamma={gamma}, members={members}, shrink=0.0)", x.shape[1], classes)
    learner = engine.chain.learner
    # The file's omega has the spread √(2γ) already.
    learner.projection = torch.from_numpy(golden["omega"]) / np.sqrt(2 * gamma)
    learner.phase = torch.from_numpy(golden["phase"])[:, None]
    assert_close(learner.mapped(torch.from_numpy(x)[None])[0], golden["features"])
    learn(engine, x[::-1].copy(), y[::-1].copy())
    assert_close(learner.sums.scatter[0], golden["whole_scatter"])
    assert_close(learner.sums.means[0], golden["whole_means"])
    assert_close(np.linalg.inv(learner.covariance()[0]) / n, golden["whole_precision"], LOOSE)
    engine.ready_to_predict()
    h = learner.mapped(torch.from_numpy(golden["x_test"])[None])
    of_members = learner.scored(learner.solution, h) * 2 / n
    precision = np.linalg.inv(learner.sums.scatter[0])
    of_image = np.einsum("bi,ij,bj->b", h[0], precision, h[0])
    assert_close(of_members[0] - of_image[:, None], golden["whole_scores"], LOOSE)
    chances = of_members.softmax(dim=-1).mean(dim=0)
    assert_close(chances, golden["whole_ensemble_probs"], LOOSE)
    np.testing.assert_array_equal(chances.argmax(dim=1), golden["whole_ensemble_pred"])
    # Ours is the mean softmax of the members at their own temperature.
    ours = (of_members * n / 2).softmax(dim=-1).mean(dim=0)
    assert_close(np.exp(scores(engine, golden["x_test"])), ours)


def test_randumb() -> None:
    """Class by class, as scikit-learn shrinks, with the classes' shares as priors; and the older file, which pools."""
    golden = load("randumb")
    order = golden["order"]
    x, y = golden["x"][order], golden["y"][order]
    classes, size, gamma = int(y.max()) + 1, int(golden["embed_dim"]), float(golden["gamma"])
    assert_close(1 / (x.shape[1] * x.var()), gamma)
    engine = engine_of(f"randumb(size={size}, priors='empirical')", x.shape[1], classes)
    learner = engine.chain.learner
    learner.projection = torch.from_numpy(golden["omega"])[None] / np.sqrt(2 * gamma)
    learner.phase = torch.from_numpy(golden["phase"])[None, None]
    learn(engine, x, y)
    assert_close(learner.gammas, [gamma])  # of the first batch, which is all of them
    assert_close(learner.mapped(torch.from_numpy(x)[None])[0], golden["h"])
    h_test = learner.mapped(torch.from_numpy(golden["x_test"])[None])
    assert_close(h_test[0], golden["h_test"])
    assert_close(learner.sums.counts / len(x), golden["priors"])
    covariance = torch.zeros(1, size, size, dtype=torch.float64)
    for label in range(classes):
        own = learned("closed()", golden["h"][y == label], y[y == label], classes).chain.learner.sums
        of_class = own.within / own.images
        covariance += float(golden["priors"][label]) * forms.shrunk(of_class, forms.oas(of_class, own.images))
    assert_close(covariance[0], golden["covariance"])
    found = forms.discriminant(learner.sums, covariance, "empirical")(h_test)[0].numpy()
    for kind in ("flag", "noflag"):
        assert int(golden[f"{kind}_width"]) == size
        assert_close(found, golden[f"{kind}_scores"])
        predicted = found.argmax(axis=1)
        np.testing.assert_array_equal(predicted, golden[f"{kind}_pred"])
        right = [(predicted == golden["y_test"])[golden["y_test"] == label].mean() for label in np.unique(golden["y_test"])]
        assert np.mean(right) == pytest.approx(float(golden[f"{kind}_accuracy"]))
    pooled = learner.sums.within / len(x)
    pooled = forms.shrunk(pooled, forms.oas(pooled, len(x)))
    assert_close(learner.sums.means[0], golden["legacy_means"])
    assert_close(pooled[0], golden["legacy_Sigma"])
    legacy = forms.discriminant(learner.sums, forms.shrunk(pooled, torch.tensor([1e-4]).double(), "identity"))(h_test)[0]
    assert_close(legacy.softmax(dim=1), golden["legacy_probas"])
    np.testing.assert_array_equal(legacy.argmax(dim=1), golden["legacy_pred"])


# Class covariances.


def of_each(matrices: Iterator[Tensor]) -> Tensor:
    """`[K, D, D]` of one layer."""
    return torch.cat(list(matrices))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("full", "{paper}"),
        ("diag", "{paper}, covariance='diagonal'"),
        ("euclid", "{paper}, covariance='none'"),
        ("vit", "beta=1.0, unit=True, rounds=1, off_diagonal=0.0"),
        ("vit_r", "beta=1.0, unit=True, rounds=1, on_diagonal=10.0, off_diagonal=10.0"),
    ],
)
def test_fecam(case: str, options: str) -> None:
    golden = load("fecam")
    x, y, x_test = golden["x"], golden["y"], golden["x_test"]
    classes = int(golden["task_sizes"].sum())
    first, second = float(golden["alpha1"]), float(golden["alpha2"])
    paper = f"beta={float(golden['beta'])}, on_diagonal={first}, off_diagonal={second}"
    engine = engine_of(f"fecam(few=0.0, {options.format(paper=paper)})", x.shape[1], classes)
    for rows in np.array_split(np.random.default_rng(0).permutation(len(x)), 7):
        learn(engine, x[rows], y[rows])
    learner = engine.chain.learner
    found = scores(engine, x_test)
    assert_close(-found, golden[f"{case}_distances"], LOOSE)
    if case in ("full", "diag", "euclid"):
        np.testing.assert_array_equal(found.argmax(axis=1), golden[f"{case}_pred"])
        assert_close(learner.plain.means[0], golden["prototypes"])
        assert_close(learner.powered(torch.from_numpy(x_test)), golden["tukey_x_test"])
    if case == "full":
        once = forms.raised(of_each(learner.covariances()), first, second)
        assert_close(once, golden["full_cov"])
        assert_close(forms.raised(once, first, second), golden["full_shrunk"])
        assert_close(of_each(learner.distances()), golden["full_normalised"])
    if case == "diag":
        assert_close(of_each(learner.distances()), golden["diag_matrix"])
    if case.startswith("vit"):
        shrunk = forms.raised(of_each(learner.covariances()), learner.on_diagonal, learner.off_diagonal)
        assert_close(shrunk, golden[f"{case}_shrunk"])
        assert_close(of_each(learner.distances()), golden[f"{case}_normalised"])


def test_class_covariances() -> None:
    """Of features as they are, before anything is done to them."""
    golden = load("fecam")
    x, y = golden["x"], golden["y"]
    classes = int(y.max()) + 1
    engine = learned("fecam(few=0.0, beta=1.0, rounds=0, correlate=False)", x, y, classes)
    assert_close(of_each(engine.chain.learner.covariances()), golden["plain_cov"])


# The choice of λ and of the shrinkage: ours.


def test_choices() -> None:
    golden = load("choice")
    h, y, h_test, ridges = golden["h"], golden["y"], golden["h_test"], torch.from_numpy(golden["lambdas"])
    classes, chosen = len(golden["counts"]), float(golden["chosen_evidence"])
    engine = learned(f"closed(solver='ridge', shrink={chosen})", h, y, classes)
    sums = engine.chain.learner.sums
    np.testing.assert_array_equal(sums.counts, golden["counts"])
    assert_close(sums.class_sums[0], golden["C"])
    assert_close(sums.gram[0], golden["G"])
    assert_close(sums.within[0], golden["scatter"])
    ridge = forms.Ridge(sums, intercept=True)
    assert_close(ridge.scale * 10.0 ** np.arange(-6, 3), golden["lambdas"])
    found = {name: [] for name in ("q", "logdet", "evidence")}
    for each in ridges:
        _, inner = ridge.solved(each[None])
        found["q"].append(float(ridge.unexplained(inner)))
        found["evidence"].append(float(ridge.evidence(each[None])))
        n = len(y)
        found["logdet"].append(found["evidence"][-1] - (n - 1) * np.log(found["q"][-1]))
    for name, values in found.items():
        assert_close(values, golden[name])
    assert golden["lambdas"][np.argmin(found["evidence"])] == chosen
    residual, freedom = ridge.fit_and_freedom(ridges[:, None])
    assert_close(residual[:, 0], golden["rss"])
    assert_close(freedom[:, 0], golden["df"])
    gcv = ridge.generalised_cross_validation(ridges[:, None])[:, 0]
    np.testing.assert_allclose(gcv, golden["gcv"], rtol=1e-4)
    assert golden["lambdas"][gcv.argmin()] == golden["chosen_gcv"]
    for choose, name in ((forms.by_evidence, "evidence"), (forms.by_cross_validation, "gcv")):
        power = np.log10(float(choose(ridge)) / float(golden[f"chosen_{name}"]))
        assert power == pytest.approx(round(2 * power) / 2)
        assert abs(power) <= 0.5 + 1e-9
    assert_close(weight(engine), golden["ridge_weight"])
    assert_close(engine.chain.learner.solution.bias[0, 0], golden["ridge_bias"])
    assert_close(scores(engine, h_test), golden["ridge_scores"])
    covariance = sums.within / len(y)
    share = forms.oas(covariance, len(y))
    assert_close(share, [golden["oas_shrinkage"]])
    assert_close(forms.shrunk(covariance, share)[0], golden["oas_covariance"])
    assert_close(forms.discriminant(sums, forms.shrunk(covariance, share))(torch.from_numpy(h_test)[None])[0], golden["lda_scores"])
    assert_close(forms.oas(covariance, len(y) - classes), [golden["oas_dof_shrinkage"]])
    assert_close(scores(learned("closed()", h, y, classes), h_test), golden["lda_dof_scores"])
    for kind in ("sqrt", "balanced"):
        assert_close(forms.class_weights(sums.counts, kind), golden[f"{kind}_weights"])
        shared = learned(f"closed(solver='ridge', shrink={chosen}, intercept=False, weights='{kind}')", h, y, classes)
        assert_close(weight(shared), golden[f"{kind}_shared_weight"])
    exact = learned(f"closed(solver='ridge', shrink={chosen}, intercept=False, weights='exact')", h, y, classes)
    assert_close(weight(exact), golden["balanced_exact_weight"])
    of_classes = exact.chain.learner.sums
    by_root = forms.Ridge(of_classes, intercept=False, weights="sqrt").at(torch.tensor([chosen]).double())
    assert_close(by_root.weight[0], golden["sqrt_exact_weight"])
