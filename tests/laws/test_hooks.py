"""Hooks: what a chain does with each of them, and CONTRIBUTING says who uses which."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl import nets, rng
from gracecl.core import Batch, LossTable, Progress, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import OF_A_LEARNER, Addition, Method, Sum, Traits, Wrapper, defines
from gracecl.methods.er import ER
from gracecl.methods.state import restored, saved
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.testing import TOY_NET, TOY_SHAPE, feed, toy_engine, toy_stream

NO_HOOKS = ("name", "as_learner", "parts", "stated", "state_dict", "load_state_dict", "grow")
HOOKS = [name for name, value in vars(Method).items() if (callable(value) or isinstance(value, property)) and name[0] != "_"]
HOOKS = ["traits", "state", *(name for name in HOOKS if name not in NO_HOOKS)]
AT_MOST = 18
AT_MOST_LISTED = 8
ONE_USER = {"optimizer"}
"""hooks that a single method needs; CONTRIBUTING says why they are hooks all the same"""
CLASSES: dict[str, type[Method]] = {name: methods.get(name) for name in methods.names()}


def users(hook: str) -> set[str]:
    """The files of methods that define a hook."""
    return {
        Path(inspect.getfile(parent)).stem
        for cls in CLASSES.values()
        for parent in cls.__mro__
        if issubclass(parent, Method) and parent not in (Method, Wrapper, Sum, Addition) and hook in vars(parent)
    }


def test_there_are_few_hooks_and_each_has_users() -> None:
    assert len(HOOKS) <= AT_MOST
    assert {hook for hook in HOOKS if len(users(hook)) < 2} == ONE_USER


def test_the_table_of_hooks_is_what_the_code_says() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", text, flags=re.M))
    expected = {
        hook: ", ".join(f"`{name}`" for name in sorted(found)) if len(found) <= AT_MOST_LISTED else f"{len(found)} files"
        for hook, found in ((hook, users(hook)) for hook in HOOKS)
    }
    assert table == expected, "\n".join(f"| `{hook}` | … | {who} |" for hook, who in expected.items() if table.get(hook) != who)


# What a chain does. `Told` is a part that notes every hook it is called by.

told: list[str] = []


@dataclass(eq=False, repr=False)
class Told(Wrapper):
    """Notes what it is told, under a name of its own."""

    label: str = "told"
    share: float = 0.0
    """of each batch that it takes for itself"""

    @property
    def name(self) -> str:
        return self.label

    def note(self, hook: str) -> None:
        told.append(f"{self.label}.{hook}")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.note("attach")

    def begin_task(self, progress: Progress) -> None:
        self.note("begin_task")

    def end_task(self, memories: Memories, progress: Progress) -> dict[str, list[float]]:
        self.note("end_task")
        return {self.label: [1.0]}

    def prepare(self, batch: Batch) -> None:
        self.note("prepare")

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {f"log/{self.label}": torch.zeros(out.layers)}

    def adjust(self, table: LossTable, out: Taps, batch: Batch) -> LossTable:
        return table | {"ce/all": 2 * table["ce/all"] + 1}

    def after_backward(self, batch: Batch) -> None:
        self.note("after_backward")

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.note("after_step")

    def after_batch(self, memories: Memories, new: StreamBatch) -> StreamBatch:
        self.note(f"after_batch {len(new)}")
        return new.select(np.arange(int(self.share * len(new)), len(new)))


class First(Told):
    """One that changes weights after a step."""

    traits = Traits(moves_weights=True)


def engine_of(method: Method) -> Engine:
    with rng.torch_seed(0, "net"):
        net = nets.build(TOY_NET, Images(TOY_SHAPE, (0.5,), (0.25,)), 6, taps=1)
    return Engine(method, net, Memories(12, Images(TOY_SHAPE)), optimizer="adam(lr=0.001)")


@pytest.fixture(autouse=True)
def forget() -> None:
    told.clear()


def calls(hook: str) -> list[str]:
    return [call.split(".")[0] for call in told if call.split(".")[1].split()[0] == hook]


def test_notifications_go_from_the_inside_out_and_batches_from_the_outside_in() -> None:
    engine = engine_of(Told(Told(ER(), "inner"), "outer"))
    feed(engine, toy_stream(batch=4), until=6)
    for hook in ("attach", "begin_task", "prepare", "after_backward", "after_step", "end_task"):
        assert calls(hook)[:2] == ["inner", "outer"], hook
    assert calls("after_batch")[:2] == ["outer", "inner"]
    assert engine.task_values == {"inner": [1.0], "outer": [1.0]}


def test_who_changes_weights_after_a_step_comes_before_who_follows_them() -> None:
    engine = engine_of(First(Told(ER(), "inner"), "outer"))
    feed(engine, toy_stream(), until=1)
    assert calls("after_step") == ["outer", "inner"]


def test_tables_are_folded_from_the_inside_out() -> None:
    plain, twice = toy_engine("er()"), engine_of(Told(Told(ER(), "inner"), "outer"))
    [one], [two] = (feed(engine, toy_stream(), until=1) for engine in (plain, twice))
    assert one is not None
    assert two is not None
    torch.testing.assert_close(two.table["ce/all"], 2 * (2 * one.table["ce/all"] + 1) + 1)
    assert [row for row in two.table if row in ("ce/all", "log/inner", "log/outer")] == ["ce/all", "log/inner", "log/outer"]


def test_images_that_a_part_takes_do_not_reach_those_inside() -> None:
    engine = engine_of(Told(Told(ER(), "inner"), "outer", 0.5))
    feed(engine, toy_stream(batch=4), until=1)
    assert told[-2:] == ["outer.after_batch 4", "inner.after_batch 2"]
    assert engine.memories.replay.offered == 2


def test_two_parts_with_the_same_row_are_refused() -> None:
    with pytest.raises(UserError, match="define the loss row 'log/told'"):
        feed(engine_of(Told(Told(ER()))), toy_stream(), until=1)


@pytest.mark.parametrize("name", [name for name, cls in CLASSES.items() if issubclass(cls, Addition)])
def test_additions_leave_to_the_learner_what_it_decides(name: str) -> None:
    assert not [hook for hook in OF_A_LEARNER if defines(CLASSES[name](), hook)]


# Declared state.


def test_what_parents_declare_is_saved_too() -> None:
    assert CLASSES["ewc"].stated() == ["anchor", "importance", "consolidated", "lowest"]


class Counter:
    """Has a state of its own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class Pair:
    """Two tensors."""

    one: Tensor
    two: Tensor

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


def test_state_comes_back_in_the_kind_that_it_had() -> None:
    counter, device = Counter(), torch.device("cpu")
    counter.value = 3
    fresh = Counter()
    assert restored(fresh, saved(counter), device) is fresh
    assert fresh.value == 3
    pair = restored(Pair(torch.zeros(1), torch.zeros(1)), saved(Pair(torch.ones(2), torch.ones(3))), device)
    assert (pair.one.tolist(), pair.two.tolist()) == ([1, 1], [1, 1, 1])
    assert restored((), [1, 2], device) == (1, 2)
    assert restored([], [[1], [2]], device) == [[1], [2]]
    assert restored({}, {"a": torch.ones(1)}, device)["a"].item() == 1
    assert restored(None, 4, device) == 4
