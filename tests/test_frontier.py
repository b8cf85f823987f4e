"""What a point of accuracy costs: FLOPs per step from what runs recorded, and the methods that none beats for less."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gracecl.lab.report import Run
from gracecl.lab.studies.frontier import flops_per_image, frontier, points_of, sections
from gracecl.lab.studies.results import Results

STREAM = "split-digits(tasks=2, size=8)"


def run(method: str, acc: float, seed: int = 0, layers: int = 1, stream: str = STREAM, **timing: Any) -> Run:
    """A run of one task and ten steps."""
    config = {"method": method, "seed": seed, "stream": stream, "net": "mlp", "layers": layers, "rule": "linear_last"}
    config |= {"forward_flops": timing.pop("per_image")} if "per_image" in timing else {}
    evaluation = {"kind": "eval", "step": 9, "task": 0, "task_end": True, "accuracy": {"linear_last": [acc]}}
    return Run(Path(), config, [], [evaluation], [], {"steps": 10, "fit_images": 0} | timing, finished=True)


def test_the_frontier_is_what_none_beats_for_less() -> None:
    points = [(1.0, 10.0), (2.0, 9.0), (2.0, 12.0), (3.0, 12.0), (4.0, 13.0), (4.0, 13.0)]
    assert frontier(points) == {0, 2, 4}
    assert frontier(points[::-1]) == {5, 3, 0}
    for place, (cost, acc) in enumerate(points):
        beaten = any(
            (other <= cost and higher > acc) or (other < cost and higher >= acc)
            for at, (other, higher) in enumerate(points)
            if at != place
        )
        assert (place in {0, 2, 4, 5}) == (not beaten)


def test_flops_of_runs_that_counted_images_alone() -> None:
    runs = [
        run("mose()", 30.0, layers=4, forward=100, backward=100, flops=10 * 300.0, per_image=10.0),
        run("old()", 20.0, layers=4, forward=50, backward=20, fit_images=10),  # another run of four heads says what an image takes
        run("unknown()", 25.0, forward=10, backward=10),
        run("er()", 25.0, layers=1, stream=STREAM.replace("8", "16"), forward=10, backward=10, per_image=99.0),
    ]
    per_image = flops_per_image(runs)
    points = {point.group.method: point for point in points_of(runs[:3], "mose()", per_image)}
    assert list(points) == ["old()", "mose()"], "no run of one head on 8 pixels told the FLOPs of an image"
    assert (points["mose()"].flops, points["mose()"].share) == (300.0, 1.0)
    assert points["old()"].flops == pytest.approx((50 + 2 * 20 + 3 * 10) * 10.0 / 10)
    assert points["old()"].share == pytest.approx(120 / 300)


def test_the_section_has_a_table_and_pictures(tmp_path: Path) -> None:
    runs = [run("mose()", 30.0 + seed, seed, forward=100, backward=100, flops=3000.0, bytes=2e6) for seed in range(2)] + [
        run("cheap()", 35.0, forward=50, backward=50, flops=1500.0, bytes=1e6),
        run("dear()", 20.0, flops=6000.0, bytes=4e6),
    ]
    [section] = sections(Results("frontier", "mini", "mose()", runs, [None] * len(runs), tmp_path))
    assert "| `cheap()` | 35.0 | 0.50 | 0 | 1.00 | yes | 1 |" in section.text
    assert "| `mose()` | 30.5 ± 0.7 | 1.00 | 0 | 2.00 |  | 2 |" in section.text
    assert [line["frontier"] for line in section.data[STREAM + ", mlp"]] == [True, False, False]
    for cost in ("flops", "bytes"):
        assert f"frontier-{cost}.png" in section.text
        assert (tmp_path / f"frontier-{cost}.png").stat().st_size > 5000


def test_no_section_where_nothing_can_be_set_against_anything(tmp_path: Path) -> None:
    runs = [run("mose()", 30.0, flops=3000.0), run("unknown()", 25.0, forward=10, backward=10)]
    assert sections(Results("frontier", "mini", "mose()", runs, [None] * len(runs), tmp_path)) == []
    assert math.isnan(points_of([run("er()", 1.0, flops=10.0)], "mose()", {})[0].share)
