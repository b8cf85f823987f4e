"""A study's methods against its control on the same seeds: differences with intervals, corrected for their number; a picture."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gracecl.functional.statistics import seeds_to_tell
from gracecl.lab.report import Run, figures
from gracecl.lab.report import compare as shared
from gracecl.lab.report.compare import Comparison
from gracecl.lab.report.groups import SETTING, Group, group_runs, options_that_vary, setting_of, told_apart
from gracecl.lab.report.table import Cell, Entry, Table, number
from gracecl.lab.report.tables import seeds_text
from gracecl.lab.report.terms import terms
from gracecl.lab.studies.results import Results, Section, needs_control
from gracecl.registry import renderers

TOLD = 1.0
"""difference in points that a study should be able to detect"""
HEADS = (
    "method",
    "acc",
    "difference to the control",
    "95 % interval",
    "p",
    "p, Holm",
    "seeds",
    "says",
    "images",
    "seconds",
    f"seeds for {TOLD:g} point",
)


@dataclass(frozen=True)
class PairedRow:
    """A method compared with the control in one setting, and its relative cost."""

    comparison: Comparison
    images: float
    """the method's images per step, forward and backward, over the control's"""
    seconds: float
    """its seconds per step over the control's; rough where runs share a machine"""

    @property
    def seeds_needed(self) -> float:
        """Paired seeds that would tell a difference of one point, at the spread seen."""
        return seeds_to_tell(self.comparison.difference, TOLD)


def compare(runs: Sequence[Run], control: str) -> list[PairedRow]:
    """Compare grace(m, …) with m where that has runs, other methods with `control`, each in its own setting."""
    pairs = [(setting, group, other) for setting, groups in settings(runs).items() for group, other in opponents(groups, control)]
    return [
        PairedRow(
            comparison,
            group.per_step("forward", "backward") / other.per_step("forward", "backward"),
            group.per_step("train_seconds") / other.per_step("train_seconds"),
        )
        for comparison, (_, group, other) in zip(shared.compare(pairs), pairs, strict=True)
    ]


def settings(runs: Sequence[Run]) -> dict[str, list[Group]]:
    """Group runs by what a fair comparison holds fixed."""
    found: dict[str, list[Run]] = {}
    keys = held_fixed(runs)
    for run in runs:
        found.setdefault(setting_of(run, keys), []).append(run)
    return {setting: group_runs(members) for setting, members in found.items()}


def held_fixed(runs: Sequence[Run]) -> list[str]:
    """List what comparisons hold fixed: stream, net, taps, memory, and other options with several values in the
    study.
    """
    return list(dict.fromkeys([*SETTING, "taps", *options_that_vary([run.config for run in runs])]))


def opponents(groups: Sequence[Group], control: str) -> list[tuple[Group, Group]]:
    """Pair each group with the one it is compared with, where they share streams."""
    by_method = {group.method: group for group in groups if group.runs}
    found = []
    for method, group in by_method.items():
        other = by_method.get(without_feedback(method)) or by_method.get(control)
        if other is not None and other is not group and group.minus(other, "acc").n:
            found.append((group, other))
    return found


def without_feedback(method: str) -> str:
    """Return m of grace(m, …); empty for other expressions."""
    call = ast.parse(method, mode="eval").body
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "grace" and call.args:
        return ast.get_source_segment(method, call.args[0]) or ""
    return ""


def against(comparison: Comparison, control: str) -> tuple[Cell, ...]:
    """Name what a method is compared with, where it is not the study's control."""
    return () if comparison.other == control else (Cell("against"), Cell(comparison.other, code=True))


def markdown(found: Sequence[PairedRow], control: str, runs: Sequence[Run]) -> str:
    """Return the tables by setting, the largest difference first; `runs` are those they are of."""
    tables, groups = [], settings(runs)
    for setting in dict.fromkeys(line.comparison.setting for line in found):
        here = [line for line in found if line.comparison.setting == setting]
        rows = [_row(line, control) for line in sorted(here, key=lambda line: -line.comparison.difference.mean)]
        tables.append(Table(HEADS, "lrrlrrrlrrr", rows, setting, terms(groups[setting])).to_markdown(tight=True))
    return "\n\n".join(tables) + "\n"


def _row(line: PairedRow, control: str) -> list[Entry]:
    comparison, (mean, _, low, high, p, _, _, n) = line.comparison, line.comparison.difference
    told = comparison.verdict != seeds_text(n)
    return [
        (Cell(comparison.method, code=True), *against(comparison, control)),
        f"{comparison.value.mean:.1f}",
        f"{mean:+.2f}",
        f"{low:+.2f} to {high:+.2f}" if told else seeds_text(n),
        shared.p_number(p),
        shared.p_number(comparison.corrected),
        str(n),
        comparison.verdict if told else "cannot tell",
        f"{number(line.images, 2)} ×",
        f"{number(line.seconds, 2)} ×",
        number(line.seeds_needed, 0),
    ]


@renderers.register("paired")
@needs_control
def sections(results: Results) -> list[Section]:
    """Every method against the control on the same seeds: differences with intervals, and a picture."""
    control, file = results.control, f"{results.name}.png"
    found = compare(results.runs, control)
    if not found:
        return []
    keys, examples = held_fixed(results.runs), {}
    for run in results.runs:
        examples[setting_of(run, keys)] = run.config
    in_short = dict(zip(examples, told_apart(list(examples.values()), keys), strict=True))
    shown = [replace(line.comparison, setting=in_short[line.comparison.setting]) for line in found]
    figures.differences(shown, results.out / file, results.titled(f"Against {control}"))
    text = "\n\n".join(
        [
            f"## Against the control `{control}`, on the same seeds",
            markdown(found, control, results.runs),
            "Difference of the final accuracy under each method's own rule: mean over paired seeds, 95 % Student-t interval, p of "
            "the paired t-test, and after Holm's correction for all comparisons of this page, which decides what the table says. "
            "Images and seconds are the method's over the control's.",
            f"![Differences to the control]({file})",
        ]
    )
    data = [
        shared.as_data(line.comparison)
        | {"acc": line.comparison.value.mean, "images": line.images, "seconds": line.seconds, "seeds_needed": line.seeds_needed}
        for line in found
    ]
    return [Section("paired", text, data)]
