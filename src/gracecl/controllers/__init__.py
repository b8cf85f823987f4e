"""Controllers of feedback, one file each: `paper.py` is the paper's; `base.py` has what they share and how to write another."""

from gracecl.controllers.base import Controller, Signals, build, relative, spread

__all__ = ["Controller", "Signals", "build", "relative", "spread"]
