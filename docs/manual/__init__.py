"""Sphinx extension: pages made of the code and the committed results, before each build, and llms.txt after it."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from manual import command_page, llms, method_pages


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", lambda _: method_pages.write())
    app.connect("builder-inited", lambda _: command_page.write())
    app.connect("build-finished", llms.write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
