"""Files that others wrote, with anything in them: results to import, sets of defaults, studies, spaces, trials.

Each is taken, or refused in one sentence that names the file, with nothing left behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import gracecl
from gracecl.report import find_runs

# Results of others.

RESULT: dict[str, Any] = {"method": "theirs", "stream": "split-digits(tasks=2)", "seed": 0, "accuracy": [[91.0], [80.5, 88.0]]}
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", 400 * "9", 5000 * "9"]
LOST = "\ud800"


def text_of(**changes: Any) -> str:
    return json.dumps(RESULT | changes)


def with_raw(name: str, value: str) -> str:
    """A result in which a value is this text, whether or not JSON has such a value."""
    return text_of(**{name: "@"}).replace('"@"', value)


def refused() -> Iterator[tuple[str, bytes]]:
    """Kinds of files that hold no results."""
    for name in ("method", "stream"):
        for value in (LOST, "a\nb", "\x1b[31mred", "a\0b", "", " ", "\u202eder", 5, None, [], {}, True):
            yield f"{name} {value!a}", text_of(**{name: value}).encode()
    for name in ("seed", "memory", "tasks", "parameters"):
        for value in ("1", 1.5, True, [], {}, -7, 10**400):
            yield f"{name} {str(value)[:9]}", text_of(**{name: value}).encode()
    for value in (5, True, [], {}):
        yield f"stream_hash {value}", text_of(stream_hash=value).encode()
    for value in ("1", True, None, [], {}, -1, 10**400):
        yield f"seconds {str(value)[:9]}", text_of(seconds=value).encode()
    for value in NUMBERS:
        for name in ("seed", "memory", "seconds"):
            yield f"{name} {value[:9]}", with_raw(name, value).encode()
        yield f"accuracy {value[:9]}", with_raw("accuracy", f"[[{value}]]").encode()
    for value in NUMBERS[:-2]:
        yield f"more {value}", with_raw("more", f'{{"deep": [{value}]}}').encode()
    for depth in (250, 900, 100_000):
        nested = depth * "[" + depth * "]"
        yield f"{depth} lists", nested.encode()
        yield f"{depth} lists in a result", with_raw("more", nested).encode()
        yield f"{depth} lists of accuracies", with_raw("accuracy", nested).encode()
        yield f"{depth} objects", with_raw("more", depth * '{"a":' + "1" + depth * "}").encode()
    yield "a lone surrogate in a key", text_of(**{LOST: 1}).encode()
    yield "a lone surrogate in a list", text_of(more=[[LOST]]).encode()
    yield "a lone surrogate in UTF-8", text_of(method="LOST").encode().replace(b"LOST", b"\xed\xa0\x80")
    for text in ("", " ", "null", "5", '"x"', "[]", "{}", "[{}]", "[null]", "{", text_of() + "x", text_of()[:-1]):
        yield f"text {text[:9]}", text.encode()
    for rows in ([], [[]], [None], [[True]], [["1"]], [[-1]], [[101]], [[1, 2]], [[1], [2]], [{}], {}, 5, None, "x", [[[1]]]):
        yield f"rows {rows}", text_of(accuracy=rows).encode()
    yield "bytes", bytes(range(256))
    yield "zeros", bytes(100)


REFUSED = dict(refused())


def test_there_are_enough_kinds() -> None:
    assert len(REFUSED) >= 60


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_imported_is_one_sentence_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs.json"
    file.write_bytes(REFUSED[kind])
    said = gracecl("import", file, "--out", tmp_path / "out")
    assert said.code == 2
    assert "theirs.json" in said.sentence
    assert len(said.sentence) < 400
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "in a folder"])
def test_only_regular_files_are_imported(kind: str, tmp_path: Path) -> None:
    """A pipe would be waited for, a device read without end."""
    place = tmp_path / "theirs.json"
    if kind == "folder":
        place.mkdir()
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        os.mkfifo(place)
    said = gracecl("import", tmp_path if kind == "in a folder" else place, "--out", tmp_path / "out")
    assert said.code == 2
    assert "theirs.json" in said.sentence
    assert not (tmp_path / "out").exists()


NAMES = ["ER ($x_$)", "$$", "a $\\frac$ b", "\\", "{}%s", "方法", "../../x", "<script>"]
MORE = [5, -5, 10**400, True, None, [], [1, [2]], {}, {"a": {"b": "$x_$"}}, "$x_$", ""]
KEYS = ["net", "commit", "classes", "layers", "optimizer", "plugin_code", "versions", "$x_$", ""]


@pytest.mark.slow
def test_names_are_text_in_every_picture_and_table(tmp_path: Path) -> None:
    results = [RESULT | {"method": f"{name} {place}", "seconds": 10.0**place} for place, name in enumerate(NAMES)]
    results += [RESULT | {"method": f"with {place}", **dict.fromkeys(KEYS, value)} for place, value in enumerate(MORE)]
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(results), encoding="utf-8")
    assert gracecl("import", file, "--out", tmp_path / "out").code == 0
    assert len(find_runs(tmp_path / "out")) == len(results)
    said = gracecl("report", tmp_path / "out", "--out", tmp_path / "report", "--formats", "html,md,csv,tex,svg")
    assert said.code == 0, said
    assert gracecl("compare", tmp_path / "out", "--out", tmp_path / "compared").code == 0


def test_a_name_with_dollars_is_drawn_as_it_is_written(tmp_path: Path) -> None:
    """And a logarithmic axis keeps its powers of ten."""
    file = tmp_path / "theirs.json"
    results = [RESULT | {"method": name, "seconds": seconds} for name, seconds in (("ER ($x_$)", 1.0), ("$y_$", 1000.0))]
    file.write_text(json.dumps(results), encoding="utf-8")
    assert gracecl("import", file, "--out", tmp_path / "out").code == 0
    assert gracecl("report", tmp_path / "out", "--out", tmp_path / "report", "--formats", "svg").code == 0
    [costs] = (tmp_path / "report").rglob("acc-against-seconds.svg")
    drawn = costs.read_text(encoding="utf-8")
    assert "<!-- ER ($x_$) -->" in drawn
    assert "<!-- $\\mathdefault{10^{2}}$ -->" in drawn


@pytest.mark.slow
def test_an_import_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the third of three results; then the same again, in place of what an earlier import left."""
    from gracecl.report import foreign

    file, out, written = tmp_path / "theirs.json", tmp_path / "out", foreign.write_run_report

    def full_at_the_third(folder: Path) -> None:
        if folder.name == "2":
            raise OSError("No space left on device")
        written(folder)

    def imported(skill: float) -> int:
        results = [RESULT | {"seed": seed, "accuracy": [[skill], [skill, skill]]} for seed in range(3)]
        file.write_text(json.dumps(results), encoding="utf-8")
        return gracecl("import", file, "--out", out).code

    with monkeypatch.context() as patch:
        patch.setattr(foreign, "write_run_report", full_at_the_third)
        assert imported(50.0) == 2
    assert list(tmp_path.iterdir()) == [file]
    assert imported(60.0) == 0
    with monkeypatch.context() as patch:
        patch.setattr(foreign, "write_run_report", full_at_the_third)
        assert imported(70.0) == 2
    assert [run.matrix("reported")[0, 0] for run in find_runs(out)] == [60.0] * 3
    assert imported(80.0) == 0
    assert [run.matrix("reported")[0, 0] for run in find_runs(out)] == [80.0] * 3


def test_a_result_does_not_replace_another_whose_name_differs_in_signs(tmp_path: Path) -> None:
    file, out = tmp_path / "theirs.json", tmp_path / "out"
    file.write_text(text_of(method="ER (x)"), encoding="utf-8")
    assert gracecl("import", file, "--out", out).code == 0
    file.write_text(text_of(method="ER [x]"), encoding="utf-8")
    said = gracecl("import", file, "--out", out)
    assert said.code == 2
    assert "holds another result (method 'ER (x)')" in said.sentence
    assert [run.config["method"] for run in find_runs(out)] == ["ER (x)"]
