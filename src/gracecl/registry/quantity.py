"""Amounts of computing and of memory as text: `2G/step`, `500G`, `4MB`, or what a method takes: `er()`, `0.5 * er()`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from gracecl.errors import UserError

PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
SCALES = PREFIXES | {"K": 10**3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
NUMBER = r"(?P<number>\d+(?:\.\d*)?|\.\d+)"
AMOUNT = re.compile(rf"{NUMBER}\s*(?P<prefix>{'|'.join(sorted(SCALES, key=len, reverse=True))})(?:FLOPs?|B)?")
MULTIPLE = re.compile(rf"(?:{NUMBER}\s*\*\s*)?(?P<method>[A-Za-z_].*)")
FORMS = {
    "budget": ("2G/step, 500G for the whole stream, or what a method takes, such as er()", ("", "step")),
    "bytes": ("4MB, 512KiB, or what a method keeps, such as er()", ("",)),
    "pace": ("2G/batch, or what a method takes, such as er()", ("", "batch")),
}
"""of each option examples of its values, and what may stand after a slash"""


@dataclass(frozen=True)
class Quantity:
    """A number, or a multiple of what a method takes."""

    number: Fraction
    """the amount itself, or the factor of the method's"""
    method: str | None = None
    """whose amount is meant; None for a plain number"""
    per: str = ""
    """what stands after the slash"""


def parse(text: str, option: str) -> Quantity:
    """Read the value of `budget`, `bytes` or `pace`."""
    examples, units = FORMS[option]
    amount, slash, per = (part.strip() for part in text.rpartition("/"))
    amount, per = (amount, per) if slash and per in units else (text.strip(), "")
    if found := AMOUNT.fullmatch(amount):
        quantity = Quantity(Fraction(found["number"]) * SCALES[found["prefix"]], None, per)
    elif found := MULTIPLE.fullmatch(amount):
        quantity = Quantity(Fraction(found["number"] or 1), found["method"], per)
    else:
        quantity = Quantity(Fraction(0))
    if quantity.number <= 0:
        raise UserError(f"--{option} is an amount above 0 such as {examples}, not '{text}'")
    return quantity


def shown(amount: float, unit: str) -> str:
    """Return an amount with three digits and a prefix: `124 GFLOP`, `48.4 MB`."""
    prefix = max((prefix for prefix, scale in PREFIXES.items() if amount >= scale), key=PREFIXES.__getitem__, default="")
    return f"{amount / PREFIXES[prefix]:.3g} {prefix}{unit}"
