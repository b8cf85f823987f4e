"""What the catalogue says of a method is what the method does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracecl import registry
from gracecl.core import NO_TASK, Progress, StreamBatch, is_loss
from gracecl.engine.boundaries import check_marks
from gracecl.engine.engine import Engine
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.lab import catalogue, paper
from gracecl.lab.catalogue import FACTS
from gracecl.memory import Memories
from gracecl.methods.base import Addition, Chain, Wrapper
from gracecl.registry import spec
from gracecl.testing import toy_stream

SHAPE, CLASSES, PER_TASK = (3, 8, 8), 100, 10
MANY_VIEWS = {"ocm", "onpro"}
"""whose counts do not depend on how many tasks came before, and which take long"""
VARIES = {"aser", "er_aml", "gss", "il2a", "lpr", "lucir"}
"""whose steps have a varying number of images"""
NOW_AND_THEN = {"lpr": 30}
"""every how many steps it looks at its memory"""


def engine_of(expression: str, memory: int, classes: int) -> Engine:
    transformer = "online_lora" in expression
    net = "vit(patch=4, dim=8, depth=4, heads=2)" if transformer else "mlp(width=8, depth=4)"
    recipe = Recipe(method=expression, net=net, memory=memory, device="cpu")
    return recipe.build(Images(SHAPE), classes)


def learn(engine: Engine, images: int, task: int, marked: bool = True) -> list[str]:
    """A batch of a task; returns the rows of its losses."""
    labels = np.arange(images) % PER_TASK + PER_TASK * task
    pixels = np.random.default_rng(engine.progress.step).integers(0, 256, (images, *SHAPE), dtype=np.uint8)
    outcome = engine.learn(StreamBatch(torch.from_numpy(pixels), labels, task=task if marked else NO_TASK))
    return [] if outcome is None else [row for row in outcome.table if is_loss(row)]


def last_task(name: str) -> tuple[Engine, list[str], float, float]:
    """A learner in the last of ten tasks with a full memory, the rows of its losses, and its images per step."""
    engine = engine_of(f"{name}()", 1000, CLASSES)
    batch = 10 if name == "online_lora" else 70 if name in MANY_VIEWS else 100  # it keeps whole batches
    for task in (0, 9) if name in MANY_VIEWS else range(10):
        learn(engine, batch, task)
    for _ in range(4):
        learn(engine, 10, 9)
    before = engine.net.meter.forward, engine.net.meter.backward
    steps = NOW_AND_THEN.get(name, 4)
    for _ in range(steps):
        rows = learn(engine, 10, 9)
    return engine, rows, (engine.net.meter.forward - before[0]) / steps, (engine.net.meter.backward - before[1]) / steps


def learn_two_tasks(expression: str) -> tuple[Engine, list[str]]:
    engine = engine_of(expression, 40, 20)
    for task in (0, 0, 1, 1):
        rows = learn(engine, 10, task)
    return engine, rows


def test_it_has_every_method() -> None:
    assert FACTS.keys() == registry.methods.written.keys()


@pytest.mark.parametrize("name", FACTS)
def test_what_a_method_is(name: str) -> None:
    facts, kind = FACTS[name], registry.methods.get(name)
    assert (facts.family == "add") == issubclass(kind, Addition)
    assert (facts.family == "wrap") == issubclass(kind, Wrapper)
    assert facts.unmarked == spec.parse_method(name).chain.unmarked
    years = {
        record["year"] for row, text in paper.EXPRESSIONS.items() for record in paper.records(method=row) if text == f"{name}()"
    }
    assert years - {None} <= {facts.year}


def learned(expression: str, marked: bool) -> tuple[Engine, list[int]]:
    """A learner after six batches of two tasks, with their marks or without, and the steps at which one of its tasks ended."""
    engine, ended = engine_of(expression, 40, 20), list[int]()
    for part in engine.chain.parts:
        if part.traits.interval is not None:
            setattr(part, part.traits.interval, 2)
    engine.chain = Chain(engine.method)  # which reads the intervals
    for part in engine.chain.defining("end_task"):
        own = part.end_task

        def noted(memories: Memories, progress: Progress, own: Callable[..., Any] = own) -> Any:
            ended.append(progress.step)
            return own(memories, progress)

        part.end_task = noted  # type: ignore[method-assign]
    for step in range(6):
        learn(engine, 10, step // 3, marked)
    return engine, ended


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.slow
def test_what_a_method_does_without_task_marks(name: str) -> None:
    """Refused; the same to the bit; at each interval, here of two steps; or something else than with marks."""
    facts, method = FACTS[name], f"{name}()"
    if facts.unmarked == "refused":
        stream = toy_stream()
        unmarked = dataclasses.replace(stream, task_of_step=np.full(len(stream), NO_TASK))
        with pytest.raises(UserError, match="needs a stream with task marks"):
            check_marks(engine_of(method, 40, 20), unmarked)
        return
    (without, ended), (with_marks, _) = learned(method, False), learned(method, True)
    weights, others = without.net.state_dict(), with_marks.net.state_dict()
    same = all(torch.equal(weights[key], others[key]) for key in weights)
    assert same or facts.unmarked != "same"
    assert set(ended) == ({1, 3, 5} if "every 500 steps" in facts.unmarked else set())
    if facts.unmarked == catalogue.BY_BATCH:
        assert not same


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS)
def test_what_a_method_keeps_and_costs(name: str) -> None:
    facts = FACTS[name]
    engine, rows, forward, backward = last_task(name)
    assert rows == facts.terms.split()
    assert (len(engine.memories.replay) > 0) == facts.keeps.startswith("images")
    if name == "joint":  # its second batch comes with the stream
        forward, backward = forward + 64, backward + 64
    close = 0.05 if name in VARIES else 0
    assert (forward, backward) == (pytest.approx(facts.forward, rel=close), pytest.approx(facts.backward, rel=close))


@pytest.mark.parametrize("name", FACTS)
def test_what_works_inside_grace(name: str) -> None:
    facts = FACTS[name]
    option = "train_head=True" if facts.grace == "head" else ""
    if facts.grace == "no":
        with pytest.raises(UserError):
            learn_two_tasks(f"grace({name}())")
        return
    engine, rows = learn_two_tasks(f"grace({name}({option}))")
    measured = [math.isfinite(value) for value in engine.method.feedback.accuracy.tolist()]  # type: ignore[attr-defined]
    assert measured == [facts.grace != "γ"] * 4
    if facts.terms:
        assert [*facts.terms.split(), *(["ce/head"] if option else []), "entropy"] == rows
        assert any(row.startswith("ce") for row in rows)


def test_the_table_fits_a_narrow_terminal() -> None:
    lines = catalogue.table().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1 : lines.index("")]] == sorted(FACTS)


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "methods.md"
    assert page.read_text(encoding="utf-8") == catalogue.markdown(), "run: gracecl list methods --markdown > docs/methods.md"
