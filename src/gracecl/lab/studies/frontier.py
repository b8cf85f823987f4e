"""What a point of accuracy costs: methods by the arithmetic that they spend, and those that none beats for less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gracecl.functional.statistics import Summary
from gracecl.lab.report import Run, figures
from gracecl.lab.report.groups import Group, cost_of, group_runs, setting_of
from gracecl.lab.report.measures import is_joint
from gracecl.lab.report.table import Cell, Entry, Table, number
from gracecl.lab.report.tables import spread_text
from gracecl.lab.studies.results import Results, Section, needs_control
from gracecl.registry import renderers
from gracecl.registry.spec import parse_call

HEADS = ("method", "acc ↑", "of the control's arithmetic", "MFLOP per step", "MB kept", "none better for less", "seeds")
PASSES = ("forward", "backward", "fit_images")
Net = tuple[str, int, str, int | None]


@dataclass(frozen=True)
class Point:
    """A method's accuracy and what it paid."""

    group: Group
    acc: Summary
    flops: float
    """of learning, per step of the stream"""
    share: float
    """its FLOPs over the control's; NaN where the control has no run"""
    bytes: float
    """that the learner keeps at the end"""


@renderers.register("frontier")
@needs_control
def sections(results: Results) -> list[Section]:
    """Accuracy against FLOPs and against bytes: a table for each setting and two pictures of the first."""
    members: dict[str, list[Run]] = {}
    for run in (run for run in results.runs if not is_joint(run)):
        members.setdefault(setting_of(run), []).append(run)
    parts = ["## What a point of accuracy costs"]
    data: dict[str, list[dict[str, Any]]] = {}
    per_image = flops_per_image(results.runs)
    for setting, runs in members.items():
        points = points_of(runs, results.control, per_image)
        if len(points) < 2:
            continue
        best = frontier([(point.flops, point.acc.mean) for point in points])
        drawn = () if data else (("flops", "FLOPs of learning per step of the stream"), ("bytes", "bytes kept"))  # of the first
        for name, label in drawn:
            file = f"{results.name}-{name}.png"
            known = [(point.group.label, getattr(point, name), point.acc.mean) for point in points]
            if figures.frontier(known, label, results.out / file):
                parts.append(f"![Accuracy against {label}, {setting}]({file})")
        rows = [row(point, place in best) for place, point in enumerate(points)]
        parts.append(Table(HEADS, "lrrrrlr", rows, setting).to_markdown(tight=True))
        data[setting] = [as_data(point, place in best) for place, point in enumerate(points)]
    told = (
        "FLOPs are those of a forward pass of one image times the images that pass forward and twice those that pass backward; "
        "scoring, teachers and fits are in them, predictions are not. A run that recorded its images alone has the FLOPs per image "
        "of another run with as many heads on the same net. joint(), which sees images in another order, is left out. – is what "
        "was not counted."
    )
    return [Section("frontier", "\n\n".join([*parts, told]), data)] if data else []


def points_of(runs: Sequence[Run], control: str, per_image: Mapping[Net, float]) -> list[Point]:
    """Return the methods of a setting from the cheapest to the dearest, those whose arithmetic is not known left out."""
    groups = [group for group in group_runs(runs) if group.runs]
    paid = {id(group): flops_per_step(group, per_image) for group in groups}
    reference = next((paid[id(group)] for group in groups if group.method == control), math.nan)
    points = [
        Point(group, group.summarise("acc"), paid[id(group)], paid[id(group)] / reference, group.cost("bytes"))
        for group in groups
        if math.isfinite(paid[id(group)])
    ]
    return sorted(points, key=lambda point: (point.flops, -point.acc.mean))


def flops_per_image(runs: Sequence[Run]) -> dict[Net, float]:
    """Return the FLOPs of one image's forward pass by net, heads and images, from the runs that recorded them."""
    return {net_of(run): run.config["forward_flops"] for run in runs if run.config.get("forward_flops")}


def net_of(run: Run) -> Net:
    """Return what the FLOPs of a pass follow from: the net, its heads, the data and the pixels."""
    stream = parse_call(run.config["stream"])
    return run.config["net"], run.config["layers"], stream.name, stream.kwargs.get("size")


def flops_per_step(group: Group, per_image: Mapping[Net, float]) -> float:
    """Return the mean over seeds of a run's FLOPs per step of the stream; NaN where nothing tells them."""

    def of_run(run: Run) -> float:
        recorded = cost_of(run, "flops")
        forward, backward, fit = (cost_of(run, name) for name in PASSES)
        passes = forward + 2 * backward + 3 * fit
        known = recorded if math.isfinite(recorded) else passes * per_image.get(net_of(run), math.nan)
        return known / max(run.length, 1)

    return sum(map(of_run, group.runs)) / len(group.runs)


def frontier(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the places of the points (cost, accuracy) that no other point reaches or beats at the same cost or less."""
    found, highest = set(), -math.inf
    for place in sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1])):
        if points[place][1] > highest:
            found.add(place)
            highest = points[place][1]
    return found


def row(point: Point, best: bool) -> list[Entry]:
    measured = (number(value, digits) for value, digits in ((point.share, 2), (point.flops / 1e6, 0), (point.bytes / 1e6, 2)))
    return [
        Cell(point.group.label, code=True),
        spread_text(point.acc, 1),
        *measured,
        "yes" if best else "",
        str(len(point.group.runs)),
    ]


def as_data(point: Point, best: bool) -> dict[str, Any]:
    return {
        "method": point.group.label,
        "acc": point.acc.mean,
        "std": point.acc.std,
        "share": point.share,
        "flops_per_step": point.flops,
        "bytes": point.bytes,
        "frontier": best,
        "seeds": len(point.group.runs),
    }
