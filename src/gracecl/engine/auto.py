"""The learner that `auto` stands for. It follows from the net, and what is recorded is the expression that it stands for.

    a net that knows something already       closed(…), which trains nothing and keeps no image
        pretrained weights, a frozen trunk, or features as inputs (identity())
    a net that begins from scratch           best(), on images

The study `pretrained` (results/pretrained) made the first choice, `record` the second. Whether a module of one's own is pretrained
nobody can tell: it counts as such if none of its parameters is to be trained.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gracecl.nets.tapped import TappedNet
from gracecl.nets.trunk import arguments_of, take_options
from gracecl.registry import normal, spec
from gracecl.registry.objects import is_opaque
from gracecl.registry.options import AUTO_FROM_SCRATCH, AUTO_ON_FEATURES

AUTO = ("auto", "auto()")


def meant(method: Any, net: Any) -> Any:
    """Return the expression that `auto` stands for on a net, which is given as text or as it is; another method as it is."""
    if not isinstance(method, str) or method not in AUTO:
        return method
    return AUTO_ON_FEATURES if knows_something(net) else AUTO_FROM_SCRATCH


def knows_something(net: Any) -> bool:
    """Whether a net has features that are worth keeping before it saw the stream."""
    if isinstance(net, nn.Module):
        trunk = net.backbone.trunk_parameters() if isinstance(net, TappedNet) else net.parameters()
        return not any(parameter.requires_grad for parameter in trunk)
    if not isinstance(net, str) or is_opaque(net):
        return False
    call, options = take_options(spec.parse_call(net))
    if options.lora:
        return False
    if options.freeze or normal(call.name) == "identity":
        return True
    given = arguments_of(call)
    return bool(given.get("weights") or (given.get("pretrained") and given.get("path", "") is not None))
