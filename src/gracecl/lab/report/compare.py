"""Compare methods on the same seeds: differences, tests corrected for their number, and a sentence for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.files import write_json, write_text
from gracecl.functional.metrics import HIGHER_IS_BETTER
from gracecl.functional.statistics import CONFIDENCE, FEWEST_SEEDS, Paired, Ranking, Summary, holm, ranking, seeds_to_tell
from gracecl.lab.report import figures
from gracecl.lab.report.groups import SETTING, Group, setting_of
from gracecl.lab.report.sheet import heading
from gracecl.lab.report.table import NOTHING, Cell, Entry, Table, number
from gracecl.lab.report.tables import BRIEF, DECIMALS, method_table, p_text, seeds_text, spread_text
from gracecl.lab.report.terms import terms
from gracecl.registry import nearest

ENOUGH_FOR_RANKS = 6
"""seeds from which on a signed-rank test can reach 5 %"""


@dataclass(frozen=True)
class Comparison:
    """A method compared with another in one setting."""

    setting: str
    method: str
    other: str
    metric: str
    value: Summary
    """the method's, over all its seeds"""
    difference: Paired
    """the method's minus the other's, over the seeds that both have"""
    corrected: float
    """p of the t-test after Holm's correction for all comparisons made together"""
    corrected_wilcoxon: float
    """p of the signed-rank test, corrected in the same way"""

    @property
    def verdict(self) -> str:
        if math.isnan(self.corrected):
            return seeds_text(self.difference.n)
        if self.corrected >= 1 - CONFIDENCE:
            return "cannot tell"
        return "above" if self.difference.mean > 0 else "below"

    @property
    def seeds_needed(self) -> float:
        """Paired seeds that would show a difference as large as the one seen with 80 % power."""
        return seeds_to_tell(self.difference, self.difference.mean)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        n, places = self.difference.n, DECIMALS.get(self.metric, 2)
        pair = f"`{self.method}` and `{self.other}`"
        if n and math.isnan(self.difference.mean):
            return f"The runs of {pair} have no {self.metric} under their rules; name one that has it with --rule."
        if math.isnan(self.corrected):
            return f"Nothing can be said about {pair} from {n} seed{'' if n == 1 else 's'}; run {FEWEST_SEEDS} or more."
        seen = (
            f"{number(self.difference.mean, places, '+')}, 95 % interval {number(self.difference.low, places, '+')} to "
            f"{number(self.difference.high, places, '+')}, {p_text(self.corrected)} after Holm's correction"
        )
        if self.verdict == "cannot tell":
            needed = self.seeds_needed
            more = f" If it is as large as it looks, {needed:,.0f} seeds would show it." if n < needed < math.inf else ""
            return f"No evidence of a difference in {self.metric} between {pair} at {n} seeds: {seen}.{more}"
        better = (self.difference.mean > 0) == HIGHER_IS_BETTER.get(self.metric, False)
        return f"`{self.method}` is {'better' if better else 'worse'} than `{self.other}` in {self.metric} at {n} seeds: {seen}."


def compare(pairs: Sequence[tuple[str, Group, Group]], metric: str = "acc") -> list[Comparison]:
    """Compare (setting, group, other) triples, corrected for their number."""
    differences = [group.minus(other, metric) for _, group, other in pairs]
    corrected = holm([difference.p for difference in differences])
    by_ranks = holm([difference.wilcoxon for difference in differences])
    return [
        Comparison(setting, group.label, other.label, metric, group.summarise(metric), difference, p, rank_p)
        for (setting, group, other), difference, p, rank_p in zip(pairs, differences, corrected, by_ranks, strict=True)
    ]


def against_first(selections: Sequence[Sequence[Group]]) -> list[tuple[str, Group, Group]]:
    """Pair each group with the group of the first selection that shares its seeds, in the same setting where there
    is one.
    """
    first, *others = selections
    found = []
    for group in (group for selection in others for group in selection):
        candidates = [other for other in first if group.minus(other, "acc").n]
        alike = [other for other in candidates if setting_of(other.runs[0]) == setting_of(group.runs[0])]
        found += [(_in_common(group, other), group, other) for other in alike] or [_unlike(group, other) for other in candidates]
    found.sort(key=lambda pair: pair[0])
    if not found:
        raise UserError(
            "no seed of the first is shared by the others, on the same stream; give runs of the same --stream and --seeds"
        )
    return found


def terms_of(pairs: Sequence[tuple[str, Group, Group]]) -> dict[str, str]:
    """Return the line under the table of each setting: whether its methods were compared on equal terms."""
    members: dict[str, dict[str, Group]] = {}
    for setting, group, other in pairs:
        members.setdefault(setting, {}).update({other.label: other, group.label: group})
    return {setting: terms(list(groups.values())) for setting, groups in members.items()}


def over_settings(groups: Sequence[Group], metric: str) -> tuple[list[str], Ranking] | None:
    """Rank the methods that every setting has; None with fewer than two settings or methods."""
    values: dict[str, dict[str, float]] = {}
    for group in groups:
        if group.runs:
            values.setdefault(setting_of(group.runs[0]), {})[group.method] = group.summarise(metric).mean
    methods = [
        method for method in dict.fromkeys(group.method for group in groups) if all(method in found for found in values.values())
    ]
    table = [[found[method] for method in methods] for found in values.values()]
    if len(methods) < 2 or len(table) < 2 or not all(math.isfinite(value) for row in table for value in row):
        return None
    return methods, ranking(table, higher_is_better=HIGHER_IS_BETTER.get(metric, False))


def check_metric(metric: str) -> None:
    known = [*HIGHER_IS_BETTER, "seconds"]
    if metric not in known:
        raise UserError(f"there is no metric '{metric}'{nearest(metric, known)} (there are: {', '.join(known)})")


