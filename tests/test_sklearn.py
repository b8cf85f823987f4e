"""`gracecl.sklearn.OnlineClassifier`: scikit-learn's own checks, and laws that none of them covers."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from gracecl import Images, Learner, UserError, rng
from gracecl.methods.sgd import SGD
from gracecl.sklearn import OnlineClassifier
from gracecl.testing import assert_same

QUICK: dict[str, Any] = {"net": "mlp(width=16, depth=1)", "optimizer": "adam(lr=0.02)", "device": "cpu", "memory": 60}
CHECKED = [
    OnlineClassifier("sgd", **QUICK, batch=40, epochs=8),
    OnlineClassifier("er(n_recall=10)", **QUICK, batch=40, epochs=8),
    OnlineClassifier("slda", **QUICK | {"net": "identity"}, batch=100, epochs=1),
]
CHECKS = """
array_api_input classifier_data_not_an_array classifiers_classes classifiers_one_label classifiers_one_label_sample_weights
classifiers_regression_target classifiers_train complex_data decision_proba_consistency dict_unchanged
do_not_raise_errors_in_init_or_set_params dont_overwrite_parameters dtype_object estimator_cloneable estimator_repr
estimator_sparse_array estimator_sparse_matrix estimator_sparse_tag estimator_tags_renamed estimators_dtypes
estimators_empty_data_messages estimators_fit_returns_self estimators_nan_inf estimators_overwrite_params
estimators_partial_fit_n_features estimators_pickle estimators_unfitted f_contiguous_array_estimator fit1d fit2d_1feature
fit2d_1sample fit2d_predict1d fit_check_is_fitted fit_idempotent fit_score_takes_y get_params_invariance
methods_sample_order_invariance methods_subset_invariance mixin_order n_features_in n_features_in_after_fitting
no_attributes_set_in_init non_transformer_estimators_n_iter parameters_default_constructible pipeline_consistency
positive_only_tag_during_fit readonly_memmap_input requires_y_none set_params supervised_y_2d supervised_y_no_nan valid_tag_types
"""
"""of scikit-learn 1.9; a release with others is looked at before it is trusted"""


@pytest.mark.slow
@parametrize_with_checks(CHECKED, expected_failed_checks=lambda classifier: {}, xfail_strict=True)
def test_scikit_learn_checks_it(estimator: OnlineClassifier, check: Any) -> None:
    check(estimator)


def test_the_checks_are_those_that_were_looked_at() -> None:
    names = {check.func.__name__.removeprefix("check_") for _, check in estimator_checks_generator(CHECKED[0])}
    assert names <= set(CHECKS.split())


def blobs(rows: int = 60, classes: int = 3, seed: int = 0) -> tuple[Any, Any]:
    of = rng.generator("blobs of a test", seed)
    y = of.integers(0, classes, rows)
    return of.standard_normal((rows, 5)) + 3 * np.eye(classes, 5)[y], np.array(["b", "c", "a", "d"])[y]


def weights(classifier: OnlineClassifier) -> dict[str, Any]:
    state: dict[str, Any] = classifier.learner_.engine.state_dict()
    return state


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("method", ["er(n_recall=10)", "slda"])
def test_pieces_are_the_whole(method: str, declared: bool) -> None:
    """Calls of multiples of `batch`, with a pickle between them, make the steps of one call to the bit."""
    X, y = blobs()
    classes = np.unique(y) if declared else None
    whole = OnlineClassifier(method, **QUICK, batch=5).partial_fit(X, y, classes)
    pieces = OnlineClassifier(method, **QUICK, batch=5)
    for start, stop in ((0, 10), (10, 15), (15, 60)):
        pieces = pickle.loads(pickle.dumps(pieces))
        pieces.partial_fit(X[start:stop], y[start:stop], classes)
    assert_same(weights(pieces), weights(whole), "after three calls and one")
    assert np.array_equal(pieces.predict_proba(X), whole.predict_proba(X))


def test_a_clone_carries_nothing() -> None:
    X, y = blobs()
    learned = OnlineClassifier(SGD(), **QUICK).partial_fit(X, y)
    again = clone(learned)
    assert not hasattr(again, "learner_")
    assert not hasattr(again, "classes_")
    assert_same(weights(again.partial_fit(X, y)), weights(learned), "the clone and what it was cloned from")


def test_classes_declared_and_never_met_have_probability_0() -> None:
    X, y = blobs()
    classifier = OnlineClassifier("er", **QUICK).partial_fit(X, y, ["a", "aa", "b", "c", "z"])
    assert classifier.classes_.tolist() == ["a", "aa", "b", "c", "z"]
    chances = classifier.predict_proba(X)
    assert chances.dtype == np.float32
    assert not chances[:, [1, 4]].any()
    assert (chances[:, [0, 2, 3]] > 0).all()
    assert np.array_equal(classifier.classes_[chances.argmax(axis=1)], classifier.predict(X))
    assert classifier.score(X, y) > 0.9


def test_classes_that_arrive() -> None:
    """Columns stay sorted by label, whenever a label came first."""
    X, y = blobs(classes=4)
    classifier = OnlineClassifier("er", **QUICK, batch=5)
    for label in "cadb":
        for _ in range(3):
            classifier.partial_fit(X[y == label], y[y == label])
    assert classifier.order_.tolist() == ["c", "a", "d", "b"]
    assert classifier.classes_.tolist() == ["a", "b", "c", "d"]
    assert np.array_equal(classifier.classes_[classifier.predict_proba(X).argmax(axis=1)], classifier.predict(X))
    assert classifier.score(X, y) > 0.6


@pytest.mark.parametrize("declared", [True, False])
def test_it_is_a_learner_to_the_bit(declared: bool) -> None:
    X, y = blobs()
    learner = Learner("er(n_recall=10)", **QUICK, seed=3, classes=["a", "b", "c"] if declared else None)
    for start in range(0, 60, 8):
        learner.learn(X[start : start + 8].astype("float32"), y[start : start + 8])
    classifier = OnlineClassifier("er(n_recall=10)", **QUICK, seed=3, batch=8)
    classifier.partial_fit(X, y, ["a", "b", "c"] if declared else None)
    assert_same(weights(classifier), learner.engine.state_dict(), "a classifier and a learner")
    assert np.array_equal(classifier.predict(X), learner.predict(X.astype("float32")).astype(str))


def test_fit_makes_shuffled_passes() -> None:
    X, y = blobs()
    number = {label: place for place, label in enumerate("abc")}
    learner = Learner("er", **QUICK, seed=4, classes=3)
    for epoch in range(2):
        order = rng.generator(4, "epoch of a classifier", epoch).permutation(60)
        for start in range(0, 60, 7):
            rows = order[start : start + 7]
            learner.learn(X[rows].astype("float32"), [number[y[row]] for row in rows])
    classifier = OnlineClassifier("er", **QUICK, seed=4, batch=7, epochs=2).fit(X[:30], y[:30]).fit(X, y)
    assert_same(weights(classifier), learner.engine.state_dict(), "fit, after another that it forgets")


def test_images_are_rows() -> None:
    """Bytes, or floats of at most 1; the learner is that of `shape=`."""
    images, y = load_digits(return_X_y=True)
    rows = (images[:40] * 15).astype("uint8")
    settings = QUICK | {"augment": "none"}
    classifier = OnlineClassifier("er", **settings, shape=(1, 8, 8)).partial_fit(rows, y[:40], range(10))
    learner = Learner("er", **settings, shape=(1, 8, 8), classes=10)
    for start in range(0, 40, 10):
        learner.learn(rows[start : start + 10].reshape(-1, 1, 8, 8), y[start : start + 10])
    assert_same(weights(classifier), learner.engine.state_dict(), "bytes in rows")
    assert classifier.n_features_in_ == 64
    floats = OnlineClassifier("er", **settings, shape=(1, 8, 8)).partial_fit(images[:40] / 16, y[:40])
    assert isinstance(floats.learner_.inputs, Images)
    assert floats.learner_.inputs.dtype == torch.float32
    with pytest.raises(ValueError, match=r"X has 64 columns, and an example of shape=\(3, 8, 8\) has 192"):
        OnlineClassifier(shape=(3, 8, 8)).fit(rows, y[:40])


def test_mistakes_have_a_sentence() -> None:
    X, y = blobs()
    fitted = OnlineClassifier("sgd", **QUICK).partial_fit(X, y, ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"label .*'d'.* is not one of the classes that were declared: \['a', 'b', 'c'\]"):
        fitted.partial_fit(X[:1], ["d"])
    with pytest.raises(ValueError, match="is not what the first call of partial_fit declared; leave it out"):
        fitted.partial_fit(X, y, ["a", "b"])
    fitted.partial_fit(X, y, ["c", "a", "b"])
    with pytest.raises(ValueError, match="is not what the first call of partial_fit declared"):
        OnlineClassifier("sgd", **QUICK).partial_fit(X, y).partial_fit(X, y, ["a", "b", "c"])
    with pytest.raises(ValueError, match="are of two kinds; give all as texts or as numbers"):
        OnlineClassifier("sgd", **QUICK).partial_fit(X, y).partial_fit(X, np.arange(60) % 2)
    with pytest.raises(ValueError, match=r"bic\(\) needs to be told where tasks end"):
        OnlineClassifier("bic", **QUICK).fit(X, y)
    with pytest.raises(ValueError, match="epochs is the number of passes over the rows, at least 1, not 0"):
        OnlineClassifier("sgd", **QUICK, epochs=0).fit(X, y)
    with pytest.raises(UserError, match="batch is the number of examples that a step learns from, at least 1, not 0"):
        OnlineClassifier("sgd", **QUICK, batch=0).fit(X, y)
    with pytest.raises(UserError, match="OnlineClassifier has no option 'memori'; did you mean 'memory'"):
        OnlineClassifier("sgd", memori=3)


def test_no_global_generator_moves() -> None:
    X, y = blobs()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    OnlineClassifier("er", **QUICK, epochs=1).fit(X, y).predict_proba(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # type: ignore[index]


@pytest.mark.slow
def test_pipelines_and_searches() -> None:
    X, y = blobs(rows=90)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), OnlineClassifier("sgd", **QUICK, epochs=2)),
        {"onlineclassifier__batch": [1, 30], "onlineclassifier__method": ["sgd", SGD()]},
        cv=2,
        error_score="raise",
    )
    assert search.fit(X, y).best_score_ > 0.8


@pytest.mark.slow
def test_gracecl_imports_neither_library() -> None:
    names = "'sklearn', 'river', 'gracecl.sklearn', 'gracecl.river'"
    program = f"import sys, gracecl; gracecl.Learner; print([name for name in ({names}) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
