"""Reading the official CIFAR pickles without running anything that a pickle asks for.

A pickle is a program. This reader gives it nothing to call: the four names that an honest CIFAR file mentions stand for
inert parts written here, every other name is refused, and numpy never sees the file's own dtype or array states. The
arrays are built afterwards, from raw bytes, after their type, shape and length have been checked.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.errors import UserError

PLAIN_TYPES = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in `path`, with text for keys, holding numbers, strings, lists and numpy arrays."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError("it holds no dictionary")
        return {_text(key): value.array() if isinstance(value, _Array) else value for key, value in content.items()}
    except _Refused as error:
        raise UserError(f"{path} asks for {error}, which no data file needs: refused; get an official copy") from error
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        OverflowError,
        MemoryError,
    ) as error:
        raise UserError(f"{path} is damaged or no CIFAR file ({error}): get an official copy") from error


class _Refused(Exception):
    """The pickle wanted something other than data."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_in = STAND_INS.get((module, name))
        if stand_in is None:
            raise _Refused(f"'{module}.{name}'")
        return stand_in

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object outside the file")


class _StandIn:
    """What an allowed name means here. A pickle cannot set its attributes, and so not change it for the next file."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("a change to the reader itself")


class _Dtype:
    """The type code of an array, and its byte order."""

    def __init__(self, code: Any, *flags: Any) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: Any) -> None:
        _version, order, subtype, names, fields, *_rest = state
        if subtype is not None or names is not None or fields is not None:
            raise _Refused("an array of records")
        self.order = _text(order)

    def numpy(self) -> np.dtype[Any]:
        if self.code not in PLAIN_TYPES or self.order not in ("|", "<", ">", "="):
            raise _Refused(f"an array of type '{self.order}{self.code}'")
        return np.dtype(self.order + self.code)


class _Array:
    """The state of an array, kept until the whole file has been read."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray[Any, np.dtype[Any]]:
        _version, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise _Refused("an array of objects")
        if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("the shape of an array is not a shape")
        return np.frombuffer(raw, dtype.numpy()).reshape(shape, order="F" if fortran else "C")


def _reconstruct(*_args: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any = None) -> bytes:
    """How Python 3 writes bytes into an old pickle: as latin-1 text. Other codecs (zlib, say) have no place there."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise _Refused(f"the codec {encoding!r}")
    return text.encode("latin1")


def _no_call(*_args: Any) -> Any:
    raise _Refused("an array made by hand")


STAND_INS = {
    ("_codecs", "encode"): _StandIn(_encode),
    ("numpy", "dtype"): _StandIn(_Dtype),
    ("numpy", "ndarray"): _StandIn(_no_call),
    ("numpy.core.multiarray", "_reconstruct"): _StandIn(_reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): _StandIn(_reconstruct),
}


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, str):
        return value
    raise TypeError(f"text expected, not {type(value).__name__}")
