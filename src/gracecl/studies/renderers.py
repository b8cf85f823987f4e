"""What a study's page can show beyond its table, by the names that a study's file calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gracecl.studies import against_paper, beside_paper, cost, entropy, mechanism, paired
from gracecl.studies.results import Results, Section


@dataclass(frozen=True)
class Renderer:
    make: Callable[[Results], list[Section]]
    """nothing where the runs have nothing to show"""
    needs_control: bool = False


RENDERERS = {
    "beside_paper": Renderer(beside_paper.sections),
    "against_paper": Renderer(against_paper.sections),
    "paired": Renderer(paired.sections, needs_control=True),
    "mechanism": Renderer(mechanism.sections, needs_control=True),
    "entropy": Renderer(entropy.sections, needs_control=True),
    "cost": Renderer(cost.sections),
}
