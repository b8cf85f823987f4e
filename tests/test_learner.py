"""The learner in somebody's own loop: no stream, no recorder, no command."""

from __future__ import annotations

import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracecl import Learner, UserError, registry
from gracecl.data import Data, load
from gracecl.errors import Caution
from gracecl.lab.runs.run import Interrupted, RunConfig, run
from gracecl.lab.runs.watch import Watch
from gracecl.methods.er import ER
from gracecl.methods.grace import Grace
from gracecl.streams.iid import without_tasks
from gracecl.testing import toy_stream
from warm import python

BATCH = 10
SMALL: dict[str, Any] = {
    "classes": 10,
    "shape": (1, 8, 8),
    "memory": 60,
    "net": "mlp(width=12, depth=4)",
    "device": "cpu",
}
Batches = list[tuple[torch.Tensor, np.ndarray]]


@pytest.fixture(scope="module")
def digits() -> Data:
    return load("digits", size=8)


@pytest.fixture(scope="module")
def batches(digits: Data) -> Batches:
    """Classes 0 and 1, then 2 and 3, then 4 and 5: six batches of each."""
    parts = [np.flatnonzero(np.isin(digits.train_y, pair))[: 6 * BATCH] for pair in ((0, 1), (2, 3), (4, 5))]
    order = np.concatenate(parts)
    rows = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    return [(digits.train_x[torch.from_numpy(index)], digits.train_y[index]) for index in rows]


def weights(learner: Learner) -> list[torch.Tensor]:
    return [value.clone() for value in learner.engine.net.state_dict().values()]


def same_learner(one: Learner, two: Learner) -> bool:
    first, second = weights(one), weights(two)
    memory = one.engine.memories.replay, two.engine.memories.replay
    return (
        all(map(torch.equal, first, second))
        and torch.equal(memory[0].images, memory[1].images)
        and np.array_equal(memory[0].labels, memory[1].labels)
        and one.engine.progress == two.engine.progress
    )


# Learning.


