"""What is measured of a run beyond its accuracy matrix: when it is evaluated, what is recorded, and what a report makes of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracecl import Learner, UserError, stream
from gracecl.engine.evaluate import evaluate
from gracecl.engine.loop import Loop
from gracecl.engine.prequential import predict
from gracecl.files import write_json
from gracecl.functional import metrics as m
from gracecl.lab import report
from gracecl.lab.report import evaluation_figures, frames, measures
from gracecl.lab.report.runs import Run, measure, summary
from gracecl.streams import Stream
from gracecl.testing import feed, toy_data, toy_engine, toy_stream
from noted_log import Noted

EVALUATIONS = [[80], [90], [50, 40], [70, 60], [84, 70], [60, 45, 30], [75, 58, 55], [80, 66, 72]]
ENDS = (1, 4, 7)


def looped(method: str, on: Stream, **asked: Any) -> tuple[Loop, list[dict[str, Any]]]:
    """A toy learner at the end of a stream, and its evaluations."""
    engine, log = toy_engine(method), Noted()
    seen = engine.as_seen(on)
    loop = Loop(engine, seen.batch, steps=len(seen), log=log, test=seen, **asked)
    loop.run()
    return loop, log.lines


def of(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def run_of(lines: list[dict[str, Any]], **more: Any) -> Run:
    """What a report reads of such lines."""
    config = {"rule": "linear_last", "method": "er()", "stream": "toy", "seed": 0, "net": "mlp", "classes": 6} | more
    kinds = {kind: of(kind, lines) for kind in ("prequential", "near_future", "confusion")}
    return Run(Path("run"), config, of("step", lines), of("eval", lines), of("task", lines), {}, finished=True, **kinds)


# When it is evaluated.


def test_evaluations_at_equal_distances_and_after_marks() -> None:
    on = toy_stream()
    marks, ends = on.marks.tolist(), on.ends.tolist()
    _, lines = looped("er", on, eval_every=4)
    assert [line["step"] for line in of("eval", lines)] == sorted({*marks, *range(3, len(on), 4)})
    images = 2 * len(on.batch(0)) + 1
    _, lines = looped("er", on, eval_every_images=images, eval_after_marks=2)
    regular = [step for step, end in enumerate(ends) if end // images > (ends[step - 1] if step else 0) // images]
    after = [mark + late for mark in marks for late in (1, 2) if mark + late < len(on)]
    assert [line["step"] for line in of("eval", lines)] == sorted({*marks, *regular, *after})
    assert [line["step"] for line in of("eval", lines) if line["regular"]] == regular
    assert len(regular) == len(on.order) // images


def test_equal_distances_make_the_area_and_evaluations_after_marks_do_not_count_twice() -> None:
    lines = [
        {"kind": "eval", "step": step, "task": task, "task_end": end, "regular": regular, "accuracy": {"linear_last": row}}
        | {"task_images": [50, 50, 200][: len(row)]}
        for step, task, end, regular, row in [
            (0, 0, False, True, [30.0]),
            (1, 0, True, False, [60.0]),
            (2, 1, False, False, [10.0, 10.0]),
            (3, 1, False, True, [80.0, 60.0]),
            (4, 2, True, True, [80.0, 60.0, 30.0]),
        ]
    ]
    found = measure(run_of(lines), "linear_last")
    assert found["a_auc"] == pytest.approx((30 + 70 + 130 / 3) / 3)
    assert found["retention"] == pytest.approx(130 / 3), "over images, of the last model"
    assert found["aaa"] == pytest.approx((30 + 60 + 70 + 170 / 3) / 4), "without the one that only follows a mark"
    assert measures.retention_curve(run_of(lines), "linear_last") == pytest.approx([30, 36, 130 / 3])
    older = [{name: value for name, value in line.items() if name not in ("regular", "task_images")} for line in lines]
    before = measure(run_of(older), "linear_last")
    assert before["aaa"] == pytest.approx((30 + 60 + 10 + 70 + 170 / 3) / 5)
    assert "a_auc" not in before


def test_some_test_images_are_fixed_nested_and_balanced() -> None:
    on = toy_stream()
    sizes = [6, 12, 13]
    chosen = [on.tested_on(images) for images in sizes]
    pixels = [{image.numpy().tobytes() for image in one.data.test_x} for one in chosen]
    assert [len(one.data.test_y) for one in chosen] == sizes
    assert pixels[0] < pixels[1] < pixels[2]
    for one in chosen:
        counts = np.bincount(one.data.test_y, minlength=6)
        assert counts.max() - counts.min() <= 1
        assert on.classes_of_task[one.test_task, one.data.test_y].all(), "an image keeps its task"
    assert on.tested_on(10_000) is on
    assert np.array_equal(on.tested_on(12).data.test_y, on.tested_on(12).data.test_y)
    with pytest.raises(UserError, match="give eval_images at least that many"):
        on.tested_on(5)


# What is recorded.


def test_an_evaluation_by_loops_over_images() -> None:
    engine, data = toy_engine("er"), toy_data()
    feed(engine, toy_stream(), until=9)
    seen = list(engine.progress.seen)
    tasks = np.where(data.test_y == 0, 0, np.where(data.test_y < 4, 2, 3))
    classes_of_task = np.zeros((4, 6), bool)
    classes_of_task[tasks, data.test_y] = True
    found = evaluate(engine, data.test_x, data.test_y, tasks, classes_of_task)
    with torch.no_grad():
        logits = engine.net.eval()(engine.net.inputs.normalise(data.test_x)).logits[-1][:, seen].double()
    p, guesses = logits.softmax(dim=1).numpy(), np.array(seen)[logits.argmax(dim=1)]
    assert found.images == np.bincount(tasks).tolist()
    for task in (0, 2, 3):
        here = tasks == task
        share = [guess in np.flatnonzero(classes_of_task[task]) for guess in guesses[here]]
        assert found.task_found["linear_last"][task] == pytest.approx(100 * np.mean(share))
        assert (found.accuracy["linear_last"][task] or 0) <= min(
            100 * np.mean(share), found.accuracy["linear_last_masked"][task] or 0
        )
    assert found.task_found["linear_last"][1] is None
    counts = {(label, guess): 0 for label in range(6) for guess in range(6)}
    for label, guess in zip(data.test_y.tolist(), guesses.tolist(), strict=True):
        counts[label, guess] += 1
    assert found.confusion == [[label, guess, n] for (label, guess), n in counts.items() if n]
    met = np.isin(data.test_y, seen)
    target = np.array([seen.index(label) if label in seen else -1 for label in data.test_y])
    sums = found.calibration
    assert sums is not None
    assert found.brier["linear_last"] == pytest.approx(m.brier(p[met], target[met]), rel=1e-5)
    for task in range(4):
        here = met & (tasks == task)
        if here.any():
            assert sums.nll[task] == pytest.approx(here.sum() * m.nll(p[here], target[here]), rel=1e-4)
            assert sums.brier[task] == pytest.approx(here.sum() * m.brier(p[here], target[here]), rel=1e-4)
        assert np.array(sums.bins[task])[0].sum() == here.sum()
    pooled = np.array(sums.bins).sum(axis=0)
    assert m.ece_of_bins(pooled) == pytest.approx(found.ece["linear_last"], abs=1e-5), "pooled bins are those of all images"


def test_the_order_of_the_test_images_does_not_matter() -> None:
    on = toy_stream()
    shuffle = np.random.default_rng(0).permutation(len(on.data.test_y))
    data = dataclasses.replace(on.data, test_x=on.data.test_x[shuffle], test_y=on.data.test_y[shuffle])
    other = dataclasses.replace(on, data=data, test_task=on.test_task[shuffle])
    (_, one), (_, two) = looped("er", on), looped("er", other)
    for before, after in zip(of("eval", one), of("eval", two), strict=True):
        for name in ("accuracy", "task_images"):
            assert before[name] == after[name]
        for name in ("ece", "nll", "brier"):
            assert before[name] == pytest.approx(after[name], abs=1e-6)
    assert of("confusion", one) == of("confusion", two)


def test_calibration_over_time_is_that_of_single_evaluations_and_confusion_is_of_the_last() -> None:
    loop, lines = looped("er", toy_stream(), eval_every=5)
    run = run_of(lines)
    whole = {row["step"]: row for row in measures.calibration_rows(run) if row["task"] is None}
    assert list(whole) == run.task_ends
    for record in run.evals:
        if record["task_end"]:
            for name in ("ece", "nll", "brier"):
                assert whole[record["step"]][name] == pytest.approx(record[name]["linear_last"], abs=1e-4)
    [confusion] = run.confusion
    right = sum(images for label, predicted, images in confusion["counts"] if label == predicted)
    assert 100 * right / sum(images for *_, images in confusion["counts"]) == pytest.approx(
        measure(run, "linear_last")["retention"]
    )
    assert loop.evaluation is not None
    assert confusion["counts"] == loop.evaluation.confusion
    assert frames.confusion_rows(run)[0].keys() == {"label", "prediction", "images"}


def test_a_frozen_model_is_as_right_before_learning_as_on_held_out_images() -> None:
    """The stream's images are also the test images, and after the first task nothing more is learned."""
    on = toy_stream()
    engine = toy_engine("er")
    feed(engine, on, until=6)
    batches = [on.batch(step) for step in range(6)]
    right = np.concatenate([predict(engine, batch).right for batch in batches])
    x, y = torch.cat([batch.x for batch in batches]), np.concatenate([batch.labels for batch in batches])
    [held_out] = evaluate(engine, x, y, np.zeros(len(y), np.int64)).accuracy["linear_last"]
    assert 100 * right.mean() == pytest.approx(held_out)


