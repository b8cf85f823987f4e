"""A set of defaults of one's own, as the text of its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gracecl.lab.defaults import PROVENANCE, outside_in, stream_name
from gracecl.methods.base import Method
from gracecl.registry import methods, spec


def as_toml(method: str, stream: str, memory: int, settings: Mapping[str, str], source: str, provenance: Mapping[str, Any]) -> str:
    """Entries with which the bare names in an expression stand for it, the run's settings in that of the outermost method."""
    learner: Method = spec.parse_method(method)
    entries = {part.name: options_of(part) for part in reversed(learner.parts) if part.name in methods.names()}
    outermost = next(part.name for part in outside_in(learner) if part.name in entries)
    entries[outermost] |= settings
    about = {"memory": [memory], "source": source}
    tables = [_table(f"[[{name}]]", {**entry, **about}) for name, entry in entries.items() if entry]
    return "\n".join([_line("streams", [stream_name(stream)]), "", *tables, *_nested(PROVENANCE, provenance)])


def options_of(method: Method) -> dict[str, Any]:
    """What a method has and would not have by itself, but for None, which TOML has no word for."""
    values = {field.name: (getattr(method, field.name), field.default) for field in dataclasses.fields(method)}
    return {
        name: value for name, (value, default) in values.items() if value not in (default, None) and not isinstance(value, Method)
    }


def _nested(name: str, values: Mapping[str, Any]) -> list[str]:
    """A table and the tables in it."""
    inside = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in values.items() if key not in inside}
    return [_table(f"[{name}]", plain), *(text for key, value in inside.items() for text in _nested(f"{name}.{key}", value))]


def _table(head: str, values: Mapping[str, Any]) -> str:
    return "\n".join([head, *(_line(name, value) for name, value in values.items() if value is not None), ""])


def _line(name: str, value: Any) -> str:
    """JSON's texts, numbers, truth values and lists are TOML's; a key with a dot in it is quoted."""
    key = name if name.isidentifier() else json.dumps(name)
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"
