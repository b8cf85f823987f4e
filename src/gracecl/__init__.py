"""gracecl: online continual learning with layer-wise feedback."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_HOME = {
    "Batches": "gracecl.data",
    "Callback": "gracecl.engine.loop",
    "Feedback": "gracecl.controllers.feedback",
    "Learner": "gracecl.learner",
    "Method": "gracecl.methods.base",
    "Wrapper": "gracecl.methods.base",
    "Result": "gracecl.lab.runs.result",
    "RunConfig": "gracecl.lab.runs.run",
    "StopTraining": "gracecl.engine.loop",
    "UserError": "gracecl.errors",
    "Images": "gracecl.inputs",
    "Inputs": "gracecl.inputs",
    "embed": "gracecl.embedding",
    "export": "gracecl.learner",
    "from_arrays": "gracecl.data",
    "from_torch": "gracecl.data",
    "load_runs": "gracecl.lab.report.frames",
    "merge": "gracecl.merging",
    "pack": "gracecl.data",
    "run": "gracecl.lab.runs.result",
    "stream": "gracecl.streams",
    "tap": "gracecl.nets.module",
}
"""public names and where they live: they are imported when first used, so that the command starts without torch"""

__all__ = [
    "Batches",
    "Callback",
    "Feedback",
    "Images",
    "Inputs",
    "Learner",
    "Method",
    "Result",
    "RunConfig",
    "StopTraining",
    "UserError",
    "Wrapper",
    "embed",
    "export",
    "from_arrays",
    "from_torch",
    "load_runs",
    "merge",
    "pack",
    "run",
    "stream",
    "tap",
]

if TYPE_CHECKING:
    from gracecl.controllers.feedback import Feedback
    from gracecl.data import Batches, from_arrays, from_torch, pack
    from gracecl.embedding import embed
    from gracecl.engine.loop import Callback, StopTraining
    from gracecl.errors import UserError
    from gracecl.inputs import Images, Inputs
    from gracecl.lab.report.frames import load_runs
    from gracecl.lab.runs.result import Result, run
    from gracecl.lab.runs.run import RunConfig
    from gracecl.learner import Learner, export
    from gracecl.merging import merge
    from gracecl.methods.base import Method, Wrapper
    from gracecl.nets.module import tap
    from gracecl.streams import stream


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gracecl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
