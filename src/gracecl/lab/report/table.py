"""A table as values, and its writers: terminal (rich), Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from gracecl.errors import UserError
from gracecl.files import as_cell

NOTHING = "–"
"""stands where there is no value"""
LONGEST_HEAD = 14
"""letters of a column's head in the terminal; a longer one is broken at its first underscore"""
NARROWEST_TEXT, WIDEST_TEXT = 12, 24
"""columns of a terminal that a column of text gets at least, and those from which on it would rather fold than push others out"""


@dataclass(frozen=True)
class Cell:
    """A text and how it looks; each writer escapes what has a meaning in its format."""

    text: str
    code: bool = False
    """an expression, such as a method"""
    bold: bool = False
    underline: bool = False
    small: bool = False
    """less important than what stands before it; in the terminal it is on a line of its own"""
    link: str = ""
    """address that the text leads to"""


Entry = str | float | Cell | tuple[Cell, ...]
"""what a row has in a column: plain text, a number, a cell, or several cells side by side"""


@dataclass(frozen=True)
class Table:
    """Heads, rows below them, a title above and a caption below."""

    heads: Sequence[str]
    align: str
    """of each column, as LaTeX has it: l or r"""
    rows: Sequence[Sequence[Entry]]
    """an empty row is a line between groups of rows"""
    title: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        if wrong := set(self.align) - {"l", "r"}:
            raise UserError(f"a table's align has '{min(wrong)}'; write l (left) or r (right) for each column")
        for number, row in enumerate((self.align, *self.rows)):
            if row and len(row) != len(self.heads):
                what = f"row {number}" if number else "align"
                raise UserError(
                    f"{what} of a table has {len(row)} columns and there are {len(self.heads)} heads; give one for each"
                )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        for part in self.within(options.max_width):
            yield part.to_rich()

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_rich(self) -> RichTable:
        """For a terminal: text folds, numbers do not."""
        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left", title_justify="left")
        for head, side in zip(self.heads, self.align, strict=True):
            short = escape(_short(head))
            if side == "l":
                table.add_column(short, overflow="fold", min_width=NARROWEST_TEXT)
            else:
                table.add_column(short, justify="right", no_wrap=True)
        for row in self.rows:
            if row:
                table.add_row(*map(_rich, row))
            else:
                table.add_section()
        table.title, table.caption = escape(self.title), escape(self.caption)
        return table

    def within(self, width: int) -> list[Table]:
        """Split the columns over several tables, each of which begins with the first column and fits into `width` if it can."""
        each = [self._width(column) for column in range(len(self.heads))]
        parts, own = [], [0]
        for column in range(1, len(each)):
            if len(own) > 1 and sum(each[place] for place in (*own, column)) >= width:
                parts.append(own)
                own = [0]
            own.append(column)
        tables = [self._columns(chosen) for chosen in (*parts, own)]
        tables[0] = replace(tables[0], title=self.title)
        tables[-1] = replace(tables[-1], caption=self.caption)
        return tables

    def _width(self, column: int) -> int:
        """Return how much of a line in a terminal a column takes, with the space beside it."""
        texts = [_short(self.heads[column]), *(_rich(row[column]).plain for row in self.rows if row)]
        longest = max(cell_len(line) for text in texts for line in text.splitlines() or [""])
        return 2 + (longest if self.align[column] == "r" else max(NARROWEST_TEXT, min(longest, WIDEST_TEXT)))

    def _columns(self, chosen: Sequence[int]) -> Table:
        """Return these columns alone, without title and caption."""
        rows = [[row[column] for column in chosen] if row else row for row in self.rows]
        return Table([self.heads[column] for column in chosen], "".join(self.align[column] for column in chosen), rows)

    def to_markdown(self, *, tight: bool = False) -> str:
        """For a page; title and caption are Markdown already. `tight` leaves no spaces in the line below the heads."""
        marks = ["---" if side == "l" else "---:" for side in self.align]
        rule = f"|{'|'.join(marks)}|" if tight else _line(marks)
        rows = [_line(map(_markdown, row)) for row in self.rows if row]
        table = "\n".join([_line(map(_markdown, self.heads)), rule, *rows])
        return "\n\n".join(part for part in (f"**{self.title}**" if self.title else "", table, self.caption) if part)

    def to_latex(self) -> str:
        """A booktabs table for a paper."""
        linked = any(cell.link for row in self.rows for entry in row for cell in _cells(entry))
        rows = [" & ".join(map(_latex, row)) + r" \\" if row else r"\midrule" for row in self.rows]
        caption = " ".join(part for part in (self.title, self.caption) if part)
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}" + (r" and \usepackage{hyperref}" if linked else ""),
                r"\begin{table}",
                r"  \centering",
                rf"  \caption{{{_tex(caption)}}}",
                rf"  \begin{{tabular}}{{{self.align}}}",
                r"    \toprule",
                f"    {' & '.join(map(_tex, self.heads))} " + r"\\",
                r"    \midrule",
                *(f"    {row}" for row in rows),
                r"    \bottomrule",
                r"  \end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def to_csv(self) -> str:
        """Heads and rows alone: numbers in full, empty where there is none, no text that a spreadsheet takes for a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(_csv, self.heads))
        writer.writerows(map(_csv, row) for row in self.rows if row)
        return text.getvalue()

    def to_html(self) -> str:
        """Return HTML for a notebook or a page."""
        sides = [' style="text-align:left"' if side == "l" else ' style="text-align:right"' for side in self.align]
        caption = "<br>".join(_html_text(part) for part in (self.title, self.caption) if part)
        body = "".join(_html_row("td", map(_html, row), sides) if row else "</tbody><tbody>" for row in self.rows)
        return "".join(
            [
                "<table>",
                f'<caption style="text-align:left">{caption}</caption>' if caption else "",
                f"<thead>{_html_row('th', map(_html_text, self.heads), sides)}</thead>",
                f"<tbody>{body}</tbody>",
                "</table>",
            ]
        )


def number(value: float, decimals: int, sign: str = "") -> str:
    """Format a number, `–` for NaN."""
    return NOTHING if math.isnan(value) else f"{value:{sign}.{decimals}f}"


def _short(head: str) -> str:
    return head if len(head) <= LONGEST_HEAD else head.replace("_", "\n_", 1)


def _cells(entry: Entry) -> tuple[Cell, ...]:
    if isinstance(entry, tuple):
        return entry
    if isinstance(entry, Cell):
        return (entry,)
    return (Cell(entry if isinstance(entry, str) else f"{entry:g}" if math.isfinite(entry) else NOTHING),)


def _joined(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rich(entry: Entry) -> Text:
    text = Text()
    for cell in _cells(entry):
        text.append(("\n" if cell.small else " ") if text else "")
        styles = {"bold": cell.bold, "underline": cell.underline, "dim": cell.small, f"link {cell.link}": bool(cell.link)}
        text.append(cell.text, _joined(name for name, wanted in styles.items() if wanted))
    return text


LETTER = r"[^\s!-/:-@\[-`{-~]"
MARKED = re.compile(rf"\\(?!{LETTER}|\s|$)|[`*|]|(?<!{LETTER})_|_(?!{LETTER})|<(?=[A-Za-z/!?])|(?<=\])\(")
"""what Markdown would take for more than a letter where it stands: `forgetting_mose` and `p < 0.05` stay as they are"""


def _markdown(entry: Entry) -> str:
    return _joined(map(_markdown_cell, _cells(entry)))


def _markdown_cell(cell: Cell) -> str:
    plain = " ".join(cell.text.splitlines())
    if cell.code:
        fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
        space = " " if len(fence) > 1 else ""  # a backtick inside may not touch those around
        text = f"{fence}{space}{plain}{space}{fence}".replace("|", "\\|")
    else:
        text = MARKED.sub(lambda found: f"\\{found[0]}", plain)
    text = f"<u>{text}</u>" if cell.underline else text
    text = f"**{text}**" if cell.bold else text
    return f"[{text}](<{quote(cell.link, safe=ADDRESS)}>)" if cell.link else text


ADDRESS = "/:?#[]@!$&'()*+,;=%~"
"""letters with a meaning in an address, which stay as they are"""
IN_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "Δ": r"$\Delta$",
    "–": "--",
    "\n": " ",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(IN_LATEX.get(character, character) for character in text)


def _latex(entry: Entry) -> str:
    return _joined(map(_latex_cell, _cells(entry)))


def _latex_cell(cell: Cell) -> str:
    signed = re.fullmatch(r"[+-][\d.,]+", cell.text)
    text = f"${cell.text}$" if signed else _tex(cell.text)
    text = rf"\texttt{{{text}}}" if cell.code else text
    text = rf"\underline{{{text}}}" if cell.underline else text
    text = rf"\textbf{{{text}}}" if cell.bold else text
    text = rf"{{\scriptsize {text}}}" if cell.small else text
    address = re.sub("[%#&_]", r"\\\g<0>", quote(cell.link, safe=ADDRESS))
    return rf"\href{{{address}}}{{{text}}}" if cell.link else text


def _csv(entry: Entry) -> Any:
    if isinstance(entry, (int, float)):
        return entry if math.isfinite(entry) else ""
    return as_cell(_joined(cell.text for cell in _cells(entry)))


def _html_text(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def _html(entry: Entry) -> str:
    return _joined(map(_html_cell, _cells(entry)))


def _html_cell(cell: Cell) -> str:
    text = _html_text(cell.text)
    for name, wanted in {"code": cell.code, "u": cell.underline, "b": cell.bold, "small": cell.small}.items():
        text = f"<{name}>{text}</{name}>" if wanted else text
    return f'<a href="{html.escape(cell.link)}">{text}</a>' if cell.link else text


def _html_row(kind: str, cells: Iterable[str], sides: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}{side}>{cell}</{kind}>' for cell, side in zip(cells, sides, strict=True))}</tr>"
