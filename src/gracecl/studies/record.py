"""The library's own learner `best` against MOSE and every other method, on classes that no choice was made on.

The setting is that of the study mini on classes 40–59 of CIFAR-100: five tasks of four, images of 16×16 pixels in one pass of 500
steps of 20, a memory of 200 images, a ResNet-18 of width 8, Adam at 0.001, paired seeds. Beside `best` stand what is left of it
without each of its parts, and on classes 0–19 what it was chosen from; the choice was committed before a run on the others began.
The first three seeds have two larger settings, where `best` meets MOSE alone: the same classes at 32×32 pixels in 1,000 steps of
10, and all hundred classes in ten tasks with a memory of 1,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gracecl.report import Run
from gracecl.runs.run import RunConfig
from gracecl.studies import mini, paired
from gracecl.studies.table import Section

CONTROL = "mose()"
STREAM = "split-cifar100(tasks=5, classes='40-59', size=16, batch=20)"
METHODS = (
    CONTROL,
    "best()",
    "grace(mose())",
    "mkd(multi_update(mose(inference='linear_votes')), strength=2.0, layers='all')",
    "mirrored(multi_update(mose(inference='linear_votes')))",
    "mirrored(mkd(mose(inference='linear_votes'), strength=2.0, layers='all'))",
    "mirrored(mose(inference='linear_votes'))",
    "er()",
    "joint()",
)
"""the learner, the paper's system, the learner without mirror images, without its teacher, without its small updates, without
both; two landmarks"""
DEVELOPED = (
    CONTROL,
    "multi_update(mose())",
    "multi_update(mose(), updates=8)",
    "mkd(multi_update(mose()), strength=2.0, layers='all')",
    "mkd(multi_update(mose()), layers='all')",
)
"""what the learner was chosen from, on classes 0-19 and the first two seeds"""
LARGER: tuple[dict[str, object], ...] = (
    {"stream": "split-cifar100(size=16, batch=20)", "memory": 1000},
    {"stream": "split-cifar100(tasks=5, classes='40-59', size=32, batch=10)"},
)
"""what a larger setting has that the first has not"""
IN_LARGER = (CONTROL, "best()")
SEEDS = "0-7"


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed."""
    found = []
    for seed in seeds:
        arms = mini.configs(methods or METHODS, [seed], quick)
        found += arms if quick else [replace(config, stream=STREAM) for config in arms]
        if not (quick or methods or seed > 1):
            found += mini.configs(DEVELOPED, [seed], quick)
        for changed in () if quick or seed > 2 else LARGER:
            found += [replace(config, **changed) for config in arms if config.method in IN_LARGER]  # type: ignore[arg-type]
    return found


def sections(runs: Sequence[Run], out: Path, name: str) -> list[Section]:
    """Every method against the control, on the same seeds."""
    return paired.section(runs, CONTROL, out, name)
