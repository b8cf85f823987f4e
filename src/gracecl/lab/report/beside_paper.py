"""Look up the paper's number for a method, in the column of its tables that matches a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gracecl.errors import UserError
from gracecl.lab import paper
from gracecl.lab.report.runs import Run
from gracecl.registry import spec
from gracecl.registry.spec import Call

METRICS = {"acc": "ACC", "forgetting_mose": "AF"}
"""ours, and what it is called there: its forgetting comes from MOSE's program"""
DATASETS = {"cifar100": "Split CIFAR-100", "tinyimagenet": "Split Tiny-ImageNet"}
TABLES = ("main_accuracy", "main_forgetting", "memory_efficiency")
"""those with a column per data set and memory"""


@dataclass(frozen=True)
class Column:
    """A data set and memory size in the paper's tables."""

    dataset: str
    memory: int

    def value(self, method: str, metric: str) -> float | None:
        """Return the paper's value for a method, None where it has none."""
        row = row_of(method)
        wanted = {"method": row, "metric": METRICS.get(metric), "dataset": self.dataset, "buffer_size": self.memory}
        found = [record for record in paper.records(**wanted) if record["table"] in TABLES] if row and metric in METRICS else []
        return float(found[0]["mean"]) if found else None

    @property
    def about(self) -> str:
        return about([self])


def about(columns: Iterable[Column]) -> str:
    """Explain which of the paper's numbers stand beside ours and how to read them."""
    listed = "; ".join(f"{column.dataset} with a memory of {column.memory:,}" for column in dict.fromkeys(columns))
    return (
        f"The paper's are of {listed}, as printed (its AF is our forgetting_mose); the difference is ours minus the paper's. "
        "Its net, images, steps and classes may differ from ours."
    )


def column_for(runs: Sequence[Run], wanted: str) -> Column | None:
    """Return the column that `--paper` names: `auto` matches the runs' data set and memory; or a memory size; or
    `none`.
    """
    if wanted == "none":
        return None
    datasets = {name for key, name in DATASETS.items() if all(key in str(run.config["stream"]).split("(")[0] for run in runs)}
    memories = {int(run.config["memory"]) for run in runs if run.config.get("memory") is not None}
    known = {(record["dataset"], record["buffer_size"]) for record in paper.tables()["records"] if record["table"] in TABLES}
    if wanted == "auto":
        chosen = [(dataset, memory) for dataset in datasets for memory in memories]
        return Column(*chosen[0]) if len(chosen) == 1 and chosen[0] in known else None
    dataset = next(iter(datasets), DATASETS["cifar100"])
    choices = sorted(memory for name, memory in known if name == dataset)
    if wanted not in map(str, choices):
        raise UserError(f"--paper must be auto, none or a memory that the paper has on {dataset}: {', '.join(map(str, choices))}")
    return Column(dataset, int(wanted))


def row_of(method: str) -> str | None:
    """Return the paper's row for a method whatever its options, None where there is none."""
    try:
        wanted = skeleton(spec.read_method(method))
    except UserError:  # a foreign result has a name of its own
        return None
    return next((row for row, text in paper.EXPRESSIONS.items() if skeleton(spec.read_method(text)) == wanted), None)


def skeleton(read: Any) -> str:
    """Return an expression without its options: a row of the paper stands for the method, however it is set."""
    match read:
        case (left, "+", right):
            return f"{skeleton(left)} + {skeleton(right)}"
        case Call(name, args, kwargs):
            inside = [skeleton(value) for value in (*args, *kwargs.values()) if isinstance(value, (Call, tuple))]
            return f"{name}({', '.join(inside)})"
    return ""
