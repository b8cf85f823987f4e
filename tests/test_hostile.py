"""Numbers, names and files that no machine can do anything with: one sentence for each, before anything is allocated."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gracecl
from gracecl import Learner, UserError, checkpoint
from gracecl.data.cache import mmap_limit
from gracecl.lab import cli
from gracecl.lab.runs.run import RunConfig, Work
from gracecl.machine import MOST_THREADS

SMALL = {"--stream": "split-digits(size=8)", "--net": "mlp(width=8)", "--memory": "20", "--steps": "2", "--device": "cpu"}
LARGE = "1" + 22 * "0"


def small(*other: str) -> list[str]:
    """The options of a small run, some of them others."""
    options = SMALL | dict(zip(other[::2], other[1::2], strict=True))
    return [word for pair in options.items() for word in pair]


def sentence(*arguments: str | Path) -> str:
    """What the command says of a mistake: one line, exit code 2, nothing on standard output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.call([str(argument) for argument in arguments])
    assert (code, out.getvalue(), err.getvalue().count("\n")) == (2, "", 1), err.getvalue()[-2000:]
    assert len(err.getvalue()) < 800
    return err.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--threads", "100000", f"--threads must be between 1 and {MOST_THREADS}"),
        ("--jobs", "100000000", f"--jobs must be between 1 and {MOST_THREADS}"),
        ("--seeds", "0-3000000000", "names more than 100,000 numbers"),
        ("--seeds", LARGE, "more than 18 digits"),
        ("--stream", "split-digits(classes='0-9999999999')", "names more than 100,000 numbers"),
        ("--stream", "split-digits(classes=[True])", "class True"),
        ("--stream", "split-digits(size=100000)", "use a smaller size"),
        ("--stream", "split-digits(size=8, epochs=1000000000)", "use fewer epochs"),
        ("--stream", f"split-digits(size=8, batch={LARGE})", "batch must be a whole number below"),
        ("--stream", "split-folder(path='a\\x00b')", "holds a NUL"),
        ("--stream", "split-digits(\0)", "null"),
        ("--net", "mlp(width=1000000000)", "use a smaller net"),
        ("--net", "mlp(width=20000, depth=1000)", "use a smaller net"),
        ("--net", "mlp(depth=100000000)", "depth must be between 1 and 1000"),
        ("--net", "resnet18(width=1000000)", "use a smaller net"),
        ("--net", "vit(depth=100000000)", "depth must be between 1 and 1000"),
        ("--memory", "100000000000000", "use a smaller --memory"),
        ("--memory", LARGE, "memory must be a whole number below"),
        ("METHOD", "+".join(["er()", *["cpr()"] * 3000]), "more than 50 parts"),
        ("METHOD", "grace(" * 60 + "er()" + ")" * 60, "more than 50 parts"),
        ("METHOD", f"er(n_recall={LARGE})", "n_recall must be a whole number below"),
        ("METHOD", "er() + ewc(n_fisher=100000000000000)", "a memory of 100000000000000 images"),
        ("METHOD", "er(mem_iters=1000000000)", "mem_iters must be between 1 and 1000"),
        ("METHOD", "rar(iterations=1000000000)", "iterations must be between 1 and 1000"),
        ("METHOD", "rar(operations=1000000000)", "operations must be between 0 and 100"),
        ("METHOD", "multi_update(updates=1000000000)", "updates must be between 1 and 1000"),
        ("METHOD", "adversarial_replay(attack_steps=1000000000)", "attack_steps must be between 0 and 1000"),
        ("METHOD", "ccil(self_distillation=1000000000)", "self_distillation must be between 0 and 10000"),
        ("METHOD", "ccil(power=1e30)", "power must be between -10 and 10"),
        ("METHOD", "gdumb(epochs=1000000000)", "epochs must be between 1 and 10000"),
        ("METHOD", "il2a(mix_times=1000000000)", "mix_times must be between 0 and 100"),
        ("METHOD", "il2a(n_prototypes=1000000000)", "n_prototypes must be between 1 and 100000"),
        ("METHOD", "aser(per_class=1e30)", "per_class must be between 1 and 1000000"),
        ("METHOD", "joint(n_recall=1000000000000)", "use a smaller n_recall"),
        ("METHOD", "joint(offline_epochs=1000000000)", "use fewer offline_epochs"),
        ("METHOD", "ranpac(projections=1000000000)", "use fewer projections"),
        ("METHOD", "lwf(temperature=1e300)", "temperature must be a number of at most 1e+38"),
        ("METHOD", "grace(er(), strength='balance(limit=1e300)')", "limit must be a number of at most 1e+38"),
        ("--net", "mlp(width=1000000000000000)", "use a smaller net"),
        ("--net", "resnet18(width=1000000000000000)", "use a smaller net"),
        ("--net", "vit(patch=4, mlp_ratio=1e15)", "use a smaller net"),
        ("--net", "vit(patch=4, lora=1000000000)", "use a smaller rank"),
        ("--jobs", "9" * 5000, f"--jobs must be between 1 and {MOST_THREADS}"),
        ("--out", "a\0b", "holds a NUL"),
        ("--data", "a\0b", "holds a NUL"),
        ("--defaults", "a\0b.toml", "holds a NUL"),
    ],
    ids=lambda value: str(value)[:40].replace("\0", "NUL"),
)
def test_a_run_that_cannot_be_is_one_sentence(option: str, value: str, said: str, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), *small(*([option, value] if option.startswith("--") else []))]
    method = value if option == "METHOD" else "er"
    others = ["--stream", "split-cifar10", "--defaults", "none"] if option == "--data" else []
    assert said in sentence("run", method, *options, *others)
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize("url", ["http://[bad", "http://a b/x", "https:///x", "http://host:port/x", "http://host\n/x"])
def test_an_address_that_is_none_is_one_sentence_at_once(url: str, tmp_path: Path) -> None:
    assert "no web address" in sentence("data", "get", "cifar10", "--data", tmp_path, "--url", url)


