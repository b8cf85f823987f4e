"""Detectors of task boundaries, one file each: `base.py` has what they share and how to write another."""

from gracecl.detectors.base import AUTO, Detector, build, canonical

__all__ = ["AUTO", "Detector", "build", "canonical"]
