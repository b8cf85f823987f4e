"""`gracecl tune`: a search on the first tasks' training images alone, that goes on where it was, and a file that a run reads."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gracecl.data import from_arrays
from gracecl.errors import UserError
from gracecl.lab import cli, defaults
from gracecl.lab.report import find_runs
from gracecl.lab.runs import jobs
from gracecl.lab.runs.run import RunConfig
from gracecl.lab.runs.watch import Watch
from gracecl.lab.tuning import space as spaces
from gracecl.lab.tuning.space import Choice, Range
from gracecl.lab.tuning.trials import Trials
from gracecl.registry import datasets
from stopping import StopAfter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STREAM = "split-digits(size=8, tasks=5, per_class=20)"
WORDS = shlex.split("--net 'mlp(width=8)' --memory 20 --device cpu --jobs 1 --threads 1 --tasks 2 --seeds 0")
SPACE = ("--space", "lr=1e-3..1e-1:log", "n_recall=4,8")


def tune(out: Path, *words: str, method: str = "er", stream: str = STREAM) -> int:
    space = () if "--space" in words else SPACE
    return cli.call(["tune", method, *space, "--stream", stream, *WORDS, "--out", str(out), *words])


def trials(out: Path) -> list[dict[str, Any]]:
    """Values and score of each finished trial, in their order."""
    found = json.loads((out / "trials.json").read_text(encoding="utf-8"))["trials"]
    return [trial["params"] | {"score": np.mean(trial["scores"]) if trial["scores"] else None} for trial in found]


def read(out: Path) -> dict[str, Any]:
    return tomllib.loads((out / "defaults.toml").read_text(encoding="utf-8"))


# --- the search


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("optuna")
    out = tmp_path_factory.mktemp("tune")
    assert tune(out, "--trials", "2") == 0
    return out


@pytest.mark.slow
def test_the_best_trial_is_written_with_where_it_comes_from(searched: Path) -> None:
    found, file = trials(searched), read(searched)
    best = max(found, key=lambda trial: trial["score"])
    about = file["provenance"]
    assert len(found) == about["trials"] == 2
    assert about["score"] == best["score"] == about["scores"][0]
    assert found[about["best_trial"] - 1] == best
    assert about["values"] == {"optimizer.lr": float(f"{best['optimizer.lr']:.4g}"), "er.n_recall": int(best["er.n_recall"])}
    assert about["data"] == {
        "stream": f"{STREAM[:-1]}, first=2, validation=0.2)",
        "tasks_used": 2,
        "tasks": 5,
        "training_images": about["data"]["training_images"],
        "validation_images": about["data"]["validation_images"],
        "test_images": 0,
    }
    assert {"commit", "command", "versions", "metric"} <= about.keys()
    assert file["streams"] == ["split-digits"]
    [entry] = file["er"]
    assert entry["memory"] == [20]
    assert entry["source"].startswith(
        f"gracecl tune: the best of 2 trials, acc {best['score']:.2f} on the held-out 20% of the training"
    )
    for run in find_runs(searched):
        assert run.config["stream"] == about["data"]["stream"]


@pytest.mark.slow
def test_a_run_reads_the_file(searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that a finished search prints."""
    assert tune(searched, "--trials", "2") == 0, "nothing is left to do"
    line = capsys.readouterr().out.splitlines()[-1]
    program, *words = shlex.split(line.partition("to use it: ")[2])
    assert program == "gracecl"
    assert cli.call([*words, "--steps", "2", "--jobs", "1", "--out", str(tmp_path)]) == 0
    [run] = find_runs(tmp_path)
    values = read(searched)["provenance"]["values"]
    assert run.config["stream"] == STREAM, "the whole of it"
    assert run.config["optimizer"] == f"adam(lr={values['optimizer.lr']!r}, weight_decay=0.0001)"
    assert run.config["method"] == f"er(n_recall={values['er.n_recall']})"


