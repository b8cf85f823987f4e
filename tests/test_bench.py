"""The benchmark measures what it says it does. How fast anything is, no test asserts."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks
from benchmarks import __main__, choices, hand, measure, methods, profile, runs, steps, workers
from benchmarks.__main__ import call
from benchmarks.measure import Row, compare, in_turns, row
from benchmarks.scene import Scene
from gracecl import registry
from gracecl.errors import UserError
from gracecl.lab.catalogue import LEARNERS
from gracecl.registry.spec import parse_method


def test_two_things_are_timed_in_turns_and_neither_always_first() -> None:
    order: list[str] = []
    first, second = in_turns(lambda: order.append("a"), lambda: order.append("b"), repeats=3, inner=2, warmup=1)
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert len(first) == len(second) == 3
    assert gc.isenabled()


def test_a_row_is_the_median_of_paired_ratios() -> None:
    found = row("n", "w", "a", [1.0, 2.0, 9.0, 3.0, 4.0], 3.0)
    assert (found.ratio, found.low, found.high, found.repeats) == (3.0, 2.0, 4.0, 5)


@pytest.mark.parametrize(
    ("ratio", "aim", "sense", "met"),
    [(1.1, 1.2, "at most", True), (1.3, 1.2, "at most", False), (1.3, 1.2, "at least", True), (1.1, 1.2, "at least", False)],
)
def test_aims_are_met_in_their_sense(ratio: float, aim: float, sense: str, met: bool) -> None:
    found = row("n", "w", "a", ratio, aim, sense=sense)  # type: ignore[arg-type]
    assert found.met is met
    assert ("met" if met else "missed") in str(found)


def test_a_figure_without_an_aim_is_neither_met_nor_missed() -> None:
    found = row("n", "w", "a", 1.0, None)
    assert found.met is None
    assert "met" not in str(found)
    assert "missed" not in str(found)


def test_an_expected_ratio_is_divided_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that says 6 s for ours and 2 s for theirs, for three calls each."""
    monkeypatch.setattr(measure, "timed", lambda work, inner: work())
    found = compare("n", "w", "a", lambda: 6.0, lambda: 2.0, 1.0, repeats=3, inner=3, divide_by=1.5)
    assert (found.ratio, found.details) == (2.0, {"seconds": 2.0, "seconds_against": 2 / 3})


def test_the_loop_by_hand_does_the_same_arithmetic_as_er() -> None:
    """The same weights give the same scores and loss, and both see as many images and keep as many."""
    scene = Scene("er(n_recall=10)", "mlp(width=100, depth=2)", 500, steps.DIGIT, 10, augment="none")
    plain = hand.two_layers(64, 100, 10)
    state = scene.engine.net.state_dict()
    names = ["backbone.hidden.0", "backbone.hidden.1", "classifier"]
    for layer, name in zip([1, 3, 5], names, strict=True):
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        flat = weight.dim() == 2
        plain[layer].weight.data.copy_(weight if flat else weight[0].T)
        plain[layer].bias.data.copy_(bias if flat else bias[0, 0])
    x = scene.engine.net.inputs.normalise(scene.images[:20])
    torch.testing.assert_close(plain(x), scene.engine.net(x).logits[0])
    loop = steps.by_hand(scene, plain, 500, n_recall=10)
    loop.step()
    assert scene.images_per_step() == 20 == loop.n_recall + hand.STREAM_BATCH
    assert len(loop.memory_x) == len(scene.engine.memories.replay) == 500


@pytest.mark.parametrize(("method", "images"), [("mose()", 384), ("grace(mose())", 384), ("er()", 74)])
def test_scenes_are_in_the_middle_of_their_stream(method: str, images: int) -> None:
    scene = Scene(method, "resnet18(width=2)", memory=300)
    memory = scene.engine.memories.replay
    assert memory.filled == 300
    assert memory.offered == 600
    assert len(np.unique(memory.tasks)) == 5
    assert scene.images_per_step() == images


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "forward", "backward", "updates"),
    [
        ("er(n_recall=16)", 26, 26, 1),
        ("mir(n_recall=16, n_candidates=24)", 26 + 10 + 2 * 24, 26 + 10, 1),
        ("rar(er(n_recall=16), iterations=3)", 78, 78, 3),
        ("ema(derpp(n_recall=16))", 42, 42, 1),
        ("gdumb()", 16, 16, 1),
        ("sgd(classes='current') + lwf()", 20, 10, 1),
    ],
)
def test_a_method_and_the_bare_loop_pass_the_same_images(method: str, forward: int, backward: int, updates: int) -> None:
    found = methods.against_bare_loop(method, quick=True)
    assert {name: found.details[name] for name in ("forward", "backward", "updates")} == {
        "forward": forward,
        "backward": backward,
        "updates": updates,
    }
    learner = methods.Learner(method, 2, (3, 8, 8), 40)
    net, optimizer = learner.engine.net, learner.engine.optimizer
    steps_made, passed = [], []
    optimizer.register_step_post_hook(lambda *_: steps_made.append(1))
    net.register_forward_hook(lambda _, inputs, out: passed.append((len(inputs[0]), out.logits.requires_grad)))
    methods.bare_loop(net, optimizer, (3, 8, 8), forward, backward, updates)()
    learned = sum(images for images, with_gradient in passed if with_gradient)
    assert (sum(images for images, _ in passed), learned, len(steps_made)) == (forward, backward, updates)


