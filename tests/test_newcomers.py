"""What a new user tries first: arrays of any kind, a module as a net, a stream of their own. It works, or a sentence says why."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import gracecl
import warm
from gracecl import Feedback, Learner, UserError, from_arrays, tap
from gracecl.data import Data
from gracecl.errors import Caution, Misfit
from gracecl.lab import cli
from gracecl.lab.report import figures
from gracecl.lab.runs import watch
from gracecl.registry import streams
from gracecl.streams import Stream
from gracecl.testing import check_backbone, check_memory, check_method, check_stream, toy_data, toy_stream

X = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), dtype=np.uint8)
Y = np.arange(8) % 4
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
TOY: dict[str, Any] = {"classes": 6, "shape": (1, 8, 8), "net": "mlp(width=12)", "memory": 12, "augment": "none", "device": "cpu"}
SMALL: dict[str, Any] = {"stream": "split-digits(size=8, classes='0-3', tasks=2)", "net": "mlp(width=8)", "memory": 5, "steps": 2}


class Endless(Dataset[Any]):
    """A data set as people write it: it never raises IndexError, so that going through it does not end."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        assert place < 100, "the data set was gone through like a list"
        return torch.zeros(1, 8, 8), place % 2


class Listlike:
    """The same without torch."""

    __len__, __getitem__ = Endless.__len__, Endless.__getitem__


# Evaluation of a stream of one's own.


@pytest.fixture
def own() -> Iterator[Callable[..., str]]:
    """Registers the toy stream with a change, and gives its expression."""

    def register(**change: Any) -> str:
        @streams.register("mine", override=True)
        def mine(data: Data, seed: int) -> Stream:
            """The toy stream, changed."""
            stream = toy_stream(seed)
            return dataclasses.replace(stream, **{name: make(stream) for name, make in change.items()})

        return "mine-digits"

    yield register
    streams.loaded.pop("mine", None)


def test_one_test_set_for_all_tasks_gives_an_accuracy_and_names_what_it_cannot(own: Callable[..., str]) -> None:
    expression = own(test_task=lambda stream: np.zeros_like(stream.test_task))
    check_stream(expression)
    with pytest.warns(Caution, match=r"3 evaluation marks and test images of 1 task, so acc, aia and aaa .* forgetting, bwt and"):
        result = gracecl.run("er", **SMALL | {"stream": expression, "steps": None})
    rows = [row["accuracy"] for row in result.evaluations if row["rule"] == result.rule]
    assert len(rows) == 3
    assert result.metrics["acc"] == rows[-1]
    assert result.metrics["aia"] == result.metrics["aaa"] == pytest.approx(np.mean(rows))
    for name in ("forgetting", "forgetting_mose", "bwt", "learning_acc", "min_acc", "wc_acc"):
        assert math.isnan(result.metrics[name]), f"{name} needs a test of every task"
    assert f"acc {rows[-1]:.1f} %, no forgetting under" in repr(result)
    assert "nan" not in repr(result)


