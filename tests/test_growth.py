"""Classes that arrive: what an engine makes room in, and what the new entries are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gracecl.core import StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.lab.catalogue import LEARNERS
from gracecl.methods.base import Addition, Wrapper
from gracecl.nets.growth import ClassAxis, Growth
from gracecl.registry import methods
from gracecl.registry.spec import parse_method
from gracecl.testing import classes_may_arrive, minds_a_larger_head, toy_data, toy_engine

COMBINED = {
    "sgd(classes='seen') + si()": True,
    "sgd(classes='seen') + mas()": True,
    "sgd(classes='seen') + ewc()": False,
    "sgd(classes='seen') + cpr(classes='all')": False,
    "ema(bic())": True,
    "mkd(bic())": False,
    "scr(train_head=True, inference='linear')": False,
}
"""whether a learner of several parts looks at classes met alone"""


def learn(engine: Engine, *labels: int) -> None:
    data = toy_data()
    rows = torch.from_numpy(np.array([np.flatnonzero(data.train_y == label % 6)[label // 6] for label in labels]))
    engine.learn(StreamBatch(data.train_x[rows], np.array(labels)))


def head(engine: Engine) -> torch.Tensor:
    return engine.net.classifier.weight


@pytest.mark.parametrize(("method", "met_only"), COMBINED.items())
def test_learners_of_several_parts(method: str, met_only: bool) -> None:
    assert toy_engine(method).chain.traits.met_only == met_only
    classes_may_arrive(method)
    assert minds_a_larger_head(method) != met_only


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in LEARNERS if not parse_method(method).chain.traits.met_only])
def test_methods_of_this_library_say_if_they_do_not_mind_a_larger_head(method: str) -> None:
    assert minds_a_larger_head(method)


def test_the_page_says_which_methods_do_not_mind_a_larger_head() -> None:
    page = (Path(__file__).parents[1] / "docs" / "learner.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| predicts the same: .* \|$", page, flags=re.M)
    alone = {name: parse_method(f"{name}()") for name in methods.names()}
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {name for name, method in alone.items() if method.chain.traits.met_only}
    [row] = re.findall(r"^\| (.*) \| predicts the same \|$", page, flags=re.M)
    outer = {name for name in alone if issubclass(methods.get(name), (Addition, Wrapper)) and name != "best"}
    harmless = {name for name in outer if alone[name].parts[-1].traits.met_only is not False}
    assert set(re.findall(r"`(\w+)`", row)) == harmless


def test_penalties_on_weights_above_a_frozen_trunk() -> None:
    classes_may_arrive("er() + si(every=2)", net="mlp(width=12, depth=4, freeze=True)", taps=4)


def test_a_class_begins_the_same_whenever_it_arrives() -> None:
    singly, at_once, other_seed = (toy_engine("er()", classes=0) for _ in range(3))
    other_seed.seed = 1
    for classes in (1, 2, 5):
        singly.grow(classes)
    at_once.grow(5)
    other_seed.grow(5)
    assert torch.equal(head(singly), head(at_once))
    assert torch.equal(singly.net.classifier.bias, at_once.net.classifier.bias)
    assert not torch.equal(head(other_seed), head(at_once))
    bound = at_once.net.width**-0.5
    assert -bound <= head(at_once).min() < -bound / 2 < bound / 2 < head(at_once).max() <= bound
    assert len(head(at_once)[0].T.unique(dim=0)) == 5


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.01)"])
def test_parameters_stay_in_the_optimizer_and_their_moments_get_zeros(optimizer: str) -> None:
    engine = toy_engine("er()", optimizer=optimizer, classes=0)
    learn(engine, 0, 1)
    weight = head(engine)
    before = {name: value.clone() for name, value in engine.optimizer.state[weight].items() if value.ndim}
    engine.grow(4)
    assert head(engine) is weight
    assert weight.shape[-1] == 4
    assert before
    for name, value in before.items():
        grown = engine.optimizer.state[weight][name]
        assert torch.equal(grown[..., :2], value)
        assert not grown[..., 2:].any()
    learn(engine, 3, 2)
    assert engine.optimizer.state[weight]["momentum_buffer" if "sgd" in optimizer else "exp_avg"][..., 3].any()


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.01)", "adamw(lr=0.01)"])
def test_classes_that_come_one_by_one(optimizer: str) -> None:
    engine = toy_engine("er()", optimizer=optimizer, classes=0)
    for label in range(4):
        learn(engine, label)
    bias = engine.net.classifier.bias
    moment = engine.optimizer.state[bias]["momentum_buffer" if "sgd" in optimizer else "exp_avg"]
    assert moment.shape == bias.shape == (1, 1, 4)


def test_moments_of_another_shape_begin_anew() -> None:
    engine = toy_engine("er()", classes=0)
    optimizer = torch.optim.Adafactor(engine.net.parameters(), lr=0.01)
    engine.optimizer = engine.update.optimizer = optimizer
    learn(engine, 0, 1)
    trunk = next(engine.net.backbone.parameters())
    assert head(engine) in optimizer.state
    engine.grow(4)
    assert head(engine) not in optimizer.state
    assert trunk in optimizer.state
    learn(engine, 3, 2)


def test_labels_that_are_met_cost_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine("er()", classes=0)
    learn(engine, 0, 1)
    monkeypatch.setattr(engine, "grow", None)
    learn(engine, 1, 0)


def test_stored_logits_are_zero_for_classes_that_came_later() -> None:
    engine = toy_engine("der()", classes=0)
    learn(engine, 0, 1)
    stored = engine.memories.replay.attributes["logits"][:2].clone()
    learn(engine, 2)
    logits = engine.memories.replay.attributes["logits"]
    assert torch.equal(logits[:2, :, :2], stored)
    assert not logits[:2, :, 2].any()
    assert logits[2, :, 2].all()


def test_stored_values_that_change_their_shape_say_how_to_declare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine("der(alpha=0)", classes=0)
    monkeypatch.setattr(type(engine.method), "kept", ())
    learn(engine, 0, 1)
    with pytest.raises(
        UserError, match=r"'logits' .* had the shape \[1, 2\] and now has \[1, 3\]; .* kept = \(per_class\('logits'"
    ):
        learn(engine, 2)


def test_blocks_of_classes_grow_each_at_its_end() -> None:
    growth = Growth(2, 3, seed=0)
    assert growth.padded(torch.tensor([1, 2, 3, 4]), 0, blocks=2).tolist() == [1, 2, 0, 3, 4, 0]
    both = growth.grown(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "name", ClassAxis(1, blocks=2, bound=0.5))
    assert both[0, [0, 1, 3, 4]].tolist() == [1, 2, 3, 4]
    assert both[0, [2, 5]].abs().min() > 0
    assert both.abs()[0, [2, 5]].max() < 0.5
    assert both[0, 2] != both[0, 5]


def test_a_module_of_ones_own_declares_its_axis() -> None:
    engine = toy_engine("er()", classes=0)
    engine.grow(1)
    own = nn.Linear(12, 1)
    own.class_axes = {"weight": ClassAxis(0, bound=0.1), "bias": ClassAxis(0, bound=0.1)}
    engine.net.add_extra("own", own)
    engine.grow(3)
    assert own(torch.zeros(1, 12)).shape == (1, 3)


def test_a_state_of_fewer_classes_is_refused() -> None:
    small, large = toy_engine("er()", classes=2), toy_engine("er()", classes=3)
    with pytest.raises(UserError, match="room for 2 classes and this one for 3; load it into a new learner"):
        large.load_state_dict(small.state_dict())


def test_blocks_of_an_axis_grow_each_at_its_end() -> None:
    value, new = torch.tensor([0, 1, 10, 11]), torch.tensor([2, 12])
    assert Growth(2, 3, 0).padded(value, 0, 2, new).tolist() == [0, 1, 2, 10, 11, 12]
