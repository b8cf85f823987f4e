"""The command `gracecl`: its verbs, exit codes and error messages.

Heavy modules are imported by the verb that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated

from gracecl.errors import UserError, is_sentence, plain_cautions, sentence
from gracecl.lab.cli.compare import compare
from gracecl.lab.cli.data import data
from gracecl.lab.cli.export import export
from gracecl.lab.cli.features import features
from gracecl.lab.cli.import_results import import_results
from gracecl.lab.cli.keep import keep
from gracecl.lab.cli.list import list_names
from gracecl.lab.cli.report import report
from gracecl.lab.cli.resume import resume
from gracecl.lab.cli.run import run
from gracecl.lab.cli.stream import stream
from gracecl.lab.cli.study import study
from gracecl.lab.cli.theory import theory
from gracecl.lab.cli.tune import tune
from gracecl.lab.runs import launch
from gracecl.registry import nearest
from gracecl.registry.options import ALIASES, docstring
from gracecl.terminal import guard_streams, lost_output, print_err, print_out, usable_width

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
    "stream": stream,
    "features": features,
    "theory": theory,
}
for function in VERBS.values():
    function.__doc__ = inspect.unwrap(function).__doc__ = docstring(function)  # the parser reads that of what is decorated
ELSEWHERE: dict[str, tuple[str, str]] = {
    "lr": ("0.01", 'the learning rate is the optimizer\'s; write --optimizer "sgd(lr={})"'),
    "model": ("er", "methods are named without an option; write gracecl run {}"),
    "dataset": ("cifar100", "data come as a stream; write --stream split-{}"),
    "batch_size": ("10", 'the batch is the stream\'s; write --stream "split-cifar100(batch={})"'),
    "minibatch_size": ("64", 'how many images are replayed is the method\'s; write "er(n_recall={})"'),
    "n_epochs": ("5", "passes over each task are --epochs {}"),
}
"""options of other libraries: an example value, and what to write instead"""


def main() -> None:
    guard_streams()
    launch.keep_freed_memory()
    plain_cautions()
    code = call(sys.argv[1:])
    if why := lost_output():
        print_err(f"gracecl: standard output could not be written ({why}); all files were written")
        code = code or 2
    sys.exit(code)


def call(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0, 1 for a crash, 2 for an error the user can fix, 130 when interrupted."""
    if not arguments:
        print_err(overview())
        return 2
    if arguments[0] in ("-h", "--help"):
        print_out(overview())
        return 0
    return exit_code("gracecl", lambda: call_verb(*arguments))


def call_verb(verb: str, *arguments: str) -> int | None:
    if verb not in VERBS:
        raise UserError(f"there is no 'gracecl {verb}'{nearest(verb, VERBS)} (there are: {', '.join(VERBS)})")
    import tyro

    for place, argument in enumerate(arguments):
        check_known_here(verb, argument, arguments[place + 1 : place + 2])
    check_lists_given_once(verb, arguments)
    with usable_width():
        return tyro.cli(one_default_each(verb), prog=f"gracecl {verb}", args=[canonical_option(argument) for argument in arguments])


def check_known_here(verb: str, argument: str, next_ones: Sequence[str]) -> None:
    """Refuse an option of another library and name ours."""
    option, _, value = argument.partition("=")
    name = option.removeprefix("--").replace("-", "_") if option.startswith("--") else ""
    if name not in ELSEWHERE or name in inspect.signature(VERBS[verb]).parameters:
        return
    example, words = ELSEWHERE[name]
    given = value or next((word for word in next_ones if not word.startswith("-")), "") or example
    raise UserError(f"there is no {option}: {words.format(given.removeprefix('seq-').removeprefix('split-'))}")


def check_lists_given_once(verb: str, arguments: Sequence[str]) -> None:
    """Refuse a second `--plugin`, `--log`, …: the parser would drop the values of the first."""
    hints = typing.get_type_hints(VERBS[verb])
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for option in given:
        kind = hints.get(option.removeprefix("--").replace("-", "_"))
        if given.count(option) > 1 and typing.get_origin(kind) is tuple:
            raise UserError(
                f"{option} is given {given.count(option)} times; give it once, with all its values after it: {option} A B"
            )


@cache
def one_default_each(verb: str) -> Callable[..., int | None]:
    """Return a verb whose help states each default once, and no empty ones."""
    import tyro

    function = VERBS[verb]
    texts = re.findall(r"^ +(\w+): (.*(?:\n +(?! |\w+: ).*)*)", docstring(function).partition("Args:")[2], re.MULTILINE)
    told = {name for name, text in texts if "(default:" in text}
    hints = typing.get_type_hints(function, include_extras=True)
    empty = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default in ((), inspect.Parameter.empty) and typing.get_origin(hints[name]) is tuple
    }
    unmarked = {name: Annotated[hints[name], tyro.conf.arg(help_behavior_hint="")] for name in told | empty}
    function.__annotations__ |= unmarked
    return function


def canonical_option(argument: str) -> str:
    """Replace an alias by the option's own name: `--memory=50` for `--buffer-size=50`."""
    option, equals, value = argument.partition("=")
    name = ALIASES.get(option.removeprefix("--").replace("-", "_")) if option.startswith("--") else None
    return argument if name is None else f"--{name.replace('_', '-')}{equals}{value}"


def exit_code(program: str, work: Callable[[], int | None]) -> int:
    """Call `work` and return its exit code; print an error as one sentence after the program's name."""
    try:
        return work() or 0
    except KeyboardInterrupt as stop:
        print_err(f"{program}: {str(stop) or 'interrupted; what was saved is intact'}")
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except Exception as error:
        if not is_sentence(error):
            raise
        print_err(f"{program}: {sentence(error)}")
        return 2


def overview() -> str:
    """Return the text of `gracecl --help`, without loading the parser, which is slow."""
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
