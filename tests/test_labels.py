"""Labels of any hashable kind, and the numbers that classes have inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gracecl.data.labels import UNKNOWN, ClassLabels
from gracecl.errors import UserError

KINDS: dict[str, Any] = {
    "texts": ["rose", "tulip", "rose"],
    "an array of texts": np.array(["rose", "tulip", "rose"]),
    "large and negative numbers": [7, -3, 10**30],
    "numpy's numbers": [np.int8(3), np.uint64(2**63), np.int64(3)],
    "a tensor": torch.tensor([5, 2, 5]),
    "tensors": [torch.tensor(5), torch.tensor(2), torch.tensor(5)],
    "truth values": [True, False, True],
    "tuples": [("a", 1), ("a", 2), ("a", 1)],
    "mixed": [1, "1", True, (1,), frozenset({1}), np.str_("1"), np.bool_(True)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_come_back_as_they_were(kind: str) -> None:
    classes, given = ClassLabels(), KINDS[kind]
    named = classes.named(classes.learned(classes.checked(given)))
    plain = [label.item() if hasattr(label, "item") else label for label in given]
    assert named.tolist() == plain
    assert [type(label) for label in named.tolist()] == [type(label) for label in plain]
    assert classes.numbers(given).tolist() == [[(type(x), x) for x in classes.labels].index((type(x), x)) for x in plain]


def test_numbers_are_those_of_arrival_and_do_not_change() -> None:
    classes = ClassLabels()
    assert classes.learned(classes.checked(["b", "a", "b"])).tolist() == [0, 1, 0]
    assert classes.learned(classes.checked(["c", "a"])).tolist() == [2, 1]
    assert classes.numbers(["d", "a"]).tolist() == [UNKNOWN, 1]
    assert classes.array.tolist() == ["b", "a", "c"]
    assert len(classes) == 3


def test_arrays_of_whole_numbers_are_integers_and_others_objects() -> None:
    assert ClassLabels([3, 1]).array.dtype == np.int64
    assert ClassLabels([3, 1 << 70]).array.dtype == object
    assert ClassLabels([True, False]).array.dtype == object
    assert ClassLabels([(1, 2), (3, 4)]).array.shape == (2,)
    assert ClassLabels(3).array.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("declared", "y", "sentence"),
    [
        (None, ["a", None], r"one of the labels is missing \(None\)"),
        (None, [0.5, 1.0], "one of the labels is the number 0.5"),
        (None, np.array([np.nan]), "one of the labels is the number nan"),
        (None, [["a"], ["b"]], "one of the labels is a list, which cannot be hashed; use a text or a tuple"),
        (None, np.eye(2, dtype=int), r"one label for each example, not an array of shape \[2, 2\]"),
        (None, "rose", "a list with one label for each example, not 'rose'"),
        (None, 3, "a list with one label for each example, not 3"),
        (["a", "b"], ["a", "c"], "label 'c' is not one of the 2 declared classes; declare it with classes="),
        (3, ["a"], "labels must be a list of whole numbers"),
        (3, [3], "label 3 is not one of the declared classes 0 to 2; declare more with classes="),
    ],
)
def test_a_label_that_cannot_be_one_is_a_sentence_and_leaves_no_trace(declared: Any, y: Any, sentence: str) -> None:
    classes = ClassLabels(declared)
    before = classes.array.tolist()
    with pytest.raises(UserError, match=sentence):
        classes.learned(classes.checked(y))
    assert classes.array.tolist() == before


@pytest.mark.parametrize("declared", [0, -3, True, "rose", [], ["a", "a"], 2.5, [1, True, 1]])
def test_a_wrong_declaration_is_a_sentence(declared: Any) -> None:
    with pytest.raises(UserError, match="classes"):
        ClassLabels(declared)