def test_a_task_without_test_images_is_left_out_of_the_averages(own: Callable[..., str]) -> None:
    def without_the_second(stream: Stream) -> Data:
        kept = stream.test_task != 1
        return dataclasses.replace(stream.data, test_x=stream.data.test_x[torch.from_numpy(kept)], test_y=stream.data.test_y[kept])

    expression = own(data=without_the_second, test_task=lambda stream: stream.test_task[stream.test_task != 1])
    with pytest.warns(Caution, match="3 evaluation marks and test images of 2 tasks"):
        result = gracecl.run("er", **SMALL | {"stream": expression, "steps": None})
    last = result.accuracy[-1]
    assert math.isnan(last[1])
    assert result.metrics["acc"] == pytest.approx((last[0] + last[2]) / 2)
    means = [result.accuracy[0, 0], result.accuracy[1, 0], (last[0] + last[2]) / 2]
    assert result.metrics["aia"] == pytest.approx(np.mean(means))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more test tasks than marks": (
        {"marks": lambda stream: stream.marks[1:]},
        "test images of task 2 and only 2 evaluation marks",
    ),
    "no marks": ({"marks": lambda stream: stream.marks[:0]}, "last step is not marked for evaluation"),
    "last step unmarked": ({"marks": lambda stream: stream.marks - 1}, "last step is not marked for evaluation"),
    "test tasks missing": ({"test_task": lambda stream: stream.test_task[1:]}, "do not belong to a task each"),
    "negative test task": ({"test_task": lambda stream: stream.test_task - 1}, "do not belong to a task each"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_stream_without_an_accuracy_is_refused_by_its_check_and_by_a_run(kind: str, own: Callable[..., str]) -> None:
    change, sentence = REFUSED[kind]
    expression = own(**change)
    with pytest.raises(AssertionError, match=sentence):
        check_stream(expression)
    with pytest.raises(UserError, match=sentence):
        gracecl.run("er", **SMALL | {"stream": expression})


def of_the_last_task(own: Callable[..., str]) -> str:
    """A stream with test images of its last task alone."""

    def only_the_last(stream: Stream) -> Data:
        kept = stream.test_task == 2
        return dataclasses.replace(stream.data, test_x=stream.data.test_x[torch.from_numpy(kept)], test_y=stream.data.test_y[kept])

    return own(data=only_the_last, test_task=lambda stream: stream.test_task[stream.test_task == 2])


def test_pictures_and_tables_have_averages_of_what_is_tested(
    own: Callable[..., str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The command's tables, the page, the pictures and `load_runs`; the label at the end of a curve said nan."""
    expression, drawn = of_the_last_task(own), list[Any]()
    monkeypatch.setattr(figures, "label_ends", lambda figure, axes, ends, **more: drawn.extend(ends))
    words = [f"--{name}={value}" for name, value in (SMALL | {"stream": expression}).items() if name != "steps"]
    with pytest.warns(Caution, match="3 evaluation marks and test images of 1 task"):
        assert cli.call(["run", "er", *words, f"--out={tmp_path}", "--jobs=1", "--threads=1"]) == 0
    [row] = gracecl.load_runs(tmp_path).to_dict("records")
    shown = capsys.readouterr().out + (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "nan" not in shown.lower()
    assert f"{row['acc']:.2f}" in shown
    assert drawn[-1].text.endswith(f"  {row['acc']:.1f}")
    assert all(math.isfinite(end.value) for end in drawn)


def test_evaluations_before_any_test_class_is_met_have_no_accuracy(own: Callable[..., str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LINES", 0.0)
    with pytest.warns(Caution, match="3 evaluation marks and test images of 1 task"):
        result = gracecl.run("er", **SMALL | {"stream": of_the_last_task(own), "steps": None}, progress=True)
    assert result.metrics["acc"] == result.accuracy[2, 2]
    shown = capsys.readouterr().err.splitlines()
    assert "test " not in shown[0]
    assert f"test {result.metrics['acc']:.1f} %" in shown[-1]


def test_a_stream_that_shows_no_class_of_its_test_images_is_refused(own: Callable[..., str]) -> None:
    with pytest.raises(
        UserError, match="none of the test images is of a class that the 7 steps of the stream show; use more steps"
    ):
        gracecl.run("er", **SMALL | {"stream": of_the_last_task(own), "steps": 7})


# Arguments.


def test_a_stream_is_checked_by_its_expression_too() -> None:
    check_stream("split-digits(size=8, tasks=2)")
    with pytest.raises(UserError, match="made of an expression such as 'split-digits"):
        check_stream(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["x", True, -1, 1.5, 2**200, None, [1]], ids=str)
@pytest.mark.parametrize("source", ["split-digits(size=8)", toy_data()], ids=["expression", "data"])
def test_a_stream_takes_whole_numbers_as_seeds(seed: Any, source: Any) -> None:
    with pytest.raises(UserError, match="stream: seed must be"):
        gracecl.stream(source, seed=seed)


def test_numbers_of_numpy_are_numbers_to_a_stream() -> None:
    mine = gracecl.stream("split-digits(size=8)", seed=np.int64(3), tasks=np.int64(2), classes=np.arange(4))  # type: ignore[arg-type]
    assert mine.hash == gracecl.stream("split-digits(size=8, tasks=2, classes=[0, 1, 2, 3])", seed=3).hash


@pytest.mark.parametrize("shape", [(4, 4, 13), (1, 1, 13), (3, 3, 32)], ids=str)
def test_square_images_of_many_channels_are_taken_as_they_lie(shape: tuple[int, int, int]) -> None:
    x = np.zeros((8, *shape), np.uint8)
    assert from_arrays(x, Y, x, Y).shape == (shape[2], *shape[:2])
    first = torch.from_numpy(x).permute(0, 3, 1, 2)
    assert from_arrays(first, Y, first, Y).shape == (shape[2], *shape[:2])


def test_the_place_of_the_channels_can_be_said() -> None:
    first = np.ascontiguousarray(X.transpose(0, 3, 1, 2))
    with pytest.raises(UserError, match=r"3 channels in the wrong place.*say channels='first' or channels='last'"):
        from_arrays(first, Y, first, Y)
    assert torch.equal(from_arrays(first, Y, first, Y, channels="first").train_x, from_arrays(X, Y, X, Y).train_x)
    assert from_arrays(first, Y, first, Y, channels="last").shape == (6, 3, 6)
    with pytest.raises(UserError, match="channels says where they lie, 'first' or 'last', not 'middle'"):
        from_arrays(X, Y, X, Y, channels="middle")  # type: ignore[arg-type]


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "data set": ({"train_x": Endless()}, r"train_x is a data set \(Endless\) and not an array; gracecl.from_torch"),
    "our data set": ({"train_x": toy_data()}, r"train_x is a data set \(Data\)"),
    "labels in a data set": ({"train_y": Endless()}, "train_y is a data set"),
    "like a list": ({"train_x": Listlike()}, "train_x must be an array or a tensor, not a Listlike"),
    "no labels": ({"train_y": None}, "train_y must be an array or a tensor, not missing"),
    "generator": ({"train_y": (label for label in Y)}, "not a generator"),
    "uneven": ({"train_x": [[1], [1, 2]]}, "not a list of uneven parts"),
    "a number of names": ({"class_names": 4}, "class_names is a list of names, one for each class, not a int"),
    "a word of names": ({"class_names": "abcd"}, "class_names is a list of names"),
    "tasks": ({"tasks": "two"}, "tasks is a whole number of at least 1, not 'two'"),
    "no tasks": ({"tasks": 0}, "tasks is a whole number of at least 1, not 0"),
    "name": ({"name": None}, "name is what the data set is called"),
    "mean": ({"mean": "abc"}, "mean must be 3 numbers"),
    "one std": ({"std": 0.5}, "std must be 3 numbers"),
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_arrays_that_are_none_are_a_sentence(kind: str) -> None:
    change, sentence = WRONG_ARRAYS[kind]
    with pytest.raises(UserError, match=sentence):
        from_arrays(**{"train_x": X, "train_y": Y, "test_x": X, "test_y": Y} | change)


def test_half_precision_and_sparse_tensors_are_arrays_too() -> None:
    x = torch.linspace(0, 1, 8 * 16).reshape(8, 1, 4, 4)
    whole = from_arrays(x.bfloat16().float(), Y, x, Y).train_x
    assert torch.equal(from_arrays(x.bfloat16(), Y, x, Y).train_x, whole)
    assert torch.equal(from_arrays(x.to_sparse(), Y, x, Y).train_x, from_arrays(x, Y, x, Y).train_x)


WRONG_BATCHES: dict[str, tuple[Any, Any, str]] = {
    "data set": (Endless(), [0], "images is a data set"),
    "like a list": (Listlike(), [0], "images must be an array or a tensor, not a Listlike"),
    "tensors with gradients": ([torch.zeros(1, 8, 8, requires_grad=True)], [0], "images must be an array or a tensor, not a list"),
    "float tensor": (torch.zeros(1, 1, 8, 8), [0], r"not torch.float32; for floats .* \(x \* 255\).round\(\).to\(torch.uint8\)"),
    "half labels": (
        torch.zeros(1, 1, 8, 8, dtype=torch.uint8),
        torch.zeros(1).bfloat16(),
        "labels must be a list of whole numbers",
    ),
}


@pytest.mark.parametrize("kind", WRONG_BATCHES)
def test_a_batch_that_is_none_is_a_sentence(kind: str) -> None:
    x, y, sentence = WRONG_BATCHES[kind]
    with pytest.raises(UserError, match=sentence):
        Learner("er", **TOY).learn(x, y)


def test_a_learner_takes_sparse_images_and_evaluates_data_sets() -> None:
    data = toy_data()
    one, two = Learner("er", **TOY).fit(data), Learner("er", **TOY).fit(gracecl.stream(data))
    assert one.evaluate(data).overall == two.evaluate(gracecl.stream(data)).overall
    sparse = data.test_x.to_sparse()
    assert np.array_equal(one.predict(sparse), one.predict(data.test_x))


@pytest.mark.parametrize("make", [lambda **net: gracecl.run("er", **SMALL | net), lambda **net: Learner("er", **TOY | net)])
def test_what_is_no_net_is_named_with_the_remedy(make: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"not a list; Learner and gracecl\.run also take a torch\.nn\.Module") as error:
        make(net=[MODEL])
    assert len(str(error.value)) < 300


WRONG_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "log=print": (
        {"log": print},
        'log is one of "tensorboard", "wandb", "mlflow" or a list of them, not a builtin_function_or_method',
    ),
    "log=True": ({"log": True}, "log is one of"),
    "log=[print]": ({"log": [print]}, "log is one of"),
    "plugins=3": ({"plugins": 3}, "plugins is a list of modules or files, not a int"),
    "one plugin": ({"plugins": "no_such_plugin.py"}, "no_such_plugin.py"),
    "out=3": ({"out": 3}, "out is a path, not a int"),
    "data=3": ({"data": 3}, "data is a path, not a int"),
    "defaults=3": ({"defaults": 3}, "defaults is the name of a set of values or a file, not a int"),
    "threads=0": ({"threads": 0}, "threads must be between 1 and"),
    "seed=-1": ({"seed": -1}, "the run: seed must be at least 0, not -1"),
    "threads=1.5": ({"threads": 1.5}, "threads is a whole number, not 1.5"),
    "stream=data": ({"stream": toy_data()}, "stream must be a word in quotes, not Data"),
}


@pytest.mark.parametrize("kind", WRONG_RUNS)
def test_a_wrong_argument_of_a_run_is_a_sentence(kind: str) -> None:
    change, sentence = WRONG_RUNS[kind]
    with pytest.raises(UserError, match=re.escape(sentence)):
        gracecl.run("er", **SMALL | change)


WRONG_TAPS: dict[str, tuple[dict[str, Any], str]] = {
    "example=dict": (
        {"example": {"x": torch.zeros(1, 16)}},
        "Sequential does not take inputs of the shape .*unexpected keyword argument 'x'",
    ),
    "example=int": ({"example": 16}, "example= is one tensor"),
    "example=str": ({"example": "16"}, "example= is one tensor"),
    "example=negative": ({"example": (1, -16)}, r"not a tuple \(\(1, -16\)\)"),
    "example=words": ({"example": ("1", "16")}, "example= is one tensor"),
    "example=nothing": ({"example": ()}, "example= is one tensor"),
    "example=number": ({"example": torch.tensor(3.0)}, "example= is one tensor"),
    "model=str": ({"model": "resnet18"}, "tap takes a torch.nn.Module, not a str"),
    "classes=str": ({"classes": "3"}, "tap: classes is a whole number of at least 1, not '3'"),
    "classes=0": ({"classes": 0}, "tap: classes is a whole number of at least 1, not 0"),
    "classes=None": ({"classes": None}, "tap: classes is"),
    "taps=str": ({"taps": "4"}, "tap: taps is"),
    "embedding=-1": ({"embedding": -1}, "tap: embedding is"),
    "at=int": ({"at": 3}, "at= is the name of a module"),
    "at=[int]": ({"at": [3]}, "at= is the name of a module"),
}


@pytest.mark.parametrize("kind", WRONG_TAPS)
def test_a_wrong_argument_of_tap_is_a_sentence(kind: str) -> None:
    change, sentence = WRONG_TAPS[kind]
    with pytest.raises(UserError, match=sentence):
        tap(**{"model": MODEL, "classes": 3} | change)


def test_an_example_of_numpy_is_an_input() -> None:
    assert tap(MODEL, classes=3, example=np.zeros((5, 16), np.float32)).layers == 4


def test_wrong_arguments_of_feedback_are_a_sentence() -> None:
    net = tap(MODEL, classes=3)
    feedback, x = Feedback(4), torch.zeros(2, 16)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: Feedback("4"), "at least one tapped layer, not '4'"),  # type: ignore[arg-type]
        (lambda: Feedback(4, 3), "controller is an expression such as"),  # type: ignore[arg-type]
        (lambda: feedback(np.zeros((4, 2, 3)), torch.zeros(4)), "as tensors, not a ndarray and a Tensor"),  # type: ignore[arg-type]
        (lambda: feedback(torch.zeros(4, 2, 3), {"a": 1}), "as tensors, not a Tensor and a dict"),  # type: ignore[arg-type]
        (lambda: feedback.observe_past(3, x, [0, 1]), "observe_past needs a net"),  # type: ignore[arg-type]
        (lambda: feedback.observe_past(net, x, [0, 3]), "labels from 0 to 2, whole numbers"),
        (lambda: feedback.observe_past(net, x, [0.5, 1.0]), "labels from 0 to 2, whole numbers"),
    ]
    for call, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            call()
    assert torch.equal(feedback.observe_past(net, x.numpy(), [0, 1]), feedback.observe_past(net, x, [0, 1]))  # type: ignore[arg-type]


# Defaults and declarations that do not fit the data.


def misfits(call: Callable[[], Any]) -> list[str]:
    """What a call cautions about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Misfit)
        call()
    return [str(caution.message) for caution in caught if issubclass(caution.category, Misfit)]


OPEN = {name: value for name, value in TOY.items() if name != "augment"}


def test_a_learner_of_tiny_images_names_the_default_augmentation_once() -> None:
    [sentence] = misfits(lambda: Learner("er", **OPEN).fit(toy_stream()))
    assert "images of 8 × 8 pixels are too small" in sentence
    assert "give augment='none'" in sentence
    for augment in ("none", "tau"):
        assert misfits(lambda augment=augment: Learner("er", **OPEN, augment=augment)) == [], "the user decided"  # type: ignore[misc]
    assert misfits(lambda: Learner("er", **OPEN | {"shape": (1, 16, 16)})) == []
    assert misfits(lambda: Learner("slda", **OPEN)) == [], "it does not train"


def test_a_saved_learner_does_not_caution_again(tmp_path: Path) -> None:
    Learner("er", **TOY | {"augment": "tau"}).save(tmp_path / "learner")
    assert misfits(lambda: Learner.load(tmp_path / "learner")) == []


def test_a_run_on_tiny_images_names_the_default_augmentation() -> None:
    [sentence] = misfits(lambda: gracecl.run("er", **SMALL))
    assert "--augment none" in sentence
    assert misfits(lambda: gracecl.run("er", **SMALL, augment="none")) == []


def characters(count: int = 12) -> tuple[Tensor, list[int]]:
    """Grey images of 16 pixels on black, of two classes."""
    images = torch.zeros(count, 1, 16, 16, dtype=torch.uint8)
    images[:, :, 4:10, 5:12] = torch.arange(1, 43, dtype=torch.uint8).view(6, 7)
    return images, [number % 2 for number in range(count)]


def test_images_on_one_colour_are_named_once() -> None:
    images, labels = characters()
    small = {"memory": 5, "net": "mlp(width=8)"}

    def learn(images: Tensor, method: str = "er", **options: Any) -> list[str]:
        learner = Learner(method, **small | options)  # type: ignore[arg-type]
        return misfits(lambda: [learner.learn(images, labels) for _ in range(2)])

    [sentence] = learn(images)
    assert "84% of the pixels have one value, as in characters or drawings" in sentence
    assert learn(images, augment="tau") == learn(images, augment="none") == [], "the user decided"
    assert learn(images, "slda") == [], "it does not train"
    generator = torch.Generator().manual_seed(0)
    assert learn(torch.randint(0, 256, images.shape, dtype=torch.uint8, generator=generator)) == []
    data = gracecl.from_arrays(images, labels, images, labels)
    learner = Learner("er", **small)  # type: ignore[arg-type]
    assert misfits(lambda: learner.fit(data)) == [sentence]


def test_a_command_says_so_in_a_line(tmp_path: Path) -> None:
    words = [
        "run",
        "er",
        "sgd",
        "--stream",
        SMALL["stream"],
        "--net",
        "mlp(width=8)",
        "--memory",
        "5",
        "--steps",
        "2",
        "--jobs",
        "1",
    ]
    done = warm.python(["-c", "from gracecl.lab.cli import main; main()", *words, "--out", "runs"], tmp_path, os.environ)
    assert done.returncode == 0
    assert done.stderr.count("gracecl: images of 8 × 8 pixels are too small for the crops") == 1


def test_far_more_classes_than_come_are_named_once() -> None:
    data = toy_data()
    learner = Learner("er", **TOY | {"classes": 1000})

    def learn(times: int) -> None:
        for _ in range(times):
            learner.learn(data.train_x[:4], data.train_y[:4])

    learn(99)
    assert misfits(lambda: learner.predict(data.test_x)) == [], "more may come"
    learn(1)
    [sentence] = misfits(lambda: learner.evaluate(data.test_x, data.test_y))
    assert sentence.startswith("1,000 classes are declared and 1 were met in 100 steps")
    assert "give classes= as many as will come" in sentence
    assert misfits(lambda: learner.predict_proba(data.test_x)) == []


def test_a_first_task_of_many_is_no_reason_to_caution() -> None:
    data = toy_data()
    learner = Learner("er", **TOY | {"classes": 120})
    for _ in range(100):
        learner.learn(data.train_x[::9], data.train_y[::9])
    assert misfits(lambda: learner.predict(data.test_x)) == []


def test_labels_that_leave_most_numbers_out_are_named() -> None:
    [sentence] = misfits(lambda: from_arrays(X, Y * 300, X, Y * 300))
    assert "the labels go up to 900, and 4 of these 901 classes have training images" in sentence
    assert "np.unique(labels, return_inverse=True)[1]" in sentence
    assert misfits(lambda: from_arrays(X, Y, X, Y)) == []
    names = [str(number) for number in range(901)]
    assert misfits(lambda: from_arrays(X, Y * 300, X, Y * 300, class_names=names)) == [], "the user named them all"


# What Python shows of them.


def test_the_package_lists_its_public_names() -> None:
    assert set(dir(gracecl)) == {*gracecl.__all__, "__version__"}


def test_a_repr_is_a_line() -> None:
    stream = gracecl.stream("split-digits(size=8, tasks=5)", seed=1)
    assert repr(stream) == "Stream(digits: 5 tasks, 10 classes, 146 steps, 1438 images, seed 1)"
    assert repr(gracecl.stream("split-digits(size=8, tasks=5, marked=False)")).startswith(
        "Stream(digits: no task marks, 10 classes"
    )
    assert repr(stream.data) == "Data(digits: 10 classes, 1438 training and 359 test images of 1 × 8 × 8)"
    batch = toy_stream().batch(0)
    assert repr(batch) == f"StreamBatch(3 images of 1 × 8 × 8, classes {sorted(set(batch.labels.tolist()))}, task 0)"
    learner = Learner("er", **TOY).fit(toy_stream())
    memories = learner.engine.memories
    assert repr(memories) == "Memories(replay: 12 of 12 images)"
    assert repr(memories.replay) == "Memory(12 of 12 images, 54 were offered)"


def test_what_a_result_holds_is_a_line() -> None:
    record = gracecl.run("er", **SMALL).record
    assert re.fullmatch(r"Run\(er\(\) on split-digits\(.*\), seed 0: 2 steps and 1 evaluations in /.*\)", repr(record))


def test_a_notebook_shows_the_picture_of_a_stream() -> None:
    assert toy_stream().plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_stream_can_be_gone_through() -> None:
    stream = toy_stream()
    batches = list(stream)
    assert len(batches) == len(stream)
    assert np.array_equal(np.concatenate([batch.labels for batch in batches]), stream.data.train_y[stream.order])
    assert stream != toy_stream()
    assert stream in {stream}
    for step in (-1, len(stream), "first", 1.5):
        with pytest.raises(UserError, match=f"the stream has the batches 0 to {len(stream) - 1}, not {step!r}"):
            stream.batch(step)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot be cut after 'a' steps"):
        stream.cut("a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: gracecl.load_runs(3), "folder is a path, not a int"),  # type: ignore[arg-type]
        (lambda: gracecl.Result.read(None), "folder is a path, not a NoneType"),  # type: ignore[arg-type]
        (lambda: gracecl.stream("split-digits", data=3), "data is a path, not a int"),  # type: ignore[arg-type]
        (lambda: check_method(None), "check_method takes an expression such as"),  # type: ignore[arg-type]
        (lambda: check_memory("reservoir"), "check_memory takes a function"),  # type: ignore[arg-type]
        (lambda: check_backbone("mlp"), "check_backbone takes a function"),  # type: ignore[arg-type]
    ],
    ids=["load_runs", "Result.read", "data", "check_method", "check_memory", "check_backbone"],
)
def test_other_wrong_arguments_are_a_sentence(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call()


def test_a_long_value_is_told_of_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"memory must be a whole number, not a list$"):
        Learner("er", **TOY | {"memory": list(range(1000))})
