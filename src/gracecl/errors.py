"""The one error that people are meant to read."""

from __future__ import annotations


class UserError(Exception):
    """One sentence that names what is wrong and the remedy; the command prints it and exits with 2, without a traceback."""


def sentence(error: UserError | OSError) -> str:
    """What to tell a person; the system's own errors come without a remedy."""
    remedy = "; check that the folder can be written and its disk is not full" if isinstance(error, OSError) else ""
    return f"{error}{remedy}"
