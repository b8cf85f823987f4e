"""Any folder of images."""

from __future__ import annotations

import os
import shutil

import layouts
import numpy as np
import pytest
from PIL import Image

from gracecl.data import check, from_folder, load, pixels
from gracecl.errors import Caution, UserError


def picture(path, height=10, width=12, channels=3, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width, channels) if channels > 1 else (height, width)
    Image.fromarray(layouts.noise(*shape, seed=seed)).save(path)
    return path


def test_train_and_test_folders(tmp_path):
    for k in range(3):
        picture(tmp_path / "set" / "train" / "cat" / f"{k}.png", seed=k)
        picture(tmp_path / "set" / "train" / "ant" / "deeper" / f"{k}.PNG", seed=10 + k)
    picture(tmp_path / "set" / "val" / "cat" / "0.png", seed=5)
    (tmp_path / "set" / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "set" / "train" / ".hidden").mkdir()
    data = from_folder(tmp_path / "set", tasks=2, root=tmp_path)
    assert (data.name, data.shape, data.class_names, data.tasks) == ("set", (3, 10, 12), ("ant", "cat"), 2)
    assert data.train_y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_y.tolist() == [1]
    assert np.array_equal(data.train_x[3].permute(1, 2, 0).numpy(), layouts.noise(10, 12, 3))
    np.testing.assert_allclose(data.mean, data.train_x.double().mean((0, 2, 3)) / 255)


def test_one_folder_is_split_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        for k in range(10):
            picture(tmp_path / "set" / name / f"{k}.png", seed=k)
    data = load(f"folder:{tmp_path / 'set'}", tmp_path)
    assert np.bincount(data.test_y).tolist() == [2, 2]
    assert data.fingerprint == from_folder(tmp_path / "set", root=tmp_path / "other").fingerprint
    other = from_folder(tmp_path / "set", seed=1, test_fraction=0.5, root=tmp_path)
    assert np.bincount(other.test_y).tolist() == [5, 5]
    assert not (tmp_path / "set" / ".gracecl-cache").exists()
    assert check(f"folder:{tmp_path / 'set'}", tmp_path) == []


def test_sizes_and_colours_may_differ(tmp_path):
    picture(tmp_path / "set" / "a" / "0.png", 20, 30)
    picture(tmp_path / "set" / "a" / "1.png", 41, 33, channels=1)
    picture(tmp_path / "set" / "b" / "0.png", 7, 90, channels=4)
    picture(tmp_path / "set" / "b" / "1.gif", 20, 30, channels=1)
    assert from_folder(tmp_path / "set", root=tmp_path).shape == (3, 20, 30)
    assert from_folder(tmp_path / "set", size=15, root=tmp_path).shape == (3, 15, 15)


def test_grey_folders_stay_grey(tmp_path):
    for k in range(4):
        picture(tmp_path / "set" / "a" / f"{k}.png", channels=1, seed=k)
    data = from_folder(tmp_path / "set", root=tmp_path)
    assert data.shape == (1, 10, 12)
    assert len(data.mean) == 1


def test_what_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no images in sub-folders"):
        from_folder(tmp_path)
    broken = picture(tmp_path / "set" / "a" / "0.png")
    with pytest.raises(UserError, match="one image only"):
        from_folder(tmp_path / "set")
    picture(tmp_path / "set" / "a" / "1.png")
    with pytest.raises(UserError, match="test_fraction"):
        from_folder(tmp_path / "set", test_fraction=1.0)
    for content in (b"no image", broken.read_bytes()[:100]):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read the image .*0\.png"):
            from_folder(tmp_path / "set")
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(broken)
    with pytest.raises(UserError, match="more than 8 bits"):
        from_folder(tmp_path / "set")
    picture(tmp_path / "two" / "train" / "a" / "0.png")
    with pytest.raises(UserError, match="neither 'test' nor 'val'"):
        from_folder(tmp_path / "two")
    picture(tmp_path / "two" / "test" / "b" / "0.png")
    with pytest.raises(UserError, match="without training images: b"):
        from_folder(tmp_path / "two")


@pytest.fixture
def pictures(tmp_path):
    """Two classes of five images each."""
    for name in ("a", "b"):
        for k in range(5):
            picture(tmp_path / "set" / name / f"{k}.png", seed=k)
    return tmp_path / "set"


def test_a_class_that_is_never_tested_is_named(pictures, tmp_path):
    picture(pictures / "lonely" / "0.png")
    with pytest.warns(Caution, match=r"1 classes in .* are never tested: lonely; add images"):
        data = from_folder(pictures, root=tmp_path)
    assert data.class_names == ("a", "b", "lonely")
    assert set(data.test_y.tolist()) == {0, 1}


def test_a_file_name_that_is_no_text_is_a_sentence(pictures, tmp_path):
    shutil.copy(pictures / "a" / "0.png", os.fsencode(pictures / "a") + b"/\xff.png")
    with pytest.raises(UserError, match=r"\\xff\.png' is not UTF-8; rename the file"):
        from_folder(pictures, root=tmp_path)


def test_a_pipe_named_as_an_image_is_not_waited_for(pictures, tmp_path):
    os.mkfifo(pictures / "a" / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png has the name of an image and is no file"):
        from_folder(pictures, root=tmp_path)


def test_a_path_with_a_nul_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="holds a NUL"):
        from_folder("a\0b", root=tmp_path)


@pytest.mark.parametrize("kind", ["EPS", "PCX", "PDF"])
def test_other_formats_are_not_opened_whatever_their_name(kind, pictures, tmp_path, monkeypatch):
    """EPS would start Ghostscript."""
    monkeypatch.setattr("subprocess.Popen", lambda *call, **options: pytest.fail("a program was started"))
    Image.fromarray(layouts.noise(10, 12, 3)).save(pictures / "a" / "odd.jpg", format=kind)
    with pytest.raises(UserError, match=r"cannot read the image .*odd\.jpg"):
        from_folder(pictures, root=tmp_path)


def test_an_image_of_too_many_pixels_is_a_sentence(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(pixels, "MOST_PIXELS", 10 * 12 - 1)
    with pytest.raises(UserError, match="has 12 × 10 pixels, more than 119"):
        from_folder(pictures, root=tmp_path)
