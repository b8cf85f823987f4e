"""The manual without Sphinx: links that lead somewhere, pages in the table of contents, a page for each method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gracecl.lab.catalogue import FACTS

ROOT = Path(__file__).parent.parent
WRITTEN = [ROOT / "docs" / "methods" / f"{name}.md" for name in (*FACTS, "index")] + [ROOT / "docs/reference/command.md"]
"""pages that the build writes"""
PAGES = [page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts and page not in WRITTEN]
PAGES += [*ROOT.glob("*.md"), *ROOT.glob("results/**/*.md")]


def links(page: Path) -> list[Path]:
    """The files that a page links to and shows."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^()\s]+)\)", text)
    return [(page.parent / link.partition("#")[0]).resolve() for link in found if not re.match(r"\w+:|#", link)]


def test_links_lead_somewhere() -> None:
    dead = {f"{page.relative_to(ROOT)}: {to}" for page in PAGES for to in links(page) if not to.exists() and to not in WRITTEN}
    assert dead == set()


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / line.strip("<> ")).resolve() for line in re.findall(r"^(?:.*<)?([\w./]+)>?$", index, re.MULTILINE)}
    pages = {page.with_suffix("") for page in PAGES if "docs" in page.relative_to(ROOT).parts}
    assert {str(page.relative_to(ROOT)) for page in pages - listed} == {"docs/index"}


@pytest.fixture(scope="module")
def method_pages() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        from manual import method_pages as pages  # type: ignore[import-not-found]

        yield pages


def test_a_method_s_page_has_its_options_and_numbers(method_pages: Any) -> None:
    page = method_pages.page("mir")
    assert "| `n_candidates` | `256` | whole number at least 0 | images drawn from memory and scored at each step |" in page
    assert "| `mir()` | 18.6 ± 1.6 | 31.8 ± 4.8 | `linear_last` | 3 |" in page, "as in results/mini/mini.md"
    assert "| MIR | Split CIFAR-100 | 1,000 | 16.0" in page, "as in the paper"
    assert "θ_v <- θ - virtual_lr · ∇CE(B_n; θ)" in page


def test_additions_and_settings_are_told_apart(method_pages: Any) -> None:
    assert [line["method"] for line in method_pages.measured("mini", "er")] == ["er()"]
    assert [line["method"] for line in method_pages.measured("mini", "ewc")] == ["er() + ewc()"]
    [row] = [line for line in method_pages.page("closed").splitlines() if "CIFAR-100 | `closed()`" in line]
    assert "63.5" in row
    assert "classes='40-59'" in method_pages.page("best")
    assert "It is not from a paper. From MOSE" in method_pages.page("best")


@pytest.mark.slow
def test_every_method_has_a_page(method_pages: Any) -> None:
    for name in FACTS:
        page = method_pages.page(name)
        for title in ("Algorithm", "Use it", "Options", "Needs and costs", "Differences from the paper", "Measured", "More"):
            assert f"\n## {title}\n" in page, f"{name} has no section {title}"
        assert "```text\n\n```" not in page, f"{name} has no algorithm"
