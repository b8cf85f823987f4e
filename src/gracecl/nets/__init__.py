"""Networks with a classification head at each tapped layer."""

from __future__ import annotations

from gracecl.errors import UserError
from gracecl.functional.augment import Pixels
from gracecl.nets.module import ModuleBackbone, tap
from gracecl.nets.tapped import Backbone, TappedNet
from gracecl.nets.trunk import TrunkOptions, take_options
from gracecl.registry import nets, spec

__all__ = ["Backbone", "ModuleBackbone", "TappedNet", "TrunkOptions", "build", "tap"]

PAPER_TAPS = 4


def build(expression: str, shape: tuple[int, int, int], classes: int, pixels: Pixels, taps: int | None = None) -> TappedNet:
    """The net an expression such as `resnet18(width=20)` names, for images of this shape.

    `taps` is the number of tapped layers, counted from the last; None means the paper's four, or as many as the backbone has.
    Whatever the net, its expression may also say how its trunk learns (`TrunkOptions`).
    """
    if taps is not None and taps < 1:
        raise UserError(f"--taps must be at least 1, not {taps}")
    call, trunk_options = take_options(spec.parse_call(expression))
    backbone: Backbone = spec.construct(nets, call, shape, taps if taps is not None else PAPER_TAPS, taps is None)
    net = TappedNet(backbone, classes, pixels)
    trunk_options.apply(net, shape, call.name)
    return net
