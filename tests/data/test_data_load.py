"""`load` and `check` on small files in the official layouts of every data set."""

from __future__ import annotations

import gzip
import logging
from collections import Counter
from pathlib import Path

import layouts
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from gracecl.data import Data, check, from_arrays, load
from gracecl.data.cifar import Cifar
from gracecl.data.pixels import centre
from gracecl.data.tinyimagenet import WORDNET_IDS
from gracecl.errors import UserError
from gracecl.registry import datasets

NAMES = {"cifar10", "cifar100", "cub200", "digits", "fashion_mnist", "mnist", "tinyimagenet"}


def test_every_set_is_listed_with_a_line():
    summaries = {name: datasets.summaries()[name] for name in NAMES}
    assert all(len(text) > 20 for text in summaries.values())


def test_digits_need_nothing():
    data = load("digits")
    assert (data.shape, data.classes, data.tasks) == ((1, 16, 16), 10, 5)
    assert len(data.train_y) + len(data.test_y) == 1797
    share = np.bincount(data.test_y) / (np.bincount(data.train_y) + np.bincount(data.test_y))
    assert np.all(abs(share - 0.2) < 0.01)
    assert int(data.train_x.max()) == 255
    assert data.fingerprint == load("Digits").fingerprint
    assert load("digits", size=9).shape == (1, 9, 9)
    assert check("digits") == []


def test_digits_are_those_of_scikit_learn_s_own_loader():
    original, data = load_digits(), load("digits", size=8)
    expected = Counter(
        (label, np.rint(image * (255 / 16)).astype(np.uint8).tobytes())
        for label, image in zip(original.target.tolist(), original.images, strict=True)
    )
    parts = [(data.train_x, data.train_y), (data.test_x, data.test_y)]
    assert expected == Counter(
        (label, x.numpy().tobytes()) for images, y in parts for x, label in zip(images, y.tolist(), strict=True)
    )


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr("gracecl.data.digits.find_spec", lambda name: None)
    with pytest.raises(UserError, match="scikit-learn, which carries the digits, is not installed"):
        load("digits", size=7)


def test_cifar100(tmp_path):
    layouts.cifar100(tmp_path)
    data = load("cifar100", tmp_path)
    assert (data.shape, data.classes, data.tasks) == ((3, 32, 32), 100, 10)
    assert data.class_names[7] == "fine7"
    assert data.train_y[:3].tolist() == [0, 1, 2]
    expected = torch.from_numpy(layouts.noise(200, 3072).reshape(-1, 3, 32, 32))
    assert torch.equal(data.train_x, expected)
    assert data.mean == pytest.approx((0.4914, 0.4824, 0.4467), abs=1e-4)


def test_cifar10_joins_its_batches(tmp_path):
    layouts.cifar10(tmp_path)
    data = load("cifar10", tmp_path)
    assert (len(data.train_y), len(data.test_y), data.tasks) == (100, 20, 5)
    assert data.class_names[3] == "class3"
    last = torch.from_numpy(layouts.noise(20, 3072, seed=4).reshape(-1, 3, 32, 32))
    assert torch.equal(data.train_x[80:], last)


def test_tinyimagenet_uses_the_classes_that_are_there_in_official_order(tmp_path, caplog):
    layouts.tinyimagenet(tmp_path)
    with caplog.at_level(logging.WARNING):
        data = load("tinyimagenet", tmp_path)
        load("tinyimagenet", tmp_path)
    assert caplog.text.count("3 of 200 classes") == 1
    assert (data.shape, data.classes, data.tasks) == ((3, 64, 64), 3, 10)
    assert data.class_names == (*WORDNET_IDS[-3:-1], "last word")
    assert data.train_y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test_y.tolist() == [2, 2, 1, 1, 0, 0]
    grey = data.train_x[0]
    assert torch.equal(grey[0], grey[1])


