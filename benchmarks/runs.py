"""What a run costs beyond its steps, and what two runs side by side gain."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.measure import Row, added_row, row, timed
from benchmarks.scene import Scene
from benchmarks.workers import Setting, seconds_in_turns, workers
from gracecl import checkpoint, streams
from gracecl.lab.runs.recorder import Recorder
from gracecl.lab.runs.trainer import Trainer
from gracecl.lab.runs.watch import Reporter

STEPS_PER_CHECKPOINT = 500


def rows(quick: bool) -> Iterator[Row]:
    yield bookkeeping(4 if quick else 20, quick)
    for method, width in (("er()", 4),) if quick else (("er()", 8), ("mose()", 8), ("mose()", 20)):
        yield side_by_side(method, width, quick)


def bookkeeping(width: int, quick: bool) -> Row:
    """Timed by itself and added to the step: a hundredth of a step could not be told from two noisy runs."""
    scene = Scene("mose()", f"resnet18(width={width})")
    outcome = scene.step()
    assert outcome is not None
    watch = Reporter(lambda progress: None)
    with tempfile.TemporaryDirectory() as folder, closing(Recorder(Path(folder) / "metrics.jsonl")) as recorder:
        trainer = Trainer(scene.engine, streams.build("split-digits", seed=0), recorder)

        def steps_of_a_checkpoint() -> None:
            for step in range(STEPS_PER_CHECKPOINT):
                recorder.step(step, 0, outcome)
                watch.advance()
            recorder.flush()
            checkpoint.save(Path(folder) / "checkpoint.safetensors", trainer.state_dict())

        with watch.following(trainer, "benchmark"):
            pairs = [(timed(steps_of_a_checkpoint) / STEPS_PER_CHECKPOINT, timed(scene.step)) for _ in range(2 if quick else 15)]
    extra, step = np.array(pairs).T
    what = f"a mose step with its record, its progress and its share of a checkpoint every {STEPS_PER_CHECKPOINT} steps"
    return added_row(f"recording, progress, checkpoints, width {width}", what, extra, step, aim=1.01)


def side_by_side(method: str, width: int, quick: bool) -> Row:
    """Runs per hour: two processes with one thread each, as `gracecl run` chooses, against one with two threads."""
    one, two = (Setting(method, f"resnet18(width={width})", threads) for threads in (1, 2))
    with workers([one, one, two]) as (first, second, alone):
        steps = 2 if quick else 3 if method == "mose()" else 20
        both, single = seconds_in_turns([[first, second], [alone]], 2 if quick else 9, steps)
    return row(
        f"two runs side by side, {method}, width {width}",
        f"{method} steps per hour of two runs at once with one thread each",
        "of one run with two threads",
        single[0] / both[0] + single[0] / both[1],
        aim=1.5,
        sense="at least",
        seconds=float(np.median(both)),
        seconds_against=float(np.median(single)),
    )