def test_a_run_that_was_begun_with_impossible_threads_is_not_continued(tmp_path: Path) -> None:
    config = RunConfig("er", net="mlp(width=8)", memory=20, steps=2, stream="split-digits(size=8)", device="cpu")
    folder = Work.new(config, tmp_path).run()
    (folder / "summary.json").unlink()
    (folder / "checkpoint.safetensors").unlink()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"threads": 100_000}))
    assert "config.json" in sentence("resume", folder)
    with pytest.raises(UserError, match="threads must be between"):
        gracecl.run("er", net="mlp", stream="split-digits(size=8)", steps=1, threads=100_000)


def test_a_name_that_is_too_long_for_a_folder_is_cut(tmp_path: Path) -> None:
    long = RunConfig("er", net="mlp", stream=f"split-digits(classes={list(range(400))})", device="cpu").folder(tmp_path)
    other = RunConfig("er", net="mlp", stream=f"split-digits(classes={list(range(401))})", device="cpu").folder(tmp_path)
    assert max(len(part) for part in long.parts) <= 255
    assert long != other
    long.mkdir(parents=True)


def test_a_model_of_transformers_that_no_machine_holds_is_refused_before_the_package_is_asked(tmp_path: Path) -> None:
    for options in ("width=1000000002", "depth=100000000", "width=30000, depth=1000"):
        said = sentence("run", "er", *small("--net", f"transformers({options})"), "--out", tmp_path)
        assert "use a smaller net" in said or "depth must be between 1 and 1000" in said


def test_an_adapter_s_rank_that_no_machine_holds_is_refused(tmp_path: Path) -> None:
    net = "vit(patch=4, dim=8, depth=2, heads=2)"
    assert "use a smaller rank" in sentence("run", "online_lora(rank=1000000000)", *small("--net", net), "--out", tmp_path)


def test_a_memory_of_the_paper_that_is_no_number_is_one_sentence(finished: Path) -> None:
    assert "--paper must be auto, none or a memory" in sentence("report", finished, "--paper", "9" * 5000)


@pytest.mark.parametrize("text", ["1e400", "nan", "many"])
def test_a_limit_of_mapped_bytes_that_is_no_number_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACECL_MMAP_BYTES", text)
    with pytest.raises(UserError, match="GRACECL_MMAP_BYTES must be a number of bytes"):
        mmap_limit(None)


