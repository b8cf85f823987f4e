"""Defaults per benchmark: every file can be used, and what the user writes comes first, then the file, then what is built in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gracecl import augment, cli, defaults, optim, registry, run, spec, streams
from gracecl.defaults import Resolved, resolve
from gracecl.errors import UserError
from gracecl.run import RunConfig

STREAMS = defaults.streams_with_defaults()
ENTRIES = [(stream, method, entry) for stream in STREAMS for method, listed in defaults.read(stream).items() for entry in listed]
ADAMW = "adamw(lr=0.0005, weight_decay=0.0001)"


# The files.


def test_there_are_files_for_the_usual_benchmarks() -> None:
    assert {"split-cifar10", "split-cifar100", "split-tinyimagenet"} <= set(STREAMS)
    for stream in STREAMS:
        family, _, dataset = stream.partition("-")
        assert family in registry.streams.names()
        assert dataset in registry.datasets.names()


@pytest.mark.parametrize(("stream", "method", "entry"), ENTRIES)
def test_every_entry_can_be_used_and_says_where_it_is_from(stream: str, method: str, entry: dict[str, Any]) -> None:
    assert method in registry.methods.names()
    assert entry["source"].strip()
    assert all(size > 0 for size in entry.get("memory", [1]))
    options = {name: value for name, value in entry.items() if name not in (*defaults.SETTINGS, *defaults.ABOUT)}
    built = registry.methods.get(method)(**options)
    for name, value in options.items():
        assert getattr(built, name) == value
    assert options or entry.keys() & {"optimiser", "augment"}, "it says something"
    if "augment" in entry:
        augment.augmentation(entry["augment"])
    if "optimiser" in entry:
        optim.build(entry["optimiser"], [(1.0, [torch.nn.Parameter(torch.zeros(1))])])


@pytest.mark.parametrize("stream", STREAMS)
def test_no_two_entries_of_a_method_list_the_same_size(stream: str) -> None:
    for listed in defaults.read(stream).values():
        sizes = [size for entry in listed for size in entry.get("memory", [None])]
        assert len(sizes) == len(set(sizes))
        assert len(listed) == 1 or None not in sizes


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("memory", [200, 1000, 10_000])
def test_every_method_resolves_to_itself_with_other_values(stream: str, memory: int) -> None:
    for name in registry.methods.names():
        found = resolve(name, stream, memory)
        assert spec.parse_method(found.method).name == spec.parse_method(name).name
        assert repr(spec.parse_method(found.method)) == found.method


# A file of our own, whose values differ from everything that is built in.

OURS = """
[[er]]
memory = [100, 400]
optimiser = "sgd(lr=0.5)"
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
optimiser = "sgd(lr=0.25)"
source = "here"

[[grace]]
beta = 0.75
source = "here"

[[rar]]
optimiser = "sgd(lr=0.125)"
iterations = 4
source = "here"

[[ewc]]
strength = 3.0
optimiser = "sgd(lr=9.0)"
source = "here"
"""


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> str:
    """A stream that has a file."""
    monkeypatch.setattr(defaults, "read", {"split-digits": defaults.tomllib.loads(OURS)}.__getitem__)
    return "split-digits(size=8)"


@pytest.mark.parametrize(
    ("written", "memory", "method", "optimiser", "augmentation"),
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
    ours: str, written: str, memory: int, method: str, optimiser: str | None, augmentation: str | None
) -> None:
    found = resolve(written, ours, memory)
    assert (found.method, found.optimiser, found.augment) == (method, optimiser, augmentation)


def test_settings_that_are_given_stay(ours: str) -> None:
    one, other = resolve("er", ours, 100, optimiser="adam"), resolve("er", ours, 100, augment="tau")
    assert (one.optimiser, one.augment) == ("adam", "none")
    assert (other.optimiser, other.augment) == ("sgd(lr=0.5)", "tau")


def test_what_was_taken_is_told(ours: str) -> None:
    told = resolve("grace(er(), beta=1.0)", ours, 100, augment="tau").taken
    assert told == "defaults of split-digits, memory 100: er n_recall=7 optimiser=sgd(lr=0.5)"
    assert resolve("er(n_recall=1)", ours, 2000).taken == ""
    assert resolve("er", ours, 2000).taken == "defaults of split-digits, memory 2,000: er n_recall=9 (those listed for 1,000)"


def test_a_stream_without_a_file_changes_nothing() -> None:
    assert resolve("  ER ", "split-digits(size=8)", 1000, None, "tau") == Resolved("  ER ", None, "tau")


@pytest.mark.parametrize(
    "stream", ["split-cifar100", "seq-cifar100", "SPLIT_CIFAR100(tasks=20, order=1993, classes='0-59', size=16)"]
)
def test_a_stream_is_known_by_its_first_words(stream: str) -> None:
    found = resolve("er", stream, 1000)
    assert (found.method, found.optimiser, found.augment) == ("er()", ADAMW, "full")


# The command.


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations that a command would run, none of which is run."""
    configs: list[RunConfig] = []
    monkeypatch.setattr(run.Work, "new", lambda config, *_: configs.append(config.canonical()))
    monkeypatch.setattr("gracecl.jobs.run_all", lambda *_: [])
    return configs


