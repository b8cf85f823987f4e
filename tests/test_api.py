"""The library from Python and a notebook: runs, whole streams, what they return, and a sentence for every mistake."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gracecl
from gracecl import Learner, Result, RunConfig, UserError
from gracecl.data import Data
from gracecl.lab import cli
from gracecl.lab.cli.main import canonical_option
from gracecl.lab.runs import result as results
from gracecl.lab.runs.run import Interrupted, run
from gracecl.registry import options
from gracecl.registry.options import LearnerOptions, RunOptions
from gracecl.streams import Stream
from gracecl.testing import toy_data, toy_stream

STREAM = "split-digits(size=8, classes='0-3', tasks=2, batch=30)"
SMALL: dict[str, Any] = {"stream": STREAM, "net": "mlp(width=8, depth=4)", "memory": 20, "device": "cpu"}
TOY: dict[str, Any] = {"classes": 6, "shape": (1, 8, 8), "net": "mlp(width=12)", "memory": 12, "device": "cpu"}
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def digits() -> Stream:
    return gracecl.stream(STREAM)


@pytest.fixture(scope="module")
def result() -> Result:
    return gracecl.run("grace(er)", **SMALL, eval_every=5)


@pytest.fixture
def fitted() -> Learner:
    return Learner("er", **TOY).fit(toy_stream())


# A run.


def test_a_run_returns_what_the_command_records(result: Result, tmp_path: Path) -> None:
    folder = run(RunConfig("grace(er)", **SMALL, eval_every=5), tmp_path)
    command = Result.read(folder)
    assert result.folder is None
    assert command.folder == folder
    assert np.array_equal(result.accuracy, command.accuracy, equal_nan=True)
    assert result.metrics == command.metrics
    assert result.record.steps == command.record.steps
    assert result.config == command.config
    assert result.config.method == "grace(er())"


def test_a_result_holds_the_matrix_the_metrics_and_the_rules(result: Result) -> None:
    assert result.accuracy.shape == (2, 2)
    assert result.metrics["acc"] == pytest.approx(result.accuracy[-1].mean())
    assert {"acc", "aia", "forgetting", "bwt"} <= result.metrics.keys()
    assert result.rule == "linear_last"
    assert result.rule in result.rules
    assert f'<td style="text-align:right">{result.metrics["acc"]:.2f}</td>' in result._repr_html_(), "a table in a notebook"
    other = result.under("linear_1")
    assert other.metrics["acc"] == pytest.approx(other.accuracy[-1].mean())
    assert not np.array_equal(other.accuracy, result.accuracy, equal_nan=True)
    with pytest.raises(UserError, match="unknown rule 'linear_las'; did you mean 'linear_last'"):
        result.under("linear_las")


def test_a_result_tells_itself_in_two_lines(result: Result, tmp_path: Path) -> None:
    first, second = repr(result).splitlines()
    assert first.startswith(f"Result(grace(er()) on {STREAM}, seed 0: acc {result.metrics['acc']:.1f} %")
    assert second == "  no folder was kept"
    kept = gracecl.run("sgd", **SMALL, steps=2, out=tmp_path)
    assert repr(kept).endswith(f"\n  {kept.folder}")


def test_a_run_in_a_folder_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gracecl.run("er", **SMALL, steps=3, seed=1, out=str(tmp_path))
    assert first.folder is not None
    assert first.folder.is_relative_to(tmp_path)
    monkeypatch.setattr("gracecl.lab.runs.run._train", None)
    again = gracecl.run("er", **SMALL, steps=3, seed=1, out=tmp_path)
    assert again.folder == first.folder
    assert again.metrics == first.metrics


def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise Interrupted("continue with: gracecl resume FOLDER")

    monkeypatch.setattr("gracecl.lab.runs.run._train", stop)
    with pytest.raises(Interrupted, match="gracecl resume FOLDER"):
        gracecl.run("er", **SMALL, out=tmp_path)
    with pytest.raises(Interrupted, match="nothing was kept; with out=FOLDER a run continues"):
        gracecl.run("er", **SMALL)


def test_a_run_is_silent_unless_progress_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    gracecl.run("er", **SMALL, steps=2)
    assert capfd.readouterr() == ("", "")
    gracecl.run("er", **SMALL, steps=2, progress=True)
    assert "step 2 of 2" in capfd.readouterr().err


def test_a_temporary_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gracecl.run("sgd", **SMALL, steps=2)
    assert not list(tmp_path.iterdir())


def test_options_are_the_fields_of_the_configuration() -> None:
    config, _ = results.configuration("er(n_recall=7)", epochs=2, **SMALL, seed=3, optimizer="sgd(lr=0.1)", steps=None)
    assert config == RunConfig("er(n_recall=7)", **SMALL | {"stream": f"{STREAM[:-1]}, epochs=2)"}, seed=3, optimizer="sgd(lr=0.1)")


def test_options_are_written_once() -> None:
    """Signature, default and sentence of each are those of its field, for the learner, the run and the command."""
    words = options.sentences(RunOptions)
    assert list(words) == ["error_name", *(field.name for field in dataclasses.fields(RunOptions))]
    of_run_alone = {*words} - {*options.sentences(LearnerOptions)}
    run, tune = cli.VERBS["run"], cli.VERBS["tune"]
    taken_by = [(Learner.__init__, of_run_alone), (gracecl.run, set()), (run, {"seed"}), (tune, {"seed", "snapshots"})]
    for function, left_out in taken_by:
        parameters = inspect.signature(function).parameters
        for field in dataclasses.fields(RunOptions):
            if field.name == "method" or field.name in left_out:
                continue
            default = None if function in (run, tune) and field.name in ("augment", "optimizer") else field.default
            assert parameters[field.name].default == default
            assert f"{field.name}: {words[field.name]}" in (function.__doc__ or "")
    with pytest.raises(UserError, match="a learner has no option 'sed'; did you mean 'seed'"):
        Learner("er", **TOY, sed=3)


def test_options_left_open_come_from_the_published_values_as_those_of_the_command_do() -> None:
    config, taken = results.configuration("er", defaults="own", stream="split-cifar100", memory=1000)
    assert (config.optimizer, config.augment) == ("sgd(lr=0.1)", "none")
    assert taken.startswith("defaults own of split-cifar100")
    assert results.configuration("er", defaults="none", stream="split-cifar100")[0].optimizer == RunConfig.optimizer


RUN_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"memry": 3}, "a run has no option 'memry'; did you mean 'memory'"),
    "a name of the call": ({"outt": "x"}, "a run has no option 'outt'; did you mean 'out'"),
    "a flag of the command": ({"seeds": "0-4"}, "a run has no option 'seeds'; did you mean 'seed'"),
    "two names": ({"memory": 3, "buffer_size": 4}, "memory and buffer_size name one option"),
    "a type": ({"memory": "many"}, "memory must be"),
    "a range": ({"steps": 0}, "steps must be at least 1"),
    "a stream": ({"stream": "split-digit"}, "did you mean 'digits'"),
    "a stream object": ({"stream": toy_stream()}, r"takes the expression of a stream.*Learner.fit"),
    "a net": ({"net": "mpl"}, "did you mean 'mlp'"),
    "a set": ({"defaults": "owm"}, "did you mean 'own'"),
    "a plugin": ({"plugins": ["no_such_module"]}, "cannot import the plugin"),
}


@pytest.mark.parametrize("kind", RUN_MISTAKES)
def test_a_mistake_in_an_option_is_one_sentence(kind: str) -> None:
    change, sentence = RUN_MISTAKES[kind]
    with pytest.raises(UserError, match=sentence) as told:
        gracecl.run("er", **SMALL | change)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("method", ["ers", 3])
def test_a_mistake_in_the_method_is_one_sentence(method: Any) -> None:
    with pytest.raises(UserError, match=r"did you mean 'er'|method must be"):
        gracecl.run(method, **SMALL)


# Tables.


def test_evaluations_and_steps_are_rows(result: Result) -> None:
    rows = [row for row in result.evaluations if row["task_end"] and row["rule"] == result.rule]
    last = [row["accuracy"] for row in rows if row["step"] == rows[-1]["step"]]
    assert last == result.accuracy[-1].tolist()
    assert any(not row["task_end"] for row in result.evaluations), "eval_every looks in between"
    first = [row for row in result.steps if row["step"] == 0 and row["term"] == "ce/all"]
    assert [row["layer"] for row in first] == [1, 2, 3, 4]
    assert [row["value"] for row in first] == result.record.steps[0]["rows"]["ce/all"]


def test_a_data_frame_is_made_of_them(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    for what in ("evaluations", "steps"):
        frame, lines = result.to_pandas(what), getattr(result, what)
        assert list(frame.columns) == list(dict.fromkeys(name for line in lines for name in line))
        assert frame["step"].tolist() == [line["step"] for line in lines]
    with pytest.raises(UserError, match="the tables evaluations, steps, predictions, gaps, calibration, not 'losses'"):
        result.to_pandas("losses")  # type: ignore[arg-type]


def test_a_missing_pandas_is_one_sentence(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        result.to_pandas()


# Streams.


def test_a_stream_is_made_of_an_expression_of_data_or_of_itself(digits: Stream) -> None:
    assert gracecl.stream("split-digits", size=8, classes="0-3", tasks=2, batch=30).hash == digits.hash
    assert gracecl.stream(STREAM, seed=1).hash != digits.hash
    assert gracecl.stream(toy_data(), tasks=3, batch=3).hash == toy_stream().hash
    assert gracecl.stream(digits) is digits


def test_arrays_become_a_stream() -> None:
    images, labels = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 4
    stream = gracecl.stream(gracecl.from_arrays(images, labels, images, labels), tasks=2, batch=3)
    assert (len(stream), stream.tasks) == (4, 2)


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ("split-digit", {}, "did you mean 'digits'"),
        ("split-digits", {"taks": 2}, "split has no option 'taks'; did you mean 'tasks'"),
        ("split-digits(tasks=5)", {"tasks": 2}, "gives tasks already"),
        (toy_data(), {"taks": 2}, "split has no option 'taks'; did you mean 'tasks'"),
        (toy_data(), {"tasks": 7}, "6 classes cannot make 7 tasks"),
        (toy_stream(), {"tasks": 2}, "not of one that is made already"),
        (3, {}, "not of a value of type int"),
    ],
    ids=["data set", "option", "twice", "option on data", "tasks", "made already", "number"],
)
def test_a_mistake_in_a_stream_is_one_sentence(source: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        gracecl.stream(source, **options)


# A learner and a whole stream.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grace", "joint", "gdumb(epochs=1)", "lucir"])
def test_a_fitted_learner_is_what_a_run_makes(method: str, digits: Stream) -> None:
    found = gracecl.run(method, **SMALL)
    data = digits.data
    options = {name: value for name, value in SMALL.items() if name != "stream"}
    learner = Learner(method, classes=data.classes, shape=data.shape, mean=data.mean, std=data.std, **options)
    accuracy = learner.fit(STREAM).evaluate(STREAM)
    assert accuracy.per_task.tolist() == found.accuracy[-1].tolist()
    assert accuracy.average == found.metrics["acc"]
    assert accuracy.rule == found.rule


def test_fit_is_learn_batch_by_batch() -> None:
    stream = toy_stream()
    whole, by_batch = Learner("mose", **TOY).fit(stream), Learner("mose", **TOY)
    for step in range(len(stream)):
        batch = stream.batch(step)
        by_batch.learn(batch.x, batch.labels, task=batch.task)
    by_batch.end_task()
    assert whole.engine.progress == by_batch.engine.progress
    for one, two in zip(whole.net.state_dict().values(), by_batch.net.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_a_second_stream_brings_new_tasks_and_learning_goes_on(fitted: Learner) -> None:
    fitted.fit(toy_stream(seed=1))
    assert fitted.engine.progress.task == 5
    assert fitted.engine.progress.step == 2 * len(toy_stream())
    data = toy_data()
    fitted.learn(data.train_x[:3], data.train_y[:3])
    assert fitted.engine.progress.task == 5, "no label is new"
    fitted.learn(data.train_x[:3], data.train_y[:3], task="more")
    assert fitted.engine.progress.task == 6


def test_accuracy_is_percent_of_all_images_and_of_each_task(fitted: Learner) -> None:
    stream = toy_stream()
    x, y, tasks = stream.data.test_x, stream.data.test_y, stream.test_task
    right = fitted.predict(x) == y
    accuracy = fitted.evaluate(x, y, tasks)
    assert accuracy.overall == pytest.approx(100 * right.mean())
    assert accuracy.per_task.tolist() == pytest.approx([100 * right[tasks == task].mean() for task in range(3)])
    assert accuracy.rule == "linear_last"
    assert fitted.evaluate(stream).per_task.tolist() == accuracy.per_task.tolist()
    assert fitted.evaluate(x.numpy(), y.tolist()).per_task.tolist() == [accuracy.overall]
    assert fitted.evaluate(stream, rule="linear_mean").rule == "linear_mean"
    gap = fitted.evaluate(x, y, 2 * tasks)
    assert np.isnan(gap.per_task).tolist() == [False, True, False, True, False]
    assert gap.average == pytest.approx(accuracy.average)


def test_tasks_that_were_not_met_do_not_count() -> None:
    stream = toy_stream()
    learner = Learner("er", **TOY).fit(stream.cut(2))
    assert len(learner.evaluate(stream).per_task) == 1


def test_a_learner_tells_itself_in_a_line(fitted: Learner) -> None:
    assert repr(fitted) == f"Learner(er(), 6 of 6 classes met in {len(toy_stream())} steps)"


def unmarked() -> Stream:
    stream = toy_stream()
    return dataclasses.replace(stream, task_of_step=np.full(len(stream), -1))


FIT_MISTAKES: dict[str, tuple[str, Any, str]] = {
    "an unknown stream": ("er", "split-digit", "did you mean 'digits'"),
    "another shape": ("er", "split-digits(size=16)", r"shape \(1, 16, 16\) and this learner's \(1, 8, 8\)"),
    "more classes": ("er", "split-digits(size=8)", "10 classes and this learner 6"),
    "no stream": ("er", 3, "a learner fits a stream, a data set, or anything that yields batches"),
    "no task marks": ("lucir", unmarked(), "needs a stream with task marks"),
}


@pytest.mark.parametrize("kind", FIT_MISTAKES)
def test_a_wrong_stream_is_one_sentence(kind: str) -> None:
    method, stream, sentence = FIT_MISTAKES[kind]
    with pytest.raises(UserError, match=sentence):
        Learner(method, **TOY).fit(stream)


def evaluation_mistakes() -> dict[str, tuple[tuple[Any, ...], str]]:
    data: Data = toy_data()
    x, y = data.test_x, data.test_y
    return {
        "no labels": ((x,), "the labels are missing"),
        "labels beside a stream": ((toy_stream(), y), "a stream brings its own labels"),
        "too few labels": ((x, y[:3]), "24 images came with 3 labels"),
        "too few tasks": ((x, y, [0, 1]), "24 labels and 2 tasks"),
        "names of tasks": ((x, y, ["a"] * len(y)), "tasks must be a list of whole numbers"),
        "negative tasks": ((x, y, -np.ones(len(y), int)), "tasks are numbers from 0 to 999,999"),
        "a rule": ((x, y, None, "linear_las"), "did you mean 'linear_last'"),
        "a class outside": ((x, y + 1), "label 6 is not one of the declared classes"),
    }


@pytest.mark.parametrize("kind", evaluation_mistakes())
def test_a_wrong_question_is_one_sentence(kind: str, fitted: Learner) -> None:
    arguments, sentence = evaluation_mistakes()[kind]
    with pytest.raises(UserError, match=sentence):
        fitted.evaluate(*arguments)


def test_evaluating_before_the_first_lesson_is_one_sentence() -> None:
    with pytest.raises(UserError, match="none of the stream's classes was learned yet"):
        Learner("er", **TOY).evaluate(toy_stream())


# Losses that are not finite.


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_term_and_the_remedy() -> None:
    sentence = r"the loss row 'ce/all' became .*(nan|inf).* at step \d+; use a smaller learning rate"
    with pytest.raises(UserError, match=sentence):
        Learner("er", **TOY, optimizer="sgd(lr=1e20)").fit(toy_stream())
    learner, stream = Learner("er", **TOY, optimizer="sgd(lr=1e20)"), toy_stream()
    with pytest.raises(UserError, match=sentence):  # noqa: PT012 (some step of several)
        for step in range(len(stream)):
            batch = stream.batch(step)
            learner.learn(batch.x, batch.labels)


# Names.


def test_buffer_size_is_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {name: value for name, value in TOY.items() if name != "memory"}
    assert Learner("er", **options, buffer_size=7).recipe.memory == 7
    with pytest.raises(UserError, match="memory and buffer_size name one option"):
        Learner("er", **TOY, buffer_size=7)
    assert results.configuration("er", buffer_size=7)[0].memory == 7
    for flag in ("--buffer-size", "--buffer-size=7", "--buffer_size"):
        assert canonical_option(flag) == flag.replace("buffer-size", "memory").replace("buffer_size", "memory")
    words = ["--stream", STREAM, "--net", "mlp(width=8)", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.call(["run", "er", "--buffer-size", "7", *words]) == 0
    [file] = tmp_path.rglob("config.json")
    assert json.loads(file.read_text())["memory"] == 7
    capsys.readouterr()


def test_public_names_are_there_and_importing_the_package_stays_light() -> None:
    for name in gracecl.__all__:
        assert getattr(gracecl, name) is not None
    program = "import sys, gracecl; sys.exit(sorted({'torch', 'numpy', 'matplotlib', 'pandas'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_examples_use_public_names_alone() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        text = example.read_text(encoding="utf-8")
        assert "gracecl.testing" not in text, example.name
        assert ".engine" not in text, example.name
