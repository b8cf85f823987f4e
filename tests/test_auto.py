"""The learner that `auto` stands for: which nets have features worth keeping, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gracecl
from gracecl import Learner
from gracecl.engine import auto
from gracecl.inputs import Inputs
from gracecl.lab.cli import call
from gracecl.registry.options import AUTO_FROM_SCRATCH, AUTO_ON_FEATURES
from gracecl.registry.spec import in_full


@pytest.mark.parametrize(
    ("net", "knows"),
    [
        ("efficientnet_lite0", True),
        ("efficientnet_lite0(pretrained=False)", False),
        ("efficientnet_lite0(pretrained=False, freeze=True)", True),
        ("resnet18(width=8)", False),
        ("resnet18(freeze=True)", True),
        ("vit(lora=4)", False),
        ("identity()", True),
        ("timm('resnet10t')", False),
        ("timm('resnet10t', pretrained=True)", True),
        ("timm('resnet10t', True)", True),
        ("timm(weights='file.safetensors')", True),
        ("transformers()", False),
        ("transformers('folder')", True),
        ("transformers('folder', pretrained=False)", False),
        ("my_module.Net@0123456789ab", False),
        (nn.Linear(2, 2), False),
        (nn.Linear(2, 2).requires_grad_(False), True),
        (gracecl.tap(nn.Sequential(nn.Linear(2, 2)).requires_grad_(False), at=["0"], classes=2, example=torch.zeros(1, 2)), True),
        (lambda: nn.Linear(2, 2), False),
    ],
)
def test_which_nets_know_something(net: object, knows: bool) -> None:
    assert auto.meant("auto", net) == (AUTO_ON_FEATURES if knows else AUTO_FROM_SCRATCH)
    assert auto.meant("er()", net) == "er()"


def test_a_learner_says_what_it_is_and_is_saved_as_that(tmp_path: Path) -> None:
    learner = Learner("auto", net="identity()", inputs=Inputs((6,)))
    assert in_full(AUTO_ON_FEATURES) in repr(learner)
    x, y = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32), ["a", "b"] * 20
    learner.learn(x + np.array([[0], [3]] * 20, np.float32), y)
    learner.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner")
    np.testing.assert_array_equal(again.predict_proba(x), learner.predict_proba(x))
    assert again.recipe.method == AUTO_ON_FEATURES
    assert Learner("auto", net=nn.Linear(6, 6).requires_grad_(False)).recipe.method == AUTO_ON_FEATURES


def test_a_run_records_what_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream = "split-digits(size=8, classes='0-3', tasks=2, batch=20)"
    assert call(["run", "auto", "--net", "identity()", "--stream", stream]) == 0
    [config] = Path("runs").rglob("config.json")
    assert json.loads(config.read_text(encoding="utf-8"))["method"] == in_full(AUTO_ON_FEATURES)


def test_the_list_of_methods_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", "methods"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"auto is {AUTO_ON_FEATURES} on a pretrained or frozen net, {AUTO_FROM_SCRATCH} on a new one" in told
