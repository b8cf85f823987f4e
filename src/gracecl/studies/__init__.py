"""`gracecl study`: runs that belong together and the table they make. One module per study, each with `METHODS` and `configs`."""

from __future__ import annotations

import importlib
from types import ModuleType

from gracecl.errors import UserError
from gracecl.registry import nearest

STUDIES = {
    "mini": "every method on twenty classes of CIFAR-100 in five tasks, with a small net and on equal terms",
    "feedback": "one head, four heads, and feedback on four heads, in the setting of mini",
}


def find(name: str) -> ModuleType:
    """The module of a study."""
    if name not in STUDIES:
        raise UserError(f"there is no study '{name}'{nearest(name, STUDIES)} (there are: {', '.join(STUDIES)})")
    return importlib.import_module(f"gracecl.studies.{name}")
