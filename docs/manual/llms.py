"""llms.txt: the pages of the manual with a sentence each, for programs that read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

OPENING = "# gracecl\n\n> Online continual learning in PyTorch: a library and a command.\n"


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    lines = [OPENING]
    for tree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        lines.append(f"## {tree['caption']}\n")
        for name in tree["includefiles"]:
            lines += [line(app, page) for page in (name, *below(app, name))]
        lines.append("")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def below(app: Sphinx, name: str) -> Iterator[str]:
    for page in app.env.toctree_includes.get(name, ()):
        yield page
        yield from below(app, page)


def line(app: Sphinx, name: str) -> str:
    """Return a page's link and the first sentence of its text, tables left out."""
    paragraphs = app.env.get_doctree(name).findall(lambda node: isinstance(node, nodes.paragraph) and not in_table(node))
    text = " ".join(next((paragraph.astext() for paragraph in paragraphs), "").split())
    return f"- [{app.env.titles[name].astext()}]({name}.html): {first_sentence(text)}"


def first_sentence(text: str) -> str:
    return re.split(r"(?<!al\.)(?<=[^.]{2}\.)\s", text)[0]


def in_table(node: nodes.Node) -> bool:
    return isinstance(node.parent, nodes.entry)
