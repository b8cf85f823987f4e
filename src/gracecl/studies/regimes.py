"""Where feedback helps and where it hurts: GRACE's literal reading and the best one against MOSE, one factor at a time.

The setting is that of the study mini, with one thing changed in each regime: memory, updates per batch, tasks, batch size, width of
the net, or the method inside. Each method is compared with the same method without feedback in the same regime.
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
METHODS = (CONTROL, "grace(mose())", "grace(mose(), past_tasks='finished')")
STREAM = "split-cifar100(tasks={tasks}, classes='0-19', size=16, batch={batch})"
CHANGED: tuple[dict[str, object], ...] = (
    {"memory": 50},
    {"memory": 1000},
    {"stream": STREAM.format(tasks=10, batch=20)},
    {"stream": STREAM.format(tasks=5, batch=5)},
    {"stream": STREAM.format(tasks=5, batch=10)},
    {"net": "resnet18(width=16)"},
)
"""what a regime has that mini has not"""
INSIDE = ("multi_update(mose(), updates=2)", "multi_update(mose(), updates=4)", "er()", "derpp()")
"""methods that feedback is put around instead of mose()"""

SEEDS = "0-2"


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed: mini itself, then each regime."""
    found = []
    for seed in seeds:
        arms = mini.configs(methods or METHODS, [seed], quick)
        found += arms
        for changed in () if quick else CHANGED:
            found += [replace(config, **changed) for config in arms]  # type: ignore[arg-type]
        for inner in () if quick or methods else INSIDE:
            taps = None if "mose" in inner else 4  # feedback has four heads, so what it is compared with has them, too
            found += [replace(arms[0], method=inner, taps=taps), replace(arms[0], method=f"grace({inner})", taps=taps)]
    return found


def sections(runs: Sequence[Run], out: Path, name: str) -> list[Section]:
    """Every method against the control, on the same seeds."""
    return paired.section(runs, CONTROL, out, name)
