"""Weight files: safetensors and PyTorch files read without executing anything, vision transformers' names made one."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gracecl.errors import UserError

PYTORCH_SUFFIXES = (".pt", ".pth", ".bin")
ENVELOPES = ("state_dict", "model")
"""entries under which training programs put the weights of what they save"""
HEADS = re.compile(r"(head|head_dist|pre_logits|classifier|pooler|vit\.pooler|(vit\.)?embeddings\.mask_token)(\.|$)")
"""what a file holds beside the backbone: classifiers, and the token that stands for a masked patch"""
TRANSFORMERS_NAMES = (
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.(?:attention\.query|q_proj)\.", ".attn.query."),
    (r"\.attention\.(?:attention\.key|k_proj)\.", ".attn.key."),
    (r"\.attention\.(?:attention\.value|v_proj)\.", ".attn.value."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^layernorm\.", "norm."),
)
"""transformers' names, of files and of models since its fifth version, and what timm calls the same"""
NAMED_AT_MOST = 4


def read(path: str) -> dict[str, Tensor]:
    """The named tensors of a file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"there is no weight file at {file}; give the path of a .safetensors, .pt, .pth or .bin file")
    tensors: Any
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        elif file.suffix in PYTORCH_SUFFIXES:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        else:
            raise UserError(f"{file} is not a .safetensors, .pt, .pth or .bin file, the kinds of weight file that can be read")
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, LookupError, EOFError, OSError) as error:
        reason = str(error).split("\n", 1)[0].strip().rstrip(".")
        raise UserError(f"cannot read the weights in {file} ({reason}); save the model's state_dict() as safetensors") from None
    for envelope in ENVELOPES:
        if isinstance(tensors, dict) and isinstance(tensors.get(envelope), dict):
            tensors = tensors[envelope]
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{file} does not hold named tensors; save the model's state_dict() into it")
    return dict(tensors)


def vision_transformer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A vision transformer's tensors under timm's names, without classifier; separate query, key and value are joined."""
    renamed = {timm_name(name): value for name, value in tensors.items() if not HEADS.match(name)}
    for name in [name for name in renamed if ".attn.query." in name]:
        parts = [name.replace(".attn.query.", f".attn.{part}.") for part in ("query", "key", "value")]
        if all(part in renamed for part in parts):
            renamed[name.replace(".attn.query.", ".attn.qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


def timm_name(name: str) -> str:
    for pattern, replacement in TRANSFORMERS_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load(module: nn.Module, tensors: dict[str, Tensor], path: str, fresh: tuple[str, ...] = ()) -> None:
    """Copy tensors into a module's parameters of the same names; all must be there except those of the `fresh` parts."""
    own = {name: value for name, value in module.state_dict().items() if not name.startswith(fresh)}
    missing, unexpected = [name for name in own if name not in tensors], [name for name in tensors if name not in own]
    differing = [
        f"{name} {list(tensors[name].shape)} instead of {list(value.shape)}"
        for name, value in own.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    faults = [
        f"{what} {some_of(names)}"
        for what, names in (("it lacks", missing), ("it also has", unexpected), ("it has", differing))
        if names
    ]
    if faults:
        raise UserError(f"the weights in {path} are not those of this net: {'; '.join(faults)}; give the net the file's sizes")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])


def some_of(names: list[str]) -> str:
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
