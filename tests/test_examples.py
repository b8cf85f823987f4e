"""Every example runs, and those about what is your own are short."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import warm
from gracecl.registry import methods
from gracecl.testing import assert_same, feed, toy_engine, toy_stream

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"avalanche_replay": "avalanche", "timm_model": "timm", "lightning_module": "lightning", "river_pipeline": "river"}
PRELUDE = """
import runpy, sys, warnings
warnings.simplefilter("ignore")
from benchmarks.avalanche import load_torchvision
if sys.argv[2] == "torchvision":
    load_torchvision()
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""a torch without CUDA needs help to load torchvision, which two of the libraries import"""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(example.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    torchvision = "torchvision" if importlib.util.find_spec("torchvision") else "none"
    done = warm.python(["-c", PRELUDE, str(example), torchvision], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("name", ["own_method", "own_dataset", "own_backbone"])
def test_what_is_your_own_takes_less_than_twenty_lines(name: str) -> None:
    (example,) = (example for example in EXAMPLES if example.stem == name)
    text = example.read_text(encoding="utf-8").split('"""', 2)[2]
    assert len([line for line in text.splitlines() if line.strip()]) < 20


@pytest.mark.parametrize("name", ["growing_labels", "vectors", "sequences_gru", "text_transformer"])
def test_any_input_and_growing_labels_take_at_most_forty_lines(name: str) -> None:
    (example,) = (example for example in EXAMPLES if example.stem == name)
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40


def test_a_replay_method_that_stores_something_takes_three_hooks() -> None:
    """And it makes the steps of the library's own, to the bit."""
    (example,) = (example for example in EXAMPLES if example.stem == "own_replay")
    text = example.read_text(encoding="utf-8")
    assert text.count("    def ") == 3
    assert len([line for line in text.splitlines() if line.strip()]) <= 40
    definition = text[: text.index("for method in")].replace('methods.register("own_der")', 'methods.register("own_der_of_a_test")')
    exec(compile(definition, str(example), "exec"), {"__name__": __name__})
    own, library = toy_engine("own_der_of_a_test(n_recall=4)"), toy_engine("der(n_recall=4, joint_forward=True)")
    del methods._name_of[methods.loaded.pop("own_der_of_a_test")]
    for engine in (own, library):
        feed(engine, toy_stream())
    assert_same(own.net.state_dict(), library.net.state_dict(), "own_replay.py beside der()")
    assert_same(own.memories.state_dict(), library.memories.state_dict(), "what own_replay.py keeps")


def test_no_example_is_forgotten() -> None:
    wanted = {
        "own_method",
        "own_replay",
        "own_dataset",
        "own_backbone",
        "own_loop",
        "growing_labels",
        "sequences_gru",
        "text_transformer",
        "vectors",
        "river_pipeline",
        "sklearn_pipeline",
        "avalanche_replay",
        "timm_model",
        "pretrained_stream",
        "lightning_module",
    }
    assert {example.stem for example in EXAMPLES} == wanted
