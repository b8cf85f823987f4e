"""The one error that people are meant to read."""

from __future__ import annotations

import re
import warnings

LONGEST_REASON = 200
"""characters of what a library says"""


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


MEMORY_RAN_OUT = re.compile(
    "(?i)(can't|cannot|unable to) allocate|not enough memory|out of memory|bad_alloc|failed to map segment|start new thread"
)
"""in the words of the system, of torch and of the loader of libraries"""


def is_sentence(error: BaseException) -> bool:
    """True for what a person can mend: mistakes, the system's own errors, and memory that ran out."""
    return isinstance(error, UserError | OSError | MemoryError) or (
        isinstance(error, RuntimeError | ImportError) and MEMORY_RAN_OUT.search(str(error)) is not None
    )


def sentence(error: BaseException) -> str:
    """What to tell a person; the system's own errors come without a remedy."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError) or MEMORY_RAN_OUT.search(str(error)):
        why = " ".join(str(error).split())
        return (
            f"memory ran out{f' ({why[:LONGEST_REASON]})' if why else ''}; what was saved is intact; "
            "take a smaller net, memory or batch, fewer --jobs, or raise the limit (ulimit -v)"
        )
    return f"{error}; check that the folder can be written and its disk is not full"
