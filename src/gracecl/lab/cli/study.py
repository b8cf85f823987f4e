"""`gracecl study`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gracecl.errors import UserError
from gracecl.lab.cli.output import print_damaged, print_unfinished
from gracecl.lab.cli.values import Trackers, number_of, seeds_of, with_cluster, with_copies, with_plugins
from gracecl.lab.runs.cluster import Cluster
from gracecl.registry.plugins import in_use
from gracecl.terminal import print_out

if TYPE_CHECKING:
    from gracecl.lab.runs.run import Work

NAMED = 8
"""most unfinished runs that --as-is names one by one"""


@with_cluster
@with_copies("out")
@with_plugins
def study(
    name: str,
    /,
    methods: tuple[str, ...] = (),
    seeds: str | None = None,
    scale: Literal["full", "small", "mini"] | None = None,
    quick: bool = False,
    out: Path | None = None,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
    log: Trackers = (),
    jobs: str = "auto",
    threads: int | None = None,
    dry_run: bool = False,
    as_is: bool = False,
    *,
    cluster: Cluster,
) -> int:
    """Make a table or a figure: the runs it needs, then NAME.md and NAME.json with the pictures beside them.

    NAME is one of the paper's: accuracy, forgetting, memory-efficiency, ablation, cub200, training-cost, batch-size, entropy; or
    of the project's own: mini, every method in a small setting on equal terms; readings: GRACE's against MOSE; regimes: where
    feedback helps; record: the best learner of the library's own; feedback: one head, four heads, feedback on four heads;
    protocol: the paper's protocol on CIFAR-100 at width 20; protocols: does the ranking of a dozen methods survive other streams,
    a speed and a budget; unmarked: streams without task marks; frontier: what a point of accuracy costs; equal-cost: replay methods
    at one arithmetic; feedback-on-best: GRACE's on the best learner; pretrained: closed forms and replay on features of a
    pretrained net. Or it is a file of yours, such as mine.toml (docs/studies.md). A study
    that was stopped continues where it was when the same command is given again; runs that another study has finished are taken
    from there.

    Args:
        name: the study
        methods: expressions of methods (default: those of the study)
        seeds: such as 0-4 or 0,3,7; the same seed gives every method the same stream (default: the study's)
        scale: full is the paper's protocol; small and mini have a narrow net and small images, mini few classes too (default: the
            first that the study has)
        quick: two or three methods on the digits, to see that it works; the figures mean little
        out: folder for the runs and the page (default: results/NAME-SCALE, results/NAME where the study has one scale, and
            runs/NAME with --quick)
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register methods or renderers of your own
        log: also show the runs in TensorBoard (files in OUT/tensorboard), Weights & Biases or MLflow (OUT/mlflow)
        jobs: runs at once, each in a process of its own; auto is as many as there are cores
        threads: of each run (default: the cores, shared out)
        dry_run: start nothing; say what is left to do and, from 20 steps of each configuration, what it would take here
        as_is: start nothing; make the page of the runs that are finished
    """
    from gracecl.lab import report
    from gracecl.lab.runs import logs
    from gracecl.lab.runs.jobs import run_all
    from gracecl.lab.runs.run import Work
    from gracecl.lab.studies import page
    from gracecl.lab.studies.results import Results
    from gracecl.lab.studies.reuse import reuse
    from gracecl.lab.studies.study import read

    with in_use(plugin) as code:  # a renderer changes no run, so its file is no part of what names one
        plugin = code.of_runs
    found = read(name, scale, quick)
    planned = found.plan(methods, None if seeds is None else seeds_of(seeds))
    folder = out or Path("runs" if quick else "results") / found.name
    works, taken = [Work.new(run.config, folder, data, plugin) for run in planned], dict[str, int]()
    if not quick:  # which is there to make runs
        works, taken = reuse(works, folder)
    print_out(f"Study {found.name}, {len(works)} runs. {found.scale_sentence}")
    for place, count in taken.items():
        print_out(f"{count} finished runs are taken from {place}")
    if dry_run:
        return print_plan(works, number_of(jobs) or os.cpu_count() or 1)
    with logs.logging(works, folder, () if as_is else log):
        outcomes = [] if as_is else run_all(works, number_of(jobs), threads, cluster)
    beside = {work.folder: run.paper for work, run in zip(works, planned, strict=True)}
    ended = [work.folder for work in works if (work.folder / report.SUMMARY).is_file() or report.line_for(work.folder)]
    nameless = [line for line in report.lines_in(folder / report.KEPT) if not line.folder]
    finished, damaged = report.read_runs([*ended, *nameless])
    if as_is and not finished:
        raise UserError(f"{folder} holds no finished run of this study; leave --as-is out to start them")
    if finished:
        folder.mkdir(parents=True, exist_ok=True)
        words = [*(["--methods", *methods] if methods else []), "--seeds", seeds or found.seeds, *(["--quick"] if quick else [])]
        words += ["--scale", found.scale] if found.name != Path(name).stem else []
        results = Results(found.name, found.scale, found.control, finished, [beside[run.path] for run in finished], folder)
        command = shlex.join(["gracecl", "study", name, *words])
        print_out(page.write(found, results, page.Made(command, len(works), taken)))
        missing = [work.config for work in works if not work.finished] if as_is else []
        for config in missing[:NAMED]:
            print_out(f"not finished: {config.title} on {config.stream}, memory {config.memory}")
        if len(missing) > NAMED:
            print_out(f"and {len(missing) - NAMED} more; --dry-run tells what each would take")
        print_out(f"{folder / found.name}.md and {folder / found.name}.json hold the table ({len(finished)} of {len(works)} runs)")
    return print_unfinished(outcomes) or print_damaged(damaged)


def print_plan(works: Sequence[Work], jobs: int) -> int:
    """Print what is left of a study and its estimated cost, a line per configuration as it is measured."""
    from gracecl.lab.studies import plan

    found = []
    for estimate in plan.estimates(works):
        found.append(estimate)
        print_out(plan.line(estimate))
    print_out(plan.total(found, jobs))
    return 0
