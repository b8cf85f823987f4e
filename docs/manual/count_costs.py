"""Count what a step of each method takes and what the method keeps: results/costs. Run: `python docs/manual/count_costs.py`.

Counts of a dry run in the setting of the study mini, on made-up images of its shape: the same on every machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from gracecl.data import Data, from_arrays
from gracecl.engine.cost import StepCost, dry_run
from gracecl.engine.recipe import Recipe
from gracecl.lab.catalogue import FACTS
from gracecl.registry.spec import parse_method
from gracecl.streams.split import split
from manual.pages import ROOT, table

FILE = ROOT / "results/costs/costs.json"
CLASSES, PER_CLASS, MEMORY, BATCH, TASKS, SHAPE = 20, 50, 200, 20, 5, (16, 16, 3)
NET, TRANSFORMER = "resnet18(width=8)", "vit(patch=4, dim=64, depth=4, heads=4)"
OPENING = """\
# What each method costs

Counted, not timed: a dry run of each method in the setting of [mini](../mini/mini.md) (20 classes, images of 16 × 16
pixels, batches of 20, a memory of 200 images, `resnet18(width=8)`), in its second task and with a full memory. FLOPs are
those of all passes of a step, a backward pass counted as two forward ones. Bytes are all that is kept from one step to the
next: images, net, optimizer, teachers, statistics. `online_lora` needs a transformer, `{transformer}`, and is not to be
compared with the others.

Written by `python docs/manual/count_costs.py`.

"""


def learner(name: str) -> str:
    """Return the expression that stands for a method: an addition needs something to be added to."""
    return f"er() + {name}()" if FACTS[name].family == "add" else f"{name}()"


def net_of(name: str) -> str:
    return TRANSFORMER if parse_method(learner(name)).chain.traits.attention else NET


def images() -> Data:
    draw, labels = np.random.default_rng(0), np.repeat(np.arange(CLASSES), PER_CLASS)
    x = draw.integers(0, 256, (len(labels), *SHAPE), dtype=np.uint8)
    return from_arrays(x, labels, x, labels, name="noise", tasks=TASKS)


def cost(name: str) -> StepCost:
    stream = split(images(), 0, tasks=TASKS, batch=BATCH)
    recipe = Recipe(learner(name), net=net_of(name), memory=MEMORY, device="cpu")
    engine = recipe.build(stream.data.inputs, CLASSES)
    return dry_run(engine, engine.as_seen(stream))


def counted(name: str) -> dict[str, float]:
    found = cost(name)
    return {"flops": round(float(found.step)), "bytes": found.fixed + MEMORY * found.slot, "bytes_per_image": found.slot}


def main() -> None:
    costs = {name: counted(name) for name in FACTS}
    FILE.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    rows = [
        [f"`{learner(name)}`", f"{told['flops'] / 1e9:.2f}", f"{told['bytes'] / 1e6:.2f}", f"{told['bytes_per_image']:,}"]
        for name, told in costs.items()
    ]
    heads = ["method", "GFLOPs per step", "MB kept", "bytes per image in memory"]
    page = OPENING.format(transformer=TRANSFORMER) + table(heads, rows, right=(1, 2, 3)) + "\n"
    FILE.with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
