"""Files of features: computed once, continued after a kill, a data set like any other, refused when they were changed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gracecl
from gracecl import embedding
from gracecl.data import features, load
from gracecl.data import pixels as pixels_module
from gracecl.errors import UserError
from gracecl.lab.cli.main import call
from gracecl.nets.inference import Inference
from gracecl.testing import toy_data

BLOCK = 16
SIZES = (16, 16, 16, 6, 16, 8)
"""of the blocks of 54 training and 24 test images"""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (pixels_module, features, embedding):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))


def computed(tmp_path, **options):
    return gracecl.embed(net, toy_data(), out=tmp_path / "a.feat", backend="torch", progress=False, **options)


def by_hand(data):
    model = net().eval()
    with torch.no_grad():
        return [model(data.inputs.normalise(x)) for x in (data.train_x, data.test_x)]


def test_features_are_what_the_net_returns_with_the_labels_of_the_images(tmp_path):
    images, data = toy_data(), computed(tmp_path)
    for found, wanted in zip((data.train_x, data.test_x), by_hand(images), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    assert np.array_equal(data.train_y, images.train_y)
    assert np.array_equal(data.test_y, images.test_y)
    assert data.class_names == images.class_names
    assert data.tasks == images.tasks
    assert data.inputs.shape == (5,)


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    data = computed(tmp_path, precision="half")
    tensors = load_file(tmp_path / "a.feat")
    assert tensors["train_x"].dtype == torch.float16
    assert torch.equal(tensors["train_x"], data.train_x)
    assert torch.equal(tensors["test_y"], torch.from_numpy(data.test_y))
    assert torch.allclose(data.test_x.float(), by_hand(toy_data())[1], atol=2e-3)


@pytest.mark.slow
def test_images_are_resized_as_a_stream_resizes_them(tmp_path):
    at_size = gracecl.embed(net, load("digits", size=12), out=tmp_path / "a", backend="torch", progress=False)
    on_the_fly = gracecl.embed(net, "split-digits(size=12)", out=tmp_path / "b", backend="torch", progress=False)
    assert torch.equal(at_size.train_x, on_the_fly.train_x)
    assert torch.equal(at_size.test_x, on_the_fly.test_x)


def test_several_taps_stand_side_by_side_each_in_its_own_width(tmp_path):
    one = gracecl.embed("resnet18(width=4)", toy_data(), out=tmp_path / "a", backend="torch", progress=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())
    two = gracecl.embed(gracecl.tap(model, at=["2", "4"], classes=2, example=(1, 1, 8, 8)), toy_data(), out=tmp_path / "b",
                        backend="torch", progress=False)  # fmt: skip
    assert one.shape == (32,)
    assert two.shape == (6 + 4,)
    with torch.no_grad():
        maps = model.eval()[:3](toy_data().inputs.normalise(toy_data().test_x))
    assert torch.allclose(two.test_x[:, :6], maps.mean(dim=(2, 3)), atol=1e-5)


def test_the_next_block_is_read_while_one_is_in_use():
    second_read = threading.Event()

    def reads():
        yield 1
        second_read.set()
        yield 2
        raise UserError("a damaged image")

    coming = embedding.read_meanwhile(reads())
    assert next(coming) == 1
    assert second_read.wait(10)
    assert next(coming) == 2
    with pytest.raises(UserError, match="a damaged image"):
        next(coming)
    assert list(embedding.read_meanwhile(iter("abc"))) == list("abc")


def test_the_second_call_opens_the_file(tmp_path, monkeypatch):
    first = computed(tmp_path)
    monkeypatch.setattr(Inference, "__call__", None)
    assert computed(tmp_path).fingerprint == first.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["a.feat"]


def test_without_a_file_features_go_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRACECL_DATA", str(tmp_path))
    first = gracecl.embed(net, toy_data(), backend="torch", progress=False)
    monkeypatch.setattr(Inference, "__call__", None)
    assert torch.equal(gracecl.embed(net, toy_data(), backend="torch", progress=False).train_x, first.train_x)
    assert len(list((tmp_path / ".gracecl-cache").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"normalise": "half"},
        {"size": 10},
        {"precision": "half"},
        {"net": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5))},
        {"data": toy_data(per_class=8)},
    ],
    ids=["normalisation", "pixels", "precision", "net", "data"],
)
def test_another_request_leaves_a_file_alone_and_has_another_fingerprint(tmp_path, change):
    first = computed(tmp_path)
    before = (tmp_path / "a.feat").read_bytes()
    options = {"net": net, "data": toy_data(), "backend": "torch", "progress": False} | change
    with pytest.raises(UserError, match=r"holds other features: its \w+ is .* choose another file, or delete this one"):
        gracecl.embed(**options, out=tmp_path / "a.feat")
    assert (tmp_path / "a.feat").read_bytes() == before
    assert gracecl.embed(**options, out=tmp_path / "b.feat").origin != first.origin


def test_other_weights_are_another_origin(tmp_path):
    def shifted():
        model = net()
        with torch.no_grad():
            model[0].weight[0, 0, 0, 0] += 1e-3
        return model

    shifted.__qualname__ = net.__qualname__
    first = computed(tmp_path)
    second = gracecl.embed(shifted, toy_data(), out=tmp_path / "b", backend="torch", progress=False)
    assert first.origin != second.origin
    assert first.fingerprint != second.fingerprint


def test_a_fingerprint_holds_the_origin(tmp_path):
    data = computed(tmp_path)
    assert data.fingerprint != gracecl.from_arrays(data.train_x, data.train_y, data.test_x, data.test_y).fingerprint


# Interrupted.


def stopped_after(blocks, monkeypatch):
    """A net that fails after so many blocks, as if the process were killed there."""
    compute, made = Inference.__call__, []

    def failing(self, images):
        if len(made) == blocks:
            raise KeyboardInterrupt
        made.append(len(images))
        return compute(self, images)

    monkeypatch.setattr(Inference, "__call__", failing)
    return made


@pytest.mark.parametrize("blocks", [0, 1, 4, 5])
def test_a_stopped_extraction_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch, blocks):
    computed(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stopped_after(blocks, patch)
        with pytest.raises(KeyboardInterrupt):
            computed(tmp_path)
    assert not (tmp_path / "a.feat").exists()
    made = stopped_after(-1, monkeypatch)
    computed(tmp_path)
    assert tuple(made) == SIZES[blocks:]
    assert (tmp_path / "a.feat").read_bytes() == (tmp_path / "whole" / "a.feat").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.feat", "whole"]


@pytest.mark.parametrize("damage", ["block", "cut block", "cut log", "no part", "other request"])
def test_what_a_killed_process_left_is_used_up_to_the_first_damage(tmp_path, monkeypatch, damage):
    computed(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stopped_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            computed(tmp_path)
    part, log = tmp_path / "a.feat.part", tmp_path / "a.feat.blocks"
    if damage == "block":
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
    elif damage == "cut block":
        os.truncate(part, part.stat().st_size - 3)
    elif damage == "cut log":
        os.truncate(log, log.stat().st_size - 3)
    elif damage == "no part":
        part.unlink()
    else:
        log.write_text(log.read_text().replace("single", "double"))
    made = stopped_after(-1, monkeypatch)
    computed(tmp_path)
    assert tuple(made) == SIZES[0 if damage in ("no part", "other request") else 3 :]
    assert (tmp_path / "a.feat").read_bytes() == (tmp_path / "whole" / "a.feat").read_bytes()


def test_a_full_disk_is_one_sentence_and_what_was_computed_is_kept(tmp_path, monkeypatch):
    add = features.open_own
    with monkeypatch.context() as patch:
        stopped_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            computed(tmp_path)

    def full(path, **options):
        if path.name.endswith(".part") and not options:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(features, "open_own", full)
        with pytest.raises(
            UserError, match=r"No space left on device\); the features of 32 of \d+ images are kept there: make room"
        ):
            computed(tmp_path)
    made = stopped_after(-1, monkeypatch)
    computed(tmp_path)
    assert tuple(made) == SIZES[2:]


def test_features_that_are_no_numbers_are_refused(tmp_path):
    def broken():
        model = net()
        model[0].weight.data[0] = float("nan")
        return model

    with pytest.raises(UserError, match="NaN or infinite; check its weights"):
        gracecl.embed(broken, toy_data(), out=tmp_path / "a", backend="torch", progress=False)


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    command = [
        sys.executable,
        "-m",
        "gracecl",
        "features",
        "resnet18(width=8)",
        "digits",
        "--out",
        str(tmp_path / "d"),
        "--backend",
        "torch",
    ]
    running = subprocess.Popen([*command, "--size", "32", "--threads", "1"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = tmp_path / "d.blocks"
    while not (log.exists() and log.read_text().count("\n") > 1):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "d").exists()
    begun = log.read_text().count("\n") - 1
    assert begun >= 1
    subprocess.run([*command, "--size", "32", "--threads", "1"], check=True, capture_output=True)
    again = gracecl.embed("resnet18(width=8)", "digits", size=32, out=tmp_path / "e", backend="torch", progress=False)
    assert torch.equal(load(f"features:{tmp_path / 'd'}").train_x, again.train_x)


def embed_there(place: str) -> str:
    return gracecl.embed("resnet18(width=4)", "digits", out=place, backend="torch", progress=False).fingerprint


@pytest.mark.slow
def test_two_processes_make_one_file(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = pool.map(embed_there, [str(tmp_path / "d")] * 2)
    assert one == other
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


# Files that are not what was written.


def flipped(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def of_format(path, number):
    """Give a file another format."""
    path.write_bytes(path.read_bytes().replace(b"gracecl-features-1", f"gracecl-features-{number}".encode()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flipped(path, -1), r"block \d+ does not match its digest"),
        (lambda path: flipped(path, 600), "header was changed|is not a file of features"),
        (lambda path: os.truncate(path, path.stat().st_size - 5), r"it has [\d,]+ bytes instead of"),
        (lambda path: os.truncate(path, 100), "is not a file of features"),
        (lambda path: of_format(path, 2), "has format 2, and this version of gracecl reads up to 1: .*or make the features again"),
        (lambda path: path.write_bytes(b""), "is not a file of features"),
        (lambda path: path.write_bytes(b"\xff" * 50), "is not a file of features"),
        (lambda path: path.write_text("label,1,2\n" * 20), "is not a file of features"),
        (lambda path: torch.save({"a": 1}, path), "is not a file of features"),
        (lambda path: path.unlink(), "there is no file"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder, not a file of features"),
    ],
)
def test_damaged_and_foreign_files_are_one_sentence(tmp_path, capsys, damage, words):
    computed(tmp_path)
    damage(tmp_path / "a.feat")
    with pytest.raises(UserError, match=words):
        load(f"features:{tmp_path / 'a.feat'}")


def test_changed_labels_are_found(tmp_path):
    computed(tmp_path)
    file = features.FeatureFile.open(tmp_path / "a.feat")
    flipped(tmp_path / "a.feat", file.places["train_y"][2])
    with pytest.raises(UserError, match="labels were changed"):
        load(f"features:{tmp_path / 'a.feat'}")


# A data set like any other.


@pytest.mark.parametrize("family", ["split", "iid", "i-blurry", "si-blurry", "gaussian", "repeat"])
def test_every_family_takes_features(tmp_path, family):
    data = computed(tmp_path)
    expression = f"{family}-features(path='{tmp_path / 'a.feat'}')"
    stream = gracecl.stream(expression, seed=1)
    assert len(stream.batch(0).x[0]) == 5
    assert stream.data.fingerprint == data.fingerprint
    assert np.array_equal(stream.order, gracecl.stream(toy_data(), seed=1, family=family).order)


def test_classes_are_picked_and_a_size_is_refused(tmp_path):
    computed(tmp_path)
    stream = gracecl.stream(f"split-features(path='{tmp_path / 'a.feat'}', classes='2,0', tasks=2)")
    assert stream.data.class_names == ("2", "0")
    with pytest.raises(UserError, match="size= is that of images, and features have none"):
        gracecl.stream(f"split-features(path='{tmp_path / 'a.feat'}', size=8)")
    with pytest.raises(UserError, match=r"needs the file that 'gracecl features' made: split-features\(path='FILE'\)"):
        gracecl.stream("split-features()")


def test_domains_are_kept(tmp_path):
    domains = gracecl.data.from_domains({"a": toy_data(), "b": toy_data(per_class=8)})
    made = gracecl.embed(net, domains, out=tmp_path / "a", backend="torch", progress=False)
    assert made.domain_names == ("a", "b")
    assert np.array_equal(made.train_domain, domains.train_domain)


@pytest.mark.slow
def test_the_command_computes_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        call(
            [
                "features",
                "resnet18(width=2)",
                "split-digits(size=8, classes='0-3', tasks=2)",
                "--out",
                "d.feat",
                "--backend",
                "torch",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "d.feat: 16 features of" in out
    assert call(["run", "slda", "--net", "identity()", "--stream", "split-features(path='d.feat', tasks=2)", "--out", "runs"]) == 0
    assert call(["features", "resnet18(width=2)", "no-such-set", "--out", "e.feat"]) == 2
    assert call(["features", "resnet18(width=2)", "digits", "--out", "d.feat", "--backend", "torch"]) == 2
    assert "holds other features" in capsys.readouterr().err


def test_data_that_are_no_images_are_refused(tmp_path):
    vectors = toy_data(kind="vectors")
    with pytest.raises(UserError, match="features are made of images"):
        gracecl.embed("identity()", vectors, out=tmp_path / "a")


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert call(["features", "resnet18(width=4)", str(tmp_path / "photos"), "--out", str(tmp_path / "a.feat")]) == 2
    assert f"there is no folder {tmp_path / 'photos'}" in capsys.readouterr().err
