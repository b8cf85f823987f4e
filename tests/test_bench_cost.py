"""The cost model of the benchmark: that it counts right, recovers what it should, and says how far it can be trusted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cost
from benchmarks.cost import CostReport, tables
from benchmarks.paper_runs import CIFAR100, TABLES, PaperRun, Work, minutes, work
from benchmarks.step_model import LANES, CostModel, Point, blocks, fit, leave_one_out, load
from gracecl import nets
from gracecl.inputs import Images

KNOWN = CostModel(overhead=0.02, per_flop=1.3e-11, per_byte=1.6e-9)
SETTINGS = [(width, taps, images) for width in (8, 12, 20) for taps in (1, 4) for images in (74, 266)]


def points_of(model: CostModel) -> list[Point]:
    return [Point("er", *setting, 32, images, model.seconds(*setting, images)) for *setting, images in SETTINGS]


@pytest.fixture(scope="module")
def quick_report() -> CostReport:
    return cost.report(quick=True)


def counted_by_torch(width: int, taps: int, side: int = 32) -> dict[str, int]:
    """FLOPs of the convolutions for one image, by direction."""
    net = nets.build(f"resnet18(width={width})", Images((3, side, side)), 100, taps)
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, side, side)).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return {"forward": counts[torch.ops.aten.convolution], "backward": counts[torch.ops.aten.convolution_backward]}


def test_flops_of_the_plain_net_by_hand() -> None:
    """3×3 convolutions of the four stages, the stem, three shortcuts: 2 FLOPs for each product, three times for a gradient step."""
    w = 20
    stem = 32**2 * 9 * 3 * w
    stages = [4 * 32**2 * 9 * w * w]
    stages += [(32 // s) ** 2 * (9 * (w * s // 2) * (w * s) + 3 * 9 * (w * s) ** 2 + (w * s // 2) * (w * s)) for s in (2, 4, 8)]
    head = 8 * w * 100
    by_hand = 2 * (2 * stem + 3 * sum(stages) + 3 * head)
    assert load(w, 1, 32, 100).flops == by_hand
    assert 384 * by_hand == pytest.approx(125.46e9, rel=0.01)


@pytest.mark.parametrize(("width", "taps", "side"), [(20, 1, 32), (12, 1, 64), (20, 4, 32)])
def test_flops_agree_with_torch_where_it_counts_right(width: int, taps: int, side: int) -> None:
    counts, each = counted_by_torch(width, taps, side), load(width, taps, side, 100)
    heads = 2 * taps * 8 * width * 100
    assert each.forward_flops == counts["forward"] + heads
    if taps == 1:
        assert each.flops == counts["forward"] + counts["backward"] + 3 * heads
    else:
        # torch's 144.5 GFLOP for 384 images take each channel of a depthwise kernel's gradient to meet all others.
        assert 384 * (counts["forward"] + counts["backward"]) == pytest.approx(144.5e9, rel=0.01)
        assert 384 * each.flops == pytest.approx(132e9, rel=0.01)


def test_whole_blocks_cost_at_least_their_channels() -> None:
    assert blocks(LANES) == LANES
    assert blocks(LANES + 1) == 2 * LANES
    for width in (8, 12, 20, 64):
        each = load(width, 4, 32, 100)
        assert each.blocked_flops >= each.flops > 2 * each.forward_flops


def test_four_times_the_pixels_are_four_times_the_work() -> None:
    small, large = load(20, 4, 32, 100), load(20, 4, 64, 100)
    assert large.flops == pytest.approx(4 * small.flops, rel=0.01)
    assert large.blocked_bytes == 4 * small.blocked_bytes


def test_fit_recovers_a_known_model() -> None:
    found = fit(points_of(KNOWN), scored=0.3)
    assert dataclasses.astuple(found) == pytest.approx((0.02, 1.3e-11, 1.6e-9, 0.3), rel=1e-6)
    assert leave_one_out(points_of(KNOWN)) == pytest.approx([0.0] * len(SETTINGS), abs=1e-6)


def test_left_out_a_point_does_not_vouch_for_itself() -> None:
    points = points_of(KNOWN)
    points[3] = dataclasses.replace(points[3], seconds=2 * points[3].seconds)
    errors = leave_one_out(points)
    assert errors[3] == pytest.approx(-0.5, abs=1e-6)


def test_no_term_is_negative() -> None:
    points = [dataclasses.replace(point, seconds=point.seconds - 0.02) for point in points_of(KNOWN)]
    assert min(dataclasses.astuple(fit(points))) >= 0


@pytest.mark.slow
def test_quick_report(quick_report: CostReport) -> None:
    assert {point.images for point in quick_report.points} == {74, 384}
    assert {(point.taps, point.side) for point in quick_report.points} == {(1, 32), (4, 32), (1, 64)}
    assert all(point.seconds > 0 for point in quick_report.points)
    assert len(quick_report.errors) == len(quick_report.points)
    assert 0 <= quick_report.median_error <= quick_report.worst_error < math.inf
    assert all(math.isfinite(row.ratio) for row in quick_report.ratios)
    assert quick_report.model.scored == quick_report.ratios[-1].ratio
    for table in quick_report.tables:
        assert all(0 < hours < math.inf for hours in (table.cpu_hours, *table.gpu_hours.values()))


@pytest.mark.slow
def test_report_as_text(quick_report: CostReport) -> None:
    text = quick_report.markdown()
    assert "estimated from FLOPs, not measured" in text
    for part in text.split("\n\n"):
        if part.startswith("|"):
            assert len({line.count("|") for line in part.splitlines()}) == 1
    assert len(quick_report.tables) == len(TABLES) * len(cost.WIDTHS)


def test_cost_of_a_table_is_proportional_to_seeds() -> None:
    for one, ten in zip(tables(KNOWN, seeds=1, cores=2), tables(KNOWN, seeds=10, cores=2), strict=True):
        assert ten.runs == 10 * one.runs
        assert (ten.cpu_hours, ten.petaflops) == pytest.approx((10 * one.cpu_hours, 10 * one.petaflops))
        assert ten.gpu_hours == pytest.approx({gpu: 10 * hours for gpu, hours in one.gpu_hours.items()})


def test_runs_of_the_paper() -> None:
    found = {(table.table, table.data): table for table in tables(KNOWN, cores=2)}
    assert found["accuracy and forgetting", "Split CIFAR-100"].runs == 20 * 3 * 10
    assert found["small memories", "Split Tiny-ImageNet"].runs == 5 * 2 * 10
    assert found["ablation", "Split CIFAR-100"].steps == 3 * 10 * 5_000


def test_work_of_a_run() -> None:
    er, mir, grace, gdumb = (work(PaperRun(row, CIFAR100, 5_000)) for row in ("ER", "MIR", "GRACE", "GDumb"))
    tested = 10_000 * 5.5  # after each of ten tasks, all classes met
    assert er == Work(5_000, 5_000 * 74, tested)
    assert mir == Work(5_000, 5_000 * 84, 5_000 * 512 + tested)
    assert grace == Work(5_000, 5_000 * 384, tested)
    assert gdumb == Work(800_000, 12_800_000, tested)


def test_the_paper_s_own_times_are_shares_of_its_gpu_s_peak() -> None:
    assert {run.row: run.taps for run in minutes()} == {"ER": 1, "SCR": 1, "MOSE": 4, "GRACE": 4}
    assert all(0.3 < share < 0.6 for share in cost.paper_utilisation().values())
