"""Two tasks on a device other than the host: nothing mixes with host tensors, and the host waits only where a method says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gracecl
import warm
from gracecl.registry import methods

TRIAL = Path(__file__).with_name("device_trial.py")
OPTIONS = {
    "adversarial_replay": "attack_steps=1",
    "gdumb": "epochs=2",
    "rar": "iterations=2",
    "ranpac": "projections=20",
    **dict.fromkeys(("acil", "air", "foal", "gacl", "klda", "randumb"), "size=20"),
}
"""that make a method small"""
ADDED = {"lwf": "sgd(classes='current') + lwf()"}
METHODS = [ADDED.get(name, f"{name}({OPTIONS.get(name, '')})") for name in methods.names()] + [
    "closed(temperature=True)",
    "ranpac(projections=20, ridge='held_out')",
    "grace(mose())",
]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_on_another_device(method: str, tmp_path: Path) -> None:
    """Learning, a checkpoint and its resume, and an evaluation, with the losses of the host."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gracecl.__file__).parent.parent)}
    said = warm.python([str(TRIAL), method], tmp_path, environment)
    assert said.returncode == 0, said.stderr
