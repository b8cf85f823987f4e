"""`gracecl study`: runs that belong together and the table they make. One module per study, each with `METHODS` and `configs`.

A module may also have `SEEDS`, where they are not the usual ones, and `sections(runs, out, name)`, what it shows beyond its table.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from gracecl.errors import UserError
from gracecl.registry import nearest

SEEDS = "0-1"
STUDIES = {
    "mini": "every method on twenty classes of CIFAR-100 in five tasks, with a small net and on equal terms",
    "paper-setting": "the paper's methods on all classes of CIFAR-100 in ten tasks, with small images and a small net",
    "readings": "GRACE in every reading of its paper against MOSE, in the setting of mini and on classes kept apart",
    "regimes": "where feedback helps and where it hurts: mini with one thing changed at a time",
    "record": "the library's best learner, its parts, and MOSE, on classes kept apart",
    "feedback": "one head, four heads, and feedback on four heads, in the setting of mini",
}


def find(name: str) -> ModuleType:
    """The module of a study."""
    if name not in STUDIES:
        raise UserError(f"there is no study '{name}'{nearest(name, STUDIES)} (there are: {', '.join(STUDIES)})")
    return importlib.import_module(f"gracecl.studies.{name.replace('-', '_')}")
