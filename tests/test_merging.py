"""`gracecl.merge`: what two sites learned, as one learner."""

from __future__ import annotations

import numpy as np
import pytest

import gracecl
from gracecl import Learner
from gracecl.errors import UserError
from gracecl.testing import TOY_SHAPE, toy_data

FAMILY = ["closed()", "closed(solver='ridge', weights='exact')", "ranpac(projections=30)", "slda()", "fecam()"]


def learner(method: str = "closed()", **more: object) -> Learner:
    return Learner(method, **({"net": "mlp(width=12)", "memory": 0, "shape": TOY_SHAPE} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", FAMILY)
@pytest.mark.parametrize("declared", [True, False])
def test_two_sites_are_one_learner(method: str, declared: bool) -> None:
    """Names of classes are compared, not their numbers; the learners stay as they are, and the new one goes on."""
    data = toy_data(6, 20)
    x, y = data.train_x, data.train_y if declared else np.array(list("abcdef"), object)[data.train_y]
    options = {"classes": 6} if declared else {}
    here, there, whole = (learner(method, **options) for _ in range(3))
    first = np.flatnonzero(data.train_y < 4)[::2]
    second = np.setdiff1d(np.arange(len(x)), first)[::-1].copy()
    for site, rows in ((here, first), (there, second)):
        for part in np.array_split(rows, 3):
            site.learn(x[part], y[part])
    before = [site.predict_proba(data.test_x) for site in (here, there)]
    both = gracecl.merge(here, there)
    whole.learn(x[np.concatenate([first, second])], y[np.concatenate([first, second])])
    assert sorted(both.classes_) == sorted(whole.classes_)

    def chances(of: Learner) -> np.ndarray:
        return of.predict_proba(data.test_x)[:, np.argsort(of.classes_)]

    np.testing.assert_allclose(chances(both), chances(whole), atol=1e-6)
    assert (both.predict(data.test_x) == whole.predict(data.test_x)).all()
    for site, was in zip((here, there), before, strict=True):
        np.testing.assert_array_equal(site.predict_proba(data.test_x), was)
    for site in (both, whole):
        site.learn(x[:9], y[:9])
    np.testing.assert_allclose(chances(both), chances(whole), atol=1e-6)
    assert both.engine.images_seen == whole.engine.images_seen


def test_a_merged_learner_is_saved_and_loaded(tmp_path) -> None:
    data = toy_data(6, 20)
    here, there = learner(), learner()
    here.learn(data.train_x[::2], data.train_y[::2])
    there.learn(data.train_x[1::2], data.train_y[1::2])
    both = gracecl.merge(here, there)
    both.save(tmp_path / "both")
    np.testing.assert_array_equal(Learner.load(tmp_path / "both").predict_proba(data.test_x), both.predict_proba(data.test_x))


@pytest.mark.parametrize(
    ("one", "two", "told"),
    [
        ({"method": "er()"}, {"method": "er()"}, "trains its weights"),
        ({"method": "closed()"}, {"method": "slda()"}, "same method"),
        ({"seed": 0}, {"seed": 1}, "same seed"),
        ({"net": "mlp(width=12)"}, {"net": "mlp(width=8)"}, "same net"),
        ({"classes": 6}, {"classes": 7}, "6 and 7 declared classes"),
        ({"method": "slda(reference=True)"}, {"method": "slda(reference=True)"}, "depends on the order"),
    ],
)
def test_what_cannot_be_added_is_refused(one: dict, two: dict, told: str) -> None:
    data = toy_data()
    both = []
    for options in (one, two):
        site = learner(**({"augment": "none"} | options))
        site.learn(data.train_x[:6], data.train_y[:6])
        both.append(site)
    with pytest.raises(UserError, match=told):
        gracecl.merge(*both)


def test_a_net_that_was_changed_is_refused() -> None:
    data = toy_data()
    here, there = learner(), learner()
    for site in (here, there):
        site.learn(data.train_x[:6], data.train_y[:6])
    next(there.net.backbone.parameters()).data[0, 0] += 1
    with pytest.raises(UserError, match="different nets"):
        gracecl.merge(here, there)