def test_tinyimagenet_check_names_what_is_missing(tmp_path):
    folder = layouts.tinyimagenet(tmp_path)
    (folder / "val" / "images" / "val_0.JPEG").unlink()
    found = check("tinyimagenet", tmp_path)
    assert any(f"197 of 200 classes have no training images: {WORDNET_IDS[0]}" in problem for problem in found)
    assert any("wrong number of training images" in problem for problem in found)
    assert any("1 validation images are missing: val_0.JPEG" in problem for problem in found)
    with pytest.raises(UserError, match=r"val_0\.JPEG is missing"):
        load("tinyimagenet", tmp_path)


def test_cub200_scales_and_crops(tmp_path):
    layouts.cub200(tmp_path)
    data = load("cub200", tmp_path, size=32)
    assert (data.shape, data.classes, data.tasks) == ((3, 32, 32), 3, 10)
    assert data.train_y.tolist() == data.test_y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.class_names[1] == "002.Bird_2"


def test_cub200_without_some_folders_uses_the_others(tmp_path):
    folder = layouts.cub200(tmp_path)
    (folder / "images" / "002.Bird_2").rename(tmp_path / "elsewhere")
    data = load("cub200", tmp_path, size=16)
    assert data.class_names == ("001.Bird_1", "003.Bird_3")
    assert data.train_y.tolist() == [0, 0, 1, 1]
    found = check("cub200", tmp_path)
    assert any("classes.txt names 3 of 200" in problem for problem in found)
    assert any("1 of 200 classes have no folder of images: 002.Bird_2" in problem for problem in found)
    (folder / "images" / "001.Bird_1" / "0.jpg").unlink()
    with pytest.raises(UserError, match=r"0\.jpg is missing"):
        load("cub200", tmp_path, size=16)


def test_cub200_tables_must_agree_and_stay_inside(tmp_path):
    folder = layouts.cub200(tmp_path)
    table = folder / "images.txt"
    text = table.read_text()
    table.write_text(text.replace("001.Bird_1/0.jpg", "../../secret.jpg"))
    with pytest.raises(UserError, match="outside"):
        load("cub200", tmp_path)
    table.write_text(text + "99 001.Bird_1/0.jpg\n")
    with pytest.raises(UserError, match="do not agree"):
        load("cub200", tmp_path)


def test_the_evaluation_crop_is_that_of_the_paper():
    """Shorter side to 256, centre 224: a 512 × 768 gradient keeps columns 80 … 304 of 384."""
    row = np.linspace(0, 255, 768)
    image = Image.fromarray(np.tile(row, (512, 1)).astype(np.uint8))
    cut = np.asarray(centre(image, (224, 224), 256 / 224))
    assert cut.shape == (224, 224)
    assert cut[100, 0] == pytest.approx(255 * 80 / 384, abs=1.5)
    assert cut[100, -1] == pytest.approx(255 * 304 / 384, abs=1.5)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_sets(tmp_path, name, zipped):
    layouts.idx(tmp_path, name, zipped)
    data = load(name, tmp_path)
    assert (data.shape, data.classes, data.tasks) == ((1, 28, 28), 10, 5)
    assert torch.equal(data.train_x[:, 0], torch.from_numpy(layouts.noise(40, 28, 28)))
    assert data.test_y.tolist() == [k % 10 for k in range(20)]
    assert any("wrong number of training images" in problem for problem in check(name, tmp_path))


