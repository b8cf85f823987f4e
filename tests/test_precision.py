"""Half precision and compilation: they run, stay finite, and resume to the same bits as any run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from gracecl import checkpoint
from gracecl.recipe import Recipe
from gracecl.testing import TOY_SHAPE, assert_same, feed, toy_stream


def make(**options: object) -> Recipe:
    return Recipe(method="grace(mose())", net="resnet18(width=2)", memory=12, device="cpu", **options)  # type: ignore[arg-type]


def learned(recipe: Recipe, steps: int, folder: Path | None = None, stop_at: int | None = None) -> dict[str, object]:
    """The state after some steps; with `stop_at`, through a file in between."""
    stream = toy_stream()
    engine = recipe.build(TOY_SHAPE, 6, (0.5,), (0.25,))
    if stop_at is not None and folder is not None:
        feed(engine, stream, until=stop_at)
        checkpoint.save(folder / "state", engine.state_dict())
        engine = recipe.build(TOY_SHAPE, 6, (0.5,), (0.25,))
        engine.load_state_dict(checkpoint.load(folder / "state"))
    for outcome in feed(engine, stream, until=steps):
        for row, value in outcome.table.items() if outcome else ():
            assert value.isfinite().all(), row
    return engine.state_dict()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_finite_and_resumes_exactly(precision: str, tmp_path: Path) -> None:
    """fp16 includes the loss scale, which moves when a gradient overflows."""
    recipe = make(precision=precision)
    whole = learned(recipe, 9)
    assert_same(learned(recipe, 9, tmp_path, stop_at=5), whole, precision)
    full = learned(make(), 9)
    assert any(not torch.equal(full["net"][name], value) for name, value in whole["net"].items()), "nothing ran in half precision"  # type: ignore[index]


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_net_learns_the_same_and_resumes_exactly(tmp_path: Path) -> None:
    """Fused kernels round differently, so the comparison with the plain net is of the first losses, not of bits."""
    recipe = Recipe(method="er()", net="mlp(width=8)", memory=12, device="cpu", compile=True)
    plain = Recipe(method="er()", net="mlp(width=8)", memory=12, device="cpu")
    whole = learned(recipe, 6)
    assert_same(learned(recipe, 6, tmp_path, stop_at=3), whole, "compiled")
    for name, value in learned(plain, 6)["net"].items():  # type: ignore[attr-defined]
        torch.testing.assert_close(whole["net"][name], value, rtol=1e-3, atol=1e-4)  # type: ignore[index]
