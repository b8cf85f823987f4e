"""A study's methods against its control on the same seeds: differences with intervals, corrected for their number; a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gracecl.functional.statistics import Paired, holm, seeds_to_tell
from gracecl.report import Run, style
from gracecl.report.groups import Group, group_runs
from gracecl.studies.table import Section

SETTING = ("stream", "net", "memory", "taps")
TOLD = 1.0
"""points that a study should be able to tell from nothing"""


@dataclass(frozen=True)
class Comparison:
    """A method against the control in one setting."""

    setting: str
    method: str
    acc: float
    difference: Paired
    corrected: float
    """p after Holm's correction for all comparisons of the study"""
    images: float
    """the method's images per step, forward and backward, over the control's"""
    seconds: float
    """its seconds per step over the control's; rough where runs share a machine"""
    seeds_needed: float
    """paired seeds that would tell a difference of one point, at the spread seen"""

    @property
    def verdict(self) -> str:
        if math.isnan(self.corrected):
            return f"{self.difference.n} seed: no interval"
        if self.corrected >= 0.05:
            return "cannot tell"
        return "above" if self.difference.mean > 0 else "below"


def compare(runs: Sequence[Run], control: str) -> list[Comparison]:
    """Every method against the control of its setting: `control` itself or, where it is not there, of grace(m) the m inside."""
    pairs = [(setting, group, other) for setting, groups in settings(runs).items() for group, other in opponents(groups, control)]
    differences = [group.minus(other, "acc") for _, group, other in pairs]
    corrected = holm([difference.p for difference in differences])
    return [
        Comparison(
            setting,
            method_of(group),
            group.summarise("acc").mean,
            difference,
            p,
            per_step(group, "forward", "backward") / per_step(other, "forward", "backward"),
            per_step(group, "train_seconds") / per_step(other, "train_seconds"),
            seeds_to_tell(difference, TOLD),
        )
        for (setting, group, other), difference, p in zip(pairs, differences, corrected, strict=True)
    ]


def settings(runs: Sequence[Run]) -> dict[str, list[Group]]:
    """Groups of runs by what a fair comparison holds fixed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(", ".join(str(run.config.get(key)) for key in SETTING if run.config.get(key) is not None), []).append(run)
    return {setting: group_runs(members) for setting, members in found.items()}


def opponents(groups: Sequence[Group], control: str) -> list[tuple[Group, Group]]:
    """Each group and the one that it is compared with."""
    by_method = {method_of(group): group for group in groups if group.runs}
    found = []
    for method, group in by_method.items():
        inside = method.removeprefix("grace(").removesuffix(")")
        other = by_method.get(control) or (by_method.get(inside) if method.startswith("grace(") else None)
        if other is not None and other is not group:
            found.append((group, other))
    return found


def method_of(group: Group) -> str:
    return str(group.runs[0].config["method"]) if group.runs else group.label


def per_step(group: Group, *names: str) -> float:
    """Means over the seeds of what the runs' times say."""
    return sum(sum(float(run.timing[name]) for name in names) / float(run.timing["steps"]) for run in group.runs) / len(group.runs)


def markdown(found: Sequence[Comparison]) -> str:
    """The table alone, setting after setting, the largest difference first."""
    lines = []
    for setting in dict.fromkeys(comparison.setting for comparison in found):
        lines += [
            f"**{setting}**",
            "",
            "| method | acc | difference to the control | 95 % interval | p | p, Holm | seeds | says | images | seconds "
            f"| seeds for {TOLD:g} point |",
            "|---|---:|---:|---|---:|---:|---:|---|---:|---:|---:|",
        ]
        here = [comparison for comparison in found if comparison.setting == setting]
        for line in sorted(here, key=lambda line: -line.difference.mean):
            mean, _, low, high, p, _, _, n = line.difference
            told = n > 2
            interval = f"{low:+.2f} to {high:+.2f}" if told else f"{n} seeds: none"
            lines.append(
                f"| `{line.method}` | {line.acc:.1f} | {mean:+.2f} | {interval} "
                f"| {f'{p:.3f}' if told else '–'} | {f'{line.corrected:.3f}' if told else '–'} | {n} "
                f"| {line.verdict if told else 'cannot tell'} | {line.images:.2f} × | {line.seconds:.2f} × "
                f"| {f'{line.seeds_needed:.0f}' if told else '–'} |"
            )
        lines.append("")
    return "\n".join(lines)


def picture(found: Sequence[Comparison], path: Path, title: str) -> None:
    """Differences with their intervals: right of the line is above the control, left of it below."""
    shown = sorted(found, key=lambda line: (line.setting, line.difference.mean))
    figure = style.new_figure(1.2 + 0.24 * len(shown))
    axes = figure.subplots()
    several = len({line.setting for line in shown}) > 1
    for place, line in enumerate(shown):
        mean, _, low, high, _, _, _, n = line.difference
        colour = {"above": "#009E73", "below": "#D55E00"}.get(line.verdict, style.QUIET)
        if n > 2:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6, solid_capstyle="round")
        axes.plot([mean], [place], "o", color=colour, markersize=4)
    labels = [line.method + (f"\n{line.setting}" if several else "") for line in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=6 if several else 7)
    axes.axvline(0, color=style.INK, linewidth=0.8)
    axes.set_xlabel("points of final accuracy above (+) or below (-) the control, 95 % interval over paired seeds", fontsize=8)
    style.plain(axes, title)
    style.save(figure, path)


def section(runs: Sequence[Run], control: str, out: Path, name: str) -> list[Section]:
    """For a study with a control: the comparisons as text, as data, and as a picture beside the study's page."""
    found = compare(runs, control)
    if not found:
        return []
    picture(found, out / f"{name}.png", f"Against {control}")
    text = "\n\n".join(
        [
            f"## Against the control `{control}`, on the same seeds",
            markdown(found),
            "Difference of the final accuracy under each method's own rule: mean over paired seeds, 95 % Student-t interval, p of "
            "the paired t-test, and after Holm's correction for all comparisons of this page, which decides what the table says. "
            "Images and seconds are the method's over the control's.",
            f"![Differences to the control]({name}.png)",
        ]
    )
    data = [vars(line) | {"difference": line.difference._asdict(), "says": line.verdict} for line in found]
    return [Section("paired", text, data)]
