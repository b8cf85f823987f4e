"""What a system without POSIX lacks is left out with a sentence: import, a learner and a run work there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_POSIX = """
import ctypes, os, signal, subprocess, sys, numpy, torch, safetensors.torch
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for module, names in {
    os: ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "sysconf", "register_at_fork", "fork", "sched_getaffinity"),
    signal: ("SIGHUP", "SIGKILL"),
}.items():
    for name in names:
        delattr(module, name)
class NoLibrary(ctypes.CDLL):
    def __init__(self, name, *rest):
        if name is None:
            raise TypeError("expected a name")
        super().__init__(name, *rest)
ctypes.CDLL = NoLibrary
"""
LEARN = """
import gracecl
x, y = numpy.zeros((4, 1, 8, 8), numpy.uint8), numpy.arange(4) % 2
learner = gracecl.Learner("er", classes=2, shape=(1, 8, 8), memory=4, net="mlp(width=8)", augment="none")
print(learner.learn(x, y) is None, sorted(set(learner.predict(x).tolist())) != [])
learner.save(sys.argv[1] + "/saved")
gracecl.Learner.load(sys.argv[1] + "/saved")
"""
RUN = """
from gracecl.lab.cli import main
stream = "split-digits(size=8, classes='0-3', tasks=2)"
options = ["--stream", stream, "--memory", "8", "--net", "mlp(width=8)", "--augment", "none", "--steps", "4"]
sys.argv[1:] = ["run", "er", "sgd", *options, "--out", *sys.argv[1:]]
main()
"""


def on_it(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_POSIX + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_learner_works_without_posix(tmp_path: Path) -> None:
    done = on_it(LEARN, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_runs_go_one_after_the_other_without_posix(tmp_path: Path) -> None:
    done = on_it(RUN, str(tmp_path), "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "this system cannot stop child processes gently, so runs go one after the other" in done.stderr
    assert done.stderr.count("no file locks") == 1, "said once, not for each folder"
    assert len(list(tmp_path.rglob("summary.json"))) == 2
