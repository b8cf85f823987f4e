"""`gracecl.river.Classifier`: river's own checks, its progressive validation beside a plain loop, items of streams."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from river import checks, evaluate, metrics, preprocessing

from gracecl import Learner, UserError, rng
from gracecl.river import Classifier, stream_items
from gracecl.testing import assert_same, toy_stream

QUICK: dict[str, Any] = {"net": "mlp(width=8, depth=1)", "optimizer": "adam(lr=0.02)", "device": "cpu", "memory": 50}
ER = "er(n_recall=5)"
CHECKS = """
bounded_memory_growth classifier_tracks_seen_labels clone_changes_memory_addresses clone_is_idempotent clone_is_independent
clone_same_class clone_with_new_params_applies disappearing_features doc emerging_features get_params_matches_signature
init_default_params_are_not_mutable init_has_default_params_for_tests learn_many_matches_learn_one learn_one
mutate_can_be_idempotent no_state_aliasing_with_input pickling pickling_supports_roundtrip predict_many_matches_predict_one
predict_one_before_any_learn predict_one_pure predict_proba_many_matches_predict_proba_one predict_proba_one
radically_disappearing_features repr repr_roundtrips_clone shuffle_features_no_impact str tags
"""
"""of river 0.26; a release with others is looked at before it is trusted"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "net", "batch"), [(ER, "mlp(width=8, depth=1)", 1), ("slda", "identity", 10)])
def test_river_checks_it(method: str, net: str, batch: int) -> None:
    """All of its checks: nothing is skipped."""
    classifier = Classifier(method, **QUICK | {"net": net}, batch=batch)
    assert not list(classifier._unit_test_skips())
    checks.check_estimator(classifier)


def test_the_checks_are_those_that_were_looked_at() -> None:
    names = {check.__name__.removeprefix("check_") for check in checks.yield_checks(Classifier())}
    assert names <= set(CHECKS.split())


def items(count: int = 40) -> list[tuple[dict[str, Any], str]]:
    of = rng.generator("items of a test")
    labels = of.integers(0, 3, count)
    rows = of.standard_normal((count, 4)) + 2 * np.eye(3, 4)[labels]
    return [
        ({"d": row[3], "a": row[0], "name": "text", "c": row[2], "b": row[1]}, "xyz"[label])
        for row, label in zip(rows, labels, strict=True)
    ]


def learned(seen: list[tuple[dict[str, Any], str]], batch: int) -> Learner:
    """What a learner makes of the numeric features, in the order of their names."""
    learner = Learner(ER, **QUICK)
    for start in range(0, len(seen) - len(seen) % batch, batch):
        part = seen[start : start + batch]
        learner.learn(np.array([[x[name] for name in "abcd"] for x, _ in part], np.float32), [y for _, y in part])
    return learner


@pytest.mark.parametrize("batch", [1, 7])
def test_it_is_a_learner_to_the_bit(batch: int) -> None:
    """However the items come: one by one, in frames, with a pickle in the middle of a step."""
    seen = items()
    one, many = Classifier(ER, **QUICK, batch=batch), Classifier(ER, **QUICK, batch=batch)
    for place, (x, y) in enumerate(seen):
        one.learn_one(x, y)
        if place == 10:
            one = pickle.loads(pickle.dumps(one))
    for start, stop in ((0, 9), (9, 40)):
        part = seen[start:stop]
        many.learn_many(pd.DataFrame([x for x, _ in part]), pd.Series([y for _, y in part]))
    learner = learned(seen, batch)
    for classifier in (one, many):
        assert classifier.learner is not None
        assert len(classifier.waiting) == 40 % batch
        assert_same(classifier.learner.engine.state_dict(), learner.engine.state_dict(), "river's classifier and a learner")
    x = seen[0][0]
    row = np.array([[x[name] for name in "abcd"]], np.float32)
    assert one.predict_one(x) == learner.predict(row)[0]
    chances = dict(zip(learner.classes_.tolist(), learner.predict_proba(row)[0].tolist(), strict=True))
    assert one.predict_proba_one(x) == pytest.approx(chances, rel=1e-6)


