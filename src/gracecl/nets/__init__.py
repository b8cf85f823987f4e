"""Networks with a classification head at each tapped layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gracecl.errors import UserError
from gracecl.inputs import Images, Inputs, Parts
from gracecl.machine import check_training
from gracecl.nets.module import ModuleBackbone, tap
from gracecl.nets.tapped import Backbone, TappedNet
from gracecl.nets.trunk import TrunkOptions, take_options
from gracecl.registry import nets, normal, spec

__all__ = ["Backbone", "ModuleBackbone", "TappedNet", "TrunkOptions", "build", "tap"]

PAPER_TAPS = 4
FOR_IMAGES = ("resnet18", "vit", "timm", "transformers", "efficientnet_lite0")
COUNTED = ("mlp", "resnet18", "vit")
"""nets whose weights are counted before they are made; others come from elsewhere and have their size"""


def build(
    expression: str | nn.Module | Callable[[], nn.Module], inputs: Inputs, classes: int, taps: int | None = None
) -> TappedNet:
    """The net an expression such as `resnet18(width=20)` names, for such inputs; or a module of one's own, with heads.

    `taps` is the number of tapped layers, counted from the last; None means the paper's four, or as many as the backbone has.
    Whatever the net, its expression may also say how its trunk learns (`TrunkOptions`).
    """
    if taps is not None and taps < 1:
        raise UserError(f"--taps must be at least 1, not {taps}")
    if not isinstance(expression, str):
        return _with_heads(expression, inputs, classes, taps)
    call, trunk_options = take_options(spec.parse_call(expression))
    check_taken(call.name, inputs)
    given = inputs.shape, taps if taps is not None else PAPER_TAPS, taps is None
    if normal(call.name) in COUNTED:
        check_training(weights_of(call, given, classes), expression, "use a smaller net")
    backbone: Backbone = spec.construct(nets, call, *given)
    net = TappedNet(backbone, classes, inputs)
    trunk_options.apply(net, call.name)
    return net


def _with_heads(given: nn.Module | Callable[[], nn.Module], inputs: Inputs, classes: int, taps: int | None) -> TappedNet:
    """A module that maps an input to features, or what makes one; what `tap` returned keeps its taps."""
    module = given if isinstance(given, nn.Module) else given()
    if isinstance(module, TappedNet):
        if classes and module.classes != classes:
            raise UserError(f"the net was tapped for {module.classes} classes and the learner has {classes}; give both the same")
        module.inputs = inputs
        return module
    if not isinstance(module, nn.Module):
        raise UserError(f"net= is a function that returns a {type(module).__name__}; let it return a torch.nn.Module")
    if not isinstance(module, Backbone):
        example = inputs.seen(1, torch.zeros)
        number = PAPER_TAPS if taps is None else taps
        module = ModuleBackbone(module, None, number, taps is None, example, freeze_unread=True, to_output=True)
    return TappedNet(module, classes, inputs)


def check_taken(name: str, inputs: Inputs) -> None:
    """Refuses a net by name for inputs that it does not take."""
    remedy = "give a module of your own that does as net=, or tap one with gracecl.tap"
    if isinstance(inputs, Parts) and normal(name) in ("mlp", *FOR_IMAGES):
        raise UserError(f"{name} takes one tensor, and the inputs are a {inputs}; {remedy}")
    if normal(name) in FOR_IMAGES and len(inputs.shape) != 3:
        raise UserError(
            f"{name} takes images [batch, channels, height, width], and the inputs are {inputs}; use mlp(...), or {remedy}"
        )
    if normal(name) in ("mlp", *FOR_IMAGES) and not (isinstance(inputs, Images) or inputs.dtype.is_floating_point):
        raise UserError(f"{name} takes floating point, and the inputs are {inputs}; convert them, or {remedy}")


def check(expression: str) -> None:
    """Refuse an expression that names no net, or options that it does not have; nothing is built."""
    call, _ = take_options(spec.parse_call(expression))
    spec.arguments(nets.get(call.name), call, before=3)


def weights_of(call: spec.Call, given: tuple[tuple[int, ...], int, bool], classes: int) -> int:
    """Count the weights that a net would have, without allocating them."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            planned = TappedNet(spec.construct(nets, call, *given), classes)
        return sum(weight.numel() for weight in planned.parameters())
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        return 1 << 63  # more than can be counted
