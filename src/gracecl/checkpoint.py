"""State on disk in one safetensors file: tensors as tensors, everything else as JSON in its header. Nothing is ever unpickled.

A file is written beside its place, synced and renamed, so at every moment the last complete checkpoint is there. It holds the
digest of its content, which is compared when it is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gracecl.errors import UserError
from gracecl.files import (
    CHECKPOINT_FORMAT,
    Digest,
    check_header,
    check_readable,
    chunk_digests,
    entries_of,
    parse_json,
    replacing,
    unfold,
    without_nul,
)
from gracecl.rows import Rows

log = logging.getLogger(__name__)

WITHOUT_DIGEST = "gracecl-1"
DIGEST = "digest"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a nested state of tensors, rows, arrays, numbers, texts, lists, tuples and dicts; rows are read as tensors."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_take_tensors(state, tensors))
    # One entry, because safetensors writes several in any order, and equal states are to give equal files.
    write_atomically(
        path, lambda beside: save_file(tensors, beside, metadata={CHECKPOINT_FORMAT: f"{_digest(tensors, tree)}:{tree}"})
    )


def load(path: Path, remedy: str = "delete it to start this run anew") -> dict[str, Any]:
    """Load the state that `save` wrote, with every tensor on the host."""
    try:
        header, tensors = _read(without_nul(path))
        if CHECKPOINT_FORMAT in header:
            digest, _, tree = header[CHECKPOINT_FORMAT].partition(":")
            _compare(digest, tensors, tree)
        elif header.get("format") == WITHOUT_DIGEST:
            log.warning("%s was written by an earlier version without a digest, and is taken as it is", path)
            tree = header["state"]
        else:
            check_header(header, CHECKPOINT_FORMAT, path, remedy)
            raise UserError(f"{path} is not a gracecl checkpoint")
        state: dict[str, Any] = unfold(parse_json(tree), lambda kind, name: _as(kind, tensors[name]))
        return state
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint at {path}") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the checkpoint {path} ({error}); {remedy}") from None


def peek(path: Path, name: str) -> Any:
    """Return one entry without tensors of a saved state, None if absent. No digest is compared."""
    try:
        return unfold(entries_of(path).get(name), lambda kind, name: dict[str, Any]()[name])
    except (ValueError, KeyError, TypeError):
        return None


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors by name, on the host and contiguous, for any program that reads safetensors files, and what they are."""
    told = json.dumps(about)
    write_atomically(path, lambda beside: save_file(tensors, beside, metadata={DIGEST: f"{_digest(tensors, told)}:{told}"}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load what `save_tensors` wrote; older files without a description are accepted."""
    header, tensors = _read(path)
    digest, _, told = header.get(DIGEST, "").partition(":")
    if digest:
        _compare(digest, tensors, told)
    return tensors, parse_json(told) if told else {}


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    check_readable(path)
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _compare(digest: str, tensors: dict[str, Tensor], tree: str = "") -> None:
    if _digest(tensors, tree) != digest:
        raise ValueError("its content does not match its digest")


def _digest(tensors: dict[str, Tensor], tree: str = "") -> str:
    """Return the digest of names, types, shapes and bytes of tensors, and of everything else."""
    digest = Digest().add(tree.encode())
    for name, tensor in sorted(tensors.items()):
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        digest.add(f"\0{name} {tensor.dtype} {list(tensor.shape)} {chunk_digests(flat.data)}".encode())
    return str(digest)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` on a temporary path and rename the result into place; a full disk leaves what was there before."""
    try:
        with replacing(without_nul(path)) as beside:
            write(beside)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write {path} ({error}); free some space or choose another place, what was saved before is intact"
        ) from None


def _take_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value with its tensors moved into `tensors` and references in their place."""
    if isinstance(value, dict):
        return {"dict": [[key, _take_tensors(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_take_tensors(item, tensors) for item in value]}
    if isinstance(value, (Tensor, Rows, np.ndarray)):
        name = str(len(tensors))
        tensors[name] = _own(value)
        return {"array" if isinstance(value, np.ndarray) else "tensor": name}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _own(value: Tensor | Rows | np.ndarray) -> Tensor:
    """Return a tensor on the host with memory of its own; safetensors refuses tensors that share memory."""
    if isinstance(value, Rows):
        return value.to("cpu").loaded()
    tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    return tensor.clone(memory_format=torch.contiguous_format)


def _as(kind: str, tensor: Tensor) -> Any:
    return tensor.numpy() if kind == "array" else tensor
