"""Sphinx extension: pages made of the code and the committed results, before each build, and llms.txt after it."""

from __future__ import annotations

from typing import Any


def setup(app: Any) -> dict[str, Any]:
    from manual import command_page, examples, llms, method_pages, pages  # here, so that pages can be made without Sphinx

    app.connect("builder-inited", lambda _: method_pages.write())
    app.connect("builder-inited", lambda _: command_page.write())
    app.connect("autodoc-process-docstring", examples.name_them)
    app.connect("doctree-read", pages.set_dashes)
    app.connect("build-finished", llms.write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
