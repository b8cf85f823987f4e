"""Tables: for the terminal (rich) and for a page (Markdown)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gracecl.errors import UserError
from gracecl.functional.metrics import HIGHER_IS_BETTER
from gracecl.functional.statistics import FEWEST_SEEDS, Paired, Summary
from gracecl.report import sheet
from gracecl.report.beside_paper import Column
from gracecl.report.groups import Group, group_runs
from gracecl.report.runs import Run, is_tap, measure
from gracecl.report.sheet import Cell

COMPARED = ("acc", "aia", "forgetting", "forgetting_mose")
"""metrics of a comparison unless others are asked for"""

RULE_METRICS = ("acc", "aia", "forgetting_mose", "ece", "nll")

DECIMALS = {"ece": 3, "nll": 3, "seconds": 1}
"""accuracies are percent with two decimals; these are not accuracies"""

BRIEF = dict.fromkeys(HIGHER_IS_BETTER, 1) | {"ece": 3, "nll": 2, "seconds": 0}
"""decimals of mean ± std in the terminal, where a comparison has to fit into 80 columns"""

NOTHING = "–"


def comparison_table(runs: Sequence[Run], metrics: Sequence[str] = COMPARED, column: Column | None = None) -> Table:
    """One row per method: mean ± sample standard deviation over seeds, under the method's own inference rule.

    The best of each column is bold and the second underlined; beside them stands what the paper has, if its column is given.
    """
    groups = group_runs(runs)
    found = sheet.lines(groups, metrics, column)
    printed = sheet.beside(found, metrics)
    heads = [head for metric in metrics for head in ([heading(metric), "paper", "Δ"] if metric in printed else [heading(metric)])]
    table = new_table("method", "n", *heads, "seconds")
    for line in found:
        cells: list[str | Text] = []
        for metric, cell in line.cells.items():
            style = {0: "bold", 1: "underline"}.get(cell.place, "") if cell.place is not None else ""
            cells.append(Text(spread_text(cell.ours, BRIEF[metric]), style))
            cells += _of_the_paper(cell) if metric in printed else []
        name = f"{escape(line.group.label)}\n[dim]{escape(line.group.rule)}[/dim]"
        table.add_row(name, str(len(line.group.runs)), *cells, spread_text(line.seconds, BRIEF["seconds"]))
    beside = [column.about] if column and printed else []
    table.caption = " ".join(["percent; mean ± sample std over n seeds", *_left_out(groups), *beside])
    return table


def rules_table(runs: Run | Sequence[Run]) -> Table:
    """What each inference rule, and each tap alone, would have scored: one run, or the seeds of one method."""
    groups = group_runs([runs] if isinstance(runs, Run) else runs, unfinished_too=True)
    if len(groups) != 1:
        raise UserError("a table of inference rules is about the runs of one method; choose its folder")
    group = groups[0]
    names = list(dict.fromkeys(name for run in group.runs for name in run.rules()))
    table = new_table("rule", *(heading(metric) for metric in RULE_METRICS))
    for taps in (False, True):
        for name in (name for name in names if is_tap(name) == taps):
            cells = [spread_text(group.under(name).summarise(metric), BRIEF[metric]) for metric in RULE_METRICS]
            table.add_row(f"{name} *" if name == group.rule else name, *cells)
        table.add_section()
    table.caption = "* the rule this method predicts with; a number is a tap, counted from the input"
    return table


def run_table(run: Run) -> Table:
    """Every metric of one run, a column for each rule that combines or chooses taps."""
    rules = [rule for rule in run.rules() if not is_tap(rule)]
    values = {rule: measure(run, rule) for rule in rules}
    table = new_table("metric", *(f"{rule} *" if rule == run.rule else rule for rule in rules))
    for metric in HIGHER_IS_BETTER:
        cells = [number(values[rule].get(metric, math.nan), DECIMALS.get(metric, 2)) for rule in rules]
        if any(cell != NOTHING for cell in cells):
            table.add_row(heading(metric), *cells)
    table.title = escape(run.title)
    table.caption = "* the rule this method predicts with" + ("" if run.finished else "; the run is not finished")
    return table


def comparison_markdown(runs: Sequence[Run], metrics: Sequence[str] = COMPARED, column: Column | None = None) -> str:
    """The comparison for a page: the same table with 95 % intervals, and paired differences to the first method."""
    groups = group_runs(runs)
    found = sheet.lines(groups, metrics, column)
    printed = sheet.beside(found, metrics)
    header, rows = ["method", "rule", "seeds"], []
    for metric in metrics:
        header += [heading(metric), "paper", "difference"] if metric in printed else [heading(metric)]
    for line in found:
        row = [f"`{line.group.label}`", f"`{line.group.rule}`", seeds_text(len(line.group.runs))]
        for metric, cell in line.cells.items():
            text = spread_text(cell.ours, DECIMALS.get(metric, 2), interval=True)
            row.append({0: f"**{text}**", 1: f"<u>{text}</u>"}.get(cell.place, text) if cell.place is not None else text)
            row += _of_the_paper(cell) if metric in printed else []
        rows.append([*row, spread_text(line.seconds, DECIMALS["seconds"])])
    note = (
        "Accuracies in percent: mean ± sample standard deviation over seeds, in brackets the half-width of the "
        "95 % Student-t interval of the mean; the best bold, the second underlined. Seconds are training time without evaluation."
    )
    notes = [note, *([column.about] if column and printed else []), *_left_out(groups)]
    parts = [markdown_table([*header, "seconds"], rows), " ".join(notes)]
    return "\n\n".join(parts + _differences(groups, metrics)) + "\n"


def _of_the_paper(cell: Cell) -> list[str]:
    """Its value and the difference to it."""
    return [NOTHING if cell.paper is None else f"{cell.paper:.1f}", number(cell.difference, 1, "+")]


def _differences(groups: list[Group], metrics: Sequence[str]) -> list[str]:
    """Heading, table and note of the paired differences; nothing when no seed is shared."""
    if not groups:
        return []
    first, rows = groups[0], []
    for group in groups[1:]:
        differences = [group.minus(first, metric) for metric in metrics]
        n = max((difference.n for difference in differences), default=0)
        if n:
            decimals = [DECIMALS.get(metric, 2) for metric in metrics]
            rows.append([f"`{group.label}`", seeds_text(n), *map(_difference, differences, decimals)])
    if not rows:
        return []
    return [
        f"### Difference to `{first.label}` on the same seeds",
        markdown_table(["method", "seeds", *(heading(metric) for metric in metrics)], rows),
        "Mean difference, its 95 % interval, and p of the paired t-test (two-sided, not corrected for the number of comparisons; "
        "`gracecl compare` corrects it).",
    ]


def _left_out(groups: list[Group]) -> list[str]:
    count = sum(group.unfinished for group in groups)
    return [f"({count} unfinished run{'s' if count > 1 else ''} left out)"] if count else []


def new_table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left", title_justify="left")
    table.add_column(first, overflow="fold", min_width=12)
    for name in others:
        table.add_column(name.replace("forgetting_", "forgetting\n_"), justify="right", no_wrap=True)
    return table


def heading(metric: str) -> str:
    return f"{metric} {'↑' if HIGHER_IS_BETTER.get(metric, False) else '↓'}"


def number(value: float, decimals: int, sign: str = "") -> str:
    return NOTHING if math.isnan(value) else f"{value:{sign}.{decimals}f}"


def spread_text(values: Summary, decimals: int, *, interval: bool = False) -> str:
    """`61.20 ± 0.42`, with `(± 1.05)` for the interval where there is one; the mean alone for one seed."""
    text = number(values.mean, decimals)
    if not math.isnan(values.std):
        text += f" ± {number(values.std, decimals)}"
    if interval and not math.isnan(values.half_width):
        text += f" (± {number(values.half_width, decimals)})"
    return text


def seeds_text(n: int) -> str:
    """Their number; too few have no interval."""
    return str(n) if n >= FEWEST_SEEDS else f"{n} seed{'' if n == 1 else 's'}: no interval"


def _difference(values: Paired, decimals: int) -> str:
    text = number(values.mean, decimals, "+")
    if not math.isnan(values.p):
        text += f" [{number(values.low, decimals, '+')}, {number(values.high, decimals, '+')}]"
        text += f", {p_text(values.p)}"
    return text


def p_text(p: float) -> str:
    """`p = 0.012` or `p < 0.001`."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---" if name in ("method", "rule", "against") else "---:" for name in header]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows])
