"""SLDA against scikit-learn and against a loop over images, through the engine's own hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from double_features import engine_of, features, learned, scores, seen_images
from sklearn.covariance import empirical_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from gracecl import Learner
from gracecl.core import StreamBatch
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.testing import TOY_SHAPE, assert_same, feed, toy_data, toy_engine, toy_stream


class ToIdentity:
    """The paper's shrinkage as one of scikit-learn's covariance estimators."""

    def __init__(self, shrinkage: float) -> None:
        self.shrinkage = shrinkage

    def fit(self, x: np.ndarray) -> ToIdentity:
        self.covariance_ = (1 - self.shrinkage) * empirical_covariance(x) + self.shrinkage * np.eye(x.shape[1])
        return self


@pytest.mark.parametrize(("taps", "batch"), [(1, 1), (1, 7), (3, 7)])
@pytest.mark.parametrize("until", [None, 20], ids=["whole stream", "unequal classes"])
@pytest.mark.parametrize(("shrink_to", "shrinkage"), [("identity", 1e-4), ("identity", 0.3), ("variance", 1e-4), ("variance", 0.3)])
def test_it_is_linear_discriminant_analysis(taps: int, batch: int, until: int | None, shrink_to: str, shrinkage: float) -> None:
    """Scores of the classes met, with the classes' shares as priors, and without priors once their logarithms are taken off.

    One image at a time, or several.
    """
    until = until and until * 7 // batch  # the same images
    method = f"slda(shrinkage={shrinkage}, shrink_to='{shrink_to}'{{}})"
    engine, stream = learned(method.format(", priors='empirical'"), taps, batch, until)
    uniform, _ = learned(method.format(""), taps, batch, until)
    images, labels = seen_images(engine, stream)
    counts = np.bincount(labels, minlength=6)
    assert until is None or len(set(counts[counts > 0])) > 1
    test = stream.data.test_x
    for layer in range(taps):
        options = {"covariance_estimator": ToIdentity(shrinkage)} if shrink_to == "identity" else {"shrinkage": shrinkage}
        lda = LinearDiscriminantAnalysis(solver="lsqr", **options).fit(features(engine, images)[layer], labels)
        expected = lda.decision_function(features(engine, test)[layer])
        np.testing.assert_allclose(scores(engine, test)[layer][:, lda.classes_], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            scores(uniform, test)[layer][:, lda.classes_], expected - np.log(lda.priors_), rtol=1e-6, atol=1e-6
        )
        assert np.abs(expected).max() > 1


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 60])
def test_a_batch_is_its_images_one_after_the_other(batch: int, reference: bool) -> None:
    """The streaming equations, image by image; `reference` is the paper's weight and a class that begins at the origin."""
    engine, stream = learned(f"slda(reference={reference})", taps=2, batch=batch)
    images, labels = seen_images(engine, stream)
    for layer in range(2):
        x = features(engine, images)[layer]
        means, counts, covariance = np.zeros((6, 64)), np.zeros(6), np.zeros((64, 64))
        for t, (z, y) in enumerate(zip(x, labels, strict=True)):
            d = z - means[y]
            weight = t / (t + 1) if reference else counts[y] / (counts[y] + 1)
            covariance = (t * covariance + weight * np.outer(d, d)) / (t + 1)
            means[y] += d / (counts[y] + 1)
            counts[y] += 1
        np.testing.assert_array_equal(engine.chain.learner.sums.counts, counts)
        np.testing.assert_allclose(engine.chain.learner.sums.means[layer], means, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(engine.chain.learner.sums.scatter[layer] / len(x), covariance, rtol=1e-9, atol=1e-9)
        precision = np.linalg.inv((1 - 1e-4) * covariance + 1e-4 * np.eye(64))
        test = features(engine, stream.data.test_x)[layer]
        expected = [[m @ precision @ z - m @ precision @ m / 2 for m in means] for z in test]
        np.testing.assert_allclose(scores(engine, stream.data.test_x)[layer], expected, rtol=1e-6, atol=1e-4)


def test_the_order_of_the_stream_does_not_matter_and_epochs_add_nothing() -> None:
    data = toy_data(6, 40)
    test, found = data.test_x, []
    for order in (np.arange(240), np.random.default_rng(0).permutation(240)):
        engine = engine_of("slda()")
        for rows in np.array_split(order, 30):
            engine.learn(StreamBatch(data.train_x[rows], data.train_y[rows]))
        before = engine.chain.state_dict()
        engine.learn(StreamBatch(data.train_x[:9], data.train_y[:9], fresh=False))
        assert_same(engine.chain.state_dict(), before, "a later epoch")
        engine.ready_to_predict()
        found.append(scores(engine, test))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("net", ["mlp(width=12, depth=4, norm=True)", "resnet18(width=2)"])
def test_the_net_stays_as_it_is_and_no_image_is_kept(net: str) -> None:
    """Frozen or not: weights, statistics and mode; each image goes through it once, in evaluation mode."""
    engine, frozen = (toy_engine("slda()", net=expression, taps=4) for expression in (net, net[:-1] + ", freeze=True)"))
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    stream = toy_stream()
    assert feed(engine, stream) == [None] * len(stream)
    assert_same(engine.net.state_dict(), before, "the net")
    assert engine.net.training
    assert len(engine.memories.replay) == 0
    assert (engine.net.meter.forward, engine.net.meter.backward) == (len(stream.order), 0)
    feed(frozen, stream)
    assert_same(frozen.chain.state_dict(), engine.chain.state_dict(), "what a frozen net gives")
    [(_, out)] = engine.net.sweep(stream.batch(0).x)
    y = stream.batch(0).labels
    single = toy_engine("slda()", net=net, taps=4)
    feed(single, stream, until=1)
    for label in set(y.tolist()):
        torch.testing.assert_close(single.chain.learner.sums.means[:, label], out.features[:, y == label].double().mean(dim=1))


def test_it_learns() -> None:
    engine, stream = learned("slda()")
    accuracy = evaluate(engine, stream.data.test_x, stream.data.test_y, stream.test_task).accuracy
    assert engine.chain.rule == "lda_last"
    assert np.mean(accuracy["lda_last"]) > 90


def test_renumbered_classes_have_the_same_scores() -> None:
    number, data = np.array([4, 2, 5, 0, 3, 1]), toy_data()
    one, two = (engine_of("slda(priors='empirical')") for _ in range(2))
    for engine, labels in ((one, data.train_y), (two, number[data.train_y])):
        engine.learn(StreamBatch(data.train_x, labels))
        engine.ready_to_predict()
    torch.testing.assert_close(scores(one, data.test_x), scores(two, data.test_x)[..., number])


def test_the_first_image_and_images_that_do_not_vary() -> None:
    for option in ("identity", "variance"):
        learner = Learner(f"slda(shrink_to='{option}')", classes=3, shape=TOY_SHAPE, net="mlp(width=4)", memory=0)
        x = np.full((1, *TOY_SHAPE), 100, np.uint8)
        assert learner.learn(x, [2]) == {}
        assert learner.predict(x).tolist() == [2]
        learner.learn(255 - x, [0])
        assert learner.predict(np.concatenate([x, 255 - x])).tolist() == [2, 0]


def test_learner_goes_on_from_a_file(tmp_path) -> None:
    data = toy_data()
    one = Learner("slda()", classes=6, shape=TOY_SHAPE, net="mlp(width=8, norm=True)", memory=0)
    one.learn(data.train_x[::2], data.train_y[::2])
    one.save(tmp_path / "learner")
    two = Learner.load(tmp_path / "learner")
    for learner in (one, two):
        learner.learn(data.train_x[1::2], data.train_y[1::2])
    np.testing.assert_array_equal(one.predict_proba(data.test_x), two.predict_proba(data.test_x))


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5])
def test_a_bad_shrinkage_is_told(value: float) -> None:
    with pytest.raises(UserError, match="shrinkage"):
        toy_engine(f"slda(shrinkage={value})")
