"""A log that tests can look into."""

from __future__ import annotations

from typing import Any

from gracecl.engine.loop import Log


class Noted(Log):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def write(self, lines: list[dict[str, Any]]) -> None:
        self.lines += lines

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]