def test_learners_are_in_the_last_of_their_tasks() -> None:
    engine = methods.Learner("er()", 2, (3, 8, 8), 40).engine
    assert engine.progress.task == 4
    assert engine.memories.replay.filled == 40
    assert len(np.unique(engine.memories.replay.tasks)) == 5


def test_every_method_is_measured_against_bare_passes() -> None:
    learners = [parse_method(method) for method in LEARNERS]
    named = {part.name for learner in learners for part in (learner, *learner.parts)}
    assert named - {"sum"} == set(registry.methods.written) - {"joint"}


def test_unknown_parts_are_refused_with_a_hint() -> None:
    with pytest.raises(UserError, match="did you mean 'steps'"):
        benchmarks.chosen(["stpes"])


def test_all_parts_exist() -> None:
    for name in (*benchmarks.PARTS, *benchmarks.TEXTS):
        assert name == "authors" or benchmarks.chosen([name]) == [name]
        assert (Path(benchmarks.__file__).parent / f"{name}.py").exists()
        assert re.search(rf"\b{name}\b", __main__.measure.__doc__ or ""), f"--help does not name {name}"


@pytest.mark.slow
def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert call(["passes", "roofline", "--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert [row["name"] for row in rows] == ["evaluation", "class means", "roofline, width 4"]
    for found in rows:
        assert found.keys() >= {"name", "ratio", "aim", "met", "low", "high", "machine", "versions"}
        assert found["name"] in printed
        assert found["ratio"] > 0
        assert found["versions"]["torch"] == torch.__version__
    assert rows[0]["met"] == (rows[0]["ratio"] <= rows[0]["aim"])


@pytest.mark.parametrize("arguments", [["--json", "missing/bench.json"], ["--threads", "0"], ["nothing"]])
def test_mistakes_are_told_before_anything_is_measured(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_bookkeeping_adds_to_a_step() -> None:
    assert runs.bookkeeping(2, quick=True).ratio > 1


@pytest.mark.slow
def test_workers_answer_with_seconds_and_end() -> None:
    setting = workers.Setting("er()", "mlp()", 1, {"shape": (1, 8, 8), "classes": 10, "memory": 50})
    with workers.workers([setting, setting]) as pair:
        taken = workers.seconds_in_turns([pair], repeats=2, steps=2)
        processes = [worker._process for worker in pair]
    assert all(value > 0 for seconds in taken[0] for value in seconds)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_a_worker_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="ended before its time"):
        workers.Worker(workers.Setting("no_such_method()", "mlp()", 1)).seconds()


@pytest.mark.slow
def test_choices_are_compared_with_the_default() -> None:
    found: list[Row] = [
        *choices.optimizers(quick=True),
        choices.gather_buffer(quick=True),
        choices.dense_convolution(8, 16, 8, 1, quick=True),
        choices.enlargement(quick=True),
        *choices.rounding(quick=True),
    ]
    assert all(item.aim is None and item.ratio > 0 for item in found)


@pytest.mark.slow
def test_the_profile_names_operations() -> None:
    text = profile.text(quick=True)
    assert "384 images" in text
    assert "aten::convolution_backward" in text


FAULTS = """
import resource
import numpy as np
from gracecl.lab.runs import launch
if {prepared}:
    launch.keep_freed_memory()
for _ in range(20):  # until the heap has grown to what is needed
    np.ones(6_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(6_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_the_launcher_keeps_freed_memory() -> None:
    """Ten arrays of 48 MB one after the other: each brings its pages anew, unless freed memory is kept."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(prepared: bool, **users: str) -> int:
        code = FAULTS.format(prepared=prepared)
        done = subprocess.run([sys.executable, "-c", code], env=environment | users, capture_output=True, text=True, check=True)
        return int(done.stdout)

    by_default = faults(prepared=False)
    assert faults(prepared=True) < by_default / 10
    assert faults(prepared=True, MALLOC_ARENA_MAX="1") > by_default / 2, "what the user set stays"
