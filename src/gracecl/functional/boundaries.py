"""Guessed boundaries beside true ones: which were found, how late, and what was found that was not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Matched:
    """The guesses of each true boundary."""

    first: tuple[int | None, ...]
    """of each true boundary, the first guess from it on and before the next one; None where it was missed"""
    false: tuple[int, ...]
    """all other guesses: before the first boundary, or a second time after one"""

    def delays(self, true: Sequence[int]) -> list[int]:
        """How long after its boundary each found one was guessed."""
        return [guess - boundary for guess, boundary in zip(self.first, true, strict=True) if guess is not None]


def matched(guessed: Sequence[int], true: Sequence[int]) -> Matched:
    """Match guesses with true boundaries, both in ascending order: the first guess after a boundary is of that one."""
    ends = [*true, float("inf")]
    first = tuple(next((guess for guess in guessed if begin <= guess < end), None) for begin, end in pairwise(ends))
    return Matched(first, tuple(guess for guess in guessed if guess not in first))
