"""Runs on a frozen trunk: features computed once, the numbers of a run that computes them in every pass, and reasons not to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gracecl import checkpoint
from gracecl.data import load
from gracecl.engine.live import Live
from gracecl.lab.runs import frozen
from gracecl.lab.runs.export import export_run
from gracecl.lab.runs.result import Result
from gracecl.lab.runs.run import Interrupted, RunConfig, Work, learner_and_stream, resume, run
from gracecl.nets.inference import Inference
from gracecl.registry import nets
from gracecl.registry.options import run_name
from stopping import StopAfter

STREAM = "split-digits(size=8, classes='0-3', tasks=2, batch=40)"
VIT = "vit(patch=4, dim=16, depth=4, heads=2, freeze=True)"
ER = RunConfig("er(n_recall=20)", net=VIT, taps=2, stream=STREAM, memory=30, augment="none", features="torch", device="cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRACECL_DATA", str(tmp_path / "data"))
    frozen.say_once.cache_clear()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"]["net"]


def record(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


@pytest.fixture
def computed(monkeypatch):
    """The blocks that a net was asked for."""
    compute, blocks = Inference.__call__, []

    def counted(self, images):
        blocks.append(len(images))
        return compute(self, images)

    monkeypatch.setattr(Inference, "__call__", counted)
    return blocks


@pytest.mark.slow
@pytest.mark.parametrize("config", [ER, replace(ER, method="slda", taps=None, augment="tau")], ids=["er", "slda"])
def test_numbers_are_those_of_passes_through_the_trunk(tmp_path, config):
    kept = run(config, tmp_path / "a")
    passed = run(replace(config, features="off"), tmp_path / "b")
    found, wanted = weights(kept), weights(passed)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name].float(), value.float(), atol=2e-3), name
    one, other = (Result.read(folder).accuracy for folder in (kept, passed))
    assert np.allclose(one, other, atol=1.0, equal_nan=True)


@pytest.mark.slow
def test_what_learns_at_the_taps_learns(tmp_path):
    engine, _ = learner_and_stream(ER)
    before = {name: value.clone() for name, value in engine.net.backbone.named_parameters()}
    after = weights(run(ER, tmp_path))
    moved = {name for name, value in before.items() if not torch.equal(after[f"backbone.{name}"], value)}
    assert moved == {"tap_norms.0.weight", "tap_norms.0.bias"}


def test_the_second_run_computes_nothing_and_has_the_same_bytes(tmp_path, computed):
    first = run(ER, tmp_path / "a")
    assert sum(computed) == 720
    computed.clear()
    second = run(ER, tmp_path / "b")
    other_method = run(replace(ER, method="slda", taps=2, augment="tau", seed=0), tmp_path / "b")
    assert not computed
    assert record(first) == record(second)
    assert "features_used" in json.loads((other_method / "config.json").read_text())


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path):
    whole = run(ER, tmp_path / "a")
    with pytest.raises(Interrupted):
        run(ER, tmp_path / "b", watch=StopAfter(5))
    [stopped] = (path.parent for path in (tmp_path / "b").rglob("config.json"))
    assert record(resume(stopped)) == record(whole)


@pytest.mark.slow
def test_the_output_and_the_configuration_say_it(tmp_path, capsys):
    folder = run(ER, tmp_path)
    used = json.loads((folder / "config.json").read_text())["features_used"]
    assert used["backend"] == f"torch {torch.__version__}"
    assert used["width"] == 32
    assert used["bytes"] == 128
    assert "the trunk is frozen: learning from its 32 features of each image, by torch" in capsys.readouterr().err
    held = checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"]["memories"]["replay"]
    assert any(isinstance(value, torch.Tensor) and value.shape == (30, 32) for value in held.values())


@pytest.mark.slow
def test_a_run_goes_on_with_the_features_it_began_with(tmp_path):
    folder = run(replace(ER, features="auto"), tmp_path / "a")
    backend = json.loads((folder / "config.json").read_text())["features_used"]["backend"]
    assert Work.begun(folder).as_begun().features == ("onnx" if backend.startswith("onnx") else "torch")
    older = run(replace(ER, net="mlp(width=8, depth=2)", taps=1), tmp_path / "b")
    assert Work.begun(older).as_begun().features == "off"


def test_the_folder_of_a_run_is_where_it_was_before_there_was_the_option():
    settings = vars(ER) | {"features": "auto"}
    assert run_name(settings) == run_name({name: value for name, value in settings.items() if name != "features"})
    assert run_name(settings | {"features": "off"}) != run_name(settings)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"augment": "crop"}, "with --augment none they would be computed once"),
        ({"method": "mose"}, "mose needs the images themselves"),
        ({"method": "mkd(er(), harder=1)"}, "mkd needs the images themselves"),
        ({"net": "resnet18(width=2, freeze=True)"}, "looks at maps; use --taps 1"),
        ({"stream": "domain-digits(kind='rotated', tasks=2)"}, "images of its own making"),
        ({"precision": "bf16"}, "computed in bf16"),
        ({"features": "off"}, ""),
        ({"net": VIT.replace("freeze", "lora").replace("True", "2")}, ""),
        ({"net": VIT.replace(", freeze=True", "")}, ""),
    ],
)
def test_images_stay_where_features_cannot_stand_in_for_them(change, why, capsys, computed):
    assert frozen.kept_features(replace(ER, **change), None, Live()) is None
    assert not computed
    said = capsys.readouterr().err
    assert why in said
    assert bool(why) == ("computed in every pass" in said)


def test_a_trunk_with_dropout_is_passed_through(capsys, computed):
    @nets.register("dropping")
    def dropping(shape, taps, at_most):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 8), nn.ReLU())
        return frozen.nets.ModuleBackbone(model, ["3"], taps, at_most, example=(1, *shape))

    try:
        assert frozen.kept_features(replace(ER, net="dropping(freeze=True)", taps=1), None, Live()) is None
    finally:
        del nets.loaded["dropping"]
    assert "computes at random while it trains (dropout)" in capsys.readouterr().err
    assert not computed


@pytest.mark.slow
def test_an_exported_learner_takes_images(tmp_path):
    folder = run(replace(ER, method="slda", taps=1), tmp_path)
    said = export_run(folder, tmp_path / "net.pt2")
    assert "uint8 images [1, 8, 8] in" in said
    data = load("digits", size=8, classes="0-3")
    program = torch.export.load(str(tmp_path / "net.pt2")).module()
    right = program(data.test_x).argmax(dim=1).numpy()
    seen = json.loads((folder / "config.json").read_text())["classes"]
    assert right.max() < seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No complete tensor found")  # of torch.export.save
def test_a_net_made_of_a_module_can_be_exported(tmp_path):
    @nets.register("small")
    def small(shape, taps, at_most):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 9)
        )
        return frozen.nets.ModuleBackbone(model, ["4"], taps, at_most, example=(1, *shape))

    try:
        folder = run(replace(ER, method="slda", taps=1, net="small(freeze=True)"), tmp_path)
        assert "uint8 images [1, 8, 8] in" in export_run(folder, tmp_path / "net.pt2")
    finally:
        del nets.loaded["small"]
