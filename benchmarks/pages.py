"""What a report of thousands of runs takes: the command, and its page in a browser."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from benchmarks.cluster import SHORT
from benchmarks.measure import Row, in_turns, row
from benchmarks.startup import COMMAND, python
from gracecl.lab.report.kept import KEPT, line_of, lines_in
from gracecl.lab.runs.jobs import run_all
from gracecl.lab.runs.run import Work
from gracecl.registry.options import run_name

RUNS, METHODS = 5_000, 10


def rows(quick: bool) -> Iterator[Row]:
    """Recorded rows of real runs under many seeds."""
    runs = 50 if quick else RUNS
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
    methods = METHODS if runs >= RUNS else 2
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
