"""The command `python -m benchmarks`, from the folder that holds this one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks
from gracecl.errors import UserError
from gracecl.lab.cli import exit_code
from gracecl.lab.runs import launch


def main() -> None:
    launch.keep_freed_memory()
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code, as `gracecl.lab.cli.call` does."""
    import tyro

    return exit_code("benchmarks", lambda: tyro.cli(measure, prog="python -m benchmarks", args=arguments))


def measure(
    parts: tuple[str, ...] = (),
    /,
    quick: bool = False,
    json: Path | None = None,
    threads: int | None = None,
    mose: Path | None = None,
) -> None:
    """Measure what gracecl costs, as ratios: ours against a yardstick, in turns, median and quartiles.

    PART is one of steps, passes, memory, runs, startup, roofline, methods, avalanche (these by default, the last if it is
    installed), inference, shards, processes, closed, serving, tabular, choices, authors, cluster, pages, profile, cost, gpus,
    shrinkage.
    On a busy machine the spread widens; the whole takes about 45 minutes on two cores.

    Args:
        parts: what to measure
        quick: tiny nets and few repeats, to see that it works; the figures mean little
        json: file for the rows; profile, cost, gpus and shrinkage print a page and have none
        threads: of this process (default: all cores)
        mose: for the part authors, your checkout of the MOSE authors' program, https://github.com/AnAppleCore/MOSE
    """
    names = benchmarks.chosen(parts, mose)
    if json is not None and not json.parent.is_dir():
        raise UserError(f"there is no folder {json.parent} for {json.name}; choose another --json")
    if threads is not None:
        if threads < 1:
            raise UserError(f"--threads must be at least 1, not {threads}")
        import torch

        torch.set_num_threads(threads)
    measured = []
    for part in names:
        if part in benchmarks.TEXTS:
            print(benchmarks.text(part, quick), flush=True)
            continue
        print(f"{part}: {benchmarks.PARTS[part]}", flush=True)
        for row in benchmarks.rows(part, quick, mose):
            measured.append(row)
            print(f"  {row}", flush=True)
            if json is not None:
                benchmarks.write(json, measured)


if __name__ == "__main__":
    main()
