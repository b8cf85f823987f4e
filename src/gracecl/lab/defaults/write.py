"""Write a user's set of defaults as TOML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gracecl.lab.defaults import PROVENANCE, outside_in, stream_name
from gracecl.methods.base import Method
from gracecl.registry import methods, spec


def as_toml(method: str, stream: str, memory: int, settings: Mapping[str, str], source: str, provenance: Mapping[str, Any]) -> str:
    """Write TOML entries that give the bare method names the options of an expression, and the outermost the run's
    settings.
    """
    learner: Method = spec.parse_method(method)
    entries = {part.name: options_of(part) for part in reversed(learner.parts) if part.name in methods.names()}
    outermost = next(part.name for part in outside_in(learner) if part.name in entries)
    entries[outermost] |= settings
    about = {"memory": [memory], "source": source}
    tables = [_table(f"[[{name}]]", {**entry, **about}) for name, entry in entries.items() if entry]
    return "\n".join([_line("streams", [stream_name(stream)]), "", *tables, *_nested(PROVENANCE, provenance)])


def options_of(method: Method) -> dict[str, Any]:
    """Return a method's options that differ from its defaults, without None, which TOML does not have."""
    values = {field.name: (getattr(method, field.name), field.default) for field in dataclasses.fields(method)}
    return {
        name: value for name, (value, default) in values.items() if value not in (default, None) and not isinstance(value, Method)
    }


def _nested(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table and of the tables inside it."""
    inside = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in values.items() if key not in inside}
    return [_table(f"[{name}]", plain), *(text for key, value in inside.items() for text in _nested(f"{name}.{key}", value))]


def _table(head: str, values: Mapping[str, Any]) -> str:
    return "\n".join([head, *(_line(name, value) for name, value in values.items() if value is not None), ""])


def _line(name: str, value: Any) -> str:
    """Return `key = value`; JSON's strings, numbers, booleans and lists are valid TOML, a key with a dot is quoted."""
    key = name if name.isidentifier() else json.dumps(name)
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"
