"""The image models of Hugging Face transformers, an optional package: a local folder, or a small one made from options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from gracecl.errors import UserError
from gracecl.machine import check_training
from gracecl.nets.module import MODEL_ERRORS, ModuleBackbone, first_line, optional_package
from gracecl.nets.tapped import Backbone
from gracecl.registry import nets
from gracecl.registry.spec import AtLeast, Within

WEIGHTS_OF_A_BLOCK = 12
"""times the square of the width: four maps of attention, and two of four times the width"""


@nets.register("transformers")
def transformers(
    shape: tuple[int, int, int],
    taps: int,
    at_most: bool,
    path: str | None = None,
    pretrained: bool = True,
    kind: Literal["vit", "deit", "beit", "dinov2"] = "vit",
    patch: Annotated[int, AtLeast(1)] = 4,
    width: Annotated[int, AtLeast(1)] = 192,
    depth: Annotated[int, Within(1, 1000)] = 12,
    heads: Annotated[int, AtLeast(1)] = 3,
    at: list[str] | None = None,
) -> Backbone:
    """An image model of transformers: the one in the folder `path`, or a new one of this kind, patch, width, depth and heads.

    With `pretrained=False` only the folder's configuration is read. Nothing is downloaded. `at` names modules to tap; without it
    the last block and evenly spaced ones before it are.
    """
    if path is None:
        check_training(WEIGHTS_OF_A_BLOCK * depth * width**2, f"transformers(width={width}, depth={depth})", "use a smaller net")
    package = optional_package("transformers", "vit", "transformers(...)")
    folder = Path(path).expanduser() if path is not None else None
    if folder is not None and not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; give the folder that a model's save_pretrained() wrote")
    if width % heads:
        raise UserError(f"transformers: width must be a multiple of heads, and {width} is not one of {heads}")
    made: dict[str, Any] = {
        "image_size": shape[1] if shape[1] == shape[2] else shape[1:],
        "num_channels": shape[0],
        "patch_size": patch,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
    }
    try:
        if folder is not None and pretrained:
            model = package.AutoModel.from_pretrained(folder, local_files_only=True)
        elif folder is not None:
            model = package.AutoModel.from_config(package.AutoConfig.from_pretrained(folder, local_files_only=True))
        else:
            model = package.AutoModel.from_config(package.AutoConfig.for_model(kind, **made))
    except (*MODEL_ERRORS, ImportError, OSError) as error:
        remedy = "check the folder's files" if path else "change kind, patch, width, depth or heads"
        raise UserError(f"transformers cannot make the model {path or kind} ({first_line(error)}); {remedy}") from None
    return ModuleBackbone(model.train(), at, taps, at_most, example=(1, *shape))
