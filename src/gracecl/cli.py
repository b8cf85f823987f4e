"""The command `gracecl`. Heavy modules are imported by the verb that needs them, so that `--help` answers at once."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gracecl.errors import UserError, plain_cautions, sentence
from gracecl.registry import load_plugins, nearest
from gracecl.registry.options import ALIASES, RunOptions, takes
from gracecl.registry.spec import parse_numbers
from gracecl.runs import launch

if TYPE_CHECKING:
    from gracecl.report import Run
    from gracecl.report.beside_paper import Column
    from gracecl.runs.jobs import Ending
    from gracecl.runs.run import Work

INTERRUPTED = 130
MOST_IN_DETAIL = 8
"""methods whose inference rules are printed one by one"""


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


@takes(
    RunOptions,
    leave_out=("method", "seed"),
    open_ended=dict.fromkeys(("augment", "optimizer"), "the benchmark's for the method"),
)
def run(
    methods: tuple[str, ...],
    /,
    *,
    seeds: str = "0",
    epochs: int | None = None,
    defaults: str = "grace-paper",
    out: Path = Path("runs"),
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = (),
    jobs: str = "auto",
    threads: int | None = None,
    **options: Any,
) -> int:
    """Train methods on a stream and report.

    Each METHOD is an expression such as er, "grace(er(n_recall=64))" or grace, which is grace(mose()), the paper's system. A run
    that was stopped continues where it was when the same command is given again.

    Args:
        methods: expressions of methods; 'gracecl list methods' names them
        seeds: such as 0-4 or 0,3,7; the same seed gives every method the same stream
        epochs: passes over each task before the next one, for methods of offline training (default: the stream's, one)
        defaults: what fills in options not given here, on benchmarks: grace-paper is the frame of the paper's system for every
            method, own what each method's own paper used, ccl-dc later online work's, none the built-in values; or your FILE.toml
        out: folder for the runs
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register methods, nets, streams or data sets of your own
        log: also show the runs in TensorBoard (files in OUT/tensorboard), Weights & Biases or MLflow (OUT/mlflow)
        jobs: runs at once, each in a process of its own; auto is as many as there are cores, and one on a GPU
        threads: of each run (default: the cores, shared out); with equal threads a run has equal bits, whatever --jobs
    """
    plugins = load_plugins(plugin)
    from gracecl.runs import logs
    from gracecl.runs.jobs import run_all
    from gracecl.runs.result import configuration
    from gracecl.runs.run import Work

    if not methods:
        raise UserError("name at least one method, for example: gracecl run grace ('gracecl list methods' prints all of them)")
    numbers = dict.fromkeys(parse_numbers(seeds, "--seeds"))
    if not numbers:
        raise UserError(f"--seeds '{seeds}' names none; write for example 0-4 or 0,3,7")
    settled = [configuration(method, defaults, epochs, **options) for method in methods]
    for line in dict.fromkeys(taken for _, taken in settled if taken):
        print(line, file=sys.stderr)
    works = [Work.new(replace(config, seed=seed), out, data, plugins) for config, _ in settled for seed in numbers]
    with logs.logging(works, out, log):
        outcomes = run_all(works, number_of(jobs), threads)
    return conclude(out, outcomes)


def study(
    name: str,
    /,
    methods: tuple[str, ...] = (),
    seeds: str | None = None,
    quick: bool = False,
    out: Path | None = None,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
    jobs: str = "auto",
    threads: int | None = None,
    dry_run: bool = False,
    as_is: bool = False,
) -> int:
    """Make a table of the project's own: the runs it needs, then NAME.md and NAME.json beside them.

    NAME is mini, every method on twenty classes of CIFAR-100 in five tasks, with a small net and on equal terms; paper-setting, the
    paper's methods on a hundred classes in ten tasks; or, in the setting of mini, feedback: one head, four heads, feedback on four
    heads; readings: GRACE's against MOSE; regimes: where feedback helps; record: the best learner of the library's own. The first
    two set their accuracies beside the paper's. A study that was stopped continues where it was when the same command is given
    again.

    Args:
        name: the study
        methods: expressions of methods (default: those of the study)
        seeds: such as 0-4 or 0,3,7; the same seed gives every method the same stream (default: the study's, mostly 0-1)
        quick: two methods on the digits, to see that it works; the figures mean little
        out: folder for the runs and the table (default: results/NAME, and runs/NAME with --quick)
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register methods of your own
        jobs: runs at once, each in a process of its own; auto is as many as there are cores
        threads: of each run (default: the cores, shared out)
        dry_run: start nothing; say what is left to do and, from a few steps of each configuration, how long it would take here
        as_is: start nothing; make the table of the runs that are finished
    """
    plugins = load_plugins(plugin)
    from gracecl import report, studies
    from gracecl.runs.jobs import run_all
    from gracecl.runs.run import Work
    from gracecl.studies import table

    module = studies.find(name)
    seeds = getattr(module, "SEEDS", studies.SEEDS) if seeds is None else seeds
    numbers = list(dict.fromkeys(parse_numbers(seeds, "--seeds")))
    if not numbers:
        raise UserError(f"--seeds '{seeds}' names none; write for example 0-4 or 0,3,7")
    folder = out or Path("runs" if quick else "results") / name
    works = [Work.new(config, folder, data, plugins) for config in module.configs(methods, numbers, quick)]
    if dry_run:
        return tell_plan(works, number_of(jobs) or os.cpu_count() or 1)
    outcomes = [] if as_is else run_all(works, number_of(jobs), threads)
    finished, damaged = report.read_runs(work.folder for work in works if work.finished)
    if as_is and not finished:
        raise UserError(f"{folder} holds no finished run of this study; leave --as-is out to start them")
    if finished:
        words = [*(["--methods", *methods] if methods else []), "--seeds", seeds, *(["--quick"] if quick else [])]
        sections = module.sections(finished, folder, name) if hasattr(module, "sections") else []
        about, command = (module.__doc__ or "").strip(), shlex.join(["gracecl", "study", name, *words])
        print(table.write(folder, name, about, command, finished, sections))
        print(f"{folder / name}.md and {folder / name}.json hold the table")
    return verdict(outcomes) or tell(damaged)


def tell_plan(works: Sequence[Work], jobs: int) -> int:
    """Prints what is left of a study and how long it would take, a line per configuration as it is measured."""
    from gracecl.studies import plan

    found = []
    for estimate in plan.estimates(works):
        found.append(estimate)
        print(plan.line(estimate), flush=True)
    print(plan.total(found, jobs))
    return 0


def resume(folder: Path, /, data: Path | None = None, plugin: tuple[str, ...] = (), jobs: str = "auto") -> int:
    """Continue every unfinished run in a folder or below it.

    Args:
        folder: a run's folder, or one that holds runs
        data: folder of the data sets (default: where the run found them)
        plugin: modules or files that register what the run uses (default: those it was begun with)
        jobs: runs at once, each in a process of its own and with the threads it was begun with; auto is as many as fit the cores
    """
    plugins = load_plugins(plugin)
    from gracecl.runs.jobs import run_all
    from gracecl.runs.run import Work

    found = sorted(file.parent for file in folder.rglob("config.json"))
    if not found:
        raise UserError(f"{folder} holds no run (no config.json); give the folder that 'gracecl run' printed")
    works, damaged = [], []
    for run in found:
        try:
            works.append(Work.begun(run, data, plugins))
        except UserError as error:
            damaged.append(str(error))
    code = tell(damaged)
    return (conclude(folder, run_all(works, number_of(jobs))) or code) if works else code


def keep(folder: Path, to: Path, /, every: int = 50) -> None:
    """Copy what is worth keeping of the finished runs below a folder: configuration, results, and a thinned record; no weights.

    A study that finds such a copy in its folder uses it as if it had made the run itself.

    Args:
        folder: what was given as --out
        to: where the copies go, each in the same place below it
        every: steps between two that are kept of the record; evaluations and ends of tasks all are
    """
    from gracecl.report.keep import keep_runs

    kept = keep_runs(folder, to, every)
    print(f"{len(kept)} runs are kept in {to}")


def compare(
    names: tuple[str, ...],
    /,
    runs: Path = Path("runs"),
    metric: str = "acc",
    rule: str | None = None,
    out: Path | None = None,
) -> None:
    """Say whether methods differ, on the seeds they share: intervals, tests, effect sizes, seeds needed, and a sentence each.

    The first NAME is what the others are compared with. A name is a folder of runs, or a method among the runs below --runs; a
    single folder stands for all its methods. Where several settings have the same methods, they are also ranked over the settings.

    Args:
        names: folders, or expressions of methods
        runs: where methods are looked for
        metric: acc, aia, forgetting, forgetting_mose (the paper's AF), bwt, learning_acc, aaa, min_acc, wc_acc, ece, nll or seconds
        rule: compare what this inference rule predicts (default: each method's own)
        out: folder for compare.md, compare.json, compare.png and, over several settings, ranks.png
    """
    from rich.console import Console

    from gracecl.report import compare as comparing
    from gracecl.report.select import select

    comparing.check_metric(metric)
    selections = select(names, runs, rule)
    found = comparing.compare(comparing.against_first(selections), metric)
    over = comparing.over_settings([group for selection in selections for group in selection], metric)
    console = Console()
    for table in comparing.terminal_tables(found):
        console.print(table)
    several = len({line.setting for line in found}) > 1
    for line in found:
        print(line.sentence + (f" ({line.setting})" if several else ""))
    if over is not None:
        print(comparing.ranks_sentence(*over, metric))
    if out is not None:
        comparing.write(out, found, over)
        print(f"{out / 'compare.md'}, compare.json and compare.png hold it")


def write_report(
    sources: tuple[str, ...],
    /,
    formats: str = "html,md",
    metrics: str = "acc,aia,forgetting,forgetting_mose",
    paper: str = "auto",
    out: Path | None = None,
) -> int:
    """Report on runs: a table here, and a page, tables and figures as files.

    Args:
        sources: folders of runs (what was given as --out), or the name of a study
        formats: which files, such as html,md,csv,tex,pdf; or all. html is a page to open in a browser, tex a table for a paper
            (booktabs), pdf and svg are figures
        metrics: columns of the tables: acc, aia, forgetting, forgetting_mose (the paper's AF), bwt, learning_acc, aaa, min_acc,
            wc_acc, ece, nll
        paper: the numbers that the tables have beside ours: auto is the paper's column of the same data set and memory, 1000 that
            of this memory, none no numbers
        out: folder for the files (default: the folder of the runs)
    """
    from gracecl import report
    from gracecl.report.beside_paper import column_for
    from gracecl.report.compare import check_metric
    from gracecl.report.select import folder_of

    if not sources:
        raise UserError("name the runs to report on: folders that were given as --out, or a study")
    folders = [folder_of(source) for source in sources]
    if out is None and len(folders) > 1:
        raise UserError("a report on several folders needs a folder of its own; name it with --out")
    kinds = list(report.FORMATS) if formats == "all" else [kind.strip() for kind in formats.split(",")]
    if unknown := [kind for kind in kinds if kind not in report.FORMATS]:
        raise UserError(f"there is no format '{unknown[0]}' (there are: {', '.join(report.FORMATS)}, all)")
    columns = [metric.strip() for metric in metrics.split(",")]
    for metric in columns:
        check_metric(metric)
    runs, damaged = report.read_runs([place for folder in folders for place in report.find_folders(folder)])
    if not runs and not damaged:
        raise UserError(f"there is no run in {' or '.join(map(str, folders))} or below; give what was given as --out")
    if runs:
        show(out or folders[0], runs, kinds, columns, column_for(runs, paper))
    return tell(damaged)


def import_results(source: Path, /, out: Path = Path("runs/imported")) -> None:
    """Take over results that others made, to stand in the same tables: a JSON file, or a folder of them.

    Args:
        source: docs/reports.md shows what a result looks like
        out: folder for them
    """
    from gracecl.report.foreign import import_results

    places = import_results(source, out)
    print(f"{len(places)} results are in {out}; 'gracecl report runs {out} --out report' would set them beside others")


def export(source: str, file: Path, /, what: Literal["runs", "evaluations", "steps"] = "runs", rule: str | None = None) -> None:
    """Write runs as a table (.csv, .parquet), or a run's learner as a model (.safetensors, .pt2, .onnx), by the file's name.

    Args:
        source: folder of runs, or the name of a study; of a model, the run's folder
        file: what to write
        what: of a table: a row per run, per evaluation, rule and task, or per step, term and layer
        rule: inference rule whose metrics or predictions are meant (default: each method's own)
    """
    from gracecl.report.select import folder_of

    folder = folder_of(source)
    if file.suffix in (".csv", ".parquet"):
        from gracecl.report import find_runs
        from gracecl.report.frames import write_table

        print(f"{write_table(find_runs(folder), file, what, rule):,} rows are in {file}")
        return
    from gracecl.runs.export import MODELS, export_run

    if file.suffix not in MODELS:
        raise UserError(f"the name of {file} must end in .csv, .parquet or {', '.join(MODELS)}")
    print(export_run(only_run(folder), file, rule))


def list_names(
    kind: Literal["methods", "streams", "nets", "datasets", "controllers"],
    /,
    describe: bool = False,
    markdown: bool = False,
    plugin: tuple[str, ...] = (),
) -> None:
    """Print the names there are, a line each; of methods, what they need, keep and cost.

    Args:
        kind: what to list
        describe: of methods, a sentence each instead
        markdown: of methods, the table as the page docs/methods.md
        plugin: modules or files that register more
    """
    load_plugins(plugin)
    from gracecl import registry
    from gracecl.registry import catalogue

    if kind != "methods" and (describe or markdown):
        raise UserError(f"--describe and --markdown are for methods; 'gracecl list {kind}' describes each by itself")
    if kind == "methods" and not describe:
        print(catalogue.markdown() if markdown else catalogue.table(), end="" if markdown else "\n")
        return

    found = {
        "methods": registry.methods,
        "streams": registry.streams,
        "nets": registry.nets,
        "datasets": registry.datasets,
        "controllers": registry.controllers,
    }[kind].summaries()
    if kind == "streams":
        sets = registry.datasets.summaries()
        found = {f"{family}-{name}": f"{what} — {text}" for family, text in found.items() for name, what in sets.items()}
    widest = max(map(len, found))
    for name, text in found.items():
        print(f"{name.replace('_', '-') if kind == 'streams' else name:<{widest}}  {text}")


def manage_data(
    action: Literal["get", "check"],
    name: str,
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


def only_run(folder: Path) -> Path:
    """The run that a folder is, or the only one below it."""
    found = sorted(file.parent for file in folder.rglob("config.json"))
    if len(found) > 1:
        raise UserError(f"{folder} holds {len(found)} runs; name one of them, such as {found[0]}")
    return found[0] if found else folder


def number_of(jobs: str) -> int | None:
    """What --jobs asks for; None leaves the choice to us."""
    if jobs == "auto":
        return None
    if not jobs.isdecimal() or int(jobs) < 1:
        raise UserError(f"--jobs must be auto or a whole number of at least 1, not '{jobs}'")
    return int(jobs)


def conclude(out: Path, outcomes: Sequence[Ending]) -> int:
    """Shows what was finished, names what was not, and returns the exit code."""
    from gracecl import report

    runs, damaged = report.read_runs(outcome.work.folder for outcome in outcomes if outcome.end == "finished")
    if runs:
        show(out, runs)
    return verdict(outcomes) or tell(damaged)


def tell(damaged: Sequence[str]) -> int:
    """Names what cannot be read, a sentence each, and returns the exit code."""
    for text in damaged:
        print(f"gracecl: {text}", file=sys.stderr)
    return 2 if damaged else 0


def verdict(outcomes: Sequence[Ending]) -> int:
    """The exit code, after the runs that did not finish were named."""
    others = [outcome for outcome in outcomes if outcome.end != "finished"]
    if not others:
        return 0
    names = "; ".join(outcome.work.config.title for outcome in others)
    print(f"gracecl: {len(others)} of {len(outcomes)} runs did not finish, for the reasons above: {names}", file=sys.stderr)
    return 1 if any(outcome.end == "crashed" for outcome in others) else 2


def show_theory(
    folder: Path,
    /,
    data: Path | None = None,
    draws: int = 20,
    points: int = 11,
    images: int = 500,
    delta: float = 0.05,
    head: Literal["last", "mean"] = "last",
) -> None:
    """Set the paper's two bounds beside what was measured in a run: tables here, theory.md and theory.png there.

    For a finished run that kept snapshots (gracecl run --snapshots): the PAC-Bayes bound of each task and the forgetting bound of
    each pair of tasks, looser and tighter levels, and where an assumption fails.

    Args:
        folder: the run's folder, as 'gracecl run' printed it
        data: folder of the data sets (default: where the run found them)
        draws: weights drawn from each posterior
        points: places on each segment between two snapshots
        images: of each task's training and test set, at most
        delta: the PAC-Bayes bound may fail with this probability
        head: whose softmax predicts: the last tap's, or the mean over all taps
    """
    from rich.console import Console

    from gracecl.theory import page
    from gracecl.theory.measure import Settings, measure

    folder = only_run(folder)
    theory = measure(folder, Settings(draws, points, images, delta, head), data)
    page.write(theory)
    console = Console()
    for table in page.tables(theory):
        console.print(table)
    print(page.reading(theory))
    print(f"{folder / 'theory.md'} explains the numbers; theory.json and theory.png are beside it")


def show(
    out: Path,
    runs: Sequence[Run],
    formats: Sequence[str] = ("html", "md"),
    metrics: Sequence[str] | None = None,
    column: Column | None = None,
) -> None:
    """The table of some runs on standard output, their report as files."""
    from rich.console import Console

    from gracecl import report
    from gracecl.report.groups import group_runs
    from gracecl.report.tables import COMPARED, comparison_table, rules_table, run_table

    metrics = metrics or COMPARED
    console = Console()
    if len(runs) == 1:
        console.print(run_table(runs[0]))
    groups = group_runs(runs, unfinished_too=True)
    for group in groups if len(groups) <= MOST_IN_DETAIL else []:
        console.print(rules_table(group.runs))
    console.print(comparison_table(runs, metrics, column))
    written = report.write_comparison(out, runs, formats, metrics, column)
    for run in runs:
        print(run.path)
    tables = [str(path) for path in written if path.parent == out and path.suffix != ".html"]
    if tables:
        print(f"{', '.join(tables)} compare them; each folder has matrix.png, layers.png and losses.png")
    if drawn := [path for path in written if path.parent != out]:
        print(f"{drawn[0].parent} has {len(drawn)} figures")
    if "html" in formats:
        print(f"Open {out / 'report.html'} in a browser to look at them")


VERBS: dict[str, Callable[..., int | None]] = {
    "run": run,
    "resume": resume,
    "study": study,
    "report": write_report,
    "compare": compare,
    "keep": keep,
    "import": import_results,
    "export": export,
    "list": list_names,
    "data": manage_data,
    "theory": show_theory,
}
