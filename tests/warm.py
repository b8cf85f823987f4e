"""Python programs in copies of a process that has loaded already what takes long.

`python([...], folder, environment)` is `subprocess.run([sys.executable, ...], ...)` without the seconds that PyTorch and matplotlib
take to load. A copy has the modules of this checkout, its own standard streams, folder and environment, and shares nothing with the
next. What is about starting, killing or stopping a process wants a real one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from select import select

OF_THIS_CHECKOUT = tuple(str(Path(__file__).parent.parent / name) for name in ("src", ""))
"""the package and the benchmarks, whatever is installed"""
TAKE_LONG = (
    "gracecl.lab.cli",
    "gracecl.learner",
    "gracecl.lab.runs.jobs",
    "gracecl.lab.report.write",
    "gracecl.lab.studies.study",
    "gracecl.testing",
)
FROM_OTHERS = ("torch._dynamo", "torch.func", "matplotlib.figure", "matplotlib.backends.backend_agg", "scipy.stats", "tyro")


def python(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """`python -c CODE …`, `python -m MODULE …` or `python FILE …`, to its end."""
    process, notes = server()
    assert process.stdin is not None
    assert process.stdout is not None
    order = {"arguments": [*arguments], "folder": str(folder), "environment": {**environment}, "notes": str(notes)}
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    if not select([process.stdout], [], [], seconds)[0]:
        os.killpg(process.pid, signal.SIGKILL)
        server.cache_clear()
        raise subprocess.TimeoutExpired([*arguments], seconds)
    code = json.loads(process.stdout.readline())
    out, err = ((notes / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    return subprocess.CompletedProcess([*arguments], code, out, err)


@cache
def server() -> tuple[subprocess.Popen[str], Path]:
    """The process that is copied, and a folder for what copies write."""
    notes = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A process with threads cannot be copied.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(OF_THIS_CHECKOUT)},
        start_new_session=True,
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        notes.cleanup()

    atexit.register(end)
    return process, Path(notes.name)


def serve() -> None:
    for module in (*FROM_OTHERS, *TAKE_LONG):
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run_order(order["arguments"], order["folder"], order["environment"], Path(order["notes"])))
        status = os.waitpid(child, 0)[1]
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def run_order(arguments: list[str], folder: str, environment: dict[str, str], notes: Path) -> int:
    for number, file in ((0, Path(os.devnull)), (1, notes / "out"), (2, notes / "err")):
        os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as Python does)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def run(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv[:], sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif first == "-m":
        sys.argv[:], sys.path[:0] = rest, [""]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[:0] = [first, *rest], [str(Path(first).parent)]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve()
