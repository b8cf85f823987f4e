"""`gracecl run`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.lab.cli.output import conclude
from gracecl.lab.cli.values import Trackers, number_of, seeds_of, with_cluster, with_copies, with_plugins
from gracecl.lab.runs.cluster import Cluster
from gracecl.registry.options import RunOptions, takes
from gracecl.terminal import print_err


@takes(
    RunOptions,
    leave_out=("method", "seed"),
    open_ended=dict.fromkeys(("augment", "optimizer"), "the benchmark's for the method"),
)
@with_cluster
@with_copies("out")
@with_plugins
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
    log: Trackers = (),
    jobs: str = "auto",
    threads: int | None = None,
    nproc: int = 1,
    cluster: Cluster,
    **options: Any,
) -> int:
    """Train methods on a stream and report.

    Each METHOD is an expression such as er, "grace(er(n_recall=64))" or grace, which is grace(mose()), the paper's system. A run
    that was stopped continues where it was when the same command is given again.

    Args:
        methods: expressions of methods; 'gracecl list methods' names them
        seeds: such as 0-4 or 0,3,7; the same seed gives every method the same stream
        epochs: passes over each task before the next one, for methods of offline training (default: the stream's, one)
        defaults: what fills in options not given here, on benchmarks: grace-paper is the optimizer, batch and replay size of
            the GRACE paper for every method, own what each method's own paper used, ccl-dc the protocol of later online work, none
            the built-in values; or your FILE.toml
        out: folder for the runs, or a URL such as s3://bucket/runs (docs/clusters.md)
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register methods, nets, streams or data sets of your own
        log: also show the runs in TensorBoard (files in OUT/tensorboard), Weights & Biases or MLflow (OUT/mlflow)
        jobs: runs at once, each in a process of its own; auto is as many as there are cores, one on a GPU, and on a cluster as many
            as it has room for
        threads: of each run (default: the cores, shared out); with equal threads a run has equal bits, whatever --jobs
        nproc: processes that learn each run together, each on a part of every batch; runs then go one after the other
    """
    from gracecl.lab.runs import logs
    from gracecl.lab.runs.jobs import run_all
    from gracecl.lab.runs.result import configuration
    from gracecl.lab.runs.run import Work

    if not methods:
        raise UserError("name at least one method, for example: gracecl run grace ('gracecl list methods' prints all of them)")
    numbers = seeds_of(seeds)
    settled = [configuration(method, defaults, epochs, **options) for method in methods]
    for line in dict.fromkeys(taken for _, taken in settled if taken):
        print_err(line)
    works = [Work.new(replace(config, seed=seed), out, data, plugin) for config, _ in settled for seed in numbers]
    with logs.logging(works, out, log):
        outcomes = run_all(works, number_of(jobs), threads, cluster, nproc)
    return conclude(out, outcomes)
