"""RanPAC against scikit-learn's Ridge and against a literal choice of the ridge, through the engine's own hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from double_features import engine_of, features, learned, scores, seen_images
from sklearn.linear_model import Ridge

from gracecl import Learner
from gracecl.core import StreamBatch
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.testing import TOY_SHAPE, assert_same, feed, toy_data, toy_engine, toy_stream

SMALL = "ranpac(projections=50{})"
HELD_OUT = ", ridge='held_out'"


def projected(method, x: np.ndarray, layer: int) -> np.ndarray:
    return np.maximum(x @ method.projection[layer].numpy(), 0)


@pytest.mark.parametrize(("taps", "batch"), [(1, 1), (1, 7), (3, 7)])
@pytest.mark.parametrize("until", [None, 20], ids=["whole stream", "two tasks"])
@pytest.mark.parametrize("ridge", [1e-2, 1.0, 1e4])
def test_it_is_ridge_regression_to_one_hot_labels(taps: int, batch: int, until: int | None, ridge: float) -> None:
    """One image at a time, or several."""
    engine, stream = learned(SMALL.format(f", ridge={ridge}"), taps, batch, until and until * 7 // batch)
    images, labels = seen_images(engine, stream)
    for layer in range(taps):
        h = projected(engine.chain.learner, features(engine, images)[layer], layer)
        assert 0.2 < (h == 0).mean() < 0.8
        regression = Ridge(alpha=ridge, fit_intercept=False).fit(h, np.eye(6)[labels])
        expected = regression.predict(projected(engine.chain.learner, features(engine, stream.data.test_x)[layer], layer))
        met = np.unique(labels)
        found = scores(engine, stream.data.test_x)[layer]
        np.testing.assert_allclose(found[:, met], expected[:, met], rtol=1e-6, atol=1e-6)
        assert np.isneginf(np.delete(found, met, axis=1)).all(), "a class that was not met"
        np.testing.assert_allclose(engine.chain.learner.solution.weight[layer].T, regression.coef_, rtol=1e-6, atol=1e-8)


def noisy(ridge_wanted: str):
    """An engine whose best ridge is neither the smallest nor the largest: labels are partly random, or not."""
    engine, stream = engine_of(SMALL.format(HELD_OUT), taps=2), toy_stream()
    generator, data = np.random.default_rng(1), toy_data(6, 40)
    labels = generator.integers(0, 6, 240) if ridge_wanted == "large" else data.train_y
    order = generator.permutation(240)
    for rows in np.array_split(order, 40):
        engine.learn(StreamBatch(data.train_x[rows], labels[rows]))
    return engine, data.train_x[order], labels[order], stream


@pytest.mark.parametrize("wanted", ["large", "small"])
def test_the_ridge_is_that_with_the_least_error_on_every_fifth_image(wanted: str) -> None:
    engine, images, labels, stream = noisy(wanted)
    engine.ready_to_predict()
    held = np.arange(240) % 5 == 4
    y = np.eye(6)[labels]
    chosen = []
    for layer in range(2):
        h = projected(engine.chain.learner, features(engine, images)[layer], layer)
        ridges = 10.0 ** np.arange(-8, 9)
        errors = [
            ((Ridge(alpha=ridge, fit_intercept=False, solver="svd").fit(h[~held], y[~held]).predict(h[held]) - y[held]) ** 2).sum()
            for ridge in ridges
        ]
        chosen.append(ridges[np.argmin(errors)])
        regression = Ridge(alpha=chosen[-1], fit_intercept=False).fit(h, y)
        expected = regression.predict(projected(engine.chain.learner, features(engine, stream.data.test_x)[layer], layer))
        np.testing.assert_allclose(scores(engine, stream.data.test_x)[layer], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(engine.chain.learner.ridges(), chosen)
    assert all(1e-8 < ridge < 1e8 for ridge in chosen)
    assert (min(chosen) >= 1e3) == (wanted == "large")


def test_before_an_image_is_held_out_the_ridge_is_1() -> None:
    engine, data = toy_engine(SMALL.format(HELD_OUT)), toy_data()
    learner = engine.chain.learner
    engine.learn(StreamBatch(data.train_x[:4], data.train_y[:4]))
    assert learner.ridges().tolist() == [1.0]
    engine.learn(StreamBatch(data.train_x[4:9], data.train_y[4:9]))
    assert (len(learner.sums), len(learner.held_out)) == (8, 1)
    engine.ready_to_predict()


def test_the_choice_of_the_ridge_changes_no_sum() -> None:
    """Sums of both parts are those that a given ridge would be used with; the evidence takes them as they are."""
    open_, given, likely = (learned(SMALL.format(option))[0].chain.learner for option in (HELD_OUT, ", ridge=2.0", ""))
    assert torch.equal(open_.projection, given.projection)
    for learner in (open_, likely):
        torch.testing.assert_close(learner.all_sums.gram, given.sums.gram)
        torch.testing.assert_close(learner.all_sums.class_sums, given.sums.class_sums)
    assert (len(open_.held_out), len(given.held_out), len(likely.held_out)) == (48, 0, 0)


def test_the_ridge_is_the_likeliest() -> None:
    """Of half powers of ten times the mean eigenvalue, by the marginal likelihood of the labels written out."""
    engine, stream = learned(SMALL.format(""), taps=2)
    images, labels = seen_images(engine, stream)
    y = np.eye(6)[labels]
    for layer in range(2):
        h = projected(engine.chain.learner, features(engine, images)[layer], layer)
        n = len(h)

        def likelihood(ridge: float, h: np.ndarray = h, n: int = n) -> float:
            kernel = np.eye(n) + h @ h.T / ridge  # the covariance of a column of y, as a multiple of the noise
            return n * np.log((y * np.linalg.solve(kernel, y)).sum()) + np.linalg.slogdet(kernel)[1]

        ridges = (h**2).sum() / min(h.shape) * 10.0 ** np.arange(-6, 2.5, 0.5)
        np.testing.assert_allclose(engine.chain.learner.ridges()[layer], ridges[np.argmin([likelihood(each) for each in ridges])])


def test_projections_are_normal_and_follow_from_the_seed() -> None:
    one, two = (
        toy_engine("ranpac(projections=3000)", net="mlp(width=12, depth=4)", taps=2).chain.learner.projection for _ in range(2)
    )
    assert torch.equal(one, two)
    assert one.shape == (2, 12, 3000)
    assert abs(one.mean()) < 0.02
    assert abs(one.std() - 1) < 0.02
    assert not torch.equal(one[0], one[1])


def test_the_net_stays_as_it_is_and_no_image_is_kept() -> None:
    engine, stream = toy_engine(SMALL.format("")), toy_stream()
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    assert feed(engine, stream) == [None] * len(stream)
    assert_same(engine.net.state_dict(), before, "the net")
    assert len(engine.memories.replay) == 0
    assert (engine.net.meter.forward, engine.net.meter.backward) == (len(stream.order), 0)


def test_it_learns() -> None:
    engine, stream = learned("ranpac(projections=100)")
    accuracy = evaluate(engine, stream.data.test_x, stream.data.test_y, stream.test_task).accuracy
    assert engine.chain.rule == "ridge_last"
    assert np.mean(accuracy["ridge_last"]) > 90


def test_learner_goes_on_from_a_file(tmp_path) -> None:
    data = toy_data()
    one = Learner(SMALL.format(""), classes=6, shape=TOY_SHAPE, net="mlp(width=8, norm=True)", memory=0)
    one.learn(data.train_x[::2], data.train_y[::2])
    one.save(tmp_path / "learner")
    two = Learner.load(tmp_path / "learner")
    for learner in (one, two):
        learner.learn(data.train_x[1::2], data.train_y[1::2])
    np.testing.assert_array_equal(one.predict_proba(data.test_x), two.predict_proba(data.test_x))


@pytest.mark.parametrize("bad", ["projections=0", "ridge=0.0", "ridge=-1.0"])
def test_bad_options_are_told(bad: str) -> None:
    with pytest.raises(UserError, match=f"ranpac: {bad.split('=')[0]} must be "):
        toy_engine(f"ranpac({bad})")
