"""The examples in docstrings, which the pages of the API show, run: in a folder with what they speak of."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gracecl
from gracecl import Learner

SOURCE = Path(gracecl.__file__).parent
MODULES = [
    ".".join(("gracecl", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if "    >>> " in path.read_text(encoding="utf-8")
]


class Shown(doctest.OutputChecker):
    """Compares what a line prints with what stands below it; where nothing stands there, it may print anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for given."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from gracecl.sklearn import OnlineClassifier

    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for file, label in (("here", 0), ("there", 1)):
        one = Learner("closed", net="identity()")
        one.learn(generator.normal(size=(8, 4)).astype("float32"), [label] * 8)
        one.save(file)
    images, labels = generator.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8), np.arange(60) % 10
    pairs = [(torch.from_numpy(image).permute(2, 0, 1), int(label)) for image, label in zip(images, labels, strict=True)]
    return {
        **{"gracecl": gracecl, "Learner": Learner, "make_pipeline": make_pipeline, "StandardScaler": StandardScaler},
        **{"OnlineClassifier": OnlineClassifier, "X": generator.normal(size=(40, 5)), "y": np.arange(40) % 2},
        **{"x": generator.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8), "torch_dataset": pairs, "test_dataset": pairs[::2]},
        **{"train_x": images, "train_y": labels, "test_x": images[::2], "test_y": labels[::2]},
    }


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str, names: dict[str, Any]) -> None:
    found = [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]
    assert found, f"{module} has examples that no docstring holds"
    runner, printed = doctest.DocTestRunner(Shown(), verbose=False), []
    for example in found:
        example.globs |= names
        runner.run(example, out=printed.append)
    assert runner.failures == 0, "".join(printed)
