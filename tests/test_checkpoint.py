"""Checkpoints: what is saved comes back bit for bit, and a file is either the old one or the new one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gracecl import checkpoint
from gracecl.errors import UserError

TORCH_TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
NUMPY_TYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]


def round_trip(value: Any, folder: Path) -> Any:
    checkpoint.save(folder / "state.safetensors", {"value": value})
    return checkpoint.load(folder / "state.safetensors")["value"]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_a_tensor_of_any_type_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = round_trip(tensor, tmp_path)
    assert isinstance(back, torch.Tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_an_array_of_any_type_and_shape_comes_back_as_an_array(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    back = round_trip(array, tmp_path)
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)


def test_numbers_that_are_not_finite_come_back_to_the_bit(tmp_path: Path) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    assert torch.equal(round_trip(tensor, tmp_path).view(torch.int32), tensor.view(torch.int32))
    nan, inf, zero = round_trip([math.nan, -math.inf, -0.0], tmp_path)
    assert math.isnan(nan)
    assert inf == -math.inf
    assert math.copysign(1, zero) == -1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        2**80,
        -1.5,
        0.1 + 0.2,
        "",
        'quotes " and \\ and\nnew lines',
        "Grüße, 日本語, 🙂",
        [],
        (),
        {},
        [1, "a", None, [2.5, [True]]],
        (1, (2, 3), [4, (5,)]),
        {"a": {"b": {"c": [{}]}}},
        {0: "int", 1: {2: "deeper"}, "0": "text", None: 3, 2.5: "float"},
        {"naïve": {"ключ": "значение"}},
        {"tensor": "0", "dict": [], "list": [1], "array": "1", "tuple": 3},
    ],
    ids=repr,
)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any, tmp_path: Path) -> None:
    back = round_trip(value, tmp_path)
    assert back == value
    assert repr(back) == repr(value), "a type changed somewhere inside"


def test_tensors_inside_lists_tuples_and_dicts_come_back_in_their_places(tmp_path: Path) -> None:
    """The shape of an optimizer's state: numbered parameters, moments, hyperparameters."""
    value = {
        "state": {0: {"step": torch.tensor(3.0), "moment": torch.ones(2, 3)}, 1: {"step": torch.tensor(4.0), "moment": None}},
        "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "fused": True, "params": [0, 1]}],
        "labels": (np.arange(4), [np.zeros(0, np.int64)]),
    }
    back = round_trip(value, tmp_path)
    assert back["param_groups"] == value["param_groups"]
    assert list(back["state"]) == [0, 1]
    assert torch.equal(back["state"][0]["moment"], torch.ones(2, 3))
    assert back["state"][1] == {"step": torch.tensor(4.0), "moment": None}
    labels, (nothing,) = back["labels"]
    assert labels.tolist() == [0, 1, 2, 3]
    assert nothing.shape == (0,)


def test_numpy_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    assert round_trip([np.int64(3), np.float32(0.5), np.bool_(True)], tmp_path) == [3, 0.5, True]


def test_tensors_that_share_memory_or_are_views_come_back(tmp_path: Path) -> None:
    """Tied weights, slices and mirrored or read-only arrays are nothing a user has to think of."""
    base = torch.arange(12.0).view(3, 4)
    locked = np.arange(3)
    locked.flags.writeable = False
    value = [base, base, base[1:], base.T, base[:, ::2], torch.ones(1).expand(5), torch.nn.Parameter(base), locked, locked[::-1]]
    back = round_trip(value, tmp_path)
    for saved, loaded in zip(value, back, strict=True):
        assert loaded.tolist() == saved.tolist()


def test_what_was_saved_does_not_follow_what_happens_afterwards(tmp_path: Path) -> None:
    tensor = torch.zeros(3)
    checkpoint.save(tmp_path / "state", {"tensor": tensor})
    tensor += 1
    assert checkpoint.load(tmp_path / "state")["tensor"].tolist() == [0, 0, 0]


