"""`gracecl tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from gracecl.errors import UserError
from gracecl.lab.cli.values import number_of, seeds_of, with_cluster, with_copies, with_plugins
from gracecl.lab.runs.cluster import Cluster
from gracecl.registry.options import RunOptions, takes
from gracecl.terminal import print_err, print_out


@takes(
    RunOptions,
    leave_out=("method", "seed", "snapshots"),
    open_ended=dict.fromkeys(("augment", "optimizer"), "the benchmark's for the method"),
)
@with_cluster
@with_copies("out")
@with_plugins
def tune(
    method: str,
    /,
    *,
    space: tuple[str, ...] = ("lr=1e-4..1e-1:log",),
    trials: int = 30,
    tune_on: str | None = None,
    tasks: int = 3,
    validation: float = 0.2,
    seeds: str = "0-2",
    metric: str = "acc",
    sampler: Literal["tpe", "random", "grid"] = "tpe",
    epochs: int | None = None,
    defaults: str = "grace-paper",
    out: Path | None = None,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
    jobs: str = "auto",
    threads: int | None = None,
    cluster: Cluster,
    **options: Any,
) -> None:
    """Search for a method's options on the first tasks' training images, and write them as a file for 'gracecl run --defaults'.

    No image of a later task and no test image is used: a share of the first tasks' training images is held out and evaluated on. A
    search that was stopped continues where it was when the same command is given again; with more --trials it goes on.

    Args:
        method: expression of the method, such as er or "grace(er() + ewc())"; options that it gives are not searched for
        space: what is searched for: options of the method, of the optimizer, or augment and optimizer, such as
            lr=1e-4..1e-1:log n_recall=16,32,64; where two have an option of that name, ewc.strength=1..100
        trials: sets of values that are tried
        tune_on: another stream to search on, whole and with its test images; the options are then for --stream, and the two may
            share no image (default: the first tasks of --stream)
        tasks: first tasks of the stream that are used, without --tune-on
        validation: share of their training images that is evaluated on and not trained on
        seeds: such as 0-2; a trial's score is the mean over them
        metric: acc, aia, forgetting, forgetting_mose (the paper's AF), bwt, learning_acc, aaa, min_acc, wc_acc, ece or nll
        sampler: tpe learns from earlier trials, random does not, grid tries every combination of listed values
        epochs: passes over each task before the next one (default: the stream's, one)
        defaults: what options have that are neither given nor searched for, as of gracecl run
        out: folder for the trials and the file defaults.toml (default: runs/tune/METHOD)
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register methods, nets, streams or data sets of your own
        jobs: runs of a trial at once, each in a process of its own; auto is as many as there are cores, and one on a GPU
        threads: of each run (default: the cores, shared out)
    """
    from gracecl.files import as_name
    from gracecl.lab.report.compare import check_metric
    from gracecl.lab.runs.result import configuration
    from gracecl.lab.tuning import search
    from gracecl.lab.tuning import space as spaces
    from gracecl.streams import from_anywhere

    if trials < 1:
        raise UserError(f"--trials must be at least 1, not {trials}")
    check_metric(metric)
    tune_on = None if tune_on is None else from_anywhere(tune_on)
    config, taken = configuration(method, defaults, epochs, **options)
    if taken:
        print_err(taken)
    config = config.canonical()
    found = spaces.parse(space, config, method)
    config, numbers = spaces.without(config, found), tuple(seeds_of(seeds))
    wanted = search.Search(config, found, tasks, validation, numbers, metric, sampler, data, plugin, tune_on)
    out = out or Path("runs/tune") / as_name(config.method)
    best = search.tune(wanted, out, trials, number_of(jobs), threads, print_err, cluster)
    print_out(f"best: {spaces.shown(best.values)}: {wanted.text(best.score)} in trial {best.place}")
    print_out(f"{out / search.DEFAULTS} holds it; to use it: {wanted.use(method, out / search.DEFAULTS)}")
