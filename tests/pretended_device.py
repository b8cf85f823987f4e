"""A device that is none: tensors whose values only operations of the device may touch, computed on the host behind its back.

Inside the block of a `PretendedDevice`, tensors on `DEVICE` hold real values. As on a GPU, an operation that mixes them with host
tensors fails, unless those are single numbers, and whatever makes the host wait for values (`.item()`, `.cpu()`, boolean indexing)
is noted with the file of the package that asked for it.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import gracecl

KIND = "pretended"
DEVICE = torch.device("privateuseone:0")
"""of PyTorch's kind for devices that it does not know"""
PACKAGE = Path(gracecl.__file__).parent
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
WAITS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal, aten.is_nonzero)
"""operations whose results the host needs"""
INDEXING = (aten.index, aten.index_put, aten.index_put_)
"""operations that take indices from the host too"""


class Held(Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        return Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=DEVICE
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Held({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the device outside of its block")


class Module:
    """What PyTorch asks of the device's kind."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def register() -> torch.library.Library:
    """Tell PyTorch of the device, once."""
    backend_registration._setup_privateuseone_for_python_backend(KIND, Module())
    library = torch.library.Library("aten", "IMPL")  # for `torch.tensor`, which no mode sees
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("copy_", _copy, "PrivateUse1")
    return library


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Held:
    return Held(torch.empty_strided(size, stride, dtype=dtype))


def _copy(one: Held, other: Tensor, _: bool = False) -> Held:
    one.held.copy_(other)
    return one


class PretendedDevice(TorchDispatchMode):
    """The device, for the length of a block."""

    def __init__(self) -> None:
        super().__init__()
        register()
        self.waits: set[str] = set()
        """files of the package that made the host wait"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        held = [tensor for tensor in tensors if isinstance(tensor, Held)]
        device = kwargs.get("device")
        to_device = device.type == DEVICE.type if device is not None else bool(held)
        if device is not None and to_device:
            kwargs["device"] = torch.device("cpu")
        if func in COPIES:
            to_device = isinstance(args[0], Held) if func is aten.copy_.default else to_device
            if held and not to_device:
                self._wait()
        elif held:
            if func._overloadpacket in WAITS or takes_mask(func, args):
                self._wait()
            for tensor in tree_leaves(args[:1]) if func._overloadpacket in INDEXING else tensors:
                assert isinstance(tensor, Held) or tensor.ndim == 0, f"{func} mixes a tensor of the host with those of the device"
        own = {id(tensor.held): tensor for tensor in held}
        made = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
        if not to_device:
            return made
        return tree_map(lambda value: own[id(value)] if id(value) in own else _device_tensor(value), made)

    def _wait(self) -> None:
        """Note who asked: the method or memory, else the innermost file of the package."""
        files = [Path(frame.f_code.co_filename) for frame, _ in walk_stack(sys._getframe(2))]
        inside = [file.relative_to(PACKAGE).as_posix() for file in files if PACKAGE in file.parents]
        self.waits |= set([file for file in inside if file.startswith(("methods/", "memory/"))][:1] or inside[:1])


def _device_tensor(value: Any) -> Any:
    return Held(value) if isinstance(value, Tensor) else value


def _bare(value: Any) -> Any:
    return value.held if isinstance(value, Held) else value


def takes_mask(func: Any, args: Any) -> bool:
    """Return whether an operation indexes by a mask, so that the size of its result depends on values."""
    return func._overloadpacket in INDEXING and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
