"""Run folders as the recorder leaves them, with made-up numbers, for tests of what is made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

STEPS_PER_TASK = 40


def write_run(root: Path, method: str = "grace(mose())", seed: int = 0, tasks: int = 3, **settings: Any) -> Path:
    """A run folder as the recorder leaves it, with made-up numbers: one value per layer, two evaluations per task."""
    layered = method != "er()"
    layers = 4 if layered else 1
    rng = np.random.default_rng([seed, len(method)])
    config = {
        "method": method,
        "stream": f"split-digits(tasks={tasks})",
        "net": "resnet18(width=8)",
        "memory": 100,
        "seed": seed,
        "commit": "0123abc",
        "stream_hash": f"order-{seed}",
        "classes": 2 * tasks,
        "layers": layers,
        "rule": "ncm_mean" if layered else "linear_last",
        **settings,
    }
    folder = root / method / str(config["memory"]) / str(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    records: list[dict[str, Any]] = []
    for step in range(tasks * STEPS_PER_TASK):
        task, within = divmod(step, STEPS_PER_TASK)
        decay = math.exp(-3 * within / STEPS_PER_TASK)
        depth = np.arange(layers)
        entropy = (0.4 + 1.3 * decay) * np.exp(-0.3 * depth) + rng.normal(0, 0.05, layers)
        rows = {"ce/all" if not layered else "ce/new": (2 * decay + 0.2 * rng.random(layers)).tolist()}
        if layered:
            z = (entropy - entropy.mean()) / entropy.std()
            rows["ce/replay"] = (1.5 * decay + 0.2 * rng.random(layers)).tolist()
            rows["sc"] = (3 + decay + 0.3 * rng.random(layers)).tolist()
            rows["rsd"] = (0.5 * decay + 0.1 * rng.random(layers)).tolist()
        if method.startswith("grace"):
            gamma = 0.005 * np.exp(np.tanh(z))
            rows["entropy"] = (gamma * entropy).tolist()
            alpha = np.ones(layers) if task == 0 else 1 + 0.2 * np.roll(depth - 1.5, task)
            rows |= {"log/H": entropy.tolist(), "log/gamma": gamma.tolist(), "log/alpha": alpha.tolist()}
        records.append({"kind": "step", "step": step, "task": task, "rows": rows, "images": 296})
        if (step + 1) % (STEPS_PER_TASK // 2) == 0:
            at_end = (step + 1) % STEPS_PER_TASK == 0
            records.append(evaluation(step, task, at_end, layers, rng, 4 * len(method)))
            if at_end:
                values = {"A": [90.0] * layers, "s": [0.0] * layers, "alpha": [1.0] * layers}
                records.append({"kind": "task", "task": task, "step": step, "values": values, "memory": {"0": 50}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    timing = {"train_seconds": 12.5 + seed, "eval_seconds": 2.0, "steps": tasks * STEPS_PER_TASK, "images": 35520}
    (folder / "timing.json").write_text(json.dumps(timing))
    (folder / "summary.json").write_text('{"metrics": {}}')  # which makes it a finished run's
    return folder


def unfinish(folder: Path, lines: int) -> None:
    """Leaves of a run folder what a run that was killed leaves: the first lines of its record."""
    record = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(record[:lines]))
    for name in ("timing.json", "summary.json"):
        (folder / name).unlink()


def evaluation(step: int, task: int, at_end: bool, layers: int, rng: np.random.Generator, skill: float) -> dict[str, Any]:
    """Old tasks fade, the new one is fresh; a half-learnt task is worse."""
    names = ["linear_last"]
    if layers > 1:
        names += ["linear_mean", "ncm_last", "ncm_mean"]
        names += [f"{rule}_{layer}" for rule in ("linear", "ncm") for layer in range(1, layers + 1)]
    base = [(96 if at_end or j < task else 60) - (50 - 0.5 * skill) * (task - j) / (task + 1) for j in range(task + 1)]
    accuracy = {name: np.clip(base + rng.normal(0, 2, task + 1) - index, 0, 100) for index, name in enumerate(names)}
    return {
        "kind": "eval",
        "step": step,
        "task": task,
        "task_end": at_end,
        "accuracy": {name: values.tolist() for name, values in accuracy.items()},
        "ece": {"linear_last": 0.12},
        "nll": {"linear_last": 0.8},
    }
