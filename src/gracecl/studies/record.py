"""The library's own learner `best` against MOSE and every other method, on classes that no choice was made on.

The setting is that of the study mini on classes 40–59 of CIFAR-100: five tasks of four, images of 16×16 pixels in one pass of 500
steps of 20, a memory of 200 images, a ResNet-18 of width 8, Adam at 0.001, paired seeds. Beside `best` stand its parts, each left
out in turn, and MOSE with as many images as `best` or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gracecl.report import Run
from gracecl.run import RunConfig
from gracecl.studies import mini, paired
from gracecl.studies.table import Section

CONTROL = "mose()"
STREAM = "split-cifar100(tasks=5, classes='40-59', size=16, batch=20)"
METHODS = (
    CONTROL,
    "best()",
    "multi_update(mose(), updates=2)",
    "multi_update(mose(), updates=4)",
    "grace(mose())",
    "er()",
    "joint()",
)

SEEDS = "0-7"


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed."""
    arms = mini.configs(methods or METHODS, seeds, quick)
    return arms if quick else [replace(config, stream=STREAM) for config in arms]


def sections(runs: Sequence[Run], out: Path, name: str) -> list[Section]:
    """Every method against the control, on the same seeds."""
    return paired.section(runs, CONTROL, out, name)
