"""State on disk in one safetensors file: tensors as tensors, everything else as JSON in its header. Nothing is ever unpickled.

A file is written beside its place, synced and renamed, so at every moment the last complete checkpoint is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gracecl.errors import UserError
from gracecl.files import replacing

FORMAT = "gracecl-1"


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a nested state of tensors, arrays, numbers, texts, lists, tuples and dicts."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_take_tensors(state, tensors))
    write_atomically(path, lambda beside: save_file(tensors, beside, metadata={"format": FORMAT, "state": tree}))


def load(path: Path) -> dict[str, Any]:
    """The state that `save` wrote, with every tensor on the host."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise UserError(f"{path} is not a gracecl checkpoint")
            state: dict[str, Any] = _put_tensors(json.loads(header["state"]), file.get_tensor)
            return state
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint at {path}") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the checkpoint {path} ({error}); delete it to start this run anew") from None


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls `write` on a temporary path and renames the result into place; a full disk leaves what was there before."""
    try:
        with replacing(path) as beside:
            write(beside)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write {path} ({error}); free some space or choose another place, what was saved before is intact"
        ) from None


def _take_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with its tensors moved into `tensors` and a reference left in their place."""
    if isinstance(value, dict):
        return {"dict": [[key, _take_tensors(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_take_tensors(item, tensors) for item in value]}
    if isinstance(value, (Tensor, np.ndarray)):
        name = str(len(tensors))
        kind = "tensor" if isinstance(value, Tensor) else "array"
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)  # safetensors refuses tensors that share memory
        return {kind: name}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _put_tensors(tree: Any, get: Callable[[str], Tensor]) -> Any:
    match tree:
        case {"dict": items}:
            return {key: _put_tensors(item, get) for key, item in items}
        case {"list": items}:
            return [_put_tensors(item, get) for item in items]
        case {"tuple": items}:
            return tuple(_put_tensors(item, get) for item in items)
        case {"tensor": name}:
            return get(name)
        case {"array": name}:
            return get(name).numpy()
    return tree
