"""Every method on twenty classes of CIFAR-100, small enough for a night on two cores and on equal terms.

Five tasks of four classes, 10,000 images of 16×16 pixels in one pass of 500 steps of 20; a memory of 200 images; a ResNet-18 of
width 8. Every method has the library's optimizer (Adam at 0.001) and augmentation and replays 64 images a step, whatever its paper
used, and otherwise the defaults of its file; additions stand beside er(), or sgd() where their paper has no memory. What is part of
a method stays: gdumb trains with its own SGD, rar augments by RandAugment, slda and ranpac train nothing and so work on random
features, ocm and onpro learn 16 rotations of every image. Two methods are shortened: gdumb trains for 64 epochs before each of the
five evaluations, not 256; ema(rar()) has the base of EMA's authors, three steps per batch with the run's augmentation, not ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gracecl.registry.catalogue import LEARNERS
from gracecl.report import Run
from gracecl.runs.run import RunConfig
from gracecl.studies import against_paper
from gracecl.studies.table import Section

SHORTENED = {"gdumb()": "gdumb(epochs=64)"}
IMPOSSIBLE = ("online_lora()",)
"""on a net that is no transformer"""
METHODS = ("joint()", *(SHORTENED.get(method, method) for method in LEARNERS if method not in IMPOSSIBLE))
QUICK_METHODS = ("sgd()", "er()")


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed, so that every method has one before any has two. `quick` is to see that it works."""
    if quick:
        stream, net, memory = "split-digits(size=8, classes='0-3', tasks=2, batch=20)", "mlp(width=32, depth=4)", 20
    else:
        stream, net, memory = "split-cifar100(tasks=5, classes='0-19', size=16, batch=20)", "resnet18(width=8)", 200
    chosen = methods or (QUICK_METHODS if quick else METHODS)
    return [
        RunConfig(method=method, stream=stream, net=net, memory=memory, seed=seed, device="cpu")
        for seed in seeds
        for method in chosen
    ]


def sections(runs: Sequence[Run], out: Path, name: str) -> list[Section]:
    """The accuracies beside the paper's."""
    found = against_paper.section(runs, out, name)
    return [] if found is None else [found]
