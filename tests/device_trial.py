"""`python tests/device_trial.py METHOD`: learn two tasks on a pretended device; end with an error where it is not as on the host.

A process of its own, as PyTorch wants to know of devices before its first backward pass.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gracecl import checkpoint
from gracecl.engine import recipe
from gracecl.engine.engine import Engine, StepResult
from gracecl.engine.evaluate import evaluate
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import as_seen, feed, toy_data, toy_engine
from pretended_device import DEVICE, PACKAGE, PretendedDevice, register

SAYS_SO = "waits for the device"
"""words in the file of a method whose steps make the host wait"""
FIRST = 4
"""steps before the checkpoint"""


def main(method: str) -> None:
    """Learn, go on from a checkpoint, evaluate; compare the losses with those of the host."""
    register()
    warnings.simplefilter("ignore")
    wanted = losses(feed(*learner_and_stream(method)))
    recipe.device_of = lambda name: DEVICE
    with PretendedDevice() as device, TemporaryDirectory() as folder:
        state = Path(folder) / "state.safetensors"
        engine, stream = learner_and_stream(method)
        assert all(value.device == DEVICE for value in engine.net.state_dict().values())
        device.waits.clear()
        first = feed(engine, stream, FIRST)
        waits = [file for file in device.waits if file.startswith(("methods/", "memory/"))]
        checkpoint.save(state, engine.state_dict())
        again, _ = learner_and_stream(method)
        again.load_state_dict(checkpoint.load(state))
        found = losses([*first, *feed(again, stream)])
        evaluate(again, *stream.test_images(again.progress.seen))
    for file in waits:
        assert SAYS_SO in (PACKAGE / file).read_text(encoding="utf-8"), f"{file} makes the host wait, and does not say so"
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for row, values in one.items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(other[row]), rtol=1e-3, atol=1e-4, equal_nan=True)


def learner_and_stream(method: str) -> tuple[Engine, Stream]:
    engine, stream = toy_engine(method, optimizer="sgd(lr=0.01)"), split(toy_data(), 0, tasks=3, batch=8)
    return engine, as_seen(method, stream).cut(6).to(engine.device)


def losses(outcomes: list[StepResult | None]) -> list[dict[str, list[float]]]:
    return [{} if outcome is None else {row: value.tolist() for row, value in outcome.table.items()} for outcome in outcomes]


if __name__ == "__main__":
    main(sys.argv[1])