def test_forward_transfer_on_domains_alone() -> None:
    domains = stream(toy_data(), family="domain(tasks=3)", batch=4)
    _, lines = looped("er", domains)
    run = run_of(lines)
    ahead = [record.get("next_task") for record in run.evals]
    assert ahead[-1] is None
    known = [one for one in ahead if one is not None]
    assert len(known) == 2
    assert all(one["chance"] == pytest.approx(100 / 6) for one in known)
    expected = np.mean([one["accuracy"] for one in known]) - 100 / 6
    assert measure(run, "linear_last")["forward_transfer"] == pytest.approx(expected)
    _, split = looped("er", toy_stream())
    assert "forward_transfer" not in measure(run_of(split), "linear_last"), "classes not met cannot be predicted"


# What a report makes of it.


def gapped() -> Run:
    lines = [
        {"kind": "eval", "step": 10 * n, "task": len(row) - 1, "task_end": n in ENDS, "accuracy": {"linear_last": row}}
        for n, row in enumerate(EVALUATIONS)
    ]
    return run_of(lines)


def test_stability_gaps_by_the_worked_example() -> None:
    run = gapped()
    found = measure(run, "linear_last")
    assert found["min_acc"] == pytest.approx(47.5)
    assert found["wc_acc"] == pytest.approx(55.6666666667)
    assert found["gap_depth"] == pytest.approx(29.6666666667)
    rows = measures.gap_rows(run, "linear_last")
    assert [(row["boundary"], row["task"], row["depth"], row["regained"]) for row in rows] == [
        (1, 0, 40, 34),
        (2, 0, 24, 20),
        (2, 1, 25, 21),
    ]
    assert [(row["step"], row["steps_to_low"], row["steps_to_recover"]) for row in rows] == [
        (10, 10, None),
        (40, 10, 30),
        (40, 10, 30),
    ]
    assert found["gap_recovered"] == pytest.approx(100 * 2 / 3), "within 5 points"
    assert summary(run)["gaps"] == rows
    ends = [record for record in run.evals if record["task_end"]]
    sparse = run_of([{"kind": "eval", **record} for record in ends])
    assert "gap_depth" not in measure(sparse, "linear_last"), "nothing was seen between the marks"


