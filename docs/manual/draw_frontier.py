"""Draw docs/start/frontier.png: what a point of accuracy costs. Run: `python docs/manual/draw_frontier.py`.

Accuracies are those of results/frontier on classes 0-19, means over seeds; FLOPs are those of these runs, and bytes those that
results/costs counted for each method, as old runs did not record theirs.
"""

from __future__ import annotations

import json

from matplotlib import pyplot as plt
from pages import ROOT

from gracecl.lab.report.figures import draw_frontier
from gracecl.registry import spec

SETTING = "split-cifar100(tasks=5, classes='0-19', size=16, batch=20), resnet18(width=8), 200"
BATCH = 20
"""images of a step of this stream"""
ENOUGH = 3
"""seeds that a method must have"""


def main() -> None:
    lines = json.loads((ROOT / "results/frontier/frontier.json").read_text(encoding="utf-8"))["frontier"][SETTING]
    kept = json.loads((ROOT / "results/costs/costs.json").read_text(encoding="utf-8"))
    lines = [line for line in lines if line["seeds"] >= ENOUGH]
    flops = [(named(line["method"]), line["flops_per_step"] / BATCH, line["acc"]) for line in lines]
    names = [(line, spec.parse_call(line["method"]).name) for line in lines if "+" not in line["method"]]
    plain = [(line, name) for line, name in names if line["method"] == f"{name}()"]
    stored = [(name, kept[name]["bytes"], line["acc"]) for line, name in plain]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.4), sharey=True)
    draw_frontier(figure, left, flops, "FLOPs of learning per image of the stream")
    draw_frontier(figure, right, stored, "bytes kept: images, weights, optimizer, teachers, sums")
    right.set_ylabel("")
    figure.tight_layout()
    figure.savefig(ROOT / "docs/start/frontier.png", dpi=130)


def named(method: str) -> str:
    """Return what a method is called in the picture."""
    return "best() of 0.2" if method.startswith("best(mkd(multi_update(mose(inference='linear_votes'), lr") else method


if __name__ == "__main__":
    main()
