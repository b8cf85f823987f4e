"""Datasets as torch, torchvision and Hugging Face make them; those of libraries that are not installed are skipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import gracecl
from gracecl.errors import UserError
from gracecl.inputs import Images, Inputs, Parts

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 5, 7, 3), np.uint8)
LABELS = [0, 1, 2, 0, 1, 2]
NAMES = ("cat", "dog", "emu")
AS_ARRAYS = gracecl.from_arrays(PIXELS, LABELS, PIXELS[:2], LABELS[:2])


class Listed(Dataset[Any]):
    """A map-style dataset of given items, with the attributes that a library would give it."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def listed(xs: Any, **attributes: Any) -> Listed:
    return Listed(list(zip(xs, LABELS, strict=True)), **attributes)


def read(dataset: Any, **options: Any) -> gracecl.data.Data:
    """The dataset, and its first two items as the test set."""
    return gracecl.from_torch(dataset, Subset(dataset, range(2)), **options)


def test_subsets_and_joined_sets_know_the_names_of_classes() -> None:
    named, other = listed(PIXELS, classes=list(NAMES)), listed(PIXELS, classes=["x", "y", "z"])
    assert read(Subset(Subset(named, range(6)), range(3))).class_names == NAMES
    assert read(ConcatDataset([named, Subset(named, range(2))])).class_names == NAMES
    assert read(ConcatDataset([named, other])).class_names == ("0", "1", "2")


def test_names_that_are_given_replace_those_of_the_dataset() -> None:
    """A transform of labels makes other classes than those the dataset knows."""
    coarse = Listed([(x, "pet" if y < 2 else "bird") for x, y in zip(PIXELS, LABELS, strict=True)], classes=list(NAMES))
    with pytest.raises(UserError, match="the label 'pet' is not one of the 3 class_names"):
        read(coarse)
    data = read(coarse, class_names=["pet", "bird"])
    assert (data.class_names, data.train_y.tolist()) == (("pet", "bird"), [0, 0, 1, 0, 0, 1])
    with pytest.raises(UserError, match="class_names is a list of names"):
        read(coarse, class_names="pet")


def test_further_columns_of_class_labels_are_no_inputs() -> None:
    features = {"img": object(), "coarse_label": SimpleNamespace(names=["pet", "bird"]), "fine_label": SimpleNamespace(names=NAMES)}
    items = [{"img": x, "fine_label": y, "coarse_label": y // 2} for x, y in zip(PIXELS, LABELS, strict=True)]
    fine, coarse = (read(Listed(items, features=features), label=label) for label in (None, "coarse_label"))
    assert (fine.fingerprint, fine.class_names) == (AS_ARRAYS.fingerprint, NAMES)
    assert (coarse.shape, coarse.class_names, coarse.train_y.tolist()) == ((3, 5, 7), ("pet", "bird"), [0, 0, 1, 0, 0, 1])


def test_features_may_be_an_attribute_of_any_kind() -> None:
    assert read(listed(torch.rand(6, 4), features=torch.rand(6, 4))).inputs == Inputs((4,))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_bytes_are_images_wherever_their_channels_lie(kind: Any) -> None:
    last, first = (read(listed(kind(x))) for x in (PIXELS, np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2))))
    assert last.fingerprint == first.fingerprint == AS_ARRAYS.fingerprint
    grey = read(listed(kind(PIXELS[..., 0].copy())))
    assert (grey.shape, isinstance(grey.inputs, Images)) == ((1, 5, 7), True)


def test_bytes_in_two_dimensions_beside_others_are_no_image() -> None:
    items = [((PIXELS[n, 0], np.zeros(2, np.float32)), LABELS[n]) for n in range(6)]
    assert read(Listed(items)).inputs == Parts([Inputs((7, 3), torch.uint8), Inputs((2,))])


@pytest.mark.parametrize(("mode", "shown"), [("1", "L"), ("P", "RGB"), ("CMYK", "RGB"), ("YCbCr", "RGB"), ("RGBA", "RGBA")])
def test_pictures_of_every_mode_are_read_as_they_look(mode: str, shown: str) -> None:
    pictures = [Image.fromarray(x).convert(mode) for x in PIXELS]
    looks = np.stack([np.asarray(picture.convert(shown)) for picture in pictures])
    assert read(listed(pictures)).fingerprint == gracecl.from_arrays(looks, LABELS, looks[:2], LABELS[:2]).fingerprint


