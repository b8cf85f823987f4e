"""Two tasks on a device other than the host: nothing mixes with host tensors, and the host waits only where a method says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gracecl import checkpoint
from gracecl.engine import recipe
from gracecl.engine.engine import Engine, StepResult
from gracecl.engine.evaluate import evaluate
from gracecl.functional import optim
from gracecl.streams import Stream
from gracecl.streams.split import split
from gracecl.testing import as_seen, feed, toy_data, toy_engine
from pretended_device import DEVICE, PACKAGE, PretendedDevice

SAYS_SO = "waits for the device"
"""words in the file of a method whose steps make the host wait"""
METHODS = [
    "acil(size=20)",
    "adversarial_replay(attack_steps=1)",
    "agem()",
    "air(size=20)",
    "aser()",
    "best()",
    "ccil()",
    "closed()",
    "cls_er()",
    "cpr()",
    "der()",
    "derpp()",
    "ema()",
    "er()",
    "er_ace()",
    "er_aml()",
    "ewc()",
    "ewc_on()",
    "ewc_pp()",
    "fecam()",
    "foal(size=20)",
    "gacl(size=20)",
    "grace(er())",
    "gsa()",
    "gss()",
    "il2a()",
    "joint()",
    "lode()",
    "lpr()",
    "lucir()",
    "mir()",
    "mirrored()",
    "mkd()",
    "mose()",
    "ncm()",
    "pcr()",
    "ranpac(projections=20)",
    "scr()",
    "sgd()",
]
"""that were tried; co2l, ocm and onpro switch autocast off, for which the pretended device has no name"""
FIRST = 4
"""steps before the checkpoint"""


def learner_and_stream(method: str) -> tuple[Engine, Stream]:
    engine, stream = toy_engine(method, optimizer="sgd(lr=0.01)"), split(toy_data(), 0, tasks=3, batch=8)
    return engine, as_seen(method, stream).cut(6).to(engine.device)


def losses(outcomes: list[StepResult | None]) -> list[dict[str, list[float]]]:
    return [{} if outcome is None else {row: value.tolist() for row, value in outcome.table.items()} for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # which this device's are in name alone
@pytest.mark.parametrize("method", METHODS)
def test_a_method_on_another_device(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning, a checkpoint and its resume, and an evaluation, with the losses of the host."""
    wanted = losses(feed(*learner_and_stream(method)))
    monkeypatch.setattr(recipe, "device_of", lambda name: DEVICE)
    monkeypatch.setitem(optim.OPTIMISERS, "sgd", torch.optim.SGD)  # ours are fused, which PyTorch has for devices that it knows
    with PretendedDevice() as device:
        engine, stream = learner_and_stream(method)
        assert all(value.device == DEVICE for value in engine.net.state_dict().values())
        device.waits.clear()
        first = feed(engine, stream, FIRST)
        waits = [file for file in device.waits if file.startswith(("methods/", "memory/"))]
        checkpoint.save(tmp_path / "state.safetensors", engine.state_dict())
        again, _ = learner_and_stream(method)
        again.load_state_dict(checkpoint.load(tmp_path / "state.safetensors"))
        found = losses([*first, *feed(again, stream)])
        evaluate(again, *stream.test_images(again.progress.seen))
    for file in waits:
        assert SAYS_SO in (PACKAGE / file).read_text(encoding="utf-8"), f"{file} makes the host wait, and does not say so"
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for row, values in one.items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(other[row]), rtol=1e-3, atol=1e-4, equal_nan=True)
