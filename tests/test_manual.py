"""The manual without Sphinx: links that lead somewhere, pages in the table of contents, a page for each method."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import gracecl
from gracecl.lab import cli
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


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, and those that it declares."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\]\([^)]*\)|[`*\[\]]", "", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_lead_to_headings_that_exist() -> None:
    """Also those of the README, which the build does not read."""
    dead = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for file, anchor in re.findall(r"\]\((?!\w+:)([^()\s#]*)#([^()\s]+)\)", text):
            to = (page.parent / file).resolve() if file else page
            if to not in WRITTEN and anchor not in anchors(to):
                dead.add(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert dead == set()


def test_names_that_pages_import_are_public() -> None:
    """What a page shows is promised: the API lists it."""
    listed = set(re.findall(r"[\w.]+", (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")))
    imported = {
        f"{module}.{name}".removeprefix("gracecl.")
        for page in PAGES
        for module, names in re.findall(r"^from (gracecl[\w.]*) import ([\w, ]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    assert imported
    assert {name for name in imported if name not in listed and name.rpartition(".")[0] not in listed} == set()
    assert set(gracecl.__all__) <= listed


def test_a_manual_is_put_beside_those_of_other_versions(tmp_path: Path, manual_on_path: None) -> None:
    from manual.versions import publish  # type: ignore[import-not-found]

    built, site = tmp_path / "html", tmp_path / "site"
    (built / "docs").mkdir(parents=True)
    (built / "docs/index.html").write_text("the manual")
    for version in ("0.9.0", "0.10.0", "0.10.0"):
        found = publish(built, version, site)
    assert found == ["0.10.0", "0.9.0"]
    assert (site / "0.9.0/docs/index.html").read_text() == "the manual"
    assert (site / "versions.js").read_text() == 'showVersions(["0.10.0", "0.9.0"]);\n'
    assert "url=0.10.0/docs/index.html" in (site / "index.html").read_text()


def test_commands_that_need_data_have_options_that_exist(manual_on_path: None) -> None:
    """Blocks marked `sh` do not run here (`bash` blocks do); their verbs and options are those of the help."""
    from manual.command_page import help_of  # type: ignore[import-not-found]

    helps: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for verb, rest in re.findall(r"^gracecl (\w+) ?(.*)$", block.replace("\\\n", ""), re.MULTILINE):
                known = helps.setdefault(verb, help_of(verb))
                unknown = {word for word in shlex.split(rest, comments=True) if word.startswith("--")} - {
                    *re.findall(r"--[\w-]+", known)
                }
                assert known.startswith("usage:"), f"{page.name}: there is no gracecl {verb}"
                assert not unknown, f"{page.name}: gracecl {verb} has no {unknown}"


def test_sentences_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    """Of each row a piece without names and numbers stands in the source."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/gracecl").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # sentences that are written over several lines
    page = (ROOT / "docs/reference/troubleshooting.md").read_text(encoding="utf-8")
    for sentence in re.findall(r"^\| (.+?) \| .+\|$", page.split("## It is slow")[0], re.MULTILINE)[1:]:
        if "--" not in sentence:
            pieces = re.split(r"\b[A-Z]+\b|'[^']*'|\bnan\b|\bfloat32\b|\d+|[…/×%:;()]", sentence)
            told = [piece.strip() for piece in pieces if len(piece.split()) > 1]
            assert any(piece in source for piece in told), f"no error or caution holds any of {told}"


def test_blocks_of_code_say_what_they_are() -> None:
    """A block without a word after its fence would be tested by nothing."""
    for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]:
        if "_build" not in page.parts and page not in WRITTEN:
            fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert all(fences[::2]), f"{page.relative_to(ROOT)} has a block without a language"


@pytest.fixture(scope="module")
def manual_on_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield


@pytest.fixture(scope="module")
def method_pages(manual_on_path: None) -> Any:
    from manual import method_pages as pages  # type: ignore[import-not-found]

    return pages


