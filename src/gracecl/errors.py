"""The one error that people are meant to read."""


class UserError(Exception):
    """One sentence that names what is wrong and the remedy; the command prints it and exits with 2, without a traceback."""
