"""How long the command takes to answer where nothing is to be computed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.measure import Row, in_turns, row

COMMAND = "from gracecl.lab.cli import main; main()"
"""what the installed script `gracecl` does"""
ASKED = (("--help",), ("list", "methods"))


def rows(quick: bool) -> Iterator[Row]:
    """For this part `ratio` is a difference: the seconds that the command takes longer than Python takes to start.

    A busy machine stretches a difference, as it does not a ratio; `seconds_added_at_best` compares the fastest of either side.
    """
    for arguments in ASKED:
        ours, bare = in_turns(partial(python, COMMAND, *arguments), partial(python, "pass"), repeats=2 if quick else 15)
        name = " ".join(("gracecl", *arguments))
        yield row(
            name,
            f"seconds added to python's start-up by {name} (a difference, not a ratio)",
            "python -c pass",
            ours - bare,
            aim=0.3,
            seconds=float(np.median(ours)),
            seconds_against=float(np.median(bare)),
            seconds_added_at_best=float(ours.min() - bare.min()),
        )


def python(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