def test_a_method_s_page_has_its_options_and_numbers(method_pages: Any) -> None:
    page = method_pages.page("mir")
    assert "| `n_candidates` | `256` | whole number at least 0 | images drawn from memory and scored at each step |" in page
    assert "| `mir()` | 18.6 ± 1.6 | 14.7 to 22.6 | 31.8 ± 4.8 | `linear_last` | 3 |" in page, "as in results/mini/mini.md"
    assert "| MIR | Split CIFAR-100 | 1,000 | 16.0" in page, "as in the paper"
    assert "θ_v <- θ - virtual_lr · ∇CE(B_n; θ)" in page


def test_long_commands_and_expressions_may_break(method_pages: Any) -> None:
    command = (
        "gracecl run 'er()' --stream \"split-cifar100(tasks=5, classes='0-19', size=16, batch=20)\" --memory 200 "
        + 9 * "--abc 'd e' "
    )
    broken = method_pages.over_lines(command.strip())
    assert shlex.split(broken.replace("\\\n", "")) == shlex.split(command)
    assert len(broken.splitlines()) == 4
    assert max(map(len, broken.splitlines())) < 100
    assert method_pages.breakable("`er()`") == "`er()`"
    assert "best(<wbr>mkd(<wbr>er(), <wbr>layers='all'" in method_pages.breakable("`best(mkd(er(), layers='all', strength=2.0))`")


def test_a_page_is_told_of_by_its_first_sentence(manual_on_path: None) -> None:
    pytest.importorskip("sphinx")
    from manual.llms import first_sentence  # type: ignore[import-not-found]

    assert first_sentence("ER-ACE: of Caccia et al. 2022. More.") == "ER-ACE: of Caccia et al. 2022."
    assert first_sentence("It has no end") == "It has no end"


def test_additions_and_settings_are_told_apart(method_pages: Any) -> None:
    assert [line["method"] for line in method_pages.measured("mini", "er")] == ["er()"]
    assert [line["method"] for line in method_pages.measured("mini", "ewc")] == ["er() + ewc()"]
    [row] = [
        line
        for line in method_pages.page("closed").splitlines()
        if "EfficientNet-Lite0, 10 tasks, memory 2,000 | `closed()`" in line and "CIFAR" in line and "×" not in line
    ]
    assert "63.5" in row
    assert ": classes 0–19 of CIFAR-100, 5 tasks, 16 pixels a side, memory 200 | `best()` | 36.5 ± 2.4" in method_pages.page("best")
    assert "It is not from a paper. From MOSE" in method_pages.page("best")


@pytest.mark.slow
def test_every_method_has_a_page(method_pages: Any) -> None:
    for name in FACTS:
        page = method_pages.page(name)
        for title in ("Algorithm", "Use it", "Options", "Needs and costs", "Differences from the paper", "Measured", "More"):
            assert f"\n## {title}\n" in page, f"{name} has no section {title}"
        assert "```text\n\n```" not in page, f"{name} has no algorithm"


def test_strong_and_weak_are_what_paired_seeds_say(method_pages: Any) -> None:
    assert "more accurate than `mose()` in 5 of 5 settings (4.7 to 9.2 points)" in method_pages.page("best")
    verdict = method_pages.strong_and_weak("grace")
    [row] = [
        line for line in verdict.splitlines() if "classes 40–59" in line and "`grace()` | `mose()`" in line and "16 pix" in line
    ]
    assert "−0.2<br>(−0.9 to +0.4)" in row, "as in docs/verdict.md"
    assert verdict.startswith("No difference can be told")


def test_costs_are_those_of_a_dry_run(method_pages: Any, manual_on_path: None) -> None:
    from manual import count_costs  # type: ignore[import-not-found]

    assert method_pages.all_costs().keys() == FACTS.keys()
    for name in ("er", "mir", "slda"):
        assert count_costs.counted(name) == method_pages.counted(name), "make it again: python docs/manual/count_costs.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS)
def test_the_command_on_a_method_s_page_runs(
    name: str, method_pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [command] = re.findall(r"^gracecl (run .*)$", method_pages.use(name, FACTS[name]), re.MULTILINE)
    fewer = command.replace("split-digits(tasks=5)", "split-digits(tasks=5, size=16)").replace("width=8", "width=2")
    assert cli.call([*shlex.split(fewer), "--steps", "2", "--eval-images", "10", "--jobs", "1"]) == 0, capsys.readouterr().err