# What a run's folder notes beside its configuration.


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b"], ids=repr)
@pytest.mark.parametrize("note", ["data_root", "plugins"])
def test_a_note_of_where_things_are_that_is_no_text_is_one_sentence(
    note: str, content: bytes, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / note).write_bytes(content)
    (folder / "summary.json").unlink()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert str(folder / note) in sentence("resume", folder)
    if note == "plugins":
        assert str(folder / note) in sentence("report", folder)
    assert before == {file: file.read_bytes() for file in before}


# Somebody's own code that ends the program.

LEAVING = """
import sys
from dataclasses import dataclass

from gracecl.methods.er import ER
from gracecl.registry import methods


@methods.register("leaving")
@dataclass(eq=False, repr=False)
class Leaving(ER):
    "Ends the program in its second step."

    def losses(self, out, batch):
        if batch.progress.step == 1:
            sys.exit(0)
        return super().losses(out, batch)
"""


def test_a_method_that_ends_the_program_does_not_pass_for_a_finished_run(tmp_path: Path) -> None:
    plugin = tmp_path / "leaving.py"
    plugin.write_text(LEAVING)
    options = [*small(), "--plugin", str(plugin), "--out", str(tmp_path / "out"), "--jobs", "1"]
    for others in ([], ["er"]):
        err = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            assert cli.call(["run", "leaving", *others, *options]) == 2
        assert "the run's own code asked to end the program (SystemExit: 0)" in err.getvalue()
        assert "Traceback" not in err.getvalue()
    assert len(list((tmp_path / "out").rglob("summary.json"))) == 1, "the other one went on"


