"""What a renderer receives and returns: the finished runs of a study, and sections of its page.

A renderer is a function that `@renderers.register("name")` makes known, for `show = ["name"]` in a study's file::

    @renderers.register("name")
    def sections(results: Results) -> list[Section]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracecl.lab.report import Run


@dataclass(frozen=True)
class Section:
    """A section of a study's page."""

    key: str
    """of `data` in the study's JSON"""
    text: str
    """for the study's page"""
    data: Any
    leads: bool = False
    """whether it stands above the study's table, as the answer to its question, and not below"""


@dataclass(frozen=True)
class Results:
    """The runs of a study, and what renderers need to know of it."""

    name: str
    """of the page and the pictures beside it"""
    scale: str
    control: str
    """the method that others are compared with; empty where there is none"""
    runs: Sequence[Run]
    beside: Sequence[Mapping[str, Any] | None]
    """of each run, fields of those of the paper's records that it is set beside"""
    out: Path

    def titled(self, title: str) -> str:
        """Return the title of a picture, with the scale."""
        return f"{title} (scale {self.scale})"


Renderer = Callable[[Results], list[Section]]
"""returns no section where the runs have nothing to show"""


def needs_control(renderer: Renderer) -> Renderer:
    """Decorate a renderer, below `register`: a study that shows it must name a control."""
    renderer.needs_control = True  # type: ignore[attr-defined]
    return renderer
