"""A learner that nobody told its classes or the shape of its images: both come with the batches."""

from __future__ import annotations

import warnings
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gracecl
from gracecl import Learner
from gracecl.data.loading import _picked
from gracecl.errors import UserError
from gracecl.lab.catalogue import LEARNERS
from gracecl.registry.spec import parse_method
from gracecl.testing import TOY_TRANSFORMER, toy_data, toy_stream

NAMES = np.array(["rose", "tulip", "poppy", "iris", "daisy", "lily"])
DATA = toy_data()
SHORTER = {"gdumb()": "gdumb(epochs=2)", "ranpac(projections=500)": "ranpac(projections=20)"}


def learner(method: str = "er", **options: Any) -> Learner:
    return Learner(method, **{"memory": 12, "net": "mlp(width=12)", "augment": "none", "device": "cpu"} | options)


def images(*classes: int, first: int = 0) -> torch.Tensor:
    return DATA.train_x[[np.flatnonzero(DATA.train_y == label)[first] for label in classes]]


def learned(one: Learner, *batches: tuple[int, ...], names: Any = NAMES) -> Learner:
    for number, classes in enumerate(batches):
        one.learn(images(*classes, first=number % 9), [names[label] for label in classes])
    return one


@pytest.mark.parametrize("method", [SHORTER.get(method, method) for method in LEARNERS])
def test_every_method_learns_labels_in_any_order(method: str) -> None:
    net = TOY_TRANSFORMER if parse_method(method).chain.traits.attention else "mlp(width=12, depth=4)"
    one = learned(learner(method, net=net), (4, 1), (1, 4, 1), (0,), (5, 0), (2, 5))
    assert one.classes_.tolist() == ["daisy", "tulip", "rose", "lily", "poppy"]
    assert one.net.classes == len(one.engine.progress.seen) == 5
    assert set(one.predict(DATA.test_x)) <= set(one.classes_)
    assert one.predict_proba(DATA.test_x).shape == (len(DATA.test_x), 5)


def test_names_learn_what_numbers_learn_and_are_predicted() -> None:
    batches = [(3, 1), (1, 3), (0, 2), (5, 4), (2, 5)]
    named, numbered = learned(learner(), *batches), learned(learner(), *batches, names=np.arange(6))
    guesses = numbered.predict(DATA.test_x)
    assert guesses.dtype == np.int64
    assert named.predict(DATA.test_x).tolist() == NAMES[guesses].tolist()
    assert numbered.classes_.tolist() == [3, 1, 0, 2, 5, 4]
    assert np.array_equal(numbered.classes_[numbered.predict_proba(DATA.test_x).argmax(axis=1)], guesses)
    right = named.evaluate(DATA.test_x, NAMES[DATA.test_y]).overall
    assert right == numbered.evaluate(DATA.test_x, DATA.test_y).overall == 100 * (guesses == DATA.test_y).mean()


def test_labels_that_were_never_met_are_wrong_guesses() -> None:
    one = learned(learner(), (0, 1))
    right = one.predict(images(0)) == "rose"
    assert one.evaluate(images(0, 2), ["rose", "poppy"]).overall == 50 * right
    assert one.classes == 2
    with pytest.raises(UserError, match=r"none of these labels was ever learned; those that were are 'rose', 'tulip'$"):
        one.evaluate(images(0, 1), [0, 1])


@pytest.mark.parametrize("classes", [6, list(NAMES), tuple(NAMES.tolist())])
def test_declared_classes_are_there_from_the_start(classes: Any) -> None:
    one = learned(learner(classes=classes), (0, 1), names=np.arange(6) if classes == 6 else NAMES)
    assert one.net.classes == one.classes == 6
    assert one.predict_proba(DATA.test_x).shape == (len(DATA.test_x), 6)
    with pytest.raises(UserError, match=r"not one of the .*declared classes"):
        one.learn(images(0), [6] if classes == 6 else ["weed"])


