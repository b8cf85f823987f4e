"""`gracecl study`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gracecl.cli.ending import tell, verdict
from gracecl.cli.values import Views, number_of, seeds_of
from gracecl.errors import UserError
from gracecl.registry import load_plugins

if TYPE_CHECKING:
    from gracecl.runs.run import Work


def study(
    name: str,
    /,
    methods: tuple[str, ...] = (),
    seeds: str | None = None,
    quick: bool = False,
    out: Path | None = None,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
    log: Views = (),
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
        log: also show the runs in TensorBoard (files in OUT/tensorboard), Weights & Biases or MLflow (OUT/mlflow)
        jobs: runs at once, each in a process of its own; auto is as many as there are cores
        threads: of each run (default: the cores, shared out)
        dry_run: start nothing; say what is left to do and, from a few steps of each configuration, how long it would take here
        as_is: start nothing; make the table of the runs that are finished
    """
    plugins = load_plugins(plugin)
    from gracecl import report, studies
    from gracecl.runs import logs
    from gracecl.runs.jobs import run_all
    from gracecl.runs.run import Work
    from gracecl.studies import table

    module = studies.find(name)
    seeds = getattr(module, "SEEDS", studies.SEEDS) if seeds is None else seeds
    numbers = seeds_of(seeds)
    folder = out or Path("runs" if quick else "results") / name
    works = [Work.new(config, folder, data, plugins) for config in module.configs(methods, numbers, quick)]
    if dry_run:
        return tell_plan(works, number_of(jobs) or os.cpu_count() or 1)
    with logs.logging(works, folder, () if as_is else log):
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
