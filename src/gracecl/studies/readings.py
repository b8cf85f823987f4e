"""GRACE's feedback in every reading of the paper against MOSE, which it is built on: what helps, what hurts, what nobody can tell.

The setting is that of the study mini: twenty classes of CIFAR-100 in five tasks, images of 16×16 pixels in one pass of 500 steps of
20, a memory of 200 images, a ResNet-18 of width 8, Adam at 0.001, paired seeds. Classes 0–19 are for development: they were looked
at when readings were chosen. Classes 40–59 and the first twenty of Tiny-ImageNet are for confirmation: CONFIRMED was committed
before any of their runs was started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gracecl.report import Run
from gracecl.runs.run import RunConfig
from gracecl.studies import mechanism, mini, paired
from gracecl.studies.table import Section

CONTROL = "mose()"
LITERAL = "grace(mose())"
PARTS = (
    "grace(mose(), entropy_mode='none')",
    "grace(mose(), adaptive=False)",
    "grace(mose(), entropy_mode='uniform')",
)
"""α alone, γ alone, and the uniform entropy term of the paper's ablation"""
READINGS = (
    "grace(mose(), past_tasks='finished')",
    "grace(mose(), past_head='ncm', val_source='heldout')",
    "grace(mose(), alpha_on='ce_past')",
    "grace(mose(), alpha_on='entropy')",
    "grace(mose(), accuracy_floor=0.05)",
    "grace(mose(), entropy_of='features')",
    "grace(mose(), entropy_layers='last')",
    "grace(mose(), entropy_sum=True)",
    "grace(mose(), entropy_mode='cpr')",
    "grace(mose(), entropy_mode='target')",
    "grace(mose(), entropy_mode='deviation')",
)
STRENGTHS = tuple(f"grace(mose(), beta={beta})" for beta in (0.05, 0.5, 2.0))
CONTROLLERS = (
    *(f"grace(mose(), strength='{rule}')" for rule in ("bayes", "pi", "balance")),
    "grace(mose(), strength='forgetting', alpha_on='ce_past')",
)
METHODS = (CONTROL, LITERAL, *PARTS, *READINGS, *STRENGTHS, *CONTROLLERS)

CONFIRMED = (CONTROL, LITERAL, "grace(mose(), past_tasks='finished')", "grace(mose(), accuracy_floor=0.05)")
"""what is compared again on classes that no choice was made on"""
CONFIRMATION = (
    "split-cifar100(tasks=5, classes='40-59', size=16, batch=20)",
    "split-tinyimagenet(tasks=5, classes='0-19', size=16, batch=20)",
)

SEEDS = "0-3"


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed; those of confirmation follow each seed's."""
    found = []
    for seed in seeds:
        arms = mini.configs(methods or (METHODS[:2] if quick else METHODS), [seed], quick)
        found += arms
        if not quick:
            again = [config for config in arms if config.method in CONFIRMED]
            found += [replace(config, stream=stream) for stream in CONFIRMATION for config in again]
    return found


def sections(runs: Sequence[Run], out: Path, name: str) -> list[Section]:
    """Every method against the control, on the same seeds, and what the literal reading does inside the net."""
    return paired.section(runs, CONTROL, out, name) + mechanism.section(runs, CONTROL, LITERAL, out, name)
