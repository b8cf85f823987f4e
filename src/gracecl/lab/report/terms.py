"""The line under every table: whether its methods were compared on equal terms, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gracecl.lab.report.groups import Group
from gracecl.registry.quantity import shown

UNITS = {"flops": "FLOP", "bytes": "B"}
FEW = 4
"""methods whose costs stand one by one; of more, the range does"""


def terms(groups: Sequence[Group]) -> str:
    """Say whether methods saw the same streams with the same seeds, what they computed and kept, and where they were tuned."""
    known = [group for group in groups if group.runs]
    if not known:
        return ""
    return f"Same stream: {_streams(known)}; {_seeds(known)}; per run {_costs(known)} kept; {_tuning(known)}."


def _streams(groups: Sequence[Group]) -> str:
    """Say yes, or which seeds or streams differ."""
    expressions = list(dict.fromkeys(str(run.config["stream"]) for group in groups for run in group.runs))
    if len(expressions) > 1:
        return f"no, {len(expressions)} different ones"
    hashes: dict[int, set[str]] = {}
    for run in (run for group in groups for run in group.runs):
        hashes.setdefault(run.config["seed"], set()).add(str(run.config.get("stream_hash")))
    differing = sorted(seed for seed, found in hashes.items() if len(found) > 1)
    return f"no, other images or another order with seed {', '.join(map(str, differing))}" if differing else "yes"


def _seeds(groups: Sequence[Group]) -> str:
    seeds = [[run.config["seed"] for run in group.runs] for group in groups]
    if all(own == seeds[0] for own in seeds):
        return f"same seeds: {', '.join(map(str, seeds[0]))}, n = {len(seeds[0])}"
    fewest, most = min(map(len, seeds)), max(map(len, seeds))
    return f"same seeds: no, n = {fewest}" + (f" to {most}" if most > fewest else "")


def _costs(groups: Sequence[Group]) -> str:
    """Return FLOPs and bytes of each method where they are few, differ and are all recorded, else the range over the methods."""
    of_each = {group.label: [group.cost(name) for name in UNITS] for group in groups}
    recorded = all(math.isfinite(cost) for costs in of_each.values() for cost in costs)
    if len(groups) > FEW or not recorded or len(set(map(tuple, of_each.values()))) == 1:
        return " and ".join(_range(groups, name, unit) for name, unit in UNITS.items())
    told = {label: " and ".join(map(shown, costs, UNITS.values())) for label, costs in of_each.items()}
    return ", ".join(f"{label} {costs}" for label, costs in told.items())


def _range(groups: Sequence[Group], name: str, unit: str) -> str:
    """Return `1.2 to 7.5 TFLOP`, over the methods that recorded it."""
    values = [value for group in groups if math.isfinite(value := group.cost(name))]
    if not values:
        return f"{unit}s not recorded" if unit == "FLOP" else "bytes not recorded"
    low, high = shown(min(values), unit), shown(max(values), unit)
    of_all = "" if len(values) == len(groups) else f" ({len(values)} of {len(groups)} methods)"
    return (low if low == high else f"{low} to {high}") + of_all


def _tuning(groups: Sequence[Group]) -> str:
    """Say on what options were chosen."""
    places = dict.fromkeys(run.config.get("tuned_on") for group in groups for run in group.runs)
    if list(places) == [None]:
        return "options as given or published, no search recorded"
    told = [f"on {place}" if place else "not recorded for some" for place in places]
    return f"options chosen {', '.join(told)}"
