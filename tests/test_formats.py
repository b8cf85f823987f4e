"""Files of earlier versions are read; those of later ones are refused in a sentence that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import gracecl as library
from commands import gracecl, only_run
from gracecl import Learner, UserError, checkpoint
from gracecl.engine.recipe import device_of
from gracecl.files import write_sealed

RELEASED = Path(__file__).parent / "fixtures" / "0.2.0"
STREAM = "split-digits(size=8, classes='0-3', tasks=2, batch=30)"


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run of 0.2.0 that was stopped after five of its steps."""
    shutil.copytree(RELEASED / "run", tmp_path / "run")
    return only_run(tmp_path / "run")


def test_a_run_of_the_last_release_is_continued_and_reported(stopped: Path) -> None:
    before = (stopped / "metrics.jsonl").read_bytes()
    assert "format" not in json.loads((stopped / "config.json").read_text())
    assert gracecl("resume", stopped).code == 0
    assert (stopped / "metrics.jsonl").read_bytes().startswith(before)
    assert json.loads((stopped / "config.json").read_text())["format"] == 1
    assert gracecl("report", stopped).code == 0


def test_a_learner_of_the_last_release_goes_on() -> None:
    learner = Learner.load(RELEASED / "learner.safetensors", device="cpu")
    stream = library.stream(STREAM)
    assert learner.engine.progress.step == 3
    assert set(np.unique(learner.predict(stream.data.test_x[:20]))) <= {0, 1, 2, 3}
    learner.fit(stream, start=3)
    assert learner.engine.progress.step == len(stream)


def test_a_run_of_a_later_format_is_refused(stopped: Path) -> None:
    config = json.loads((stopped / "config.json").read_text())
    write_sealed(stopped / "config.json", {name: value for name, value in config.items() if name != "digests"} | {"format": 2})
    before = {file: file.read_bytes() for file in stopped.rglob("*") if file.is_file()}
    for verb in ("resume", "report"):
        assert "has format 2, and this version of gracecl reads up to 1: install the version" in gracecl(verb, stopped).err
    assert {file: file.read_bytes() for file in stopped.rglob("*") if file.is_file() and file.name != ".lock"} == before


def test_files_of_a_later_format_are_refused(tmp_path: Path) -> None:
    state = checkpoint.load(RELEASED / "learner.safetensors")
    checkpoint.save(tmp_path / "learner", state | {"format": 7})
    with pytest.raises(UserError, match="has format 7, and this version of gracecl reads up to 1"):
        Learner.load(tmp_path / "learner")
    checkpoint.save(tmp_path / "strange", state | {"format": "x"})
    with pytest.raises(UserError, match="has a format that is not known here"):
        Learner.load(tmp_path / "strange")
    with safe_open(RELEASED / "learner.safetensors", framework="pt") as file:
        tensors, [text] = {name: file.get_tensor(name) for name in file.keys()}, file.metadata().values()  # noqa: SIM118
    save_file(tensors, tmp_path / "later", metadata={"gracecl-3": text})
    with pytest.raises(UserError, match="has format 3, and this version of gracecl reads up to 2"):
        Learner.load(tmp_path / "later")
    save_file(tensors, tmp_path / "other", metadata={"somebody's": text})
    with pytest.raises(UserError, match="is not a gracecl checkpoint"):
        Learner.load(tmp_path / "other")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_devices_are_taken_where_pytorch_has_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    monkeypatch.setattr(module, "is_available", lambda: True)
    assert device_of(kind).type == kind
    monkeypatch.setattr(module, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device '{kind}' was asked for, but this PyTorch sees no"):
        device_of(kind)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UserError, match="cannot learn on the device 'meta'; use cpu, cuda, mps or xpu"):
        device_of("meta")