# Records of the wrong kind.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig("er", net="mlp(width=8)", memory=20, steps=3, stream="split-digits(size=8)", device="cpu")
    return Work.new(config, tmp_path_factory.mktemp("out")).run()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"method": 3}),
        ("config.json", {"stream": None}),
        ("config.json", {"seed": "zero"}),
        ("config.json", {"rule": []}),
        ("config.json", {"tasks": "five"}),
        ("step", {"step": "one"}),
        ("step", {"task": None}),
        ("step", {"rows": 7}),
        ("step", {"rows": {"ce": 3}}),
        ("step", {"rows": {"ce": ["x"]}}),
        ("eval", {"accuracy": []}),
        ("eval", {"accuracy": {"linear_last": "many"}}),
        ("eval", {"task_end": "yes"}),
        ("step", {"step": 10**30}),
        ("step", {"rows": {"ce": []}}),
        ("step", {"rows": {"ce": [True]}}),
        ("eval", {"task": -1}),
        ("eval", {"accuracy": {"linear_last": []}}),
        ("eval", {"ece": "x"}),
        ("eval", {"ece": {"linear_last": "x"}}),
        ("eval", {"nll": None}),
        ("config.json", {"memory": "many"}),
        ("config.json", {"parameters": []}),
        ("timing.json", {"train_seconds": "x"}),
        ("timing.json", {"forward": {}}),
        ("step", {"kind": ["step"]}),
    ],
    ids=str,
)
def test_a_report_of_a_record_of_the_wrong_kind_is_one_sentence(
    file: str, change: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "metrics.jsonl", "timing.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    if file.endswith(".json"):
        settings = json.loads((tmp_path / file).read_text())
        del settings["digests"]  # as older files have none
        (tmp_path / file).write_text(json.dumps(settings | change))
    else:
        records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        place = max(place for place, record in enumerate(records) if record["kind"] == file)
        records[place] |= change
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if change == {"kind": ["step"]}:  # a kind that is nobody's is passed over
        gracecl.lab.report.read_run(tmp_path)
        return
    assert str(tmp_path) in sentence("report", tmp_path)


# Learners.


def saved(path: Path) -> Learner:
    learner = Learner("er", classes=4, shape=(1, 4, 4), memory=6, net="mlp(width=4, depth=1)", augment="none", device="cpu")
    learner.learn(np.zeros((4, 1, 4, 4), np.uint8), [0, 1, 2, 3])
    learner.save(path)
    return learner


def places_in(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of every level of a nested state."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [place for key, value in items for place in [(*path, key), *places_in(value, (*path, key))]]


@pytest.mark.slow
def test_a_learner_s_file_with_any_part_changed_is_loaded_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """Every entry of another kind, under a digest that fits: never an error of Python's own."""
    file = tmp_path / "learner"
    saved(file)
    state = checkpoint.load(file)
    said = []
    for place in places_in(state):
        for replacement in (None, "x", -1, [], {}):
            changed = copy.deepcopy(state)
            part = changed
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = replacement
            checkpoint.save(file, changed)
            try:
                Learner.load(file, device="cpu")
            except UserError as error:
                said.append(str(error))
    assert len(said) > 100
    assert all(str(file) in text for text in said)


@pytest.mark.exhaustive
def test_a_run_s_checkpoint_with_any_part_changed_is_taken_or_refused_in_a_sentence(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry of another kind (one of three, by turns), under a digest that fits, of a run that has only its report to make."""
    monkeypatch.setattr(gracecl.lab.report, "write_run_report", lambda *_: {})  # which takes longer than all the rest
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    file, said = folder / "checkpoint.safetensors", []
    state, whole = checkpoint.load(file), {path: path.read_bytes() for path in folder.iterdir()}
    for number, place in enumerate(places_in(state)):
        for replacement in ((None, "x", [])[number % 3],):
            for path, data in whole.items():
                path.write_bytes(data)
            (folder / "summary.json").unlink(missing_ok=True)
            changed = copy.deepcopy(state)
            part = changed
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = replacement
            checkpoint.save(file, changed)
            try:
                Work.begun(folder).run()
            except UserError as error:
                said.append(str(error))
    assert len(said) > 50
    assert all(str(folder) in text for text in said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"classes": "10"}, "number of classes"),
        ({"classes": True}, "number of classes"),
        ({"classes": 10**30}, "number of classes"),
        ({"shape": 8}, "channels, height, width"),
        ({"shape": ("1", 8, 8)}, "channels, height, width"),
        ({"mean": 3}, "lists of numbers"),
        ({"std": ["x"]}, "lists of numbers"),
        ({"memory": "10"}, "memory must be a whole number"),
    ],
)
def test_a_learner_of_impossible_values_is_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Learner("er", **{"classes": 4, "shape": (1, 8, 8), "net": "mlp"} | given)


def test_a_path_with_a_nul_is_one_sentence(tmp_path: Path) -> None:
    learner, nowhere = saved(tmp_path / "learner"), tmp_path / "a\0b"
    for act in (
        lambda: learner.save(nowhere),
        lambda: Learner.load(nowhere),
        lambda: gracecl.run("er", stream="split-digits(size=8)", net="mlp", steps=1, out=nowhere),
        lambda: gracecl.stream("split-cifar10", data=nowhere),
    ):
        with pytest.raises(UserError, match="holds a NUL"):
            act()


def test_tasks_and_labels_that_nothing_can_be_counted_by_are_one_sentence(tmp_path: Path) -> None:
    learner, x, y = saved(tmp_path / "learner"), np.zeros((2, 1, 4, 4), np.uint8), [0, 1]
    with pytest.raises(UserError, match="tasks are numbers from 0 to 999,999, and one of them is 10000000000000"):
        learner.evaluate(x, y, tasks=[0, 10**13])
    with pytest.raises(UserError, match="one of them is 18446744073709551615"):
        learner.evaluate(x, y, tasks=np.array([0, 2**64 - 1], np.uint64))
    with pytest.raises(UserError, match="label 18446744073709551615 is not one of the declared classes 0 to 3"):
        learner.learn(x, np.array([0, 2**64 - 1], np.uint64))


def test_a_rule_that_is_no_name_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rule is a name such as 'linear_last', not 3"):
        saved(tmp_path / "learner").predict(np.zeros((1, 1, 4, 4), np.uint8), rule=3)  # type: ignore[arg-type]


def test_a_learner_used_by_several_threads_learns_and_predicts_whole_batches() -> None:
    learner = Learner("mose", classes=4, shape=(1, 4, 4), memory=20, net="mlp(width=4, depth=4)", augment="none", device="cpu")
    x, y = np.random.default_rng(0).integers(0, 256, (8, 1, 4, 4)).astype(np.uint8), np.arange(8) % 4
    learner.learn(x, y)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(6):
                learner.learn(x, y)
                assert len(learner.predict(x)) == 8
        except BaseException as error:  # noqa: BLE001 (whatever a thread may meet)
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert learner.engine.progress.step == 25
    assert torch.equal(copy.deepcopy(learner).net.classifier.weight, learner.net.classifier.weight)