def test_labels_that_wait_are_known() -> None:
    classifier = Classifier(ER, **QUICK, batch=3)
    (x, _), *_ = items()
    assert classifier.predict_one(x) is None
    assert classifier.predict_proba_one(x) == {}
    assert classifier.predict_proba_many(pd.DataFrame([x])).empty
    classifier.learn_one(x, True)
    classifier.learn_one(x, 1)
    assert [*classifier.predict_proba_one(x).values()] == [0.5]  # a dict takes True and 1 for one key
    classifier.learn_one(x, "a")
    classifier.learn_one(x, "b")
    chances = classifier.predict_proba_one(x)
    assert chances["b"] == 0
    assert classifier.predict_one(x) in (True, "a")


def test_features_come_and_go() -> None:
    classifier = Classifier("sgd", **QUICK, features=("b", "a"))
    for x, y in items():
        classifier.learn_one(x, y)
    assert classifier.columns == ("b", "a")
    assert classifier.predict_proba_one({"a": 1.0}) == classifier.predict_proba_one({"new": 3, "b": 0, "a": 1})
    assert classifier.predict_proba_one({"a": 1.0}) != classifier.predict_proba_one({"b": 1.0})
    with pytest.raises(UserError, match="feature 'a' was a number and is 'text' now; encode it"):
        classifier.predict_one({"a": "text"})


def test_declared_classes_are_the_learners() -> None:
    classifier = Classifier("sgd", **QUICK, classes=("x", "y"), batch=4)
    (x, _), *_ = items()
    with pytest.raises(UserError, match="label 'z' is not one of the 2 declared classes"):
        classifier.learn_one(x, "z")
    assert not classifier.waiting


@pytest.mark.parametrize("delay", [None, 2, 5])
def test_progressive_validation_is_prequential_accuracy(delay: int | None) -> None:
    """River reveals label i just before question i + delay, and does not score what a model does not answer."""
    seen, learner = items(30), Learner(ER, **QUICK)
    right, answered = 0, 0

    def reveal(place: int) -> None:
        x, y = seen[place]
        learner.learn(np.array([[x[name] for name in "abcd"]], np.float32), [y])

    for place, (x, y) in enumerate(seen):
        if place >= (delay or 1):
            reveal(place - (delay or 1))
            answered += 1
            right += learner.predict(np.array([[x[name] for name in "abcd"]], np.float32))[0] == y
    score = evaluate.progressive_val_score(seen, Classifier(ER, **QUICK), metrics.Accuracy(), delay=delay)
    assert answered == 30 - (delay or 1)
    assert score.get() == right / answered
    assert 0.3 < score.get() < 1


def test_it_stands_in_a_pipeline() -> None:
    model = preprocessing.StandardScaler() | Classifier("slda", **QUICK | {"net": "identity"})
    numeric = [({name: value for name, value in x.items() if name != "name"}, y) for x, y in items(60)]
    assert evaluate.progressive_val_score(numeric, model, metrics.Accuracy()).get() > 0.5


def test_items_of_a_stream_are_its_images() -> None:
    stream, classifier = toy_stream(), Classifier(ER, **QUICK, augment="none", batch=len(toy_stream().batch(0)))
    for x, y in stream_items(stream):
        classifier.learn_one(x, y)
    learner = Learner(ER, **QUICK, augment="none")
    for batch in stream:
        learner.learn(batch.x, batch.labels)
    assert classifier.learner is not None
    assert_same(classifier.learner.engine.state_dict(), learner.engine.state_dict(), "items and batches")
    assert [y for _, y in stream_items(stream)] == stream.labels(stream.order).tolist()


def test_no_global_generator_moves() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    classifier = Classifier(ER, **QUICK)
    for x, y in items(5):
        classifier.learn_one(x, y)
        classifier.predict_proba_one(x)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # type: ignore[index]
