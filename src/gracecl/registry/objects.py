"""Objects in place of expressions: a method, net, optimizer, scheduler or augmentation that a program gives as it is.

Configurations and files hold text. An object that an expression can name is written as that expression. Any other is *opaque*: it
is written as what it calls itself and a digest of its source, `MyNet@0123456789ab`, and whoever continues must give it again.
The digest is made of the source of its classes and functions, of the options and values it holds, and of the values a function
closes over; for code without source (an interactive line) of the compiled code. What a function takes from the module around it
is not covered, nor is the code of installed libraries.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gracecl.errors import UserError

OPAQUE = re.compile(r"@[0-9a-f]{12}$")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""where an object lies in memory, which its text may tell"""
LIBRARIES = ("builtins", "gracecl", "torch", "torchvision", "numpy", "collections", "functools", "abc", "typing")
"""whose code is known by name"""
PLAIN = (type(None), bool, int, float, complex, str, bytes)


DEEPEST = 20
"""objects inside one another that a digest looks into"""


class Walk:
    """The way through an object: what was met, which is kept so that no other gets its place in memory, and how deep it is."""

    def __init__(self) -> None:
        self.met: dict[int, Any] = {}
        self.depth = 0


def is_opaque(text: Any) -> bool:
    """Whether a setting stands for an object that no expression names."""
    return isinstance(text, str) and OPAQUE.search(text) is not None


def opaque(name: str, thing: Any) -> str:
    """The text that stands for an object."""
    return f"{ADDRESS.sub('', ' '.join(name.split()))}@{digest(thing)}"


def digest(*things: Any) -> str:
    """Of the source and the values of objects."""
    sha = hashlib.sha256()
    for piece in _pieces(things, Walk()):
        sha.update(piece if isinstance(piece, bytes) else f"\0{piece}".encode())
    return sha.hexdigest()[:12]


def name_of(thing: Any) -> str:
    """What an object calls itself, without the values it holds."""
    if isinstance(thing, functools.partial):
        return name_of(thing.func)
    kind = thing if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType) else type(thing)
    name = kind.__qualname__.rpartition("<locals>.")[2]
    return name if kind.__module__ in ("__main__", None) else f"{kind.__module__}.{name}"


def missing(what: str, settings: Mapping[str, Any], given: Mapping[str, Any], remedy: str) -> None:
    """Refuses settings that stand for objects of which some were not given."""
    for name, text in settings.items():
        if is_opaque(text) and given.get(name) is None:
            raise UserError(f"{what} was given its {name} as an object ({text}), which no file holds; {remedy.format(name=name)}")


def _pieces(value: Any, walk: Walk) -> Iterator[str | bytes]:
    """What an object's digest is made of, in a fixed order."""
    if isinstance(value, PLAIN):
        yield repr(value)
    elif id(value) in walk.met:
        yield "again"
    elif walk.depth == DEEPEST:
        yield type(value).__qualname__
    else:
        walk.met[id(value)] = value
        walk.depth += 1
        yield from _inside(value, walk)
        walk.depth -= 1


def _inside(value: Any, walk: Walk) -> Iterator[str | bytes]:
    if isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _pieces(item, walk)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(map(repr, value))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _pieces(value[key], walk)
    elif isinstance(value, type):
        yield from _of_class(value, walk)
    elif isinstance(value, functools.partial):
        yield from _pieces((value.func, value.args, value.keywords), walk)
    elif isinstance(value, types.MethodType):
        yield from _pieces((value.__func__, value.__self__), walk)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, walk)
    elif hasattr(value, "detach") or hasattr(value, "__array__"):
        yield from _of_tensor(value)
    else:
        yield from _of_class(type(value), walk)
        if hasattr(value, "named_modules"):
            yield from _of_module(value, walk)
        elif is_dataclass(value):
            for field in fields(value):
                yield field.name
                yield from _pieces(getattr(value, field.name), walk)
        else:
            yield from _pieces(getattr(value, "__dict__", {}), walk)


def _of_class(kind: type, walk: Walk) -> Iterator[str | bytes]:
    for part in kind.__mro__:
        yield f"{part.__module__}.{part.__qualname__}" if part.__module__ != "__main__" else part.__qualname__
        if part.__module__.partition(".")[0] in LIBRARIES:
            continue
        try:
            yield inspect.getsource(part)
        except (OSError, TypeError):
            for name, member in sorted(vars(part).items()):
                if isinstance(member, types.FunctionType):
                    yield name
                    yield from _of_code(member.__code__)


def _of_function(function: types.FunctionType, walk: Walk) -> Iterator[str | bytes]:
    try:
        yield inspect.getsource(function)
        if function.__name__ == "<lambda>":  # whose source is the whole line, which may hold others
            yield repr(function.__code__.co_names)
    except (OSError, TypeError):
        yield from _of_code(function.__code__)
    yield from _pieces(function.__defaults__, walk)
    yield from _pieces(function.__kwdefaults__, walk)
    for cell in function.__closure__ or ():
        try:
            yield from _pieces(cell.cell_contents, walk)
        except ValueError:  # a name that was not given a value yet
            yield "empty"


def _of_code(code: types.CodeType) -> Iterator[str | bytes]:
    yield code.co_code
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield repr(constant)


def _of_module(module: Any, walk: Walk) -> Iterator[str | bytes]:
    """A net: its parts, and the names and shapes of its weights, whose values learning changes."""
    for name, part in module.named_modules():
        yield name
        yield from _of_class(type(part), walk)
    yield ADDRESS.sub("", repr(module))
    for name, value in module.state_dict().items():
        yield f"{name} {tuple(getattr(value, 'shape', ()))}"


def _of_tensor(value: Any) -> Iterator[str | bytes]:
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else value.__array__()
    yield f"{array.dtype} {array.shape}"
    yield array.tobytes()
