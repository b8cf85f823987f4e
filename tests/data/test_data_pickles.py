"""A pickle is a program; none of these may run."""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import layouts
import numpy as np
import pytest

from gracecl.data import load
from gracecl.data.pickles import STAND_INS, read_pickle
from gracecl.errors import UserError


class Calls:
    """Pickles as a call of `function(*args)`."""

    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


def saved(tmp_path: Path, content: object, protocol: int = 2) -> Path:
    file = tmp_path / "file"
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=protocol))
    return file


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", [np.uint8, np.int64, ">i4", np.float32])
def test_arrays_strings_numbers_and_containers_are_read(tmp_path, protocol, kind):
    array = np.arange(12).reshape(3, 4).astype(kind)
    honest = {b"data": array, "turned": array.T, b"labels": [1, 2.5, None, (True, "é", b"\xff")], "nested": {b"a": [1]}}
    content = read_pickle(saved(tmp_path, honest, protocol))
    np.testing.assert_array_equal(content["data"], array)
    np.testing.assert_array_equal(content["turned"], array.T)
    assert content["data"].dtype == array.dtype
    assert content["labels"] == [1, 2.5, None, (True, "é", b"\xff")]
    assert content["nested"] == {b"a": [1]}


def test_the_form_that_python_2_wrote(tmp_path):
    """Byte for byte what the official archives hold: old module names, and plain strings for bytes."""
    raw = bytes(range(256)) * 24
    text = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"q\x05(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tbU\x0bfine_labelsq\x08]q\t(K\x03K\x05eu."
    )
    content = read_pickle(saved(tmp_path, text))
    assert content["fine_labels"] == [3, 5]
    np.testing.assert_array_equal(content["data"], np.frombuffer(raw, np.uint8).reshape(2, 3072))


def test_nothing_is_called(tmp_path):
    mark = tmp_path / "ran"
    command = f"touch {mark}"
    attacks = [
        Calls(os.system, command),
        Calls(eval, f"open({str(mark)!r}, 'w')"),
        Calls(exec, f"open({str(mark)!r}, 'w')"),
        Calls(open, str(mark), "w"),
        Calls(getattr, "text", "upper"),
        Calls(np.fromfile, str(mark)),
        Calls(np.save, str(mark), 3),
        Calls(bytearray, 10),
        OrderedDict(a=1),
        {1, 2},
    ]
    for protocol in (0, 2, 4):
        for attack in attacks:
            if isinstance(attack, set) and protocol == 4:
                continue  # has an opcode of its own there, and is a container
            for content in (attack, {b"data": attack}, {b"data": [attack]}):
                with pytest.raises(UserError, match=r"refused|damaged"):
                    read_pickle(saved(tmp_path, content, protocol))
    assert not mark.exists()


def test_a_malicious_cifar_file_is_refused_with_a_sentence(tmp_path):
    mark = tmp_path / "ran"
    folder = layouts.cifar100(tmp_path)
    (folder / "train").write_bytes(pickle.dumps({b"data": Calls(os.system, f"touch {mark}")}, protocol=2))
    with pytest.raises(UserError, match=r"asks for '(posix|nt)\.system'.*refused"):
        load("cifar100", tmp_path)
    assert not mark.exists()


OBJECTS = np.array([[1], "two", None], dtype=object)
RECORDS = np.zeros(3, dtype=[("a", "u1"), ("b", "f4")])
DTYPE = b"cnumpy\ndtype\n"
ENCODE = b"c_codecs\nencode\n"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
U1 = DTYPE + b"(U\x02u1K\x00K\x01tR"


def as_data(program: bytes) -> bytes:
    """{"data": what the program leaves on the stack}"""
    return b"\x80\x02}U\x04data" + program + b"s."


