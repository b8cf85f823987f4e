"""All single errors that tests must find: at least one for every equation."""

from __future__ import annotations

from mutant import SOURCE, TESTS, Mutant
from of_boundaries import BOUNDARIES
from of_budgets import BUDGETS
from of_closed import CLOSED
from of_corners import CORNERS
from of_methods import METHODS
from of_numbers import NUMBERS
from of_parts import PARTS
from of_streams import STREAMS

__all__ = ["MUTANTS", "SOURCE", "TESTS", "Mutant"]

MUTANTS = [*PARTS, *STREAMS, *NUMBERS, *METHODS, *CLOSED, *CORNERS, *BUDGETS, *BOUNDARIES]
