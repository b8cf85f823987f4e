"""Defaults per benchmark: every set can be used, and what the user writes comes first, then the set, then what is built in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gracecl import registry, streams
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.images import augment
from gracecl.lab import cli, defaults
from gracecl.lab.defaults import Resolved, resolve
from gracecl.lab.runs import run
from gracecl.lab.runs.run import RunConfig
from gracecl.methods.base import Addition, Method
from gracecl.registry import spec
from gracecl.registry.options import OPTIMIZER

SETS = {name: defaults.read(name) for name in defaults.sets()}
ABOUT = [(name, stream) for name, found in SETS.items() for stream in found.streams or ()]
ENTRIES = [(name, method, entry) for name, found in SETS.items() for method, listed in found.entries.items() for entry in listed]
ADAM, TAU = "adam(lr=0.001, weight_decay=0.0001)", "tau"
CIFAR100 = ("split-cifar100", 1000)


# The sets.


def test_there_are_three_sets_and_each_says_which_streams_it_is_about() -> None:
    assert list(SETS) == ["ccl-dc", "grace-paper", "own"]
    for found in SETS.values():
        assert found.streams is not None
        assert {"split-cifar10", "split-cifar100", "split-tinyimagenet"} <= set(found.streams)
    for _, stream in ABOUT:
        family, _, dataset = stream.partition("-")
        assert family in registry.streams.names()
        assert dataset in registry.datasets.names()


@pytest.mark.parametrize(("name", "method", "entry"), ENTRIES)
def test_every_entry_can_be_used_and_says_where_it_is_from(name: str, method: str, entry: dict[str, Any]) -> None:
    assert method in registry.methods.names()
    assert entry["source"].strip()
    assert all(size > 0 for size in entry.get("memory", [1]))
    assert set(entry.get("streams", [])) <= set(SETS[name].streams or ())
    options = {name: value for name, value in entry.items() if name not in (*defaults.SETTINGS, *defaults.ABOUT)}
    built = registry.methods.get(method)(**options)
    for name, value in options.items():
        assert getattr(built, name) == value
    assert options or entry.keys() & {"optimizer", "augment"}, "it says something"
    assert isinstance(built, Method)
    assert not isinstance(built, Addition) or not entry.keys() & {"optimizer", "augment"}, "the learner decides about those"
    if "augment" in entry:
        augment.augmentation(entry["augment"])
    if "optimizer" in entry:
        optim.build(entry["optimizer"], [(1.0, [torch.nn.Parameter(torch.zeros(1))])])


@pytest.mark.parametrize(("name", "stream"), ABOUT)
def test_no_two_entries_of_a_method_list_the_same_size(name: str, stream: str) -> None:
    benchmark = SETS[name].on(stream, 1000)
    assert benchmark is not None
    for listed in benchmark.entries.values():
        sizes = [size for entry in listed for size in entry.get("memory", [None])]
        assert len(sizes) == len(set(sizes))
        assert len(listed) == 1 or None not in sizes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stream"), ABOUT)
@pytest.mark.parametrize("memory", [200, 1000, 10_000])
def test_every_method_resolves_to_itself_with_other_values(name: str, stream: str, memory: int) -> None:
    for method in registry.methods.names():
        found = resolve(method, stream, memory, defaults=name)
        assert spec.parse_method(found.method).name == spec.parse_method(method).name
        assert repr(spec.parse_method(found.method)) == found.method


def test_the_paper_s_set_gives_the_values_of_the_mose_program() -> None:
    assert resolve("er", *CIFAR100) == Resolved(
        "er(recall_per_class=7)",
        ADAM,
        TAU,
        "defaults grace-paper of split-cifar100, memory 1,000: "
        f"er n_recall=64 recall_per_class=7 reduction=concat optimizer={ADAM} augment=tau",
    )
    scr = spec.parse_method(resolve("scr", *CIFAR100).method)
    assert (scr.temperature, scr.projector, scr.joint_forward, scr.recall_per_class) == (0.07, "linear", True, 7)
    assert resolve("grace", *CIFAR100).method == "grace(mose())", "what is built in"


def test_own_set_gives_the_values_of_a_method_s_own_program() -> None:
    found = resolve("er", *CIFAR100, defaults="own")
    assert (found.method, found.optimizer, found.augment) == ("er(n_recall=10)", "sgd(lr=0.1)", "none")
    assert resolve("aser", "split-cifar10", 200, defaults="own").method == "aser(n_recall=10, per_class=9)"
    assert resolve("derpp", "split-tinyimagenet", 5000, defaults="own").method == "derpp(n_recall=32, alpha=0.1, beta=0.5)"


# A file of our own, whose values differ from everything that is built in.

OURS = """
[[er]]
memory = [100, 400]
optimizer = "sgd(lr=0.5)"
augment = "none"
n_recall = 7
source = "here"

[[er]]
memory = [1000]
n_recall = 9
source = "here"

[[derpp]]
n_recall = 3
beta = 0.25
optimizer = "sgd(lr=0.25)"
source = "here"

[[grace]]
beta = 0.75
source = "here"

[[rar]]
optimizer = "sgd(lr=0.125)"
iterations = 4
source = "here"

