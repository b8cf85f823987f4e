"""What the programs that write pages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def write_page(path: Path, text: str) -> None:
    """Write a page, unless it is there already: Sphinx reads changed files alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def cell(text: object) -> str:
    """Return a text as the cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(heads: list[str], rows: list[list[object]], right: tuple[int, ...] = ()) -> str:
    """Return a Markdown table; columns in `right` are aligned to the right."""
    rule = ["---:" if place in right else "---" for place in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def set_dashes(app: Any, tree: Any) -> None:
    """Draw the dash between a parameter and its sentence, which Sphinx writes as two hyphens; all others are options."""
    from docutils import nodes  # here, so that pages can be made without Sphinx

    for node in list(tree.findall(nodes.Text)):
        if node == " -- ":
            node.parent.replace(node, nodes.Text(" – "))
