"""The real data sets, where $GRACECL_DATA has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gracecl.data import check, load

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def _no_copy_of_the_cache(monkeypatch):
    """Real data may be decoded for minutes; its own cache is the right one."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def needs(folder: str) -> pytest.MarkDecorator:
    root = os.environ.get("GRACECL_DATA")
    return pytest.mark.skipif(root is None or not (Path(root) / folder).is_dir(), reason=f"GRACECL_DATA has no folder {folder}")


@needs("cifar-100-python")
def test_cifar100():
    data = load("cifar100")
    assert np.bincount(data.train_y).tolist() == [500] * 100
    assert np.bincount(data.test_y).tolist() == [100] * 100
    means = [data.train_x[:, channel].double().mean().item() / 255 for channel in range(3)]
    assert means == pytest.approx([0.5071, 0.4866, 0.4409], abs=1e-4)
    assert data.class_names[:3] == ("apple", "aquarium_fish", "baby")
    assert check("cifar100") == []


@needs("tiny-imagenet-200")
def test_tinyimagenet():
    data = load("tinyimagenet")
    assert data.shape == (3, 64, 64)
    assert np.bincount(data.train_y).tolist() == [500] * data.classes
    assert np.bincount(data.test_y).tolist() == [50] * data.classes


@needs("CUB_200_2011")
def test_cub200():
    data = load("cub200")
    assert data.shape == (3, 224, 224)
    assert set(data.train_y) == set(data.test_y) == set(range(data.classes))


@needs("mnist")
def test_mnist():
    assert check("mnist") == []


@needs("fashion-mnist")
def test_fashion_mnist():
    assert check("fashion-mnist") == []