def test_a_checkpoint_is_a_safetensors_file_that_anybody_can_open(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "state", {"weights": torch.ones(2), "step": 3})
    with safe_open(tmp_path / "state", framework="np") as file:
        assert [file.get_tensor(name).tolist() for name in file.keys()] == [[1.0, 1.0]]  # noqa: SIM118 (not a dict)
        assert json.loads(file.metadata()["gracecl-2"].partition(":")[2])


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(5)]
    for file in files:
        checkpoint.save(file, {"weights": torch.ones(2), "steps": [3, {"a": np.arange(3)}]})
    assert len({file.read_bytes() for file in files}) == 1


STATE = {
    "weights": torch.linspace(0, 1, 30).view(5, 6),
    "half": torch.ones(7, dtype=torch.bfloat16),
    "labels": np.arange(4),
    "nothing": torch.zeros(0, 3),
    "name": "er()",
    "rate": 0.1,
}


def test_no_flipped_bit_passes_unnoticed(tmp_path: Path) -> None:
    """Every byte of a file, one bit each: the state comes back as it was, or a sentence says that it does not."""
    file = tmp_path / "state"
    checkpoint.save(file, STATE)
    whole, refused = file.read_bytes(), 0
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            back = checkpoint.load(file)
        except UserError:
            refused += 1
        else:
            assert repr(back) == repr(STATE), f"byte {at}"
    assert refused > 0.9 * len(whole), "most bytes mean something"


def test_a_file_from_before_digests_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = '{"dict": [["weight", {"tensor": "0"}]]}'
    save_file({"0": torch.ones(2)}, tmp_path / "state", metadata={"format": "gracecl-1", "state": tree})
    assert checkpoint.load(tmp_path / "state")["weight"].tolist() == [1, 1]
    assert "without a digest" in caplog.text


def test_tensors_by_name_are_compared_with_their_digest(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    checkpoint.save_tensors(file, {"weight": torch.ones(3)}, {"ended": 1})
    tensors, about = checkpoint.load_tensors(file)
    assert load_file(file)["weight"].tolist() == tensors["weight"].tolist() == [1, 1, 1]
    assert about == {"ended": 1}
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="does not match its digest"):
        checkpoint.load_tensors(file)


def test_something_that_cannot_be_saved_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "state"
    checkpoint.save(file, {"step": 1})
    with pytest.raises(TypeError):
        checkpoint.save(file, {"step": object()})
    assert checkpoint.load(file) == {"step": 1}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), ValueError("a mistake"), MemoryError()], ids=repr)
def test_an_exception_while_writing_leaves_the_old_file_and_no_other(error: BaseException, tmp_path: Path) -> None:
    """Interrupted halfway through the new file, the old one is still the one that is there."""
    file = tmp_path / "state"
    file.write_text("old")

    def write(beside: Path) -> None:
        beside.write_text("half of the new")
        raise error

    with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
        checkpoint.write_atomically(file, write)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_new_file_takes_the_place_of_the_old_one_only_when_complete(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("old")

    def write(beside: Path) -> None:
        beside.write_text("new")
        assert file.read_text() == "old"

    checkpoint.write_atomically(file, write)
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "nowhere" / "state", tmp_path / "file" / "state", tmp_path / "folder"):
        with pytest.raises(UserError, match="cannot write"):
            checkpoint.save(place, {"tensor": torch.ones(1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_missing_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint at"):
        checkpoint.load(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 1, 8, 100, 0.5, -1])
def test_a_file_cut_short_is_a_sentence(kept: float, tmp_path: Path) -> None:
    file = tmp_path / "state"
    checkpoint.save(file, {"tensor": torch.ones(100)})
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        checkpoint.load(file)


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_are_a_sentence(seed: int, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(np.random.default_rng(seed).bytes(1000))
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        checkpoint.load(tmp_path / "state")


@pytest.mark.parametrize(
    "header",
    [
        None,
        {"format": "pt"},
        {"format": "gracecl-1"},
        {"format": "gracecl-1", "state": "{"},
        {"format": "gracecl-1", "state": '{"dict": 3}'},
        {"format": "gracecl-1", "state": '{"dict": [["lost", {"tensor": "7"}]]}'},
    ],
    ids=str,
)
def test_somebody_else_s_safetensors_file_is_a_sentence(header: dict[str, str] | None, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "state", metadata=header)
    with pytest.raises(UserError, match=str(tmp_path)):
        checkpoint.load(tmp_path / "state")