[[ewc]]
strength = 3.0
optimizer = "sgd(lr=9.0)"
source = "here"
"""


DIGITS = "split-digits(size=8)"


@pytest.fixture
def ours(tmp_path: Path) -> str:
    """A file of defaults, for any stream."""
    file = tmp_path / "ours.toml"
    file.write_text(OURS, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("written", "memory", "method", "optimizer", "augmentation"),
    [
        ("er", 100, "er(n_recall=7)", "sgd(lr=0.5)", "none"),
        ("ER(n_recall=64)", 400, "er()", "sgd(lr=0.5)", "none"),
        ("er(5)", 400, "er(n_recall=5)", "sgd(lr=0.5)", "none"),
        ("er", 1000, "er(n_recall=9)", None, None),
        ("er", 1, "er(n_recall=7)", "sgd(lr=0.5)", "none"),
        ("er", 700, "er(n_recall=7)", "sgd(lr=0.5)", "none"),
        ("er", 701, "er(n_recall=9)", None, None),
        ("er", 99_999, "er(n_recall=9)", None, None),
        ("grace(er)", 100, "grace(er(n_recall=7), beta=0.75)", "sgd(lr=0.5)", "none"),
        ("grace(inner=er(), beta=0.005)", 100, "grace(er(n_recall=7))", "sgd(lr=0.5)", "none"),
        ("grace", 100, "grace(mose(), beta=0.75)", None, None),
        ("lode", 100, "lode(derpp(n_recall=3, beta=0.25))", "sgd(lr=0.25)", None),
        ("rar", 100, "rar(er(n_recall=7, reduction='sum_of_means'), iterations=4)", "sgd(lr=0.125)", "none"),
        ("ema(rar(derpp))", 100, "ema(rar(derpp(n_recall=3, beta=0.25), iterations=4))", "sgd(lr=0.125)", None),
        ("er + ewc", 100, "er(n_recall=7) + ewc(strength=3.0)", "sgd(lr=0.5)", "none"),
        ("ewc", 100, "sgd() + ewc(strength=3.0)", None, None),
        ("mir", 100, "mir()", None, None),
    ],
)
def test_what_is_not_written_comes_from_the_file(
    ours: str, written: str, memory: int, method: str, optimizer: str | None, augmentation: str | None
) -> None:
    found = resolve(written, DIGITS, memory, defaults=ours)
    assert (found.method, found.optimizer, found.augment) == (method, optimizer, augmentation)


def test_settings_that_are_given_stay(ours: str) -> None:
    one = resolve("er", DIGITS, 100, optimizer="adam", defaults=ours)
    other = resolve("er", DIGITS, 100, augment="tau", defaults=ours)
    assert (one.optimizer, one.augment) == ("adam", "none")
    assert (other.optimizer, other.augment) == ("sgd(lr=0.5)", "tau")


def test_what_was_taken_is_told(ours: str) -> None:
    def told(method: str, memory: int, **settings: str) -> str:
        return resolve(method, DIGITS, memory, **settings, defaults=ours).taken.removeprefix(
            f"defaults {ours} of split-digits, memory "
        )

    assert told("grace(er(), beta=1.0)", 100, augment="tau") == "100: er n_recall=7 optimizer=sgd(lr=0.5)"
    assert told("er(n_recall=1)", 2000) == "2,000: nothing for er"
    assert told("er", 2000) == "2,000: er n_recall=9 (those listed for 1,000)"
    assert told("grace(mir(), beta=1.0)", 100) == "100: nothing for mir and grace"


def test_an_entry_holds_for_the_streams_that_it_lists(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    entries = '[[er]]\nstreams = ["split-mnist"]\nn_recall = 3\n[[er]]\nstreams = ["split-digits"]\nn_recall = 4'
    file.write_text('streams = ["split-digits", "split-mnist"]\n' + entries, encoding="utf-8")
    found = {stream: resolve("er", stream, 100, defaults=str(file)) for stream in ("split-mnist", "split-digits", "split-cifar10")}
    assert [one.method for one in found.values()] == ["er(n_recall=3)", "er(n_recall=4)", "er"]
    assert found["split-cifar10"].taken == f"defaults {file}: nothing for split-cifar10"


def test_a_stream_that_no_set_is_about_changes_nothing() -> None:
    assert resolve("  ER ", "split-digits(size=8)", 1000, None, "tau") == Resolved("  ER ", None, "tau")
    assert resolve("er", "split-cifar100", 1000, defaults="none") == Resolved("er", None, None)


@pytest.mark.parametrize(
    "stream", ["split-cifar100", "seq-cifar100", "SPLIT_CIFAR100(tasks=20, order=1993, classes='0-59', size=16)"]
)
def test_a_stream_is_known_by_its_first_words(stream: str) -> None:
    found = resolve("er", stream, 1000)
    assert (found.method, found.optimizer, found.augment) == ("er(recall_per_class=7)", ADAM, TAU)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "owns",
            None,
            "--defaults 'owns' is no set; did you mean 'own'? (there are: ccl-dc, grace-paper, own, none, or your own FILE.toml)",
        ),
        ("paper", None, "--defaults 'paper' is no set"),
        ("missing.toml", None, "there is no such file"),
        ("bad.toml", "[[er]", "is not a TOML file"),
        ("bad.toml", "[er]\nn_recall = 3", "'er' is not an entry; begin each with [[method]], such as [[er]]"),
        ("bad.toml", "[[er]]\nn_recal = 3", "er has no option 'n_recal'; did you mean 'n_recall'?"),
    ],
)
def test_a_bad_set_is_told_in_a_sentence(name: str, text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(sentence)):
        resolve("er", "split-digits", 100, defaults=str(tmp_path / name) if name.endswith(".toml") else name)


# The command.


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations that a command would run, none of which is run."""
    configs: list[RunConfig] = []
    monkeypatch.setattr(run.Work, "new", lambda config, *_: configs.append(config.canonical()))
    monkeypatch.setattr("gracecl.lab.runs.jobs.run_all", lambda *_: [])
    return configs