def with_state(*parts: bytes) -> bytes:
    return as_data(ARRAY + b"(" + b"".join(parts) + b"tb")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({b"data": OBJECTS}, id="objects"),
        pytest.param({b"data": RECORDS}, id="records"),
        pytest.param({b"data": np.array(["text"])}, id="text"),
        pytest.param({b"data": np.array(["2020"], "M8[Y]")}, id="dates"),
        pytest.param(as_data(ENCODE + b"(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR"), id="codec hex"),
        pytest.param(as_data(ENCODE + b"(X\x01\x00\x00\x00aX\x04\x00\x00\x00zlibtR"), id="codec zlib"),
        pytest.param(as_data(ENCODE + b"(K\x05X\x06\x00\x00\x00latin1tR"), id="codec of a number"),
        pytest.param(as_data(ENCODE + b"}U\x05_makeK\x00sb"), id="build on an allowed name"),
        pytest.param(as_data(DTYPE + b"N}U\x05_makeK\x00s\x86b"), id="slots of an allowed name"),
        pytest.param(as_data(b"cnumpy\nndarray\n(K\x05tR"), id="array made by hand"),
        pytest.param(as_data(b"cnumpy\nndarray\n(K\x05t\x81"), id="newobj"),
        pytest.param(as_data(DTYPE + b"(U\x02u1tR(K\x03tb"), id="short dtype state"),
        pytest.param(with_state(b"K\x01", b"K\x02\x85", DTYPE + b"(U\x01OtR", b"\x89", b"]"), id="list for bytes"),
        pytest.param(with_state(b"K\x01", b"K\x09\x85", U1, b"\x89", b"U\x02ab"), id="too few bytes"),
        pytest.param(with_state(b"K\x01", b"J\xff\xff\xff\xff\x85", U1, b"\x89", b"U\x02ab"), id="negative side"),
        pytest.param(with_state(b"K\x01", b"U\x02xx\x85", U1, b"\x89", b"U\x02ab"), id="shape of text"),
        pytest.param(with_state(b"K\x01", b"K\x02\x85", b"U\x02u1", b"\x89", b"U\x02ab"), id="text for a dtype"),
        pytest.param(with_state(b"K\x01", b"K\x02\x85"), id="short array state"),
        pytest.param(as_data(ARRAY), id="array without state"),
        pytest.param(as_data(DTYPE + b"(U\x02u1tR(K\x03U\x01?NNNNNNtb"), id="dtype alone is no array"),
        pytest.param(b"\x80\x02U\x01xQ.", id="persistent id"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension"),
        pytest.param(b"(S'touch x'\nios\nsystem\n.", id="inst"),
        pytest.param(b"\x80\x02]K\x01a.", id="no dictionary"),
        pytest.param(b"\x80\x02}K\x01K\x02s.", id="number for a key"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x02}", id="cut"),
        pytest.param(b"\x80\x63", id="unknown protocol"),
        pytest.param(b"garbage", id="garbage"),
    ],
)
def test_tricks_with_what_is_allowed(tmp_path, content):
    """One sentence that names the file, and the reader is afterwards what it was before."""
    before = {name: stand_in._make for name, stand_in in STAND_INS.items()}
    folder = layouts.cifar100(tmp_path)
    saved(folder, content).replace(folder / "train")
    with pytest.raises(UserError, match="train") as caught:
        load("cifar100", tmp_path)
    assert "\n" not in str(caught.value)
    assert {name: stand_in._make for name, stand_in in STAND_INS.items()} == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({b"data": layouts.noise(2, 3071), b"fine_labels": [0, 1]}, "3,072"),
        ({b"data": layouts.noise(2, 3072).astype(float), b"fine_labels": [0, 1]}, "3,072"),
        ({b"data": layouts.noise(2, 3072), b"fine_labels": [0]}, "one whole number per image"),
        ({b"data": layouts.noise(2, 3072), b"fine_labels": [0, "1"]}, "one whole number per image"),
        ({b"data": layouts.noise(2, 3072), b"fine_labels": [0, 100]}, "outside 0 … 99"),
        ({b"data": layouts.noise(2, 3072)}, "fine_labels"),
    ],
)
def test_wrong_contents_are_named(tmp_path, content, says):
    folder = layouts.cifar100(tmp_path)
    (folder / "train").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UserError, match=says):
        load("cifar100", tmp_path)


DEEP = 1_000_000
NESTED = {
    "as a key": b"\x80\x02})" + b"\x85" * DEEP + b"K\x01s.",
    "as a value": b"\x80\x02}U\x01a)" + b"\x85" * DEEP + b"s.",
    "in a set": b"\x80\x04\x8f()" + b"\x85" * DEEP + b"\x90.",
    "through the memo": b"\x80\x02}(" + b"q\x00".join([b")", *[b"0h\x00\x85"] * DEEP]) + b"K\x01u.",
    "through numbered notes": b"\x80\x04}("
    + b"".join([b")\x94", *(b"0j%b\x85\x94" % struct.pack("<I", at) for at in range(DEEP))])
    + b"K\x01u.",
    "through text notes": b"}(" + b"".join([b")p0\n", *[b"0g0\n\x85p0\n"] * DEEP]) + b"I1\nu.",
    "by doubles": b"\x80\x02})" + b"2\x86" * DEEP + b"K\x01s.",
    "by marks": b"\x80\x02}" + b"(" * DEEP + b"t" * DEEP + b"K\x01s.",
    "behind a mark that is taken back": b"\x80\x02}(0)" + b"\x85" * DEEP + b"K\x01s.",
    "frozen sets": b"\x80\x04}" + b"(" * DEEP + b"\x91" * DEEP + b"K\x01s.",
}


@pytest.mark.parametrize("place", NESTED)
def test_a_million_tuples_within_each_other_are_refused(tmp_path, place):
    """Python's own hash of such a tuple ends the process."""
    with pytest.raises(UserError, match="more than 20 tuples within each other"):
        read_pickle(saved(tmp_path, NESTED[place]))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_many_tuples_side_by_side_are_read(tmp_path, protocol):
    """Python 3 writes each of its bytes into an old pickle as a call, with a tuple of arguments."""
    names = [b"%d.png" % number for number in range(5000)]
    deep = eval("(" * 18 + "1" + ",)" * 18)
    content = read_pickle(saved(tmp_path, {b"filenames": names, "deep": deep, "same": [names, names]}, protocol))
    assert content["filenames"] == names
    assert content["deep"] == deep


@pytest.mark.parametrize(
    "cut", [b"", b"\x80", b"\x80\x02}U\xff", b"\x80\x02t.", b"\x80\x02h\x05.", b"\x80\x02q\x00.", b"\xff.", b"(", b"g\n.", b"0."]
)
def test_programs_that_break_off_are_damaged(tmp_path, cut):
    with pytest.raises(UserError, match="damaged or no CIFAR file"):
        read_pickle(saved(tmp_path, cut))


def test_names_of_classes_are_text(tmp_path):
    """A list of lists would be written out as text, which takes a call for each."""
    folder = layouts.cifar100(tmp_path)
    deep = b"]" * 100_000 + b"a" * 99_999
    (folder / "meta").write_bytes(b"\x80\x02}U\x10fine_label_names](" + b"U\x01a" * 99 + deep + b"es.")
    with pytest.raises(UserError, match="fine_label_names"):
        load("cifar100", tmp_path)