def test_a_palette_with_transparent_entries_is_read_without_a_warning() -> None:
    picture = Image.fromarray(PIXELS[0]).convert("P")
    picture.info["transparency"] = bytes(range(256))
    assert read(listed([picture] * 6)).shape == (3, 5, 7)


def test_datasets_that_give_several_items_are_asked_for_several() -> None:
    asked: list[list[int]] = []

    class Several(Listed):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            asked.append(numbers)
            return [self.items[number] for number in numbers]

    items = [(np.array([n, n + 1]), n % 3) for n in range(600)]
    several, single = Several(items), Listed(items)
    assert gracecl.from_torch(several, single).fingerprint == gracecl.from_torch(single, single).fingerprint
    assert [number for numbers in asked for number in numbers] == list(range(600))
    assert len(asked) == 3


def test_a_label_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="the entries 'x', 'label' and none called 'kind'; say which is the label with label="):
        read(Listed([{"x": [1.0], "label": 0}] * 2), label="kind")


def test_tensor_datasets() -> None:
    assert read(TensorDataset(torch.rand(6, 4), torch.tensor(LABELS))).train_y.tolist() == LABELS


# Hugging Face.


@pytest.fixture
def hugging_face() -> Any:
    return pytest.importorskip("datasets")


@pytest.mark.parametrize("layout", [None, "torch", "numpy"])
def test_hugging_face_images_with_class_labels(hugging_face: Any, layout: str | None) -> None:
    label = hugging_face.ClassLabel(names=list(NAMES))
    features = hugging_face.Features({"img": hugging_face.Image(), "fine_label": label, "coarse_label": label})
    columns = {"img": [Image.fromarray(x) for x in PIXELS], "fine_label": LABELS, "coarse_label": [0] * 6}
    dataset = hugging_face.Dataset.from_dict(columns, features=features).with_format(layout)
    data = gracecl.from_torch(dataset, dataset.select(range(2)))
    assert (data.fingerprint, data.inputs, data.class_names) == (AS_ARRAYS.fingerprint, AS_ARRAYS.inputs, NAMES)
    assert read(dataset).class_names == NAMES


@pytest.mark.parametrize("layout", [None, "torch", "numpy"])
def test_hugging_face_tokens_and_labels_of_text(hugging_face: Any, layout: str | None) -> None:
    ids, mask = RNG.integers(0, 50, (6, 9)), np.ones((6, 9), np.int64)
    columns = {"input_ids": ids.tolist(), "attention_mask": mask.tolist(), "labels": [NAMES[y] for y in LABELS]}
    data = read(hugging_face.Dataset.from_dict(columns).with_format(layout))
    x = {"input_ids": ids, "attention_mask": mask}
    same = gracecl.from_arrays(x, columns["labels"], {name: part[:2] for name, part in x.items()}, columns["labels"][:2])
    assert (data.fingerprint, data.labels, data.class_names) == (same.fingerprint, NAMES, NAMES)


def test_hugging_face_sets_of_several_splits_are_a_sentence(hugging_face: Any) -> None:
    splits = hugging_face.DatasetDict(train=hugging_face.Dataset.from_dict({"x": [[1.0]], "label": [0]}))
    with pytest.raises(UserError, match=r"the dataset is a DatasetDict; give one of its parts, such as dataset\['train'\]"):
        gracecl.from_torch(splits, splits)


# torchvision.


@pytest.fixture
def torchvision() -> Any:
    return pytest.importorskip("torchvision")


def test_torchvision_folders_with_and_without_transforms(torchvision: Any, tmp_path: Path) -> None:
    from torchvision.transforms import v2

    order = np.argsort(LABELS, kind="stable")
    for number in order:
        folder = tmp_path / NAMES[LABELS[number]]
        folder.mkdir(exist_ok=True)
        Image.fromarray(PIXELS[number]).save(folder / f"{number}.png")
    same = gracecl.from_arrays(PIXELS[order], np.sort(LABELS), PIXELS[order[:2]], np.sort(LABELS)[:2])
    to_bytes = v2.Compose([v2.ToImage(), v2.ToDtype(torch.uint8, scale=True)])
    for transform in (None, to_bytes):
        data = read(torchvision.datasets.ImageFolder(tmp_path, transform))
        assert (data.fingerprint, data.inputs, data.class_names) == (same.fingerprint, same.inputs, NAMES)
    floats = read(torchvision.datasets.ImageFolder(tmp_path, torchvision.transforms.ToTensor()))
    assert (type(floats.inputs), floats.inputs.dtype) == (Images, torch.float32)
    torch.testing.assert_close(floats.train_x, same.train_x / 255)