def test_a_loop_of_one_s_own_learns_the_digits(digits: Data) -> None:
    """Ten classes in five tasks, one pass: clearly above the chance of 10 %, and the same for the same seed."""

    def learn(seed: int) -> tuple[float, Learner]:
        learner = Learner("er", **SMALL | {"net": "mlp(width=64, depth=2)", "memory": 200}, optimizer="adam(lr=0.003)", seed=seed)
        for task in range(5):
            index = np.flatnonzero(digits.train_y // 2 == task)
            index = index[np.random.default_rng(task).permutation(len(index))]
            for at in range(0, len(index), BATCH):
                rows = index[at : at + BATCH]
                learner.learn(digits.train_x[torch.from_numpy(rows)], digits.train_y[rows], task=task)
        return float((learner.predict(digits.test_x) == digits.test_y).mean()), learner

    accuracy, learner = learn(seed=0)
    assert accuracy > 0.4
    again, same = learn(seed=0)
    assert again == accuracy
    assert same_learner(learner, same)
    assert not same_learner(learner, learn(seed=1)[1])


def test_learn_returns_the_loss_of_each_term_and_layer(batches: Batches) -> None:
    learner = Learner("grace(er)", **SMALL)
    table = learner.learn(*batches[0])
    assert {"ce/all", "entropy"} <= table.keys()
    assert all(len(row) == 4 for row in table.values())
    assert Learner("mose", **SMALL).learn(*batches[0]) == {}, "mose stores the very first batch and does not update"


def test_the_paper_s_system_is_the_default_and_needs_three_lines(batches: Batches) -> None:
    learner = Learner(classes=10, shape=(1, 8, 8), net="resnet18(width=2)", device="cpu")
    for x, y in batches[:3]:
        learner.learn(x, y)
    assert repr(learner.method) == "grace(mose())"
    assert set(learner.predict(batches[0][0])) <= {0, 1}


def test_torch_numpy_and_lists_are_the_same_to_it(batches: Batches) -> None:
    one, two, three = (Learner("er", **SMALL) for _ in range(3))
    for x, y in batches[:4]:
        one.learn(x, torch.from_numpy(y))
        two.learn(x.numpy(), y.astype(np.int32))
        three.learn(x, y.tolist())
    assert same_learner(one, two)
    assert same_learner(one, three)
    x = batches[0][0]
    assert np.array_equal(one.predict(x), two.predict(x.numpy()))
    assert np.array_equal(one.predict_proba(x), two.predict_proba(x.numpy()))


def test_mirrored_and_read_only_arrays_are_as_good_as_any(batches: Batches) -> None:
    one, two, three = (Learner("er", **SMALL) for _ in range(3))
    x, y = batches[0]
    mirrored = x.numpy()[:, :, :, ::-1]
    locked = mirrored.copy()
    locked.flags.writeable = False
    one.learn(mirrored, y)
    two.learn(mirrored.copy(), y)
    three.learn(locked, y)
    assert same_learner(one, two)
    assert same_learner(one, three)


def test_a_shape_given_as_a_list_and_statistics_given_as_arrays_are_understood(batches: Batches, tmp_path: Path) -> None:
    statistics = {"mean": np.array([0.3], np.float32), "std": np.array([0.4], np.float32)}
    learner = Learner("er", **SMALL | {"shape": [1, 8, 8]}, **statistics)
    learner.learn(*batches[0])
    learner.save(tmp_path / "learner")
    assert same_learner(Learner.load(tmp_path / "learner", device="cpu"), learner)


@pytest.mark.parametrize("method", [ER(n_recall=7), Grace(ER(n_recall=7), beta=0.02)], ids=repr)
def test_a_method_may_be_given_as_an_object(method: Any, batches: Batches) -> None:
    one, two = Learner(method, **SMALL), Learner(repr(method), **SMALL)
    for x, y in batches[:3]:
        assert one.learn(x, y) == two.learn(x, y)
    assert same_learner(one, two)


# Predicting.


@pytest.mark.parametrize("method", ["er", "mose", "grace(er)"])
def test_predictions_are_among_the_classes_met_and_agree_with_the_probabilities(
    method: str, batches: Batches, digits: Data
) -> None:
    learner = Learner(method, **SMALL)
    for x, y in batches[:9]:
        learner.learn(x, y)
    predicted, chances = learner.predict(digits.test_x), learner.predict_proba(digits.test_x)
    assert predicted.shape == (len(digits.test_x),)
    assert set(predicted) <= {0, 1, 2, 3}
    assert chances.shape == (len(digits.test_x), 10)
    assert np.allclose(chances.sum(axis=1), 1, atol=1e-5)
    assert (chances[:, 4:] == 0).all()
    assert (chances >= 0).all()
    assert np.array_equal(chances.argmax(axis=1), predicted)


def test_every_rule_can_be_asked_for_and_an_unknown_one_is_a_sentence(batches: Batches) -> None:
    learner = Learner("mose", **SMALL)
    for x, y in batches[:9]:
        learner.learn(x, y)
    x = batches[0][0]
    assert np.array_equal(learner.predict(x), learner.predict(x, rule="ncm_mean"))
    scores = {rule: learner.predict_proba(x, rule=rule) for rule in ("linear_last", "linear_mean", "ncm_last", "ncm_mean", "ncm_2")}
    for rule, chances in scores.items():
        assert np.array_equal(chances.argmax(axis=1), learner.predict(x, rule=rule))
    assert not np.allclose(scores["linear_last"], scores["ncm_last"])
    for ask in (learner.predict, learner.predict_proba):
        with pytest.raises(UserError, match="unknown rule 'ncm_men'; did you mean 'ncm_mean'"):
            ask(x, rule="ncm_men")
    assert learner.engine.net.training, "the refused question left the net in evaluation mode"


def test_asking_changes_nothing(batches: Batches) -> None:
    """A learner that is asked after every batch learns the same as one that never is."""
    quiet, asked = Learner("grace", **SMALL), Learner("grace", **SMALL)
    for x, y in batches[:9]:
        assert quiet.learn(x, y) == asked.learn(x, y)
        asked.predict(x)
        asked.predict_proba(x, rule="linear_mean")
    assert same_learner(quiet, asked)


def test_a_question_before_the_first_lesson_is_a_sentence(batches: Batches) -> None:
    learner = Learner("er", **SMALL)
    for ask in (learner.predict, learner.predict_proba):
        with pytest.raises(UserError, match=r"nothing was learned yet.*call learn"):
            ask(batches[0][0])


def test_random_states_of_the_program_around_it_are_left_alone(batches: Batches, tmp_path: Path) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state().tolist()

    before = states()
    learner = Learner("grace", **SMALL)
    for x, y in batches[:8]:
        learner.learn(x, y)
        learner.predict(x)
    learner.end_task()
    learner.save(tmp_path / "learner")
    Learner.load(tmp_path / "learner", device="cpu").learn(*batches[0])
    assert states() == before


def test_what_the_program_around_it_draws_does_not_matter(batches: Batches) -> None:
    one, two = Learner("grace", **SMALL), Learner("grace", **SMALL)
    for x, y in batches[:8]:
        one.learn(x, y)
    for x, y in batches[:8]:
        torch.rand(3)
        np.random.rand(3)
        random.random()
        two.learn(x, y)
    assert same_learner(one, two)


# Saving and loading.

TASK_NAMES: dict[str, list[Any]] = {
    "unnamed": [None, None, None],
    "words": ["zero and one", "zwei und drei", "四と五"],
    "pairs": [("digits", 0), ("digits", 1), ("digits", 2)],
}


@pytest.mark.parametrize("at", [0.0, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_learner_s_file_with_a_flipped_bit_is_refused(at: float, tmp_path: Path) -> None:
    file = tmp_path / "learner"
    Learner("er", classes=4, shape=(1, 8, 8), memory=10, net="mlp(width=8)", device="cpu").save(file)
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 4
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"cannot read the checkpoint {file} .*; take an earlier copy of it"):
        Learner.load(file)


@pytest.mark.parametrize("names", TASK_NAMES)
@pytest.mark.parametrize("at", [6, 9])
def test_a_loaded_learner_goes_on_to_the_same_bits(names: str, at: int, batches: Batches, tmp_path: Path) -> None:
    """Saved within a task and between two, with named tasks and with tasks that new labels start."""
    named = [TASK_NAMES[names][number // 6] for number in range(len(batches))]
    whole, first = Learner("grace", **SMALL, seed=3), Learner("grace", **SMALL, seed=3)
    tables = [whole.learn(x, y, task) for (x, y), task in zip(batches, named, strict=True)]
    for (x, y), task in zip(batches[:at], named[:at], strict=True):
        first.learn(x, y, task)
    first.save(tmp_path / "learner")
    second = Learner.load(tmp_path / "learner", device="cpu")
    assert [second.learn(x, y, task) for (x, y), task in zip(batches[at:], named[at:], strict=True)] == tables[at:]
    assert whole.engine.progress.task == 2, "three tasks were learned"
    assert same_learner(whole, second)
    for x, _ in batches:
        assert np.array_equal(whole.predict_proba(x), second.predict_proba(x))


def test_ending_a_task_before_saving_is_remembered(batches: Batches, tmp_path: Path) -> None:
    whole, first = Learner("grace", **SMALL), Learner("grace", **SMALL)
    for learner in (whole, first):
        for x, y in batches[:6]:
            learner.learn(x, y, "one")
        learner.end_task()
    first.save(tmp_path / "learner")
    second = Learner.load(tmp_path / "learner", device="cpu")
    for x, y in batches[6:9]:
        assert whole.learn(x, y, "two") == second.learn(x, y, "two")
    assert same_learner(whole, second)


def test_saving_twice_keeps_the_last_and_the_learner_goes_on(batches: Batches, tmp_path: Path) -> None:
    learner = Learner("er", **SMALL)
    learner.learn(*batches[0])
    learner.save(tmp_path / "learner")
    learner.learn(*batches[1])
    learner.save(str(tmp_path / "learner"))
    assert same_learner(Learner.load(str(tmp_path / "learner"), device="cpu"), learner)
    assert [file.name for file in tmp_path.iterdir()] == ["learner"]


class StopAtOnce(Watch):
    """Presses Ctrl-C after the first step."""

    def advance(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_the_checkpoint_of_a_run_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(RunConfig(method="er", stream="split-digits(size=8)", net="mlp", memory=5, device="cpu"), tmp_path, watch=StopAtOnce())
    (saved,) = tmp_path.rglob("checkpoint.safetensors")
    with pytest.raises(UserError, match=r"is the checkpoint of a run, not of a learner; continue it with 'gracecl resume'"):
        Learner.load(saved)


def test_a_place_that_cannot_be_written_or_read_is_a_sentence(batches: Batches, tmp_path: Path) -> None:
    learner = Learner("er", **SMALL)
    learner.learn(*batches[0])
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "nowhere" / "learner", tmp_path / "file" / "learner", tmp_path):
        with pytest.raises(UserError, match="cannot write"):
            learner.save(place)
    with pytest.raises(UserError, match="there is no checkpoint"):
        Learner.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        Learner.load(tmp_path / "file")


# Mistakes.

X = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
Y = [0, 1]
MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "float tensor": (X.float(), Y, r"images must be uint8 \(0 to 255\), not torch.float32"),
    "float array": (X.double().numpy(), Y, r"images must be uint8 \(0 to 255\), not float64"),
    "NaN": (np.full((2, 1, 8, 8), np.nan), Y, "images must be uint8"),
    "whole numbers of another type": (X.long(), Y, "images must be uint8"),
    "nested lists": (X.tolist(), Y, "images must be uint8"),
    "nothing": (None, Y, "images must be"),
    "text": ("image.png", Y, "images must be"),
    "uneven lists": ([[1], [1, 2]], Y, "images must be"),
    "no channel axis": (X[:, 0], Y, r"shape \[batch, 1, 8, 8\], not \[2, 8, 8\]"),
    "one image": (X[0], [0], r"shape \[batch, 1, 8, 8\], not \[1, 8, 8\]"),
    "three channels": (X.repeat(1, 3, 1, 1), Y, r"shape \[batch, 1, 8, 8\], not \[2, 3, 8, 8\]"),
    "channels last": (X.permute(0, 2, 3, 1), Y, r"not \[2, 8, 8, 1\]"),
    "another size": (X[..., :6], Y, r"not \[2, 1, 8, 6\]"),
    "an empty batch": (X[:0], [], "the batch is empty"),
    "too many labels": (X, [0, 1, 2], "2 images came with 3 labels"),
    "too few labels": (X, [0], "2 images came with 1 labels"),
    "label above": (X, [0, 10], "label 10 is not one of the declared classes 0 to 9"),
    "label below": (X, [-1, 0], "label -1 is not one of the declared classes 0 to 9"),
    "fractions": (X, [0.0, 1.0], "labels must be a list of whole numbers, not float64"),
    "NaN label": (X, [0.0, float("nan")], "labels must be a list of whole numbers"),
    "names": (X, ["cat", "dog"], "labels must be a list of whole numbers"),
    "truth values": (X, [True, False], "labels must be a list of whole numbers, not bool"),
    "one-hot labels": (X, np.eye(10, dtype=int)[[0, 1]], r"labels must be a list of whole numbers, not int64 of shape \[2, 10\]"),
    "uneven labels": (X, [[0], [0, 1]], "labels must be"),
    "no labels": (X, None, "labels must be"),
    "one label": (X, 0, "labels must be"),
}


@pytest.mark.parametrize("kind", ["net", "method"])
def test_a_saved_learner_of_one_s_own_net_or_method_says_what_to_import(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": "er", "net": "mlp(width=4)", kind: "mine"}
    with monkeypatch.context() as registered:
        registered.setitem(registry.nets.loaded, "mine", registry.nets.get("mlp"))
        registered.setitem(registry.methods.loaded, "mine", ER)
        Learner(**settings, classes=2, shape=(1, 4, 4), memory=4).save(tmp_path / "saved")
    with pytest.raises(
        UserError, match=f"holds a learner with an unknown {kind} 'mine'.* first import the module that registers it"
    ):
        Learner.load(tmp_path / "saved")


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_wrong_batch_is_a_sentence_and_nothing_is_learned_from_it(kind: str, batches: Batches) -> None:
    x, y, sentence = MISTAKES[kind]
    learner, untouched = Learner("er", **SMALL), Learner("er", **SMALL)
    for one in (learner, untouched):
        one.learn(*batches[0])
    with pytest.raises(UserError, match=sentence):
        learner.learn(x, y)
    assert same_learner(learner, untouched)
    assert learner.learn(*batches[6]) == untouched.learn(*batches[6]), "the refused batch left a trace"


@pytest.mark.parametrize("kind", [kind for kind, (x, *_) in MISTAKES.items() if x is not X])
def test_wrong_images_are_a_sentence_when_predicting_too(kind: str, batches: Batches) -> None:
    learner = Learner("er", **SMALL)
    learner.learn(*batches[0])
    x, _, sentence = MISTAKES[kind]
    for ask in (learner.predict, learner.predict_proba):
        with pytest.raises(UserError, match=sentence):
            ask(x)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"classes": 0}, "number of classes, at least 1"),
        ({"classes": -3}, "number of classes, at least 1"),
        ({"shape": (8, 8, 8, 8)}, r"shape is \(channels, height, width\)"),
        ({"shape": (1, 0, 8)}, r"shape is \(channels, height, width\)"),
        ({"memory": -1}, "memory"),
        ({"mean": [0.5, 0.5]}, "one number for each of the 1 channels"),
        ({"std": [0.5, 0.5]}, "one number for each of the 1 channels"),
        ({"method": "ers"}, "did you mean 'er'"),
        ({"net": "mpl"}, "did you mean 'mlp'"),
        ({"net": "mlp(depth='deep')"}, "depth"),
        ({"taps": 9}, "taps"),
        ({"augment": "taus"}, "did you mean 'tau'"),
        ({"optimizer": "adams"}, "did you mean 'adam'"),
        ({"optimizer": "adam(lr=-1)"}, "learning rate"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"precision": "fp8"}, "fp8"),
        ({"method": 3}, "3"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Learner(**{"method": "er"} | SMALL | change)


# Without task names.


def unnamed(method: str, steps: int) -> Learner:
    """A learner that meets all of its classes in the first batch and goes on."""
    learner = Learner(method, classes=4, shape=(1, 8, 8), memory=20, net="mlp(width=8, depth=4)", augment="none")
    for step in range(steps):
        x = np.random.default_rng(step).integers(0, 256, (8, 1, 8, 8)).astype(np.uint8)
        learner.learn(x, np.arange(8) % 4)
    return learner


def test_without_task_names_alpha_is_renewed_by_the_clock() -> None:
    """Labels that are all known start no task any more, so the steps decide."""
    early, late = (unnamed("grace(er(), refresh_every=3)", steps).method.feedback.accuracy for steps in (2, 3))
    assert early.isnan().all()
    assert late.isfinite().all()


def test_without_task_names_a_penalty_acts_by_the_clock(tmp_path: Path) -> None:
    plain, held = (unnamed(method, 6) for method in ("er()", "er() + ewc(every=3)"))
    assert not torch.equal(plain.net.classifier.weight, held.net.classifier.weight)
    learner = unnamed("er() + ewc(every=5)", 3)
    learner.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved")
    for one in (learner, again):
        for _ in range(3):
            one.learn(np.zeros((8, 1, 8, 8), np.uint8), np.arange(8) % 4)
    assert again.method.right.consolidated
    assert torch.equal(learner.net.classifier.weight, again.net.classifier.weight)


def test_with_task_names_the_names_alone_decide() -> None:
    learner = Learner("er() + ewc(every=2)", classes=4, shape=(1, 8, 8), memory=20, net="mlp(width=8)")
    for _ in range(4):
        learner.learn(np.zeros((8, 1, 8, 8), np.uint8), np.arange(8) % 4, task="first")
    assert not learner.method.right.consolidated


@pytest.mark.parametrize(
    ("method", "name", "option"), [("er() + ewc()", "ewc", "every"), ("grace(er())", "grace", "refresh_every")]
)
def test_a_stream_without_marks_that_is_too_short_to_act_on_is_named(method: str, name: str, option: str) -> None:
    stream = without_tasks(toy_stream(), (of := toy_stream()).order, of.ends)
    learner = Learner(method, classes=6, shape=(1, 8, 8), memory=20, net="mlp(width=8, depth=4)")
    with pytest.warns(Caution, match=rf"{name} acts every 500 steps, which its 18 steps never reach; give {name}\({option}=…\)"):
        learner.fit(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Learner("er() + ewc(every=5)", classes=6, shape=(1, 8, 8), memory=20, net="mlp(width=8)", augment="none").fit(stream)


FORK = """
import os, threading, time
import numpy as np, torch
from gracecl import Learner

torch.set_num_threads(1)
learner = Learner("er", classes=4, shape=(1, 8, 8), net="mlp(width=8)", memory=20, device="cpu")
other = Learner("er", classes=4, shape=(1, 8, 8), net="mlp(width=8)", memory=20, device="cpu")
x, y = np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8), np.uint8), [0, 1, 2, 3] * 2
learner.learn(x, y)
other.learn(x, y)
going = True

def learn():
    while going:
        learner.learn(x, y)

thread = threading.Thread(target=learn)
thread.start()
children = []
for _ in range(10):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        learner.predict(x)
        learner.learn(x, y)
        other.predict(x)
        step = learner.engine.progress.step
        os._exit(0 if learner.engine.memories.replay.offered == 8 * step else 3)
    children.append(child)
codes = []
end = time.monotonic() + 60
for child in children:
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, 9)
    codes.append(os.waitstatus_to_exitcode(done[1]) if done[0] else "hangs")
going = False
thread.join()
learner.predict(x)
print(codes)
"""


@pytest.mark.slow
def test_forked_children_have_the_learner_between_two_calls(tmp_path):
    """Another thread of the parent learns meanwhile; its lock is no child's."""
    done = python(["-c", FORK], tmp_path, os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.stdout == f"{[0] * 10}\n", done.stderr
