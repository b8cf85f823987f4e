"""The command `gracecl`: its verbs, its exit codes, and what it says when something goes wrong.

Heavy modules are imported by the verb that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from gracecl.cli.compare import compare
from gracecl.cli.data import data
from gracecl.cli.export import export
from gracecl.cli.import_results import import_results
from gracecl.cli.keep import keep
from gracecl.cli.list import list_names
from gracecl.cli.report import report
from gracecl.cli.resume import resume
from gracecl.cli.run import run
from gracecl.cli.study import study
from gracecl.cli.theory import theory
from gracecl.cli.tune import tune
from gracecl.errors import UserError, plain_cautions, sentence
from gracecl.registry import nearest
from gracecl.registry.options import ALIASES
from gracecl.runs import launch

INTERRUPTED = 130
VERBS: dict[str, Callable[..., int | None]] = {
    "run": run,
    "resume": resume,
    "study": study,
    "tune": tune,
    "report": report,
    "compare": compare,
    "keep": keep,
    "import": import_results,
    "export": export,
    "list": list_names,
    "data": data,
    "theory": theory,
}


def main() -> None:
    launch.keep_freed_memory()
    plain_cautions()
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, 1 for a fault, 2 for a mistake the user can mend, 130 when interrupted."""
    if not arguments:
        print(overview(), file=sys.stderr)
        return 2
    if arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    return exit_code("gracecl", lambda: call_verb(*arguments))


def call_verb(verb: str, *arguments: str) -> int | None:
    if verb not in VERBS:
        raise UserError(f"there is no 'gracecl {verb}'{nearest(verb, VERBS)} (there are: {', '.join(VERBS)})")
    import tyro

    return tyro.cli(VERBS[verb], prog=f"gracecl {verb}", args=[in_our_words(argument) for argument in arguments])


def in_our_words(argument: str) -> str:
    """`--memory=50` for `--buffer-size=50`; all else is as it was."""
    option, equals, value = argument.partition("=")
    name = ALIASES.get(option.removeprefix("--").replace("-", "_")) if option.startswith("--") else None
    return argument if name is None else f"--{name.replace('_', '-')}{equals}{value}"


def exit_code(program: str, work: Callable[[], int | None]) -> int:
    """Does the work of a program; what goes wrong is told in one sentence after the program's name."""
    try:
        return work() or 0
    except UserError as error:
        complain(f"{program}: {error}")
        return 2
    except KeyboardInterrupt as stop:
        complain(f"{program}: {str(stop) or 'interrupted; what was saved is intact'}")
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except OSError as error:
        complain(f"{program}: {sentence(error)}")
        return 2


def complain(text: str) -> None:
    """On standard error, if there still is one: the terminal may be gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def overview() -> str:
    """What `gracecl --help` prints. The parser that explains each verb takes a while to load and is not needed for it."""
    lines = [f"  {verb:<8} {(function.__doc__ or '').splitlines()[0]}" for verb, function in VERBS.items()]
    return "\n".join(
        [
            "usage: gracecl VERB ...",
            "",
            "Online continual learning with layer-wise feedback.",
            "",
            *lines,
            "",
            "gracecl VERB --help explains a verb and its options.",
        ]
    )
