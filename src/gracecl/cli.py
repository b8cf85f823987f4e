"""The command `gracecl`. Heavy modules are imported by the verb that needs them, so that `--help` answers at once."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from gracecl.errors import UserError
from gracecl.spec import parse_numbers

INTERRUPTED = 130


def main() -> None:
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, 2 for a mistake the user can mend, 130 when interrupted."""
    verbs: dict[str, Callable[..., None]] = {
        "run": run,
        "resume": resume,
        "report": write_report,
        "list": list_names,
        "data": manage_data,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            verbs,
            args=list(arguments),
            prog="gracecl",
            description="Online continual learning with layer-wise feedback.",
        )
    except UserError as error:
        print(f"gracecl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"gracecl: {stop or 'interrupted; what was saved is intact'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(f"gracecl: {error}; check that the folder can be written and its disk is not full", file=sys.stderr)
        return 2
    return 0


def run(
    methods: Positional[tuple[str, ...]],
    /,
    stream: str = "split-cifar100",
    memory: int = 1000,
    net: str = "resnet18(width=64)",
    seeds: str = "0",
    steps: int | None = None,
    taps: int | None = None,
    augment: str = "tau",
    optimiser: str = "adam(lr=0.001, weight_decay=0.0001)",
    device: str = "auto",
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    compile: bool = False,
    eval_every: int = 0,
    checkpoint_every: int = 500,
    out: Path = Path("runs"),
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
) -> None:
    """Train methods on a stream and report.

    Each METHOD is an expression such as er, "grace(er(n_recall=64))" or grace, which is grace(mose()), the paper's system. A run
    that was stopped continues where it was when the same command is given again.

    Args:
        methods: expressions of methods; 'gracecl list methods' names them
        stream: such as split-cifar100 or "split-cifar100(tasks=5, classes='0-19')"
        memory: images that may be kept
        net: such as "resnet18(width=20)"
        seeds: such as 0-4 or 0,3,7; the same seed gives every method the same stream
        steps: stop the stream after so many batches
        taps: tapped layers, counted from the last; by default 4 for methods that work on layers, else 1
        augment: none, tau, simclr, partial or full
        optimiser: such as "sgd(lr=0.1)"
        device: cpu, cuda, cuda:1, or auto
        precision: of forward and losses
        compile: let torch.compile fuse the backbone
        eval_every: evaluate every so many steps too, not only where tasks end
        checkpoint_every: save every so many steps (and every two minutes)
        out: folder for the runs
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register methods, nets, streams or data sets of your own
    """
    load_plugins(plugin)
    from gracecl import run as running
    from gracecl.watch import LiveWatch

    if not methods:
        raise UserError("name at least one method, for example: gracecl run grace ('gracecl list methods' prints all of them)")
    numbers = dict.fromkeys(parse_numbers(seeds, "--seeds"))
    if not numbers:
        raise UserError(f"--seeds '{seeds}' names none; write for example 0-4 or 0,3,7")
    configs = [
        running.RunConfig(
            method=method,
            stream=stream,
            memory=memory,
            net=net,
            seed=seed,
            steps=steps,
            taps=taps,
            augment=augment,
            optimiser=optimiser,
            device=device,
            precision=precision,
            compile=compile,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
        ).canonical()
        for method in methods
        for seed in numbers
    ]
    show(out, [running.run(config, out, data, LiveWatch()) for config in configs])


def resume(folder: Positional[Path], /, data: Path | None = None, plugin: tuple[str, ...] = ()) -> None:
    """Continue every unfinished run in a folder or below it.

    Args:
        folder: a run's folder, or one that holds runs
        data: folder of the data sets (default: where the run found them)
        plugin: modules or files that register what the run uses
    """
    load_plugins(plugin)
    from gracecl import run as running
    from gracecl.watch import LiveWatch

    found = sorted(file.parent for file in folder.rglob("config.json"))
    if not found:
        raise UserError(f"{folder} holds no run (no config.json); give the folder that 'gracecl run' printed")
    show(folder, [running.resume(run, data, LiveWatch()) for run in found])


def write_report(folder: Positional[Path], /) -> None:
    """Compare the runs below a folder: a table here, report.md and comparison.png there.

    Args:
        folder: what was given as --out
    """
    from gracecl import report

    runs = report.find_runs(folder)
    if not runs:
        raise UserError(f"there is no run in {folder} or below it; give what was given as --out")
    show(folder, [run.path for run in runs])


def list_names(kind: Positional[Literal["methods", "streams", "nets", "datasets"]], /, plugin: tuple[str, ...] = ()) -> None:
    """Print the names there are, a line each.

    Args:
        kind: what to list
        plugin: modules or files that register more
    """
    load_plugins(plugin)
    from gracecl import registry

    found = {
        "methods": registry.methods,
        "streams": registry.streams,
        "nets": registry.nets,
        "datasets": registry.datasets,
    }[kind].summaries()
    if kind == "streams":
        sets = registry.datasets.summaries()
        found = {f"{family}-{name}": f"{what} — {text}" for family, text in found.items() for name, what in sets.items()}
    widest = max(map(len, found))
    for name, text in found.items():
        print(f"{name.replace('_', '-') if kind == 'streams' else name:<{widest}}  {text}")


def manage_data(
    action: Positional[Literal["get", "check"]],
    name: Positional[str],
    /,
    data: Path | None = None,
    url: str | None = None,
) -> None:
    """Download a data set's official archive, or verify what is there by its content.

    Args:
        action: get downloads, checks and unpacks; check says what is missing
        name: 'gracecl list datasets' prints them
        data: folder of the data sets (default: $GRACECL_DATA)
        url: a mirror of the official file
    """
    from gracecl import data as datasets

    if action == "get":
        print(datasets.get(name, data, url=url))
    elif problems := datasets.check(name, data):
        raise UserError(f"{name} is not complete: " + "; ".join(problems))
    else:
        print(f"{name}: complete")


def show(out: Path, folders: Sequence[Path]) -> None:
    """The table of some runs on standard output, their comparison as files."""
    from rich.console import Console

    from gracecl import report
    from gracecl.report.groups import group_runs
    from gracecl.report.tables import comparison_table, rules_table, run_table

    runs = [report.read_run(folder) for folder in folders]
    console = Console()
    if len(runs) == 1:
        console.print(run_table(runs[0]))
    for group in group_runs(runs, unfinished_too=True):
        console.print(rules_table(group.runs))
    console.print(comparison_table(runs))
    report.write_comparison(out, runs)
    for folder in folders:
        print(folder)
    print(f"{out / 'report.md'} and {out / 'comparison.png'} compare them; each folder has matrix.png, layers.png and losses.png")


def load_plugins(names: Sequence[str]) -> None:
    """Imports modules by name or by file, so that what they register is known."""
    for name in names:
        file = Path(name)
        try:
            if file.suffix == ".py":
                spec = importlib.util.spec_from_file_location(f"gracecl_plugin_{file.stem}", file)
                if spec is None or spec.loader is None:
                    raise ImportError("not a Python file")
                # Dataclasses look for the names in their annotations in sys.modules.
                module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            else:
                importlib.import_module(name)
        except (ImportError, OSError, SyntaxError, ValueError, TypeError) as error:
            raise UserError(f"cannot import the plugin '{name}' ({error}); give a module name or a .py file") from None
