"""The image models of timm (https://github.com/huggingface/pytorch-image-models), an optional package, tapped at their stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.nets.module import MODEL_ERRORS, ModuleBackbone, first_line, optional_package
from gracecl.nets.tapped import Backbone
from gracecl.registry import nearest, nets


@nets.register("timm")
def timm(
    shape: tuple[int, int, int],
    taps: int,
    at_most: bool,
    name: str = "resnet10t",
    pretrained: bool = False,
    at: list[str] | None = None,
    weights: str | None = None,
) -> Backbone:
    """Any model of timm by its name, without its classifier; `pretrained` downloads its weights, `weights` is a local file of them.

    `at` names modules to tap; without it the last stage or block and evenly spaced ones before it are.
    """
    package = optional_package("timm", "timm", "timm(...)")
    if not package.is_model(name):
        raise UserError(f"timm has no model '{name}'{nearest(name, package.list_models())} ('timm.list_models()' names them)")
    settings: dict[str, Any] = {"in_chans": shape[0], "num_classes": 0}
    if package.get_pretrained_cfg(name, allow_unregistered=True).fixed_input_size:
        settings["img_size"] = shape[1:]
    if weights is not None:
        file = Path(weights).expanduser()
        if not file.is_file():
            raise UserError(f"timm: there is no weight file at {file}; give the path of a .safetensors or .pth file")
        settings["pretrained_cfg_overlay"] = {"file": str(file)}
    try:
        model = package.create_model(name, pretrained=pretrained or weights is not None, **settings)
    except (*MODEL_ERRORS, OSError) as error:
        remedy = "give a local file with weights=, or leave pretrained out" if pretrained or weights else "choose another"
        raise UserError(f"timm cannot make '{name}' for images {list(shape)} ({first_line(error)}); {remedy}") from None
    return ModuleBackbone(model, at, taps, at_most, example=(1, *shape))
