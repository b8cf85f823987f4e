"""What a Ray cluster costs: two nodes of one core against two jobs here, the command's part of each run, and a page of all runs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from benchmarks.measure import Row, in_turns, row
from benchmarks.nodes import Nodes, nodes
from benchmarks.startup import COMMAND, python
from gracecl.lab.report.kept import KEPT, line_of, lines_in
from gracecl.lab.runs.cluster import Cluster
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.run import RunConfig, Work
from gracecl.lab.runs.watch import Board
from gracecl.registry.options import run_name

SHORT = RunConfig(method="er", stream="split-digits(tasks=2)", net="mlp(width=4)", memory=20, device="cpu", augment="none", steps=2)
LONG = RunConfig(method="er", stream="split-digits(size=16)", net="resnet18(width=4)", memory=200, device="cpu")
SIMULATED = 8
"""nodes of one core each, processes of this machine"""
RUNS = 2_000
PER_BLOCK = 100
KEPT_RUNS, KEPT_METHODS = 5_000, 10


def rows(quick: bool) -> Iterator[Row]:
    yield from many_runs_on_a_page(quick)
    with nodes("first", "second") as cluster:
        yield two_nodes(cluster, quick)
    with nodes(*(f"node {number}" for number in range(2 if quick else SIMULATED))) as cluster:
        yield from part_of_the_command(cluster, quick)


def two_nodes(cluster: Nodes, quick: bool) -> Row:
    """Runs per hour on two nodes of one core against two jobs here; both start their processes anew each time."""
    runs = 2 if quick else 8
    config = SHORT if quick else LONG

    def execute(where: Cluster) -> Callable[[], None]:
        def work() -> None:
            with tempfile.TemporaryDirectory() as out:
                works = [Work.new(replace(config, seed=seed), Path(out)) for seed in range(runs)]
                assert all(outcome.status == "finished" for outcome in run_all(works, 2, 1, where))

        return work

    on_ray, here = in_turns(execute(Cluster("ray", cluster.address)), execute(Cluster()), repeats=1 if quick else 3)
    return row(
        "two nodes of one core",
        f"runs per hour of {runs} runs of {config.method}, {config.net}, on a Ray cluster of two nodes of one core on this machine",
        "per hour with --jobs 2",
        here / on_ray,
        aim=0.95,
        sense="at least",
        seconds=float(np.median(on_ray)),
        seconds_against=float(np.median(here)),
    )


def part_of_the_command(cluster: Nodes, quick: bool) -> Iterator[Row]:
    """Processor time and memory of the command while runs of two steps go through a cluster."""
    runs, block = (20, 5) if quick else (RUNS, PER_BLOCK)
    with tempfile.TemporaryDirectory() as out:
        executor = Cluster("ray", cluster.address).executor(None, 1, Board(runs, 0))
        for seed in range(runs):
            executor.submit(Work.new(replace(SHORT, seed=seed), Path(out)))
        began, marks = time.monotonic(), [(time.process_time(), resident())]
        for number, outcome in enumerate(executor.outcomes(), start=1):
            assert outcome.status == "finished", outcome
            if number % block == 0:
                marks.append((time.process_time(), resident()))
        wall = (time.monotonic() - began) / runs
    busy, held = np.array(marks).T
    simulated = f"{len(cluster.nodes)} simulated nodes of one core, {runs} runs of {SHORT.steps} steps"
    yield row(
        "the command's part of a run",
        f"seconds of a processor that the command takes per run (not a ratio); {simulated}",
        "nothing",
        np.diff(busy) / block,
        aim=0.05,
        wall_seconds_per_run=wall,
    )
    yield row(
        "memory of the command",
        f"bytes in memory at the end; {simulated}",
        f"after {block} runs",
        held[-1:] / held[1],
        aim=1.05,
        bytes=float(held[-1]),
        bytes_against=float(held[1]),
    )


def resident() -> int:
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return 1024 * int(fields[0])


def many_runs_on_a_page(quick: bool) -> Iterator[Row]:
    """Recorded rows of real runs under many seeds."""
    runs = 50 if quick else KEPT_RUNS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keep_many(folder, runs)
        seconds = in_turns(lambda: python(COMMAND, "report", str(folder), "--out", str(folder)), lambda: None, repeats=1)[0]
        yield row(f"report of {runs:,} runs", "seconds of gracecl report (not a ratio)", "nothing", seconds, aim=None)
        if opened := opening(folder / "report.html", 1 if quick else 7):
            size = (folder / "report.html").stat().st_size
            yield row(
                f"page of {runs:,} runs",
                "seconds until a browser has drawn the page (not a ratio)",
                "nothing",
                np.array(opened),
                aim=3.0,
                bytes=size,
            )


def keep_many(folder: Path, runs: int) -> None:
    """Write one finished run of each of some methods under many seeds into `runs.jsonl`."""
    real = folder / "real"
    config = replace(SHORT, steps=60, eval_every=10)
    methods = KEPT_METHODS if runs >= KEPT_RUNS else 2
    works = [Work.new(replace(config, method=f"er(n_recall={10 + number})"), real) for number in range(methods)]
    assert all(outcome.status == "finished" for outcome in run_all(works, 1, 1))
    python(COMMAND, "keep", str(real), str(folder / "kept"))
    lines = []
    for kept in lines_in(folder / "kept" / KEPT):
        parts = kept.read()
        for seed in range(runs // methods):
            lines.append(under_seed(kept.folder, parts, seed))
    shutil.rmtree(folder / "kept")
    shutil.rmtree(real)
    (folder / KEPT).write_bytes(b"".join(sorted(lines)))


def under_seed(folder: str, parts: dict[str, Any], seed: int) -> bytes:
    """Encode a run as if another seed had led to the same numbers."""
    config = parts["config"] | {"seed": seed}
    place = PurePosixPath(folder).parents[1] / run_name(config)
    changed = {"config": config, "summary": parts["summary"] | {"seed": seed}, "timing": parts["timing"]}
    for name in ("summary", "timing"):
        if "run" in changed[name]:
            changed[name] = changed[name] | {"run": run_name(config)}
    return line_of(place, parts | changed)


def opening(page: Path, repeats: int) -> list[float]:
    """Return the seconds until chromium has drawn a page; nothing where there is no browser."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    if chromium is None:
        return []
    seconds = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(repeats):
            shown = browser.new_page()
            began = time.monotonic()
            shown.goto(page.as_uri())
            shown.wait_for_selector("svg")
            shown.evaluate("() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            seconds.append(time.monotonic() - began)
            shown.close()
        browser.close()
    return seconds
