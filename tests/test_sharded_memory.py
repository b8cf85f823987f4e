"""A memory spread over the processes of a group: the slots of one in RAM, a part in each process, one checkpoint for any number.

The processes are threads here, with an `all_reduce` of their own; `test_processes.py` has real ones.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

from gracecl import Learner, UserError, checkpoint, processes
from gracecl.inputs import Images, Inputs, Parts, leaves, loaded
from gracecl.memory import Memories, Memory, in_group
from gracecl.memory.in_group import ShardedMemory
from gracecl.testing import ToyKind, check_memory
from test_stores import PARTS, batch, offer

T = TypeVar("T")
BYTES, NUMBERS = Images((3, 8, 8)), Inputs((5,))
CAPACITY = 25
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")


class Done:
    """Work that is done when it is returned."""

    def wait(self, *_: Any) -> None:
        pass


class Group:
    """Threads in the place of a group's processes."""

    def __init__(self) -> None:
        self.place = threading.local()
        self.count = 1

    def all_reduce(self, tensor: Tensor, operation: Any = None, async_op: bool = False) -> Done:
        """Put the sum or the largest of what all brought in the place of the tensor."""
        self.brought[self.rank()] = tensor.clone()
        self.meeting.wait()
        together = torch.stack(self.brought)
        tensor.copy_(together.sum(dim=0) if operation is None else together.amax(dim=0))
        self.meeting.wait()
        return Done()

    def rank(self) -> int:
        return getattr(self.place, "rank", 0)

    def each(self, count: int, work: Callable[[], T]) -> list[T]:
        """Return what each of so many processes makes."""
        self.count, self.brought = count, [torch.empty(0)] * count
        self.meeting = threading.Barrier(count, timeout=30)

        def as_process(rank: int) -> T:
            self.place.rank = rank
            try:
                return work()
            except BaseException:
                self.meeting.abort()
                raise

        with ThreadPoolExecutor(count) as threads:
            found = [threads.submit(as_process, rank) for rank in range(count)]
        self.count = 1
        return [one.result() for one in found]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    found = Group()
    monkeypatch.setattr(processes, "count", lambda: found.count)
    monkeypatch.setattr(processes, "rank", found.rank)
    monkeypatch.setattr(distributed, "all_reduce", found.all_reduce)
    return found


def made(inputs: Inputs, capacity: int = CAPACITY) -> Memory:
    return Memories(capacity, inputs, store="sharded").replay


def filled(inputs: Inputs, steps: range = range(20), memory: Memory | None = None) -> Memory:
    memory = made(inputs) if memory is None else memory
    offer(memory, steps)
    return memory


def content(memory: Memory) -> list[Any]:
    """All of a memory: images in order and as they are drawn, labels, tasks."""
    drawn = memory.draw(7, np.random.default_rng(1), except_task=0)
    images = [leaf for x in (loaded(memory.examples.images), memory[drawn]) for _, leaf in leaves(x)]
    return [*images, drawn, memory.labels.copy(), memory.tasks.copy(), memory.offered, len(memory)]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(
        torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else np.array_equal(one, other)
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "inputs", [BYTES, NUMBERS, PARTS, Parts({"flag": Inputs((2,), torch.bool), "id": Inputs((), torch.int64)})]
)
def test_the_processes_hold_together_what_one_holds(inputs: Inputs, count: int, group: Group) -> None:
    wanted = content(filled(inputs, memory=Memory(CAPACITY, inputs)))
    for found in group.each(count, lambda: content(filled(inputs))):
        assert same(found, wanted)


@pytest.mark.parametrize("count", [2, 4])
def test_each_process_holds_its_part_alone(count: int, group: Group) -> None:
    capacity, inputs = 41, Images((3, 64, 64))

    def held() -> tuple[int, bool]:
        memory = filled(inputs, memory=made(inputs, capacity))
        return len(pickle.dumps(memory)), memory.spread

    whole = capacity * inputs.bytes
    sizes = [size for size, spread in group.each(count, held) if spread]
    assert len(sizes) == count
    assert whole < sum(sizes) < 1.1 * whole
    assert max(sizes) < 1.3 * whole / count
    assert len(pickle.dumps(filled(inputs, memory=Memory(capacity, inputs)))) > whole


def test_one_process_has_a_memory_in_ram() -> None:
    assert type(made(BYTES)) is Memory
    assert not made(BYTES).spread


@pytest.mark.parametrize("reader", [1, 2, 4])
@pytest.mark.parametrize("writer", [1, 2, 4])
def test_checkpoints_do_not_depend_on_the_number_of_processes(
    writer: int, reader: int, tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the bytes of a memory in RAM, also when the images are sent in pieces; whoever reads it goes on as that does."""
    monkeypatch.setattr(in_group, "AT_ONCE", 100)
    before, after = range(2), range(2, 20)
    wanted = filled(PARTS, before, Memory(CAPACITY, PARTS))
    assert len(wanted) < CAPACITY
    checkpoint.save(tmp_path / "of_ram", {"memory": wanted.state_dict()})

    def write() -> None:
        memory = filled(PARTS, before)
        if processes.is_first():
            checkpoint.save(tmp_path / "state", {"memory": memory.state_dict()})
        else:
            memory.send_images()

    def read() -> list[Any]:
        memory = made(PARTS)
        memory.load_state_dict(checkpoint.load(tmp_path / "state")["memory"])
        return content(filled(PARTS, after, memory))

    group.each(writer, write)
    assert (tmp_path / "state").read_bytes() == (tmp_path / "of_ram").read_bytes()
    offer(wanted, after)
    for found in group.each(reader, read):
        assert same(found, content(wanted))


@pytest.mark.parametrize("kind", ["images", "vectors", "parts"])
def test_the_laws_of_memories(kind: ToyKind, group: Group) -> None:
    group.each(2, lambda: check_memory(ShardedMemory, kind=kind))


def test_a_second_store_is_spread_too(group: Group) -> None:
    def second() -> list[Any]:
        memories = Memories(CAPACITY, BYTES, store="sharded")
        memories.reserve("second", 5)
        assert all(store.spread for store in memories.stores.values())
        return content(filled(BYTES, memory=memories["second"]))

    wanted = content(filled(BYTES, memory=Memory(5, BYTES)))
    for found in group.each(2, second):
        assert same(found, wanted)


def test_slots_that_one_process_reads_by_itself_are_refused(group: Group) -> None:
    def read() -> str:
        memory = filled(BYTES)
        with pytest.raises(UserError) as error:
            memory[np.arange(3) + processes.rank()]
        return str(error.value)

    for said in group.each(2, read):
        assert said.startswith("one process reads images of the memory that the others do not; with store='sharded'")


def test_a_process_with_a_part_of_the_memory_makes_no_snapshots_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction in another thread waits for the call in progress."""
    monkeypatch.setattr(Memory, "spread", True)
    learner = Learner("er", net="mlp(width=4)", memory=10, shape=BYTES.shape, augment="none", device="cpu")
    x = batch(BYTES, 0)
    learner.learn(x, np.arange(10) % 2)
    with ThreadPoolExecutor(1) as other:
        with learner._turns:
            answer = other.submit(learner.predict, x)
            time.sleep(0.1)
            learner.learn(x, np.arange(10) % 2)
            assert not answer.done()
        assert len(answer.result(30)) == 10
    assert learner._serving.latest is None
