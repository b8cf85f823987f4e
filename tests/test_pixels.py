"""What pixels become before a pretrained net sees them: what it was trained with, unless one says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gracecl import Learner
from gracecl.errors import UserError
from gracecl.images.augment import normalisation
from gracecl.inputs import Images
from gracecl.lab.runs.run import RunConfig
from gracecl.nets.pixels import PREPROCESSOR, expected, meant


@pytest.mark.parametrize(
    ("net", "name"),
    [
        ("efficientnet_lite0", "half"),
        ("efficientnet_lite0(freeze=True)", "half"),
        ("efficientnet_lite0(pretrained=False)", None),
        ("resnet18(width=8)", None),
        ("timm('vit_base_patch16_224.augreg_in21k', pretrained=True, lora=4)", "half"),
        ("timm('resnet10t', pretrained=True)", "imagenet"),
        ("timm('resnet10t', weights='some.safetensors')", "imagenet"),
        ("timm('resnet10t')", None),
        ("timm('vit_base_patch32_clip_224.openai', pretrained=True)", "clip"),
        ("transformers(width=8)", None),
    ],
)
def test_pretrained_nets_say_what_they_were_trained_with(net: str, name: str | None) -> None:
    if net.startswith("timm"):
        pytest.importorskip("timm")
    assert expected(net) == name
    assert meant("auto", net) == name or meant("auto", net) == "data"
    assert meant("imagenet", net) == "imagenet", "what is given counts"


def test_transformers_say_it_in_a_file_beside_the_weights(tmp_path: Path) -> None:
    net = f"transformers('{tmp_path}')"
    assert expected(net) is None
    file = tmp_path / PREPROCESSOR
    for mean, std, name in [([0.5] * 3, [0.5] * 3, "half"), ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], "imagenet")]:
        file.write_text(json.dumps({"image_mean": mean, "image_std": std}), encoding="utf-8")
        assert expected(net) == name
    file.write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}), encoding="utf-8")
    assert expected(net) is None, "numbers without a name"
    file.write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": False}), encoding="utf-8")
    assert expected(net) == "none"
    file.write_text("[", encoding="utf-8")
    assert expected(net) is None, "what loads the model says what is wrong with its folder"


def test_a_run_records_the_name_that_auto_stands_for() -> None:
    frozen, scratch = (RunConfig("slda", net).canonical().normalise for net in ("efficientnet_lite0(freeze=True)", "mlp"))
    assert (frozen, scratch) == ("half", "data")
    assert RunConfig("slda", "efficientnet_lite0", normalise="data").canonical().normalise == "data"


def test_grey_images_take_the_mean_over_channels() -> None:
    grey = normalisation("imagenet", Images((1, 2, 2))).images
    assert grey.statistics == (pytest.approx(((0.485 + 0.456 + 0.406) / 3,)), pytest.approx(((0.229 + 0.224 + 0.225) / 3,)))
    with pytest.raises(UserError, match="images of 3 channels, not 2"):
        normalisation("imagenet", Images((2, 2, 2)))


@pytest.mark.slow
def test_a_learner_on_a_pretrained_net_sees_pixels_as_the_net_was_trained() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    learner = Learner("auto", net="efficientnet_lite0", shape=(3, 32, 32))
    assert learner.engine.net.inputs.images.statistics == ((0.5,) * 3, (0.5,) * 3)
    other = Learner("auto", net="efficientnet_lite0", shape=(3, 32, 32), mean=(0.4,) * 3, std=(0.3,) * 3)
    assert other.engine.net.inputs.images.statistics == ((0.4,) * 3, (0.3,) * 3)
    scratch = Learner("er", net="mlp")
    scratch.learn(np.zeros((2, 3, 8, 8), np.uint8), [0, 1])
    assert scratch.engine.net.inputs.images.statistics == ((0.5,) * 3, (0.25,) * 3)
