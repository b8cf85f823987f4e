"""Files that others wrote, with anything in them: results to import, sets of defaults, studies, spaces, trials.

Each is taken, or refused in one sentence that names the file, with nothing left behind.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import gracecl
from gracecl.errors import UserError
from gracecl.lab.defaults import resolve
from gracecl.lab.report import find_runs
from gracecl.lab.runs.run import RunConfig
from gracecl.lab.studies.study import AT_THE_TOP, OF_A_BLOCK, OF_A_STUDY
from gracecl.lab.studies.study import OPTIONS as OPTIONS_OF_A_RUN
from gracecl.lab.studies.study import read as read_study
from gracecl.lab.tuning import space as spaces
from gracecl.registry.options import ALIASES
from run_folders import write_run


def refusal(work: Callable[[], Any]) -> str:
    """The sentence with which something is refused; empty if it is not."""
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


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


@pytest.mark.exhaustive
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
    from gracecl.lab.report import foreign

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


def test_what_a_killed_import_left_is_no_run(tmp_path: Path) -> None:
    kept, left = write_run(tmp_path, "er()"), write_run(tmp_path / ".123.part" / "new", "er()")
    (left / "config.json").unlink()
    assert [run.path for run in find_runs(tmp_path)] == [kept]


def test_a_result_does_not_replace_another_whose_name_differs_in_signs(tmp_path: Path) -> None:
    file, out = tmp_path / "theirs.json", tmp_path / "out"
    file.write_text(text_of(method="ER (x)"), encoding="utf-8")
    assert gracecl("import", file, "--out", out).code == 0
    file.write_text(text_of(method="ER [x]"), encoding="utf-8")
    said = gracecl("import", file, "--out", out)
    assert said.code == 2
    assert "holds another result (method 'ER (x)')" in said.sentence
    assert [run.config["method"] for run in find_runs(out)] == ["ER (x)"]


# Sets of defaults.

VALUES = {
    "text": '"x"',
    "number": "3",
    "negative": "-3",
    "real": "1.5",
    "not a number": "nan",
    "infinite": "inf",
    "long": 400 * "9",
    "true": "true",
    "date": "2020-01-01",
    "time": "12:00:00",
    "list": "[]",
    "numbers": "[1, 2]",
    "mixed": '["x", 1, [2]]',
    "nested": "[[[1]]]",
    "table": "{}",
    "tables": '[{a = 1}, {b = "x"}]',
    "in tables": "{a = {b = {c = 1}}}",
}
DEFAULTS_KEYS = ["streams", "er", "[[er]] memory", "[[er]] streams", "[[er]] source", "[[er]] optimizer", "[[er]] augment"]
DEFAULTS_KEYS += ["[[er]] n_recall", "[[er]] reduction", "[[grace]] beta", "[[nothing]] memory", "provenance"]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", DEFAULTS_KEYS)
def test_a_set_of_defaults_with_any_value_is_taken_or_refused_in_a_sentence(key: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    table, _, option = key.rpartition(" ")
    file.write_text(f"{table}\n{option} = {VALUES[value]}\n", encoding="utf-8")
    told = refusal(lambda: resolve("grace(er())", "split-digits", 100, defaults=str(file)))
    if told:
        assert told.startswith(f"--defaults {file}")
        assert option in told
        assert len(told) < 400
        assert "\n" not in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('streams = "split-digits"', "streams must be a list of names such as [\"split-digits\"], not 'split-digits'"),
        ("[[er]]\nn_recall = 1\n[[ER]]\nn_recall = 2", "has both [[er]] and [[ER]], which name one method"),
        ("[[er]]\n[[er]]\nmemory = 100", "[[er]] 2: memory must be a list of whole numbers such as [1000], not 100"),
        ("[[er]]\nmemory = []", "[[er]]: memory must be a list"),
        ("[[er]]\noptimizer = 0.1", "[[er]]: optimizer must be text in quotes"),
        ("[[er]]\noptimizer = 'sdg(lr=1)'", "[[er]]: unknown optimizer 'sdg'; did you mean 'sgd'?"),
        ("[[er]]\naugment = 'nonne'", "[[er]]: unknown augmentation 'nonne'"),
        ("[[ewc]]\nstrength = 'x'", "[[ewc]]: ewc: strength must be a number, not 'x'"),
        ("a = " + 2000 * "[" + 2000 * "]", "lists or tables within each other"),
        ("a." * 2000 + "a = 1", "lists or tables within each other"),
        ("a = " + 5000 * "9", "is not a TOML file"),
    ],
)
def test_what_is_wrong_with_a_set_of_defaults_is_told(text: str, said: str, tmp_path: Path) -> None:
    """Also in entries of methods that the run does not use."""
    file = tmp_path / "ours.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(said)):
        resolve("er", "split-digits", 100, defaults=str(file))


def test_a_set_of_defaults_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    for name, said in (("pipe.toml", "it is a pipe, not a file"), ("folder.toml", "there is no such file")):
        with pytest.raises(UserError, match=said):
            resolve("er", "split-digits", 100, defaults=str(tmp_path / name))


# Studies.

OPTIONS = [*OPTIONS_OF_A_RUN, "buffer_size"]
STUDY_KEYS = [
    *OF_A_BLOCK,
    *OF_A_STUDY,
    *AT_THE_TOP,
    *OPTIONS,
    "[[runs]] methods",
    "[[runs]] memory",
    "[[runs]] paper",
    "[mini] show",
]
STUDY_KEYS += ["[mini] optimizer", "[quick] stream", "[[runs]] nothing"]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", STUDY_KEYS)
def test_a_study_with_any_value_is_planned_or_refused_in_a_sentence(key: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    table, _, option = key.rpartition(" ")
    settings = {"methods": '["er()"]', "stream": '"split-digits"', "device": '"cpu"'}
    above = "".join(f"{name} = {text}\n" for name, text in settings.items() if table or name != option)
    file.write_text(f"{above}{table}\n{option} = {VALUES[value]}\n", encoding="utf-8")
    told = refusal(lambda: read_study(str(file)).plan())
    if told:
        assert told.startswith(str(file)) or option == "base"
        assert option in told or ALIASES.get(option, option) in told
        assert len(told) < 600
        assert "\n" not in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('net = "mlp(widht=8)"', "mine.toml: net: mlp has no option 'widht'; did you mean 'width'?"),
        ("net = \"mlp(width='x')\"", "mine.toml: net: mlp: width must be"),
        ('stream = "split-digits(task=5)"', "mine.toml: stream: split has no option 'task'; did you mean 'tasks'?"),
        ("stream = \"split-digits(size='x')\"", "mine.toml: stream: digits: size must be"),
        ('stream = ["split-digits", "split-folder"]', "mine.toml: stream: split_folder needs the folder of images"),
        ('optimizer = "sgd(lr=-1)"', "mine.toml: optimizer: sgd(lr=-1): Invalid learning rate"),
        ('optimizer = "sdg"', "mine.toml: optimizer: unknown optimizer 'sdg'; did you mean 'sgd'?"),
        ('augment = ["none", "nonne"]', "mine.toml: augment: unknown augmentation 'nonne'; did you mean 'none'?"),
        ('normalise = "hal"', "mine.toml: normalise: unknown normalisation 'hal'"),
        ("taps = 0", "mine.toml: taps must be at least 1 or None, not 0"),
        ('[[runs]]\nmemory = 5\n[[runs]]\nnet = "mpl"', "mine.toml: [[runs]] 2: net: unknown net 'mpl'; did you mean 'mlp'?"),
        ('[mini]\nsteps = [3, "x"]', "mine.toml: [mini]: steps must be a whole number or None, not 'x'"),
        ('[quick]\ntaps = "x"', "mine.toml: [quick]: taps must be"),
        ('paper.tabel = "main"', "mine.toml: paper has no field 'tabel'"),
        ("memory = 5\nbuffer_size = 6", "mine.toml: memory and buffer_size name one option; leave one of them out"),
        ('defaults = "owns"', "mine.toml: defaults: --defaults 'owns' is no set; did you mean 'own'?"),
        ("a = " + 2000 * "[" + 2000 * "]", "lists or tables within each other"),
        ("paper" + 2000 * ".a" + " = 1", "lists or tables within each other"),
        ("memory = " + 5000 * "9", "is not a TOML file"),
        (f"memory = {list(range(200))}\nsteps = {list(range(1, 200))}\ntaps = {list(range(1, 200))}", "has 7,920,200 runs"),
    ],
)
def test_what_is_wrong_with_a_study_is_told_with_its_key_when_it_is_read(text: str, said: str, tmp_path: Path) -> None:
    """Before any run starts, in every block and at every scale."""
    file = tmp_path / "mine.toml"
    file.write_text(f'methods = ["er()"]\n{text}\n', encoding="utf-8")
    told = refusal(lambda: read_study(str(file)).plan())
    assert said in told
    assert len(told) < 600


def test_a_study_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "it is a pipe, not a file" in gracecl("study", tmp_path / "pipe.toml").sentence
    assert "there is no file" in gracecl("study", tmp_path / "folder.toml").sentence


# Spaces.

SPACES = [
    *("=", "=1", "lr=", "lr", "==", "lr==1", "lr=..", "lr=1..", "lr=..1", "lr=1..2..3", "lr=1...2", "lr=1..2:", "lr=1..2:log:log"),
    *("lr=nan..1", "lr=0..inf", "lr=1e400..1e500", "lr=-1..1", "lr=0..1:log", "lr=1..1", "lr=1,1", "lr=,", "lr=,1", "lr=1,,2"),
    *("lr=[1]", "lr=[[[[1]]]]", "lr=" + 3000 * "[", "lr=" + 400 * "9", "lr=" + 5000 * "9", "lr=1e999", "lr=-1e999", "lr=True"),
    *("lr=None", "lr='x'", "lr={}", "lr={1:2}", "lr=x", "lr=x.y", "lr=1j", "lr=b'x'", "lr=1if", "lr=*a", "lr=**a", "lr=lambda:0"),
    *("n_recall=0.5", "n_recall=1..2.5", "n_recall=1e30..1e31", "n_recall=" + 30 * "9", "n_recall=-5,5", "n_recall=1e3", "a.b.c=1"),
    *(".lr=1", "lr.=1", "er.lr=1", "optimizer.n_recall=1", "inner=er()", "optimizer=x", "optimizer=sgd(", "optimizer=sgd(lr=x)"),
    *("optimizer=sgd(lr=1e999)", "optimizer=er()", "augment=1", "augment=None", "augment=[]", "\0=1", "lr=\0", "lr=\ud800"),
    *(
        "lr=1#2",
        "lr=1;2",
        "lr=1\\",
        "lr=(1,2)",
        "lr=1)",
        "lr=f'{1}'",
        "reduction=" + 2000 * "x",
        "lr=__import__('os')",
        "n_recall={4}",
    ),
    *("lr=" + 300 * "-" + "1", "lr=" + 100 * "(" + "1" + 100 * ")", "lr=" + "+".join(2000 * ["1"]), "reduction='a','b'", "lr=1:2"),
]


@pytest.mark.parametrize("text", SPACES, ids=lambda text: ascii(text)[:30])
def test_a_space_of_any_text_is_read_or_refused_in_a_sentence(text: str) -> None:
    told = refusal(lambda: spaces.parse([text], CONFIG, "er"))
    assert len(told) < 600
    assert "\n" not in told
    if not told:
        [dimension] = spaces.parse([text], CONFIG, "er").values()
        assert dimension in spaces.parse([f"{text.partition('=')[0]}={dimension}"], CONFIG, "er").values(), (
            "as the file of trials has it"
        )


CONFIG = RunConfig(method="er()", device="cpu").canonical()
