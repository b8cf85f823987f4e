"""Does feedback help beyond deep supervision alone? Methods with one head, with a head at each of four layers, and with feedback.

The setting is that of the study mini: twenty classes of CIFAR-100 in five tasks, images of 16×16 pixels in one pass of 500 steps of
20, a memory of 200 images, a ResNet-18 of width 8, Adam at 0.001. "taps=1" is the plain method; "taps=4" has heads at four layers
and sums their losses, which is deep supervision; grace(...) weighs and regularises the same four heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gracecl.runs.run import RunConfig
from gracecl.studies import mini

BASES = ("er()", "derpp()", "er() + ewc()")
OTHER_RULES = ("bayes", "pi", "balance")
METHODS = (*(f"grace({base})" for base in BASES), *(f"grace(er(), strength='{rule}')" for rule in OTHER_RULES))


def configs(methods: Sequence[str], seeds: Iterable[int], quick: bool) -> list[RunConfig]:
    """The runs, seed after seed. `methods` are bases to wrap, in place of those of the study."""
    bases = methods or (BASES[:1] if quick else BASES)
    wrapped = [f"grace({base})" for base in bases] + ([] if methods or quick else list(METHODS[len(BASES) :]))
    found = []
    for config in mini.configs(["er()"], seeds, quick):
        found += [replace(config, method=base, taps=taps) for base in bases for taps in (1, 4)]
        found += [replace(config, method=method) for method in wrapped]
    return found
