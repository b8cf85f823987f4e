"""The methods of the paper's main table in its setting, with smaller images and a smaller net: CIFAR-100 in ten tasks of ten.

50,000 images of 16×16 pixels in one pass of 2,500 steps of 20; a memory of 1,000 images; a ResNet-18 of width 8 (the paper's images
have 32×32 pixels, its steps 10 images, its net width 64). Otherwise as the study mini: every method has the library's optimizer
(Adam at 0.001) and augmentation and replays 64 images a step, and gdumb trains for 64 epochs before each evaluation, not 256. sgd
and joint stand beside them as bounds. One seed, unless more are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gracecl import paper
from gracecl.runs.run import RunConfig
from gracecl.studies import mini
from gracecl.studies.mini import sections

__all__ = ["METHODS", "SEEDS", "configs", "sections"]

SEEDS = "0"
STREAM, MEMORY = "split-cifar100(size=16, batch=20)", 1000
METHODS = ("joint()", "sgd()", *(mini.SHORTENED.get(paper.EXPRESSIONS[row], paper.EXPRESSIONS[row]) for row in paper.accuracies()))
QUICK_METHODS = ("agem()", "er()", "scr()")


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed."""
    found = mini.configs(methods or (QUICK_METHODS if quick else METHODS), seeds, quick)
    return found if quick else [replace(config, stream=STREAM, memory=MEMORY) for config in found]
