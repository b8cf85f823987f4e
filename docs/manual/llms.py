"""llms.txt: the pages of the manual with a sentence each, for programs that read."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

OPENING = "# gracecl\n\n> Online continual learning in PyTorch: a library and a command.\n\n## Pages\n"


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    lines = [OPENING]
    for name in sorted(app.env.found_docs):
        tree = app.env.get_doctree(name)
        title = app.env.titles[name].astext()
        first = next((paragraph.astext() for paragraph in tree.findall(nodes.paragraph)), "")
        sentence = re.split(r"(?<=[.:])\s", " ".join(first.split()))[0]
        lines.append(f"- [{title}]({name}.html): {sentence}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
