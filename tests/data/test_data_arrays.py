"""`from_arrays`, `Data` and the statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layouts import noise

from gracecl.data import from_arrays
from gracecl.data.splits import held_out
from gracecl.errors import UserError

X, Y = noise(6, 5, 7, 3), [0, 1, 2, 0, 1, 2]


def test_numpy_is_channels_last_and_tensors_are_channels_first():
    data = from_arrays(X, Y, torch.from_numpy(X.transpose(0, 3, 1, 2).copy()), torch.tensor(Y))
    assert data.shape == (3, 5, 7)
    assert data.classes == 3
    assert data.class_names == ("0", "1", "2")
    assert data.train_x.dtype == torch.uint8
    assert torch.equal(data.train_x, data.test_x)
    assert data.train_y.dtype == data.test_y.dtype == np.int64


def test_statistics_are_those_of_the_scaled_training_pixels():
    data = from_arrays(X, Y, X[:2], Y[:2])
    np.testing.assert_allclose(data.mean, (X / 255).mean((0, 1, 2)))
    np.testing.assert_allclose(data.std, (X / 255).std((0, 1, 2)))


def test_a_constant_channel_can_still_be_divided_by_its_deviation():
    assert from_arrays(np.full((2, 4, 4), 7, np.uint8), [0, 1], np.zeros((1, 4, 4), np.uint8), [0]).std == (1.0,)


def test_floats_become_bytes_rounded_to_even():
    x = np.array([0, 1, 0.5 / 255, 1.5 / 255], np.float64).reshape(1, 2, 2)
    assert from_arrays(x, [0], x, [0]).train_x.flatten().tolist() == [0, 255, 0, 2]


def test_grey_images_need_no_channel():
    assert from_arrays(X[..., 0], Y, torch.from_numpy(X[..., 0].copy()), Y).shape == (1, 5, 7)


def test_read_only_arrays_are_copied_and_writable_ones_shared():
    x = noise(4, 1, 3, 3)
    shared = from_arrays(torch.from_numpy(x), [0] * 4, torch.from_numpy(x), [0] * 4)
    x[0] = 0
    assert not shared.train_x[0].any()
    frozen = noise(4, 3, 3)
    frozen.flags.writeable = False
    from_arrays(frozen, [0] * 4, frozen, [0] * 4).train_x[0] = 0
    assert frozen[0].any()


def test_a_class_may_have_no_images():
    assert from_arrays(X[:2], [0, 4], X[:1], [2]).classes == 5
    assert from_arrays(X[:2], [0, 1], X[:1], [1], class_names=["a", "b", "c"]).class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_y": [0, 1]}, "one label for each of the 6 examples"),
        ({"train_y": [0.0, 1, 2, 0, 1, 2]}, "whole numbers"),
        ({"train_y": [np.nan, 1, 2, 0, 1, 2]}, "NaN"),
        ({"train_y": [-1, 1, 2, 0, 1, 2]}, "negative label -1"),
        ({"train_y": np.zeros((6, 1), int)}, "shape"),
        ({"train_x": X.astype(np.int64)}, "int64"),
        ({"train_x": X.astype(np.float32)}, r"outside \[0, 1\]"),
        ({"train_x": np.full(X.shape, np.nan)}, "NaN"),
        ({"train_x": X[0, 0]}, "test_x must have the shape"),
        ({"train_x": X[:0], "train_y": []}, "no images"),
        ({"train_x": X.transpose(0, 3, 1, 2)}, "channels"),
        ({"train_x": torch.from_numpy(X)}, "channels"),
        ({"test_x": X[:, :4]}, "must agree"),
        ({"class_names": ["a"]}, "at least 3"),
        ({"mean": (0.5,)}, "mean must be 3"),
        ({"std": (0.0, 1.0, 1.0)}, "positive"),
    ],
)
def test_what_is_refused(change, says):
    with pytest.raises(UserError, match=says):
        from_arrays(**{"train_x": X, "train_y": Y, "test_x": X, "test_y": Y, **change})


def test_the_fingerprint_knows_labels_pixels_and_order():
    def print_of(x=X, y=Y):
        return from_arrays(x, y, X, Y).fingerprint

    assert print_of() == print_of()
    changed = X.copy()
    changed[0, 0, 0, 0] ^= 1
    assert len({print_of(), print_of(x=changed), print_of(x=X[::-1]), print_of(y=[1, 0, 2, 0, 1, 2])}) == 4
    assert len(print_of()) == 64


def test_held_out_rows_go_by_key_not_by_position():
    keys = [f"image{k}" for k in range(100)]
    labels = np.arange(100) % 3
    held = held_out(keys, labels, 0.2, seed=1)
    assert [int(held[labels == k].sum()) for k in range(3)] == [7, 7, 7]
    order = np.random.default_rng(0).permutation(100)
    again = held_out([keys[k] for k in order], labels[order], 0.2, seed=1)
    assert np.array_equal(again, held[order])
    assert not np.array_equal(held_out(keys, labels, 0.2, seed=2), held)


def test_both_sides_of_a_split_get_an_image_of_every_class():
    labels = np.array([0, 0, 1, 1, 1, 2])
    held = held_out(list("abcdef"), labels, 0.01, seed=0)
    assert [int(held[labels == k].sum()) for k in range(3)] == [1, 1, 0]
    held = held_out(list("abcdef"), labels, 0.99, seed=0)
    assert [int(held[labels == k].sum()) for k in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("label", [2**64 - 1, 2**63, 10**9])
def test_a_label_that_no_data_set_has_is_refused_and_not_wrapped(label):
    x = np.zeros((2, 4, 4), np.uint8)
    with pytest.raises(UserError, match=f"has the label {label}; labels are the numbers of classes"):
        from_arrays(x, np.array([0, label], np.uint64), x, np.array([0, 0]))
