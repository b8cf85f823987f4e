"""What pixels a pretrained net expects: the mean and standard deviation that it was trained with.

Nets say so in their own ways: timm in each model's configuration, transformers in a file beside the weights, and EfficientNet-Lite0
in its authors' programs alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gracecl.images.augment import NORMALISATIONS
from gracecl.nets.module import optional_package
from gracecl.nets.trunk import arguments_of
from gracecl.registry import normal, spec
from gracecl.registry.objects import is_opaque
from gracecl.registry.options import BY_THE_NET, OF_THE_DATA

PREPROCESSOR = "preprocessor_config.json"


def meant(normalise: str, net: Any) -> str:
    """Return the normalisation that `auto` stands for on a net: that of its weights, else the data's; another as it is."""
    return (expected(net) or OF_THE_DATA) if normalise == BY_THE_NET else normalise


def expected(net: Any) -> str | None:
    """Name the normalisation that a net's weights were trained with; None for a net without any, or one that does not say."""
    if not isinstance(net, str) or is_opaque(net):
        return None
    call = spec.parse_call(net)
    says = SAYS.get(normal(call.name))
    return None if says is None else says(arguments_of(call))


def _of_efficientnet_lite(options: dict[str, Any]) -> str | None:
    return "half" if options["pretrained"] else None


def _of_timm(options: dict[str, Any]) -> str | None:
    if not (options["pretrained"] or options["weights"]):
        return None
    package = optional_package("timm", "timm", "timm(...)")
    known = package.get_pretrained_cfg(options["name"], allow_unregistered=True) if package.is_model(options["name"]) else None
    return None if known is None else _name_of(known.mean, known.std)


def _of_transformers(options: dict[str, Any]) -> str | None:
    """A folder without that file says nothing; what cannot be read is left to what loads the model."""
    if not (options["pretrained"] and options["path"]):
        return None
    try:
        known = json.loads((Path(options["path"]).expanduser() / PREPROCESSOR).read_text(encoding="utf-8"))
        return _name_of(known["image_mean"], known["image_std"]) if known.get("do_normalize", True) else "none"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


SAYS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "efficientnet_lite0": _of_efficientnet_lite,
    "timm": _of_timm,
    "transformers": _of_transformers,
}


def _name_of(mean: Sequence[float], std: Sequence[float]) -> str | None:
    """The name of these numbers, if they have one."""
    given = tuple(round(float(value), 3) for value in (*mean, *std))
    for name, parts in NORMALISATIONS.items():
        whole = [value * 3 if len(value) == 1 else value for value in parts]
        if given == tuple(round(value, 3) for part in whole for value in part):
            return name
    return None
