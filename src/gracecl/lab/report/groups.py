"""Group runs that differ only in the seed: a row of a table or a curve of a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gracecl.functional.statistics import Paired, Summary, paired, summarise
from gracecl.lab.report.runs import Run, measure
from gracecl.registry.options import ADDED_LATER, LIMITS
from gracecl.registry.spec import parse_call

VARIES_WITHIN_A_GROUP = (
    "seed",
    "stream_hash",
    "stream_steps",
    "commit",
    "versions",
    "format",
    "threads",
    "checkpoint_every",
    "snapshots",
    "allotted",
)
"""fields in which the runs of one method in one setting may differ; a stream that is drawn may be longer for one seed"""
FOLLOWS = ("layers", "parameters", "rule", "images_beyond_memory", "forward_flops", "tuned_on")
"""fields that follow from the settings"""
OF_THE_STREAM = ("tasks", "classes")
"""fields that repeat the stream's expression"""
EXPRESSIONS = ("stream", "net", "optimizer")
"""settings that are names with options"""
SETTING = ("stream", "net", "memory", *LIMITS)
"""what a fair comparison holds fixed; named in the label of every group when it is not"""


COSTS = {
    "seconds": "seconds of training",
    "forward": "images through the net",
    "memory": "images in the memory",
    "parameters": "parameters",
    "flops": "FLOPs of learning",
    "bytes": "bytes kept",
}
"""what a metric can be set against, and what it is called on an axis"""
COUNTED = ("flops", "bytes")
"""costs that span orders of magnitude, and are drawn so"""


@dataclass(frozen=True)
class Group:
    """One method in one setting, over seeds."""

    label: str
    runs: list[Run]
    """one per seed, in the order of seeds"""
    unfinished: int
    """number of unfinished runs left out"""
    rule: str
    """the inference rule whose numbers are reported"""

    @property
    def method(self) -> str:
        return str(self.runs[0].config["method"]) if self.runs else self.label

    def under(self, rule: str) -> Group:
        """Return the same runs under another inference rule."""
        return replace(self, rule=rule)

    def summarise(self, metric: str) -> Summary:
        return summarise([value_of(run, metric, self.rule) for run in self.runs])

    def cost(self, name: str) -> float:
        """Return the mean over seeds of `seconds`, of a number in the configuration (`memory`) or in the timing
        (`forward`).
        """
        costs = [cost_of(run, name) for run in self.runs]
        return sum(costs) / len(costs) if costs else float("nan")

    def per_step(self, *names: str) -> float:
        """Return the mean over seeds of a timing per step of the stream; NaN where a run lacks it."""
        sums = [sum(cost_of(run, name) for name in names) / max(run.length, 1) for run in self.runs]
        return sum(sums) / len(sums) if sums else float("nan")

    def minus(self, other: Group, metric: str) -> Paired:
        """Return the difference on the seeds that both have, where both saw the same stream."""
        theirs = {_pair_key(run): value_of(run, metric, other.rule) for run in other.runs}
        shared = [run for run in self.runs if _pair_key(run) in theirs]
        return paired(
            [value_of(run, metric, self.rule) for run in shared],
            [theirs[_pair_key(run)] for run in shared],
        )


def value_of(run: Run, metric: str, rule: str) -> float:
    """Return a metric by name, NaN if the run lacks it; `seconds` is the training time."""
    if metric == "seconds":
        return cost_of(run, metric)
    return measure(run, rule).get(metric, float("nan"))


def cost_of(run: Run, name: str) -> float:
    """Return a cost by name, NaN if the run lacks it."""
    found = run.timing.get("train_seconds") if name == "seconds" else run.timing.get(name, run.config.get(name))
    return float(found) if isinstance(found, (int, float)) else float("nan")