def ranks_sentence(methods: Sequence[str], found: Ranking, metric: str) -> str:
    """State the mean ranks of the methods and the critical difference."""
    order = sorted(zip(found.ranks, methods, strict=True))
    ranked = ", ".join(f"{method} {rank:.2f}" for rank, method in order)
    about = f"Mean ranks by {metric} over {found.settings} settings: {ranked}. Friedman's test: {p_text(found.p)};"
    return f"{about} ranks that differ by less than {found.critical:.2f} cannot be told apart."


def write(out: Path, found: Sequence[Comparison], under: Mapping[str, str], over: tuple[list[str], Ranking] | None = None) -> None:
    """Write compare.md, compare.json, compare.png, and ranks.png where methods were ranked over settings.

    `under` is the line under each setting's table.
    """
    out.mkdir(parents=True, exist_ok=True)
    metric = found[0].metric
    figures.differences(found, out / "compare.png", f"Against {' / '.join(dict.fromkeys(line.other for line in found))}")
    parts = ["# Comparison on the same seeds", markdown(found, under), "![Differences with their intervals](compare.png)"]
    data: dict[str, Any] = {"metric": metric, "comparisons": [as_data(line) for line in found]}
    if over is not None:
        figures.critical_difference(*over, out / "ranks.png", metric)
        parts += ["## Over settings", ranks_sentence(*over, metric), "![Critical differences](ranks.png)"]
        data["ranks"] = over[1]._asdict() | {"methods": over[0]}
    write_text(out / "compare.md", "\n\n".join(parts) + "\n")
    write_json(out / "compare.json", data)


def terminal_tables(found: Sequence[Comparison], under: Mapping[str, str]) -> list[Table]:
    """Return a table for each setting and reference method, at most 80 columns wide, with the setting's line under it."""
    chosen = list(dict.fromkeys((line.setting, line.other) for line in found))
    tables = []
    for setting, other in chosen:
        here = [line for line in found if (line.setting, line.other) == (setting, other)]
        heads = ["method", "n", heading(here[0].metric), "Δ", "95 % interval", "p", "ranks", "d", "seeds"]
        rows = [[name, *entries] for name, _, *entries in _rows(here, BRIEF[here[0].metric])]
        title = f"against {other}" + (f"; {setting}" if setting else "")
        notes = [under[setting], *([CAPTION] if (setting, other) == chosen[-1] else [])]
        tables.append(method_table(heads, rows, title, " ".join(notes)))
    return tables


def markdown(found: Sequence[Comparison], under: Mapping[str, str]) -> str:
    """Return the table of each setting with its line under it, its reading in sentences, and notes."""
    metric = heading(found[0].metric)
    header = [
        "method",
        "against",
        "seeds",
        metric,
        "difference",
        "95 % interval",
        "p, Holm",
        "p of ranks, Holm",
        "d",
        "seeds needed",
    ]
    parts = []
    for setting in dict.fromkeys(line.setting for line in found):
        here = [line for line in found if line.setting == setting]
        table = Table(header, "ll" + "r" * (len(header) - 2), _rows(here, DECIMALS.get(metric, 2)), setting, under[setting])
        parts += [table.to_markdown(), "\n".join(f"- {line.sentence}" for line in here)]
    return "\n\n".join([*parts, CAPTION])


CAPTION = (
    "Mean ± sample std; difference on paired seeds with its 95 % Student-t interval; p of the paired t-test and, under ranks, of "
    f"the exact signed-rank test, both after Holm's correction (ranks cannot reach 5 % with fewer than {ENOUGH_FOR_RANKS} seeds); "
    "d is the difference over its standard deviation; seeds needed to show the difference seen with 80 % power."
)


def as_data(line: Comparison) -> dict[str, Any]:
    """Convert to plain values for JSON."""
    more = {"says": line.verdict, "sentence": line.sentence, "seeds_needed": line.seeds_needed}
    return vars(line) | {"value": line.value._asdict(), "difference": line.difference._asdict()} | more


def _rows(found: Sequence[Comparison], places: int) -> list[list[Entry]]:
    rows: list[list[Entry]] = []
    for line in found:
        mean, _, low, high, _, _, effect, n = line.difference
        told = not math.isnan(line.corrected)
        rows.append(
            [
                Cell(line.method, code=True),
                Cell(line.other, code=True),
                str(n),
                spread_text(line.value, places),
                number(mean, places, "+"),
                f"{number(low, places, '+')} to {number(high, places, '+')}" if told else seeds_text(n),
                p_number(line.corrected),
                p_number(line.corrected_wilcoxon),
                number(effect, 2, "+"),
                _count(line.seeds_needed),
            ]
        )
    return rows


def p_number(p: float) -> str:
    """Format a p-value to three places."""
    return "< 0.001" if p < 0.001 else number(p, 3)


def _count(seeds: float) -> str:
    if math.isnan(seeds):
        return NOTHING
    return "> 10,000" if math.isinf(seeds) else f"{seeds:,.0f}"


def _unlike(group: Group, other: Group) -> tuple[str, Group, Group]:
    """Label two groups of different settings with what differs."""
    mine, theirs = group.runs[0].config, other.runs[0].config
    keys = [key for key in SETTING if mine.get(key) != theirs.get(key)]

    def told(one: Group) -> Group:
        return replace(one, label=", ".join([one.label, *(f"{key}={one.runs[0].config.get(key)}" for key in keys)]))

    return _in_common(group, other), told(group), told(other)


def _in_common(group: Group, other: Group) -> str:
    mine, theirs = group.runs[0].config, other.runs[0].config
    return ", ".join(f"{key} {mine[key]}" for key in SETTING if mine.get(key) is not None and mine.get(key) == theirs.get(key))
