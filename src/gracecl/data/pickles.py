"""Reading the official CIFAR pickles without running anything that a pickle asks for.

A pickle is a program. This reader gives it nothing to call: the four names that an honest CIFAR file mentions stand for
inert parts written here, every other name is refused, and numpy never sees the file's own dtype or array states. The
arrays are built afterwards, from raw bytes, after their type, shape and length have been checked. Tuples within tuples are
counted before anything is made, as Python's own hash of a tuple ends the process where there are a hundred thousand.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gracecl.errors import UserError
from gracecl.files import read_file

DEEPEST = 20
"""tuples within each other; an array's state has two"""
OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
MAKE_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
BYTES_OF_A_LENGTH = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
PLAIN_TYPES = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a dictionary with text keys that holds numbers, strings, lists and numpy arrays."""
    try:
        data = read_file(path)
        _check_depth(data)
        content = _Reader(io.BytesIO(data), encoding="bytes").load()
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


def _check_depth(data: bytes) -> None:
    """Follow the program of a pickle with the depth of each tuple in place of the tuple."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    at = 0
    while True:
        opcode = OPCODES.get(data[at])
        if opcode is None:
            raise pickle.UnpicklingError(f"byte {at} is no instruction")
        argument, at = _argument(opcode, data, at + 1)
        name, takes = opcode.name, len(opcode.stack_before)
        if name == "STOP":
            return
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
            continue
        taken: list[int] = []
        if pickletools.markobject in opcode.stack_before:
            start = marks.pop()
            taken, takes = stack[start:], opcode.stack_before.index(pickletools.markobject)
            del stack[start:]
        if takes > len(stack):
            raise pickle.UnpicklingError("it takes what is not there")
        taken = stack[len(stack) - takes :] + taken
        del stack[len(stack) - takes :]
        depth = 0
        if name in MAKE_TUPLES:
            depth = 1 + max(taken, default=0)
            if depth > DEEPEST:
                raise pickle.UnpicklingError(f"it has more than {DEEPEST} tuples within each other")
        elif name == "DUP":
            [depth] = taken
        elif name.endswith("GET"):
            depth = memo[int.from_bytes(argument, "little") if "BIN" in name else int(argument)]
        elif name == "MEMOIZE":
            [depth] = taken
            memo[len(memo)] = depth
        elif name.endswith("PUT"):
            memo[int.from_bytes(argument, "little") if "BIN" in name else int(argument)] = stack[-1]
        stack += [depth] * len(opcode.stack_after)


def _argument(opcode: pickletools.OpcodeInfo, data: bytes, at: int) -> tuple[bytes, int]:
    """Return the argument of an instruction, and the position of the next one."""
    if opcode.arg is None:
        return b"", at
    length = opcode.arg.n
    if length == pickletools.UP_TO_NEWLINE:
        end = data.index(b"\n", at)
        if opcode.arg.name == "stringnl_noescape_pair":
            end = data.index(b"\n", end + 1)
        return data[at:end], end + 1
    if length < 0:
        prefix = BYTES_OF_A_LENGTH[length]
        length = int.from_bytes(data[at : at + prefix], "little")
        at += prefix
    return data[at : at + length], at + length


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
    """Encode bytes as Python 3 writes them into an old pickle: latin-1 text. Other codecs (zlib, say) are refused."""
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