def test_a_declared_list_is_its_numbers_under_names() -> None:
    named = learned(learner(classes=list(NAMES)), (4, 1), (0, 3))
    numbered = learned(learner(classes=6), (4, 1), (0, 3), names=np.arange(6))
    assert torch.equal(named.net.classifier.weight, numbered.net.classifier.weight)
    assert named.predict(DATA.test_x).tolist() == NAMES[numbered.predict(DATA.test_x)].tolist()


@pytest.mark.parametrize("method", ["er", "derpp", "er() + ewc(every=2)", "ema(er())", "slda"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_saved_learner_goes_on_to_the_same_bits(method: str, at: int, tmp_path: Path) -> None:
    """Saved before anything was learned, before a class is new, and after it."""
    batches = [(3, 1), (1, 0), (0, 2)]
    whole = learned(learner(method), *batches[:at])
    whole.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved", device="cpu")
    assert repr(again) == repr(whole)
    for one in (whole, again):
        learned(one, *batches[at:])
    assert again.classes_.tolist() == whole.classes_.tolist()
    for weight, same in zip(whole.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(weight, same)


def test_labels_of_every_kind_that_a_file_holds_come_back(tmp_path: Path) -> None:
    labels = [1, "1", True, ("a", (2, False)), 10**30, -4]
    one = learned(learner(), (0, 1, 2, 3, 4, 5), names=labels)
    one.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved", device="cpu").classes_.tolist()
    assert [(type(label), label) for label in again] == [(type(label), label) for label in labels]


def test_a_label_that_a_file_cannot_hold_is_refused_when_saving(tmp_path: Path) -> None:
    color = IntEnum("color", ["red"])
    one = learned(learner(), (0,), names=[color.red])
    assert one.predict(images(0)).tolist() == [color.red]
    with pytest.raises(UserError, match=r"the label <color.red: 1> is a color, which a file does not give back"):
        one.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_a_learner_says_before_its_first_batch(tmp_path: Path) -> None:
    one, x = learner(), images(0, 1)
    assert repr(one) == f"Learner({one.method!r}, nothing learned yet)"
    assert one.classes_.tolist() == []
    one.end_task()
    for ask in (one.predict, one.predict_proba, lambda x: one.evaluate(x, ["a", "b"])):
        with pytest.raises(UserError, match=r"nothing was learned yet, so there is nothing to predict; call learn\(x, y\) first"):
            ask(x)
    with pytest.raises(UserError, match="none of the stream's classes was learned yet"):
        one.evaluate(toy_stream())
    with pytest.raises(
        UserError, match=r"built when its first batch shows what its inputs are; call learn\(x, y\), or give shape="
    ):
        one.net  # noqa: B018 (asked for)


@pytest.mark.parametrize("options", [{}, {"shape": (1, 8, 8)}, {"classes": 6, "shape": (1, 8, 8)}])
def test_a_default_stands_for_predictions_before_anything_was_learned(options: dict[str, Any]) -> None:
    one, x = learner(**options), images(0, 1)
    assert one.predict(x, default="unknown").tolist() == ["unknown", "unknown"]
    assert one.predict(x, default=None).tolist() == [None, None]
    assert one.predict(x, default=-1).dtype == np.int64
    learned(one, (0, 1), names=np.arange(6))
    assert set(one.predict(x, default="unknown")) <= {0, 1}


def test_wrong_settings_are_refused_before_the_first_batch() -> None:
    for change in ({"method": "ers"}, {"net": "mpl"}, {"optimizer": "adams"}, {"augment": "taus"}, {"device": "gpu"}):
        with pytest.raises(UserError):
            learner(**change)


def test_a_refused_first_batch_builds_nothing() -> None:
    one = learner()
    for x, y in ((images(0).float(), ["a"]), (images(0), [0.5]), (images(0), ["a", "b"])):
        with pytest.raises(UserError):
            one.learn(x, y)
    assert repr(one).endswith("nothing learned yet)")
    assert one.classes == 0
    one.learn(torch.zeros(2, 3, 5, 7, dtype=torch.uint8), ["a", "b"])
    assert one.inputs is not None
    assert one.inputs.shape == (3, 5, 7)


def test_fit_takes_a_stream_without_being_told_anything() -> None:
    one = learner().fit(toy_stream())
    arrival = list(dict.fromkeys(DATA.train_y[toy_stream().order].tolist()))
    assert one.classes_.tolist() == arrival
    assert set(one.predict(DATA.test_x).tolist()) <= set(range(6))
    found = one.evaluate(toy_stream())
    assert found.overall == pytest.approx(100 * (one.predict(DATA.test_x) == DATA.test_y).mean())
    assert len(found.per_task) == 3


@pytest.mark.parametrize(
    "family", ["domain(kind='permute', tasks=2)", "noisy(split(tasks=3), 0.2)", "i-blurry(tasks=3)", "task(split(tasks=3))"]
)
def test_fit_knows_the_classes_of_every_family_of_streams(family: str) -> None:
    """After other labels, so that the learner's numbers are not the stream's."""
    seen: list[float] = []

    class Watch(gracecl.Callback):
        def on_evaluation(self, state: Any) -> None:
            seen.append(state.accuracy)

    one, stream = learned(learner(), (0, 1)), gracecl.stream(DATA, family=family)
    one.fit(stream, callbacks=[Watch()])
    assert one.classes == 8
    assert seen[-1] == pytest.approx(one.evaluate(stream).average)
    assert set(one.engine.progress.seen) == set(range(8))


def test_a_stream_has_its_class_names_as_labels_if_the_learner_was_given_these() -> None:
    named, numbered = learner(classes=list(DATA.class_names)), learner(classes=6)
    for one in (named, numbered):
        one.fit(toy_stream())
    guesses = numbered.predict(DATA.test_x)
    assert named.predict(DATA.test_x).tolist() == [DATA.class_names[number] for number in guesses]
    assert named.evaluate(toy_stream()).overall == numbered.evaluate(toy_stream()).overall


def test_labels_given_to_from_arrays_are_those_of_the_learner() -> None:
    data = gracecl.from_arrays(DATA.train_x, NAMES[DATA.train_y], DATA.test_x, NAMES[DATA.test_y])
    stream = gracecl.stream(data, tasks=3)
    one = learner().fit(stream)
    assert set(one.classes_.tolist()) == set(NAMES.tolist())
    assert one.evaluate(stream).overall == one.evaluate(DATA.test_x, NAMES[DATA.test_y]).overall
    assert _picked(data, [4, 0]).labels == tuple(sorted(NAMES.tolist())[number] for number in (4, 0))
    assert learner(classes=6).fit(stream).classes_.tolist() == list(range(6))


def test_fit_takes_a_loader_without_being_told_anything() -> None:
    loader = DataLoader(TensorDataset(DATA.train_x, torch.from_numpy(DATA.train_y)), batch_size=6)
    one = learner().fit(loader)
    assert one.classes_.tolist() == list(range(6))
    with pytest.raises(UserError, match="has no batch, from which this learner would be built"):
        learner().fit([])


def test_evaluations_along_a_stream_know_its_classes() -> None:
    seen: list[float] = []

    class Watch(gracecl.Callback):
        def on_evaluation(self, state: Any) -> None:
            seen.append(state.accuracy)

    one = learner()
    one.learn(images(5, 3), ["own", "other"])
    one.fit(toy_stream(), callbacks=[Watch()])
    assert one.classes == 8
    assert seen[-1] == pytest.approx(one.evaluate(toy_stream()).average)


def test_classes_that_arrive_are_no_reason_for_a_caution() -> None:
    one = learner()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(101):
            one.learn(images(0), ["rose"])
        one.predict(images(0))