CIFAR = ("--stream", "split-cifar100", "--memory", "1000", "--device", "cpu")


def test_the_command_uses_the_file_and_says_so(configured: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["run", "er", "er", "grace", *CIFAR, "--seeds", "0-1"]) == 0
    assert [(config.method, config.optimiser, config.augment) for config in configured] == [
        *[("er()", ADAMW, "full")] * 4,
        *[("grace(mose())", optim.DEFAULT, "tau")] * 2,
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "one for each method"
    assert lines[0] == f"defaults of split-cifar100, memory 1,000: er n_recall=64 reduction=concat optimiser={ADAMW} augment=full"


@pytest.mark.parametrize(
    ("options", "optimiser", "augmentation"),
    [
        (["--defaults", "none"], optim.DEFAULT, "tau"),
        (["--optimiser", "sgd(lr=0.1)"], "sgd(lr=0.1)", "full"),
        (["--augment", "none"], ADAMW, "none"),
        (["--defaults", "none", "--augment", "none"], optim.DEFAULT, "none"),
    ],
)
def test_options_come_before_the_file(
    configured: list[RunConfig], options: list[str], optimiser: str, augmentation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["run", "er", *CIFAR, *options]) == 0
    assert (configured[0].optimiser, configured[0].augment) == (optimiser, augmentation)
    assert ("defaults of" in capsys.readouterr().err) == ("none" not in options or "--defaults" not in options)


def test_without_a_file_the_command_is_what_it_was(configured: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["run", "er", "grace", "--stream", "split-digits", "--device", "cpu"]) == 0
    assert configured == [RunConfig(method=method, stream="split-digits", device="cpu").canonical() for method in ("er", "grace")]
    assert capsys.readouterr().err == ""


def test_the_run_holds_the_values_themselves(ours: str, tmp_path: Path) -> None:
    """The folder needs no file of defaults any more: the same run by hand is the same folder."""
    words = [
        "--stream",
        ours,
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
    assert cli.call(["run", "er", *words]) == 0
    written = [json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.rglob("config.json")]
    assert [(one["method"], one["optimiser"], one["augment"]) for one in written] == [("er(n_recall=7)", "sgd(lr=0.5)", "none")]
    by_hand = ["er(n_recall=7)", "--optimiser", "sgd(lr=0.5)", "--augment", "none", "--defaults", "none"]
    assert cli.call(["run", *by_hand, *words]) == 0
    assert len(list(tmp_path.rglob("config.json"))) == 1


def test_help_names_what_is_used_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.call(["run", "--help"])
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert RunConfig.optimiser in text
    assert f"else {RunConfig.augment}" in text


def test_streams_know_their_aliases() -> None:
    """The names of files are those that `streams.build` gives its families."""
    assert {defaults.stream_name(f"{alias}-digits") for alias in streams.ALIASES} == {"split-digits"}


@pytest.mark.parametrize("mistake", ["ers", "er(n_recal=3)", "er(1, n_recall=2)", "grace(3)", "er + 3"])
def test_a_mistake_in_an_expression_is_told_as_without_a_file(mistake: str) -> None:
    with pytest.raises(UserError) as without_file:
        spec.parse_method(mistake)
    with pytest.raises(UserError, match=re.escape(str(without_file.value))):
        resolve(mistake, "split-cifar100", 1000)
