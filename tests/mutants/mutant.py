"""A single error that tests must find: a text of the source, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "gracecl"
TESTS = Path(__file__).parents[1]
Change = tuple[str, str]
REGULARISERS = "golden/test_golden_regularisers.py oracle/test_regularisers.py"


@dataclass(frozen=True)
class Mutant:
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    """where it is found, below `tests/`"""

    def changed(self, source: Path) -> str:
        """The text of the file with the error in it."""
        text = (source / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} holds {self.before!r} {text.count(self.before)} times, not once")
        return text.replace(self.before, self.after)

    @property
    def part(self) -> str:
        """The part of the library that it is made in: a folder, or a file that is in none."""
        return self.file.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.before.split())}  ->  {' '.join(self.after.split())}"


def of(file: str, tests: str, *changes: Change) -> list[Mutant]:
    """Several errors in one file that the same tests find."""
    return [Mutant(file, before, after, tuple(tests.split())) for before, after in changes]


def method(name: str, *changes: Change, tests: str = "") -> list[Mutant]:
    """Errors in the file of a method, whose tests are its oracle and golden files unless others are named."""
    own = (f"golden/test_golden_{name}.py", f"oracle/test_{name}.py")
    return of(f"methods/{name}.py", tests or " ".join(file for file in own if (TESTS / file).exists()), *changes)
