"""The one error that people are meant to read."""

from __future__ import annotations

import warnings


class UserError(Exception):
    """One sentence that names what is wrong and the remedy; the command prints it and exits with 2, without a traceback."""


class Caution(UserWarning):
    """One sentence about what was asked for and will not do what its name says."""


class Misfit(Caution):
    """One sentence about a default or a declaration that costs accuracy on the data at hand."""


def plain_cautions() -> None:
    """Cautions are printed as sentences, each once, without the place in the source where they arose."""
    others, said = warnings.formatwarning, set[str]()

    def plain(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if not issubclass(category, Caution):
            return others(message, category, filename, lineno, line)
        sentence = f"gracecl: {message}\n"
        again = sentence in said
        said.add(sentence)
        return "" if again else sentence

    warnings.formatwarning = plain


def sentence(error: UserError | OSError) -> str:
    """What to tell a person; the system's own errors come without a remedy."""
    remedy = "; check that the folder can be written and its disk is not full" if isinstance(error, OSError) else ""
    return f"{error}{remedy}"
