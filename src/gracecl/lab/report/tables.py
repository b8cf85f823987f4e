"""The tables of a report: of methods, of one run, of its inference rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gracecl.errors import UserError
from gracecl.functional.metrics import HIGHER_IS_BETTER, NOT_PERCENT
from gracecl.functional.statistics import FEWEST_SEEDS, Paired, Summary
from gracecl.lab.report import sheet
from gracecl.lab.report.beside_paper import Column
from gracecl.lab.report.groups import Group, group_runs
from gracecl.lab.report.runs import Run, is_tap, measure
from gracecl.lab.report.sheet import Value, heading
from gracecl.lab.report.table import NOTHING, Cell, Entry, Table, number
from gracecl.lab.report.terms import terms

COMPARED = ("acc", "aia", "forgetting", "forgetting_mose")
"""metrics of a comparison unless others are asked for"""

RULE_METRICS = ("acc", "aia", "forgetting_mose", "ece", "nll")

DECIMALS = dict.fromkeys(NOT_PERCENT, 3) | {"seconds": 1}
"""accuracies are percent with two decimals; these are not accuracies"""

BRIEF = dict.fromkeys(HIGHER_IS_BETTER, 1) | dict.fromkeys(NOT_PERCENT, 3) | {"nll": 2, "seconds": 0}
"""decimals of mean ± std in the terminal, where a comparison has to fit into 80 columns"""


def comparison_table(runs: Sequence[Run], metrics: Sequence[str] = COMPARED, column: Column | None = None) -> Table:
    """Return one row per method: mean ± sample standard deviation over seeds, under the method's own inference rule.

    The best of each column is bold and the second underlined; beside them stands what the paper has, if its column is given.
    """
    groups = group_runs(runs)
    found = sheet.lines(groups, metrics, column)
    printed = sheet.beside(found, metrics)

    def show(metric: str, value: Value) -> Entry:
        return value.marked(spread_text(value.ours, BRIEF[metric]))

    rows = [
        [
            (Cell(line.group.label), Cell(line.group.rule, small=True)),
            str(len(line.group.runs)),
            *line.entries(show, printed),
            spread_text(line.seconds, BRIEF["seconds"]),
        ]
        for line in found
    ]
    beside = [column.about] if column and printed else []
    left_out = "".join(f" {text}" for text in _left_out(groups))
    caption = " ".join([f"percent; mean ± sample std over n seeds{left_out}.", *beside, terms(groups)])
    return method_table(["method", "n", *sheet.heads(metrics, printed, "Δ"), "seconds"], rows, caption=caption)


def rules_table(runs: Run | Sequence[Run]) -> Table:
    """Return the score of each inference rule and each tap: of one run, or over the seeds of one method."""
    groups = group_runs([runs] if isinstance(runs, Run) else runs, unfinished_too=True)
    if len(groups) != 1:
        raise UserError("a table of inference rules is about the runs of one method; choose its folder")
    group = groups[0]
    names = list(dict.fromkeys(name for run in group.runs for name in run.rules()))
    rows: list[list[str]] = []
    for taps in (False, True):
        for name in (name for name in names if is_tap(name) == taps):
            values = [spread_text(group.under(name).summarise(metric), BRIEF[metric]) for metric in RULE_METRICS]
            rows.append([f"{name} *" if name == group.rule else name, *values])
        rows.append([])
    caption = "* the rule this method predicts with; a number is a tap, counted from the input"
    return method_table(["rule", *map(heading, RULE_METRICS)], rows, caption=caption)


def run_table(run: Run) -> Table:
    """Return every metric of one run, a column per rule that combines or chooses taps."""
    rules = [rule for rule in run.rules() if not is_tap(rule)]
    values = {rule: measure(run, rule) for rule in rules}
    rows = []
    for metric in HIGHER_IS_BETTER:
        texts = [number(values[rule].get(metric, math.nan), DECIMALS.get(metric, 2)) for rule in rules]
        if any(text != NOTHING for text in texts):
            rows.append([heading(metric), *texts])
    heads = ["metric", *(f"{rule} *" if rule == run.rule else rule for rule in rules)]
    caption = "* the rule this method predicts with" + ("" if run.finished else "; the run is not finished")
    return method_table(heads, rows, run.title, caption)


def comparison_markdown(runs: Sequence[Run], metrics: Sequence[str] = COMPARED, column: Column | None = None) -> str:
    """Return the comparison for a page, with 95 % intervals and paired differences to the first method."""
    groups = group_runs(runs)
    found = sheet.lines(groups, metrics, column)
    printed = sheet.beside(found, metrics)

    def show(metric: str, value: Value) -> Entry:
        return value.marked(spread_text(value.ours, DECIMALS.get(metric, 2), interval=True))

    rows = [
        [
            Cell(line.group.label, code=True),
            Cell(line.group.rule, code=True),
            seeds_text(len(line.group.runs)),
            *line.entries(show, printed),
            spread_text(line.seconds, DECIMALS["seconds"]),
        ]
        for line in found
    ]
    note = (
        "Accuracies in percent: mean ± sample standard deviation over seeds, in brackets the half-width of the "
        "95 % Student-t interval of the mean; the best bold, the second underlined. Seconds are training time without evaluation."
    )
    notes = [note, *([column.about] if column and printed else []), *_left_out(groups), terms(groups)]
    heads = ["method", "rule", "seeds", *sheet.heads(metrics, printed, "difference"), "seconds"]
    table = Table(heads, "ll" + "r" * (len(heads) - 2), rows, caption=" ".join(notes))
    return "\n\n".join([table.to_markdown(), *_differences(groups, metrics)]) + "\n"


def _differences(groups: list[Group], metrics: Sequence[str]) -> list[str]:
    """Return heading, table and note of the paired differences; nothing if no seed is shared."""
    if not groups:
        return []
    first = groups[0]
    rows: list[list[Entry]] = []
    for group in groups[1:]:
        differences = [group.minus(first, metric) for metric in metrics]
        n = max((difference.n for difference in differences), default=0)
        if n:
            decimals = [DECIMALS.get(metric, 2) for metric in metrics]
            rows.append([Cell(group.label, code=True), seeds_text(n), *map(_difference, differences, decimals)])
    if not rows:
        return []
    return [
        f"### Difference to `{first.label}` on the same seeds",
        method_table(["method", "seeds", *map(heading, metrics)], rows).to_markdown(),
        "Mean difference, its 95 % interval, and p of the paired t-test (two-sided, not corrected for the number of comparisons; "
        "`gracecl compare` corrects it).",
    ]


def _left_out(groups: list[Group]) -> list[str]:
    count = sum(group.unfinished for group in groups)
    return [f"({count} unfinished run{'s' if count > 1 else ''} left out)"] if count else []


def method_table(heads: Sequence[str], rows: Sequence[Sequence[Entry]], title: str = "", caption: str = "") -> Table:
    """Return a table with names at the left and numbers at the right."""
    return Table(heads, "l" + "r" * (len(heads) - 1), rows, title, caption)


def spread_text(values: Summary, decimals: int, *, interval: bool = False) -> str:
    """Format `61.20 ± 0.42`, with `(± 1.05)` for the interval where there is one; the mean alone for one seed."""
    text = number(values.mean, decimals)
    if not math.isnan(values.std):
        text += f" ± {number(values.std, decimals)}"
    if interval and not math.isnan(values.half_width):
        text += f" (± {number(values.half_width, decimals)})"
    return text


def seeds_text(n: int) -> str:
    """Format the number of seeds and say if they are too few for an interval."""
    return str(n) if n >= FEWEST_SEEDS else f"{n} seed{'' if n == 1 else 's'}: no interval"


def _difference(values: Paired, decimals: int) -> str:
    text = number(values.mean, decimals, "+")
    if not math.isnan(values.p):
        text += f" [{number(values.low, decimals, '+')}, {number(values.high, decimals, '+')}]"
        text += f", {p_text(values.p)}"
    return text


def p_text(p: float) -> str:
    """Format `p = 0.012` or `p < 0.001`."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