CIFAR = ("--stream", "split-cifar100", "--memory", "1000", "--device", "cpu")


def test_the_command_uses_the_set_and_says_so(configured: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["run", "er", "er", "grace", *CIFAR, "--seeds", "0-1"]) == 0
    assert [(config.method, config.optimizer, config.augment) for config in configured] == [
        *[("er(recall_per_class=7)", ADAM, TAU)] * 4,
        *[("grace(mose())", OPTIMIZER, TAU)] * 2,
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "one for each method"
    assert lines[0] == resolve("er", *CIFAR100).taken


@pytest.mark.parametrize(
    ("options", "optimizer", "augmentation", "told"),
    [
        (["--defaults", "none"], OPTIMIZER, "tau", ""),
        (["--defaults", "own"], "sgd(lr=0.1)", "none", "defaults own of split-cifar100"),
        (["--defaults", "own", "--optimizer", "sgd(lr=0.2)"], "sgd(lr=0.2)", "none", "defaults own of split-cifar100"),
        (["--defaults", "ccl-dc", "--augment", "none"], "adamw(lr=0.0005, weight_decay=0.0001)", "none", "defaults ccl-dc of"),
        (["--defaults", "none", "--augment", "none"], OPTIMIZER, "none", ""),
    ],
)
def test_options_come_before_the_set(
    configured: list[RunConfig],
    options: list[str],
    optimizer: str,
    augmentation: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["run", "er", *CIFAR, *options]) == 0
    assert (configured[0].optimizer, configured[0].augment) == (optimizer, augmentation)
    printed = capsys.readouterr().err
    assert printed.startswith(told)
    assert bool(printed) == bool(told)


def test_without_a_file_the_command_is_what_it_was(configured: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["run", "er", "grace", "--stream", "split-digits", "--device", "cpu"]) == 0
    assert configured == [RunConfig(method=method, stream="split-digits", device="cpu").canonical() for method in ("er", "grace")]
    assert capsys.readouterr().err == ""


def test_the_run_holds_the_values_themselves(ours: str, tmp_path: Path) -> None:
    """The folder needs no file of defaults any more: the same run by hand is the same folder."""
    words = [
        "--stream",
        DIGITS,
        "--memory",
        "100",
        "--net",
        "mlp(width=8)",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert cli.call(["run", "er", "--defaults", ours, *words]) == 0
    written = [json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.rglob("config.json")]
    assert [(one["method"], one["optimizer"], one["augment"]) for one in written] == [("er(n_recall=7)", "sgd(lr=0.5)", "none")]
    by_hand = ["er(n_recall=7)", "--optimizer", "sgd(lr=0.5)", "--augment", "none", "--defaults", "none"]
    assert cli.call(["run", *by_hand, *words]) == 0
    assert len(list(tmp_path.rglob("config.json"))) == 1


def test_help_names_what_is_used_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.call(["run", "--help"])
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert RunConfig.optimizer in text
    assert f"else {RunConfig.augment}" in text


def test_a_method_by_another_name_has_its_own_values(tmp_path: Path) -> None:
    for alias, name in (("replay", "er"), ("grace(der++)", "grace(derpp)")):
        assert resolve(alias, *CIFAR100, defaults="own") == resolve(name, *CIFAR100, defaults="own")
    (tmp_path / "mine.toml").write_text("[[replay]]\nn_recall = 7\n")
    assert resolve("er", *CIFAR100, defaults=str(tmp_path / "mine.toml")).method == "er(n_recall=7)"


def test_streams_know_their_aliases() -> None:
    """The names of files are those that `streams.build` gives its families."""
    assert {defaults.stream_name(f"{alias}-digits") for alias in streams.ALIASES} == {"split-digits"}


@pytest.mark.parametrize("mistake", ["ers", "er(n_recal=3)", "er(1, n_recall=2)", "grace(3)", "er + 3"])
def test_a_mistake_in_an_expression_is_told_as_without_a_file(mistake: str) -> None:
    with pytest.raises(UserError) as without_file:
        spec.parse_method(mistake)
    with pytest.raises(UserError, match=re.escape(str(without_file.value))):
        resolve(mistake, "split-cifar100", 1000)
