"""`gracecl theory`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.lab.cli.values import only_run
from gracecl.terminal import print_out, print_table


def theory(
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
    from gracecl.lab.theory import page
    from gracecl.lab.theory.measure import Settings, measure

    folder = only_run(folder)
    theory = measure(folder, Settings(draws, points, images, delta, head), data)
    page.write(theory)
    for table in page.tables(theory):
        print_table(table)
    print_out(page.reading(theory))
    print_out(f"{folder / 'theory.md'} explains the numbers; theory.json and theory.png are beside it")