def test_gaps_need_test_images_of_every_task() -> None:
    """With two test tasks and three marks a boundary would have no task of its own."""
    rows = [{**record, "accuracy": {"linear_last": record["accuracy"]["linear_last"][:2]}} for record in gapped().evals]
    run = run_of([{"kind": "eval", **row} for row in rows])
    assert measures.gap_rows(run, "linear_last") == []
    assert "gap_depth" not in measure(run, "linear_last")


def test_intransigence_beside_a_joint_run() -> None:
    matrix = [[70, 12, 8, 10], [78, 85, 15, 9], [60, 50, 80, 20], [55, 62, 40, 88]]
    own = run_of(
        [
            {"kind": "eval", "step": task, "task": task, "task_end": True, "accuracy": {"linear_last": row}}
            for task, row in enumerate(matrix)
        ]
    )
    last = {"kind": "eval", "step": 3, "task": 3, "task_end": True, "accuracy": {"linear_last": [75, 90, 88, 91]}}
    joint, other = run_of([last], method="joint()"), run_of([last], method="joint()", seed=1)
    measures.link_joint([other, own])
    assert own.joint is None
    assert "intransigence" not in measure(own, "linear_last"), "of another seed"
    measures.link_joint([other, own, joint])
    assert measure(own, "linear_last")["intransigence"] == pytest.approx(5.25)
    assert joint.joint is None
    found = measure(own, "linear_last")
    assert (found["learning_acc"], found["relative_forgetting"]) == (80.75, pytest.approx(0.2664, abs=1e-4))