def test_the_command_in_the_file_continues_the_search(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(read(searched)["provenance"]["command"])
    assert program == "gracecl"
    assert cli.call([*words, "--trials", "3", "--jobs", "1", "--threads", "1", "--out", str(searched)]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trial")]
    assert len(told) == 1
    assert told[0].startswith("trial 3 of 3: optimizer.lr=")
    assert len(trials(searched)) == 3


def test_another_search_needs_another_folder(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(searched, "--validation", "0.3") == 2
    assert "holds another search; choose another --out, or continue that one with: gracecl tune 'er()'" in capsys.readouterr().err


def register_dots(poison: bool) -> None:
    """Noise of four tasks; poisoned, the images of the last two tasks and all test images are other ones."""

    def dots(root: Path, size: int | None) -> Any:
        labels = np.repeat(np.arange(8), 20)
        train, test = np.random.default_rng(0).integers(0, 256, (2, len(labels), 4, 4), dtype=np.uint8)
        train[:, 0, 0] = 30 * labels
        if poison:
            train[labels >= 4] = 255 - train[labels >= 4] // 3
            test[:] = 0
        return from_arrays(train, labels, test, labels, name="dots", tasks=4)

    datasets.loaded["dots"] = dots


@pytest.fixture
def dots() -> Iterator[None]:
    register_dots(poison=False)
    yield
    del datasets.loaded["dots"]


def test_later_tasks_and_test_images_change_nothing(dots: None, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    for poison in (False, True):
        register_dots(poison)
        assert tune(tmp_path / str(poison), "--trials", "1", stream="split-dots") == 0
    assert trials(tmp_path / "False") == trials(tmp_path / "True")
    [clean], [poisoned] = (find_runs(tmp_path / name) for name in ("False", "True"))
    assert clean.config["stream_hash"] == poisoned.config["stream_hash"], "the same pixels and labels"
    records = [(run.path / "metrics.jsonl").read_bytes() for run in (clean, poisoned)]
    assert records[0] == records[1], "every loss to the last bit"
    assert clean.config["classes"] == 8
    assert len(clean.matrix(clean.rule)) == 2


@pytest.mark.slow
def test_a_search_that_is_stopped_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of the second trial's run, and once more after it; then the file of trials is lost."""
    pytest.importorskip("optuna")
    words = ["--trials", "3", "--sampler", "random"]
    assert tune(tmp_path / "whole", *words) == 0
    watches = iter([Watch(), StopAfter(3)])
    monkeypatch.setattr(jobs.watch, "LiveWatch", lambda: next(watches, Watch()))
    capsys.readouterr()
    assert tune(tmp_path / "stopped", *words) == 130
    assert "stopped in trial 2 of 3; continue with the same command" in capsys.readouterr().err
    assert read(tmp_path / "stopped")["provenance"]["trials"] == 1, "the best so far is there"
    assert tune(tmp_path / "stopped", *words[2:], "--trials", "2") == 0
    for lost in (False, True):
        if lost:
            (tmp_path / "stopped" / "trials.json").unlink()
        assert tune(tmp_path / "stopped", *words) == 0
        assert trials(tmp_path / "stopped") == trials(tmp_path / "whole")
        assert read(tmp_path / "stopped") == read(tmp_path / "whole")


def test_every_combination_of_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that do not stay finite count as the worst, and the search goes on."""
    pytest.importorskip("optuna")
    words = ["--sampler", "grid", "--space", "optimizer=sgd(lr=1e30),sgd(lr=0.1)", "augment=none"]
    assert tune(tmp_path, *words) == 0
    told = capsys.readouterr().err
    assert "trial 1 of 2: run.optimizer=sgd(lr=1e30), run.augment=none: its numbers did not stay finite" in told
    about = read(tmp_path)
    assert (about["provenance"]["trials"], about["provenance"]["trials_without_score"]) == (2, 1)
    assert about["er"][0]["optimizer"] == "sgd(lr=0.1)"
    assert about["er"][0]["augment"] == "none"


# --- mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tasks", "5"], "--tasks 5 leaves none of the 5 tasks"),
        (["--tasks", "0"], "first must be at least 1"),
        (["--validation", "1.5"], "validation must be above 0 and below 1"),
        (["--trials", "0"], "--trials must be at least 1, not 0"),
        (["--metric", "accuracy"], "there is no metric 'accuracy'"),
        (["--sampler", "grid"], "--sampler grid needs a list of values for optimizer.lr, not 0.001..0.1:log"),
        (["--stream", "split-digits(first=2)"], "gives first, which a search sets by --tasks and --validation"),
        (["--space", "n_recal=3,4"], "there is no option 'n_recal' to search for; did you mean 'n_recall'?"),
        (["--net", "mlp(widht=8)", "--trials", "1"], "mlp has no option 'widht'"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    assert tune(tmp_path, *words) == 2
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if line.startswith("gracecl: ")]) == len(told) == 1
    assert sentence in told[0]


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert tune(tmp_path / "out") == 2
    assert "gracecl tune needs optuna; install it with: pip install 'gracecl[tune]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def damages(whole: bytes) -> Iterator[bytes]:
    """A file with a flipped bit, cut short, or another one altogether."""
    chosen = random.Random(0)
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[chosen.randrange(len(whole))] ^= 1 << chosen.randrange(8)
        yield bytes(damaged)
    yield from (b"", b"{}", b"[]", b"null", whole[:-1], whole[: len(whole) // 2], whole + b" ", bytes(len(whole)))
    yield b"SQLite format 3\0" + bytes(84)
    yield b"[" * 100_000


def test_a_damaged_file_of_trials_is_one_sentence(searched: Path, tmp_path: Path) -> None:
    """Every value of it counts: another score would be another winner."""
    whole, about = (searched / "trials.json").read_bytes(), read(searched)["provenance"]["command"]
    space = spaces.parse(SPACE[1:], RunConfig(method="er()", device="cpu").canonical(), "er")
    file = tmp_path / "trials.json"
    file.write_bytes(whole)
    assert Trials(file, about, True, space, "tpe").best is not None
    for damaged in damages(whole):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"delete {file} to search anew, which reuses the runs that are finished") as told:
            Trials(file, about, True, space, "tpe")
        assert "\n" not in str(told.value)
        assert file.read_bytes() == damaged


def test_a_file_of_trials_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "trials.json").write_text("not JSON")
    assert tune(tmp_path) == 2
    told = capsys.readouterr().err
    assert "trials.json is damaged: it is not JSON; delete" in told
    assert told.count("\n") == 1
    assert (tmp_path / "trials.json").read_text() == "not JSON"


# --- the space

CONFIG = RunConfig(method="grace(er() + ewc())", optimizer="sgd(0.1, momentum=0.9)", device="cpu").canonical()


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=1e-4..1e-1:log", ("optimizer", "lr"), Range(1e-4, 0.1, True)),
        ("optimizer.momentum=0..0.9", ("optimizer", "momentum"), Range(0.0, 0.9)),
        ("n_recall=16..128:log", ("er", "n_recall"), Range(16, 128, True)),
        ("beta=0..1", ("grace", "beta"), Range(0.0, 1.0)),
        ("er.n_recall=16,32", ("er", "n_recall"), Choice((16, 32))),
        ("reduction=concat,'sum_of_means'", ("er", "reduction"), Choice(("concat", "sum_of_means"))),
        ("recall_per_class=None,7", ("er", "recall_per_class"), Choice((None, 7))),
        ("augment=none,tau", ("run", "augment"), Choice(("none", "tau"))),
        ("optimizer=adam(lr=0.001),sgd(lr=0.1)", ("run", "optimizer"), Choice(("adam(lr=0.001)", "sgd(lr=0.1)"))),
    ],
)
def test_a_space_is_read(text: str, name: tuple[str, str], values: Range | Choice) -> None:
    [(found, read_as)] = spaces.parse([text], CONFIG, "grace(er() + ewc())").items()
    assert (found, read_as) == (name, values)
    if isinstance(values, Range) and isinstance(read_as, Range):
        assert read_as.whole == values.whole
    again = spaces.parse([f"{'.'.join(found)}={read_as}"], CONFIG, "grace(er() + ewc())")
    assert again == {name: values}, "and written back"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr", "'lr' is not an option and its values; write for example --space lr=1e-4..1e-1:log n_recall=16,32,64"),
        ("", "--space is empty"),
        ("lr=0.1..0.01", "'lr=0.1..0.01' is no range, which goes from less to more"),
        ("lr=0..0.01:log", "with :log from above 0"),
        ("lr=0.01..0.1:lin", "is no range"),
        ("lr=a..b", "'a' in 'lr=a..b' is not a number"),
        ("lr=1..inf", "'inf' in 'lr=1..inf' is not a number"),
        ("n_recall=1.5..3", "er: n_recall must be a whole number, not 1.5"),
        ("n_recall=4,many", "er: n_recall must be a whole number, not 'many'"),
        ("n_recall=4,,", "cannot read the values of 'n_recall=4,,'"),
        ("n_recall=[", "cannot read the values"),
        ("lr=0.1,0.2 optimizer.lr=0.1,0.2", "--space names optimizer.lr twice"),
        ("memory=100,200", "there is no option 'memory' to search for"),
        ("augment=nonne", "unknown augmentation 'nonne'"),
        ("lr=-1,0.1", "Invalid learning rate"),
        ("beta=0,1", "gives beta already; leave it out there, or out of --space"),
    ],
)
def test_a_mistake_in_a_space_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        spaces.parse([text], CONFIG, "grace(er() + ewc(), beta=0.5)")


def test_options_of_the_same_name_are_told_apart_by_their_owner() -> None:
    config = RunConfig(method="er() + ewc() + si()", device="cpu").canonical()
    with pytest.raises(UserError, match=r"ewc and si have an option strength; write ewc\.strength"):
        spaces.parse(["strength=1..2"], config, config.method)
    [name] = spaces.parse(["si.strength=1..2"], config, config.method)
    assert name == ("si", "strength")
    assert spaces.with_values(config, {name: 1.5}).method == "er() + ewc() + si(strength=1.5)"


def test_values_are_put_where_they_belong() -> None:
    values = {("er", "n_recall"): 7, ("optimizer", "lr"): 0.2, ("run", "augment"): "none", ("ewc", "strength"): 3.0}
    found = spaces.with_values(CONFIG, values)
    assert found.method == "grace(er(n_recall=7) + ewc(strength=3.0))"
    assert found.optimizer == "sgd(lr=0.2, momentum=0.9)"
    assert found.augment == "none"
    assert spaces.without(found, {("er", "n_recall"): Choice((1, 2))}).method == "grace(er() + ewc(strength=3.0))"


@pytest.mark.parametrize(
    "method", ["grace(er(n_recall=7, reduction='concat') + ewc(strength=3.0), beta=0.25)", "ocm()", "best", "si(strength=2.0)"]
)
def test_a_set_that_is_written_stands_for_its_expression(method: str, tmp_path: Path) -> None:
    from gracecl.lab.defaults.write import as_toml
    from gracecl.registry import spec

    settings = {"optimizer": "sgd(lr=1e-05)", "augment": "none"}
    text = as_toml(
        method, "split-digits(size=8)", 100, settings, 'a "source" of ±', {"score": 1.5, "data": {"er.x": [1, 2], "it": True}}
    )
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    bare = re.sub(r"\w+=[^(),]+(, )?", "", method).replace(", )", ")")
    found = defaults.resolve(bare, "split-digits", 100, defaults=str(file))
    assert found.method == repr(spec.parse_method(method))
    assert (found.optimizer, found.augment) == ("sgd(lr=1e-05)", "none")
    assert tomllib.loads(text)["provenance"] == {"score": 1.5, "data": {"er.x": [1, 2], "it": True}}
