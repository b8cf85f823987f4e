"""Networks with a classification head at each tapped layer."""

from __future__ import annotations

from gracecl import spec
from gracecl.augment import Pixels
from gracecl.errors import UserError
from gracecl.method import Method
from gracecl.nets.tapped import Backbone, TappedNet
from gracecl.registry import nets

__all__ = ["Backbone", "TappedNet", "build", "taps_for"]

PAPER_TAPS = 4


def taps_for(method: Method, taps: int | None) -> int | None:
    """`taps = auto`: the paper's four where the method works on layers, else the last alone."""
    return taps if taps is not None or method.wants_taps else 1


def build(expression: str, shape: tuple[int, int, int], classes: int, pixels: Pixels, taps: int | None = None) -> TappedNet:
    """The net an expression such as `resnet18(width=20)` names, for images of this shape.

    `taps` is the number of tapped layers, counted from the last; None means the paper's four, or as many as the backbone has.
    """
    if taps is not None and taps < 1:
        raise UserError(f"--taps must be at least 1, not {taps}")
    call = spec.parse_call(expression)
    backbone: Backbone = spec.construct(nets, call, shape, taps if taps is not None else PAPER_TAPS, taps is None)
    return TappedNet(backbone, classes, pixels)
