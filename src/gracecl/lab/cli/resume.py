"""`gracecl resume`."""

from __future__ import annotations

from pathlib import Path

from gracecl.errors import UserError
from gracecl.lab.cli.output import conclude, print_damaged
from gracecl.lab.cli.values import Trackers, number_of, with_cluster, with_copies
from gracecl.lab.runs.cluster import Cluster
from gracecl.registry.plugins import found as found_plugins


@with_cluster
@with_copies("folder")
def resume(
    folder: Path,
    /,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
    log: Trackers = (),
    jobs: str = "auto",
    nproc: int = 1,
    *,
    cluster: Cluster,
) -> int:
    """Continue every unfinished run in a folder or below it.

    Args:
        folder: a run's folder, or one that holds runs; a URL such as s3://bucket/runs too
        data: folder of the data sets (default: where the run found them)
        plugin: modules or files that register what the run uses (default: those it was begun with)
        log: also show the runs in TensorBoard, Weights & Biases or MLflow; one that was shown there goes on in its place
        jobs: runs at once, each in a process of its own and with the threads it was begun with; auto is as many as fit the cores
        nproc: processes that learn each run together, each on a part of every batch; runs then go one after the other
    """
    plugins = found_plugins(plugin)
    from gracecl.lab import report
    from gracecl.lab.runs import logs
    from gracecl.lab.runs.jobs import run_all
    from gracecl.lab.runs.run import Work

    found = report.find_begun(folder)
    if not found:
        raise UserError(report.without_config(folder))
    works, damaged = [], []
    for run in found:
        try:
            works.append(Work.begun(run, data, plugins))
        except UserError as error:
            damaged.append(str(error))
    code = print_damaged(damaged)
    if not works:
        return code
    with logs.logging(works, folder, log):
        outcomes = run_all(works, number_of(jobs), None, cluster, nproc)
    return conclude(folder, outcomes) or code