def test_masked_accuracy_and_the_task_found() -> None:
    accuracy = {"linear_last": [40.0, 20.0], "linear_last_masked": [80.0, 60.0]}
    line = {
        "kind": "eval",
        "step": 1,
        "task": 1,
        "task_end": True,
        "accuracy": accuracy,
        "task_found": {"linear_last": [60.0, None]},
    }
    first = line | {"step": 0, "task": 0, "accuracy": {name: row[:1] for name, row in accuracy.items()}}
    found = measure(run_of([first, line]), "linear_last")
    assert (found["acc"], found["masked_acc"], found["task_found"]) == (30, 70, 60)


def test_predictions_in_tables() -> None:
    _, lines = looped("er", toy_stream(), prequential=True, near_future=2, probabilities=True, eval_every=3)
    run = run_of(lines)
    found = measure(run, "linear_last")
    pairs = [pair for line in of("prequential", lines) for pair in zip(line["labels"], line["predictions"], strict=True)]
    assert found["prequential"] == pytest.approx(100 * np.mean([label == guess for label, guess in pairs]))
    later = [pair for line in of("near_future", lines) for pair in zip(line["labels"], line["predictions"], strict=True)]
    assert found["near_future"] == pytest.approx(100 * np.mean([label == guess for label, guess in later]))
    assert math.isfinite(found["near_future_blind"])
    rows = frames.prediction_rows(run)
    assert len(rows) == len(pairs) + len(later)
    assert rows[0].keys() == {"step", "ahead", "label", "prediction", "confidence", "probability"}
    assert {row["ahead"] for row in rows} == {0, 2}
    assert evaluation_figures.image_steps(run)[:3] == pytest.approx(np.arange(3) / len(lines[0]["labels"]))
    assert measures.with_baselines(["acc", "kappa", "majority"]) == ["acc", "kappa", "majority", "no_change"]
    assert measures.with_baselines(["acc"]) == ["acc"]


@pytest.mark.slow
def test_figures_of_what_was_recorded_and_of_nothing(tmp_path: Path) -> None:
    _, lines = looped("er", toy_stream(), prequential=True, eval_every=3)
    run = run_of(lines)
    for draw in ("prequential", "gaps", "calibration", "confusion"):
        file = tmp_path / f"{draw}.png"
        assert getattr(evaluation_figures, draw)(run, file)
        assert file.read_bytes().startswith(b"\x89PNG")
        assert not getattr(evaluation_figures, draw)(run_of([]), file)


def test_a_learner_tests_then_trains() -> None:
    on = toy_stream()
    options: dict[str, Any] = {
        "classes": 6,
        "shape": (1, 8, 8),
        "memory": 20,
        "net": "mlp(width=8)",
        "augment": "none",
        "device": "cpu",
    }
    by_hand, right = Learner("er", **options), []
    for step, batch in enumerate(on):
        guesses = by_hand.predict(batch.x) if step else [-1] * len(batch)
        right += [guess == label for guess, label in zip(guesses, batch.labels, strict=True)]
        by_hand.learn(batch.x, batch.labels, task=batch.task)
    learner = Learner("er", **options)
    found = learner.prequential(on)
    assert found.right.tolist() == right
    assert all(map(torch.equal, learner.net.state_dict().values(), by_hand.net.state_dict().values()))
    names = np.array(["a", "b", "c", "d", "e", "f"])
    named = Learner("er", **options | {"classes": names.tolist()})
    again = named.prequential((batch.x, names[batch.labels], batch.task) for batch in on)
    assert again.right.tolist() == right
    assert named.classes_[again.labels[:3]].tolist() == names[on.batch(0).labels[:3]].tolist()
    assert len(learner.prequential([])) == 0


@pytest.mark.parametrize(
    "field",
    [
        {"regular": 1},
        {"task_images": "many"},
        {"brier": [0.1]},
        {"next_task": {"accuracy": "high"}},
        {"task_found": {"linear_last": []}},
        {"calibration": {"bins": [[[0] * 15] * 3], "nll": [0.0]}},
        {"calibration": {"bins": [[[0] * 14] * 3], "nll": [0.0], "brier": [0.0]}},
        {"calibration": {"bins": [[[0] * 15] * 3], "nll": [0.0, 1.0], "brier": [0.0]}},
    ],
)
def test_a_damaged_evaluation_is_refused(field: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"method": "er", "stream": "split-digits", "seed": 0, "rule": "linear_last"})
    line = {"kind": "eval", "step": 0, "task": 0, "task_end": True, "accuracy": {"linear_last": [50.0]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | field) + "\n")
    with pytest.raises(UserError, match="is no eval record"):
        report.read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "confusion", "step": 0, "counts": [[0, 1]]}) + "\n")
    with pytest.raises(UserError, match="is no confusion record"):
        report.read_run(tmp_path)