def damage(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def test_damaged_idx_files_are_named(tmp_path):
    folder = layouts.idx(tmp_path, zipped=False)
    file = folder / "train-images-idx3-ubyte"
    whole = file.read_bytes()
    for content, says in [
        (whole[:-1], "ends after 31,359 of 31,360"),
        (whole + b"!", "goes on"),
        (whole[:3], "damaged"),
        (b"\0\0\x0d" + whole[3:], "idx file"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "ends after 0"),
    ]:
        damage(file, content)
        with pytest.raises(UserError, match=says) as caught:
            load("mnist", tmp_path)
        assert str(file) in str(caught.value)
    file.unlink()
    with pytest.raises(UserError, match=r"neither train-images-idx3-ubyte nor .* data get mnist"):
        load("mnist", tmp_path)
    for content in (gzip.compress(whole)[:-20], b"not gzip"):
        damage(folder / "train-images-idx3-ubyte.gz", content)
        with pytest.raises(UserError, match="damaged"):
            load("mnist", tmp_path)
    damage(file, layouts.idx_bytes(layouts.noise(39, 28, 28)))
    with pytest.raises(UserError, match="do not fit together"):
        load("mnist", tmp_path)


def test_missing_sets_name_the_remedy(tmp_path):
    with pytest.raises(UserError, match=f"gracecl data get cifar100 --data {tmp_path}"):
        load("cifar100", tmp_path)
    assert "no folder 'cifar-100-python'" in check("cifar100", tmp_path)[0]
    (layouts.cifar100(tmp_path) / "meta").unlink()
    with pytest.raises(UserError, match="meta is missing"):
        load("cifar100", tmp_path)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UserError, match="did you mean 'cifar100'"):
        load("cifar1000")


def test_the_environment_names_the_place(tmp_path, monkeypatch):
    layouts.cifar10(tmp_path)
    monkeypatch.setenv("GRACECL_DATA", str(tmp_path))
    assert load("cifar10").classes == 10


def test_check_compares_counts_then_pixels(tmp_path, monkeypatch):
    layouts.cifar100(tmp_path)
    assert any(
        "100 of 100 classes have the wrong number of training images: fine0 has 2 of 500" in p for p in check("cifar100", tmp_path)
    )
    complete = layouts.cifar10(tmp_path)
    monkeypatch.setattr(Cifar, "problems", lambda self, folder: [])
    assert check("cifar10", tmp_path) == []
    (complete / "test_batch").write_bytes(b"")
    assert "test_batch is damaged" in check("cifar10", tmp_path)[0]


@pytest.mark.parametrize(
    ("classes", "numbers"), [("0-2", [0, 1, 2]), ("7,3", [7, 3]), ("8-9, 0", [8, 9, 0]), ([5], [5]), ((4, 2), [4, 2])]
)
def test_classes_are_picked_and_numbered_in_the_order_given(classes, numbers):
    whole, part = load("digits"), load("digits", classes=classes)
    assert part.class_names == tuple(str(number) for number in numbers)
    assert part.tasks == whole.tasks
    rows = np.flatnonzero(np.isin(whole.train_y, numbers))
    assert torch.equal(part.train_x, whole.train_x[torch.from_numpy(rows)])
    assert [numbers[label] for label in part.train_y] == whole.train_y[rows].tolist()
    assert set(part.test_y) == set(range(len(numbers)))


@pytest.mark.parametrize("classes", ["", "a", "3-", "-3", "1,1", "10", "5-3", [], [-1], [10], [1.5]])
def test_classes_that_make_no_sense(classes):
    with pytest.raises(UserError, match="classes"):
        load("digits", classes=classes)


@pytest.mark.parametrize("size", [0, -3, 2.5, True])
def test_sizes_that_make_no_sense(size):
    with pytest.raises(UserError, match="size"):
        load("digits", size=size)


@pytest.mark.parametrize("size", [17, 28, 40])
def test_other_resolutions(tmp_path, size):
    layouts.cifar100(tmp_path)
    data = load("cifar100", tmp_path, size=size)
    assert data.shape == (3, size, size)
    assert data.train_x.float().mean() == pytest.approx(127.5, abs=2)


def test_a_registered_function_is_a_data_set(monkeypatch):
    x = layouts.noise(4, 6, 6)

    def mine(root: Path, size: int | None) -> Data:
        """Mine."""
        return from_arrays(x, [0, 1, 0, 1], x, [0, 1, 0, 1], name="mine")

    monkeypatch.setitem(datasets.loaded, "mine", mine)
    assert load("mine", classes="1").classes == 1
    monkeypatch.setitem(datasets.loaded, "mine", lambda root, size: 3)
    with pytest.raises(UserError, match="gave int"):
        load("mine")
