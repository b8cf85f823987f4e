"""Half precision and compilation: they may change the numbers, but a stopped run goes on to the same bits all the same."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracecl import checkpoint
from gracecl.lab import cli
from gracecl.lab.runs.run import Interrupted, RunConfig, run
from stopping import StopAfter

SMALL: dict[str, Any] = {
    "stream": "split-digits(size=8, classes='0-3', tasks=2)",
    "net": "mlp(width=16, depth=4)",
    "memory": 40,
    "device": "cpu",
    "eval_every": 7,
}


def stopped(out: Path, *steps: int, **options: Any) -> Path:
    """A run that was interrupted after each of these steps and started again after each but the last."""
    config = RunConfig(**SMALL | options)
    for step in steps:
        with pytest.raises(Interrupted):
            run(config, out, watch=StopAfter(step))
    return config.canonical().folder(out)


def state(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"]  # type: ignore[no-any-return]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}")
    else:
        yield name, value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def assert_same_run(one: Path, two: Path) -> None:
    """The same bytes in the record, the same bits in net, optimizer, loss scale, memory and method."""
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    first, second = dict(leaves(state(one))), dict(leaves(state(two)))
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == second[name], f"{name} differs"


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line["rows"] for line in lines if line["kind"] == "step"]
    return [value for row in rows for name, values in row.items() if not name.startswith("log/") for value in values]


HALVES = [
    ("bf16", "grace(er(n_recall=10))", "mlp(width=16, depth=4)", 32),
    ("fp16", "grace(mose(n_recall=16))", "mlp(width=16, depth=4)", 32),
    ("bf16", "mose(n_recall=16)", "resnet18(width=2)", 6),
    ("fp16", "er(n_recall=10)", "resnet18(width=2)", 6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "method", "net", "steps"), HALVES)
def test_half_precision_stays_finite_on_a_cpu_and_resumes_exactly(
    precision: str, method: str, net: str, steps: int, tmp_path: Path
) -> None:
    options = {"precision": precision, "method": method, "net": net}
    whole = stopped(tmp_path / "whole", steps, **options)
    assert np.isfinite(losses(whole)).all()
    weights = state(whole)["net"]
    assert all(value.isfinite().all() for value in weights.values())
    assert {value.dtype for name, value in weights.items() if "weight" in name} == {torch.float32}, "weights are kept in full"
    resumed = stopped(tmp_path / "resumed", steps // 2, steps, **options)
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_what_the_forward_pass_uses(precision: str, tmp_path: Path) -> None:
    """Near the losses of full precision, and not equal to them."""
    full, half = (losses(stopped(tmp_path / name, 10, method="er", precision=name)) for name in ("fp32", precision))
    assert half != full
    assert np.allclose(half, full, rtol=0.05)


def test_the_loss_scale_of_fp16_goes_on_where_it_was(tmp_path: Path) -> None:
    """A scaler that starts anew would skip other steps; it has counted the steps since its last change, and goes on counting."""
    folder = stopped(tmp_path, 12, method="er", precision="fp16")
    before = state(folder)["scaler"]
    assert before["scale"] > 1
    assert before["_growth_tracker"] > 0
    stopped(tmp_path, 20, method="er", precision="fp16")
    after = state(folder)["scaler"]
    assert (after["scale"], after["_growth_tracker"]) == (before["scale"], before["_growth_tracker"] + 8)


def test_full_precision_resumed_again_and_again_is_the_same_run(tmp_path: Path) -> None:
    """Within a task, at its very end, just after it, and twice at neighbouring steps."""
    whole = stopped(tmp_path / "whole", 32, method="grace(er)")
    resumed = stopped(tmp_path / "resumed", 11, 12, 29, 30, 32, method="grace(er)")
    assert_same_run(resumed, whole)


def test_the_command_has_a_switch_for_each_precision(tmp_path: Path) -> None:
    words = ["run", "sgd", "--steps", "2", "--precision", "bf16", "--stream", SMALL["stream"], "--net", "mlp", "--device", "cpu"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.call([*words, "--out", str(tmp_path)]) == 0
    (config,) = tmp_path.rglob("config.json")
    assert json.loads(config.read_text())["precision"] == "bf16"


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, [os.environ.get("CXX", "g++"), "clang++"])), reason="torch.compile needs a C++ compiler"
)


@pytest.mark.slow
@needs_compiler
def test_a_compiled_net_may_be_gone_back_through_twice(tmp_path: Path) -> None:
    options = {"method": "grace(agem(n_reference=4))", "net": "mlp(width=4, depth=1)", "eval_every": 0}
    plain = stopped(tmp_path / "plain", 4, **options)
    torch._dynamo.reset()
    compiled = stopped(tmp_path / "compiled", 4, **options, compile=True)
    assert np.allclose(losses(compiled), losses(plain), rtol=1e-4)


@pytest.mark.slow
@needs_compiler
def test_a_compiled_net_learns_and_resumes_exactly(tmp_path: Path) -> None:
    """As after a new start: what was compiled before is forgotten, and batch sizes come in another order."""
    options = {"method": "er(n_recall=10)", "net": "mlp(width=4, depth=1)", "compile": True, "eval_every": 0}
    plain = stopped(tmp_path / "plain", 4, **options | {"compile": False})
    torch._dynamo.reset()
    whole = stopped(tmp_path / "whole", 4, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert np.allclose(losses(whole), losses(plain), rtol=1e-4)
    resumed = stopped(tmp_path / "resumed", 2, **options)
    torch._dynamo.reset()
    assert stopped(tmp_path / "resumed", 4, **options) == resumed
    assert_same_run(resumed, whole)
