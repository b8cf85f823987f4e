"""One table and its writers: what has a meaning in a format is escaped there, and looks are what they are called."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as xml
from io import StringIO

import pytest
from rich.console import Console

from gracecl.errors import UserError
from gracecl.lab.report.table import NOTHING, Cell, Table

ODD = "a|b `c` *d* _e_ <b>&\\# $5 100% {x}^~ [f](g)"
TABLE = Table(
    ["method", "forgetting_mose ↓"],
    "lr",
    [
        [Cell("er()", code=True), Cell("1.5", bold=True)],
        [],
        [Cell("sgd()", code=True), (Cell("-2.5", underline=True), Cell("± 0.4", small=True))],
    ],
    "A title",
    "A caption",
)


def printed(table: Table) -> list[str]:
    console = Console(file=StringIO(), width=100)
    console.print(table)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]


def test_markdown() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "**A title**",
        "",
        "| method | forgetting_mose ↓ |",
        "| --- | ---: |",
        "| `er()` | **1.5** |",
        "| `sgd()` | <u>-2.5</u> ± 0.4 |",
        "",
        "A caption",
    ]
    assert TABLE.to_markdown(tight=True).splitlines()[3] == "|---|---:|"


def test_latex() -> None:
    text = TABLE.to_latex()
    assert text.startswith("% needs \\usepackage{booktabs}\n")
    assert r"\caption{A title A caption}" in text
    assert r"method & forgetting\_mose $\downarrow$ \\" in text
    body = [line.strip() for line in text.split("\\midrule", 1)[1].split("\\bottomrule")[0].strip().splitlines()]
    assert body == [
        r"\texttt{er()} & \textbf{1.5} \\",
        r"\midrule",
        r"\texttt{sgd()} & \underline{$-2.5$} {\scriptsize $\pm$ 0.4} \\",
    ]


def test_terminal() -> None:
    lines = printed(TABLE)
    assert lines[0] == "A title"
    assert lines[-1] == "A caption"
    assert "_mose ↓" in lines[2], "a long head is broken"
    assert re.fullmatch(r"er\(\) +1\.5", lines[-4])
    assert re.fullmatch(r"sgd\(\) +-2\.5", lines[-3])
    assert lines[-2] == "± 0.4"
    assert any("[bold]odd[/bold]" in line for line in printed(Table(["a"], "l", [["[bold]odd[/bold]"]]))), "text is no markup"


def test_html() -> None:
    assert TABLE._repr_html_() == TABLE.to_html()
    table = xml.fromstring(TABLE.to_html().replace("<br>", "<br/>"))
    assert [cell.text for cell in table.findall("thead/tr/th")] == ["method", "forgetting_mose ↓"]
    assert len(table.findall("tbody")) == 2, "a group each"
    assert [cell.text for cell in table.findall("tbody/tr/td/code")] == ["er()", "sgd()"]
    assert [table.find(f"tbody/tr/td/{name}").text for name in ("b", "u", "small")] == ["1.5", "-2.5", "± 0.4"]  # type: ignore[union-attr]


def test_csv() -> None:
    rows = [["=1+1", 0.1 + 0.2, float("nan")], ["-1.5", 3, "-x"], []]
    table = Table(["name", "value", "other"], "lrr", rows)
    assert list(csv.reader(StringIO(table.to_csv()))) == [
        ["name", "value", "other"],
        ["'=1+1", "0.30000000000000004", ""],
        ["'-1.5", "3", "'-x"],
    ]
    assert list(csv.reader(StringIO(TABLE.to_csv())))[1:] == [["er()", "1.5"], ["sgd()", "'-2.5 ± 0.4"]]


def test_odd_text_is_shown_as_it_is() -> None:
    table = Table([ODD], "l", [[ODD], [Cell(ODD, code=True)], [Cell("two\nlines")], [float("nan")]])
    head, _, plain, code, two, none = table.to_markdown().splitlines()
    assert head == plain == r"| a\|b \`c\` \*d\* \_e\_ \<b>&\\# $5 100% {x}^~ [f]\(g) |"
    assert code == rf"| `` {ODD} `` |".replace("a|b", r"a\|b")
    assert (two, none) == ("| two lines |", f"| {NOTHING} |")
    shown = r"a|b `c` *d* \_e\_ <b>\&\textbackslash{}\# \$5 100\% \{x\}\textasciicircum{}\textasciitilde{} [f](g)"
    assert f"    {shown} \\\\\n    \\texttt{{{shown}}} \\\\\n    two lines \\\\\n    -- \\\\\n" in table.to_latex()
    cells = xml.fromstring(table.to_html().replace("<br>", "<br/>")).findall("tbody/tr/td")
    assert cells[0].text == cells[1][0].text == ODD
    assert [row[0] for row in csv.reader(StringIO(table.to_csv()))][:3] == [ODD, ODD, ODD]
    for kept in ("forgetting_mose ↓", "p < 0.001", "+0.50 [+0.10, +0.90], p = 0.012", "R̂_k"):
        assert f"| {kept} |" in Table(["a"], "l", [[kept]]).to_markdown()


def test_links() -> None:
    table = Table(["a"], "l", [[Cell("page", link='https://x.org/a_b?c=1&d="#e')]])
    assert "[page](<https://x.org/a_b?c=1&d=%22#e>)" in table.to_markdown()
    assert r"\href{https://x.org/a\_b?c=1\&d=\%22\#e}{page}" in table.to_latex()
    assert r"\usepackage{hyperref}" in table.to_latex()
    assert xml.fromstring(table.to_html()).find("tbody/tr/td/a").get("href") == 'https://x.org/a_b?c=1&d="#e'  # type: ignore[union-attr]
    assert "page" in printed(table)[-1]


def test_a_table_has_a_value_for_each_head() -> None:
    with pytest.raises(UserError, match="row 2 of a table has 1 columns and there are 2 heads"):
        Table(["a", "b"], "lr", [["1", "2"], ["3"]])
    with pytest.raises(UserError, match="align of a table has 1 columns"):
        Table(["a", "b"], "l", [])
    with pytest.raises(UserError, match="align has 'c'; write l"):
        Table(["a"], "c", [])