def group_runs(runs: Sequence[Run], *, unfinished_too: bool = False) -> list[Group]:
    """Group runs by method and setting, in the order of their first runs; unfinished ones only if asked for."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        fixed = {key: value for key, value in complete(run.config).items() if key not in (*VARIES_WITHIN_A_GROUP, *FOLLOWS)}
        members.setdefault(json.dumps(fixed, sort_keys=True), []).append(run)
    groups = list(members.values())
    labels = _labels([group[0].config for group in groups])
    return [_group(label, group, unfinished_too) for label, group in zip(labels, groups, strict=True)]


def group_apart(selections: Mapping[str, Sequence[Run]]) -> list[list[Group]]:
    """The groups of several selections of runs, each by its name. A label tells a group apart from the others in its setting; equal
    configurations in two selections are two groups."""
    found: dict[str, list[Group]] = {name: [] for name in selections}
    by_setting: dict[str, list[tuple[str, Group]]] = {}
    for name, runs in selections.items():
        for group in (group for group in group_runs(runs) if group.runs):
            by_setting.setdefault(setting_of(group.runs[0]), []).append((name, group))
    for members in by_setting.values():
        labels = _labels([group.runs[0].config for _, group in members])
        for label, (name, group) in zip(labels, members, strict=True):
            found[name].append(replace(group, label=f"{label} in {name}" if labels.count(label) > 1 else label))
    return list(found.values())


def setting_of(run: Run, keys: Sequence[str] = SETTING) -> str:
    """Describe what a fair comparison holds fixed."""
    config = complete(run.config)
    given = {key: config[key] for key in keys if config.get(key) is not None}
    return ", ".join(f"{key} {value}" if key in LIMITS else str(value) for key, value in given.items())


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the options that came after its run, at the values that leave results as they were."""
    return ADDED_LATER | dict(config)


def options_that_vary(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """List options outside the setting that differ between runs of the same method."""
    told = {*SETTING, *VARIES_WITHIN_A_GROUP, *FOLLOWS, *OF_THE_STREAM}
    by_method: dict[str, list[dict[str, Any]]] = {}
    for config in map(complete, configs):
        by_method.setdefault(str(config["method"]), []).append(config)
    keys = dict.fromkeys(key for same_method in by_method.values() for config in same_method for key in config if key not in told)
    return [key for key in keys if any(_varies(key, same_method) for same_method in by_method.values())]


def told_apart(configs: Sequence[dict[str, Any]], keys: Sequence[str] = SETTING) -> list[str]:
    """Abbreviate settings to the parts that differ between them."""
    parts = [_parts(complete(config), keys) for config in configs]
    names = dict.fromkeys(name for part in parts for name in part)
    varying = [name for name in names if len({part.get(name) for part in parts}) > 1]
    varying.sort(key=lambda name: keys.index(name.split(".")[0]))
    return [", ".join(part[name] for name in varying if name in part) for part in parts]


def _parts(config: dict[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Split a setting into named parts: of an expression its name and each option."""
    found: dict[str, str] = {}
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if key in EXPRESSIONS:
            found[key] = str(value).split("(")[0]
            found |= {f"{key}.{name}": f"{name}={option}" for name, option in parse_call(str(value)).kwargs.items()}
        else:
            found[key] = f"{key}={value}"
    return found


def _group(label: str, runs: list[Run], unfinished_too: bool) -> Group:
    by_seed = {run.config["seed"]: run for run in runs if run.finished or unfinished_too}
    unfinished = {run.config["seed"] for run in runs} - set(by_seed)
    return Group(label, [by_seed[seed] for seed in sorted(by_seed)], len(unfinished), runs[0].rule)


def _labels(configs: list[dict[str, Any]]) -> list[str]:
    """The method, and what else tells two groups apart: the setting when it varies at all, and any other option that
    varies between groups of the same method (between methods it varies by nature)."""
    labels, configs = [], list(map(complete, configs))
    for config in configs:
        same_method = [other for other in configs if other["method"] == config["method"]]
        keys = [
            key
            for key in SETTING
            if config.get(key) is not None and _varies(key, [one for one in configs if key in LIMITS or one.get(key) is not None])
        ]
        keys += options_that_vary(same_method)
        labels.append(", ".join([str(config["method"]), *(f"{key}={config.get(key)}" for key in keys)]))
    return labels


def _varies(key: str, configs: list[dict[str, Any]]) -> bool:
    return any(config.get(key) != configs[0].get(key) for config in configs)


def _pair_key(run: Run) -> tuple[Any, ...]:
    return run.config["seed"], run.config["stream"], run.config.get("stream_hash")
